"""What ``sw.export`` and ``shardwise export`` write is loaded by transformers, and gives the same logits."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.cli import main
from shardwise.engine.storage.attachment import engine_of
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.testing import StorageCount, run_on_ranks
from tests.common.ranks import on_ranks, refusal
from tests.train.train_here import train_well

pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama")

_SIZES: dict[str, Any] = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": None}
_HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def of_family(name: str) -> nn.Module:
    """A small model; the same on every call."""
    import transformers

    torch.manual_seed(3)
    llama = {**_SIZES, **_HEADS, "num_hidden_layers": 2, "initializer_range": 0.3}
    if name == "gpt":
        return sw.models.gpt("gpt-tiny", num_layers=2)
    if name == "gpt without biases":
        return sw.models.gpt("gpt-tiny", num_layers=2, bias=False, tied=False)
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **_SIZES)
        )
    if name == "mixtral":  # transformers merges the files' experts into one tensor
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **llama))
    is_tied = name == "tied llama"
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=is_tied, **llama))


def of_other_files(name: str) -> nn.Module:
    """A small model whose files have other names or shapes than its parameters."""
    import transformers

    torch.manual_seed(3)
    llama = {**_SIZES, **_HEADS, "num_hidden_layers": 2}
    if name == "camembert":  # the head, which has the embedding's weight, comes first
        config = transformers.CamembertConfig(**llama, is_decoder=True, max_position_embeddings=64)
        return transformers.CamembertForCausalLM(config)
    # the files' experts are transposed where their shapes say so
    text = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8, **llama}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def logits(model: nn.Module) -> Tensor:
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        found = model.eval()(ids)
    return found if isinstance(found, Tensor) else found.logits


EXPORTED = {
    "gpt": {},
    "gpt without biases": {"pp": 2},
    "gpt2": {"strategy": "zero1"},
    "llama": {"tp": 2},
    "tied llama": {"pp": 2},
    "mixtral": {},
}


@on_ranks(2, timeout_s=100)
def test_transformers_loads_what_any_layout_exports(tmp_path: Path) -> None:
    """Bitwise; ours goes through GPT-2's other kernels."""
    from transformers import AutoModelForCausalLM

    for name, plan in EXPORTED.items():
        model = sw.parallelize(of_family(name), sw.ParallelPlan(**plan))
        sw.export(tmp_path / name, model, max_shard_bytes=40_000)
        if distributed.get_rank():
            continue
        found, info = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert not any(info.values()), (name, info)
        assert len(list((tmp_path / name).glob("model-*-of-*.safetensors"))) > 1
        assert all(path.stat().st_size < 70_000 for path in (tmp_path / name).glob("*-of-*")), name
        expected = logits(of_family(name))
        if name.startswith("gpt") and name != "gpt2":
            torch.testing.assert_close(logits(found), expected, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(logits(found), expected), name


@on_ranks(2, timeout_s=60)
def test_files_have_the_names_and_values_that_transformers_writes(tmp_path: Path) -> None:
    for name in ("camembert", "qwen3_vl_moe"):
        plain = of_other_files(name)
        sw.export(tmp_path / name, sw.parallelize(of_other_files(name)))
        if distributed.get_rank() == 0:
            plain.save_pretrained(tmp_path / "plain")
            got, wanted = (load_file(tmp_path / each / "model.safetensors") for each in (name, "plain"))
            assert got.keys() == wanted.keys()
            assert [key for key in got if not torch.equal(got[key], wanted[key])] == []


@on_ranks(2, timeout_s=60)
def test_weights_are_cast_and_all_ranks_hear_of_what_was_refused(tmp_path: Path) -> None:
    """Nothing is left behind, and ranks go on together."""
    from transformers import AutoModelForCausalLM

    plain = of_family("llama")
    model = sw.parallelize(of_family("llama"))
    sw.export(tmp_path / "half", model, dtype="bf16")
    _check_peak(tmp_path / "whole", model)
    assert "exists" in refusal(ConfigError, sw.export, tmp_path / "half", model)
    for name in ("int8", "fp8_e4m3"):  # fp8 needs scales
        assert f"cannot be written as {name}" in refusal(ConfigError, sw.export, tmp_path / name, model, dtype=name)
    before, os.pwrite = os.pwrite, _full
    text = refusal(StorageError, sw.export, tmp_path / "full", model)
    os.pwrite = before
    assert "No space left on device" in text
    assert text.startswith("rank 0: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "whole"]
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, value in found.named_parameters():
        assert torch.equal(value, plain.get_parameter(name).bfloat16()), name
    model.generation_config.temperature = 0.5  # without do_sample, which transformers refuses to write
    text = refusal(ConfigError, sw.export, tmp_path / "settings", model)
    assert "settings was not written: ValueError: GenerationConfig is invalid" in text
    assert not (tmp_path / "settings").exists()
    other = sw.parallelize(nn.Sequential(nn.Linear(4, 4)))
    assert "transformers has no Sequential" in refusal(ConfigError, sw.export, tmp_path / "other", other)
    experts = sw.parallelize(sw.models.gpt("gpt-tiny", num_layers=1, num_experts=2))
    assert "no GPT-2 with experts" in refusal(ConfigError, sw.export, tmp_path / "other", experts)


def _check_peak(path: Path, model: nn.Module) -> None:
    """Rank 0 holds one unit whole and the others nothing, besides some numbers."""
    units: dict[str, int] = {}
    for group in engine_of(model, "test").groups:
        numel = sum(spec.numel for spec in group.layout.params)
        units[group.unit.name] = units.get(group.unit.name, 0) + 4 * numel
    count = StorageCount("cpu", sees_arguments=False)
    count.see_all_objects()
    before = count.live_bytes
    with count:
        sw.export(path, model)
    count.forget()
    most = max(units.values()) if distributed.get_rank() == 0 else 0
    assert most <= count.peak_bytes - before < most + 4000, (units, before, count.peak_bytes)


def _full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_a_run_is_exported_from_its_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train_well(tmp_path, 2, ["--run-dir=run", "--set=train.ema_decay=0.5", "--set=train.eval_every=null"])
    run, plain, average = tmp_path / "run", tmp_path / "plain", tmp_path / "average"
    with monkeypatch.context() as without:
        for package in ("transformers", "tokenizers"):
            without.setitem(sys.modules, package, None)
        assert main(["export", str(run), str(plain)]) == 78
        assert "Install shardwise[hf]" in capsys.readouterr().err
    assert main(["export", str(run), str(plain)]) == 0
    hint = "these are the weights as trained; --average takes the run's averages of them\n"
    assert capsys.readouterr().err == hint
    assert main(["export", str(run), str(average), "--average", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().err == ""
    assert main(["export", str(run), str(plain)]) == 78
    assert "exists" in capsys.readouterr().err
    assert main(["export", str(plain), str(tmp_path / "again")]) == 78
    assert "is a Hugging Face folder already" in capsys.readouterr().err
    assert main(["export", str(run), "--triton", str(tmp_path / "triton"), "--dtype", "bf16"]) == 0
    found = {str(path.relative_to(tmp_path / "triton")) for path in (tmp_path / "triton").rglob("*.*")}
    assert {"run/config.pbtxt", "run/1/model.py", "run/1/model/model.safetensors", "run/1/model/config.json"} <= found
    text = "def é(x):\n\treturn 1  # 🙂"
    tokenizer = AutoTokenizer.from_pretrained(plain)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    found = AutoModelForCausalLM.from_pretrained(plain)
    prompt = torch.tensor([tokenizer.encode("def main")])
    assert main(["generate", str(run), "--prompt=def main", "--max-new-tokens=8", "--json"]) == 0
    output = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.generate(prompt, max_new_tokens=8, do_sample=False)[0].tolist()[8:] == output["tokens"]
    halved = AutoModelForCausalLM.from_pretrained(average)
    assert halved.dtype is torch.bfloat16
    pairs = list(zip(found.parameters(), halved.parameters(), strict=True))
    assert not any(torch.equal(a.bfloat16(), b) for a, b in pairs if a.dim() == 2)
    assert all(torch.allclose(a, b.float(), atol=0.1) for a, b in pairs)


def export_adapted(folder: str, plan: sw.ParallelPlan, layers: list[int]) -> dict[str, Tensor]:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name of before
    torch.manual_seed(1)
    targets = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": layers}
    config = LoraConfig(r=2, lora_alpha=4, **targets, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(f"{folder}/base"), config)
    other = LoraConfig(r=3, target_modules=["q_proj"], layers_to_transform=layers, init_lora_weights=False)
    model.add_adapter("other", other)
    model.set_adapter("default")
    model = sw.parallelize(model, plan)
    sw.export(f"{folder}/adapter", model)
    sw.export(f"{folder}/merged", model, merge_adapter=True)
    return sw.full_state_dict(model)


@pytest.mark.preload("transformers.models.llama.modeling_llama", "peft")
@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        (sw.ParallelPlan(strategy="zero3"), [0, 1]),
        (sw.ParallelPlan(pp=2), [0, 1]),
        (sw.ParallelPlan(pp=2), [1]),
    ],
    ids=["zero3", "pp", "pp, on one stage"],
)
def test_of_a_model_with_adapters_the_active_one_is_written_by_itself_or_merged(
    plan: sw.ParallelPlan, layers: list[int], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the lora extra is not installed")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape)).save_pretrained(tmp_path / "base")
    state = run_on_ranks(export_adapted, 2, str(tmp_path), plan, layers, timeout_s=60)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for a name of before
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapter = {name: value for name, value in loaded.state_dict().items() if "lora" in name}
    assert len(adapter) == 2 * 2 * len(layers)
    assert all(torch.equal(value, state[name]) for name, value in adapter.items())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, value in loaded.merge_and_unload().state_dict().items():
        assert torch.equal(value, merged[name]), name
