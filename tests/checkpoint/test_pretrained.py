"""`shardwise train` builds on meta: each rank reads, or draws and keeps, what it owns, with the plain values."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

import shardwise as sw
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.weights import WeightFiles
from shardwise.cli import main
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.extent import Extent
from shardwise.spec.slice import Cut
from shardwise.testing import StorageCount, run_on_ranks, streams
from shardwise.train.checkpoints.random_state import seed_all
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.model.build import build_model, defer_model
from shardwise.train.model.pretrained import deferred_from_folder
from shardwise.train.predicted.memory import peak_of_tensors
from tests.common.own import own
from tests.train.train_here import train_well

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytestmark = pytest.mark.preload(
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.gptj.modeling_gptj",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.vit.modeling_vit",
)

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def folder_of(name: str, folder: Path) -> str:
    """A Hugging Face folder; ``name`` says which model, and in what form it is stored."""
    import transformers as hf

    torch.manual_seed(5)
    config: Any = hf.LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=64, tie_word_embeddings="tied" in name)
    if name == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 32}
        config = hf.GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    elif name == "mixtral":
        config = hf.MixtralConfig(**SIZES, num_key_value_heads=2, vocab_size=64, num_local_experts=2)
    elif name == "gptj-half":
        config = hf.GPTJConfig(n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=32, vocab_size=64)
    elif name == "vit":
        config = hf.ViTConfig(**SIZES, image_size=16, patch_size=8)
    path = folder / name
    if name == "unread":
        config.save_pretrained(path)
        return str(path)
    kinds = {"llama-base": hf.LlamaModel, "vit": hf.ViTForImageClassification}
    kind = kinds.get(name) or hf.AutoModelForCausalLM._model_mapping[type(config)]
    model = kind(config)
    if "half" in name:
        model = model.to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="30KB" if "sharded" in name else "1GB")
    return str(path)


def resolved_for(folder: str, world: int, **parallel: Any) -> RunConfig:
    base = {
        "model": {"hf": folder},
        "data": {"source": "random", "seq_len": 8},
        "parallel": parallel,
        "train": {"steps": 1, "micro_batch_size": 1, "gradient_accumulation_steps": parallel.get("pp", 1)},
    }
    return resolve(read_config(None, base=base, title="test"), world, raises_masters=False)


def counting(read_at: Callable[..., None], count: list[int]) -> Callable[..., None]:
    """``read_at``, with the bytes that it reads added up."""

    def read(file: int, target: memoryview, offset: int) -> None:
        count[0] += target.nbytes
        read_at(file, target, offset)

    return read


def differing(folder: str, plans: list[dict[str, Any]]) -> list[tuple[list[str], int]]:
    """Under each plan, the names whose values are not those of the whole model, and the bytes read from files here."""
    found = []
    world = int(os.environ["WORLD_SIZE"])
    for parallel in plans:
        resolved = resolved_for(folder, world, **parallel)
        seed_all(3)
        plain = build_model(resolved, CPU)
        expected = plain.state_dict() | dict(plain.named_buffers())
        seed_all(3)
        count = [0]
        with mock.patch("shardwise.checkpoint.folder.read_at", counting(folders.read_at, count)):
            model, weights = defer_model(resolved, CPU)
            model = sw.parallelize(model, resolved.plan, init=weights)
        got = sw.full_state_dict(model)
        if got and parallel.get("pp", 1) == 1:
            got |= dict(model.named_buffers())
        wrong = [name for name, value in got.items() if value.dtype != expected[name].dtype]
        wrong += [name for name, value in got.items() if not torch.equal(value, expected[name])]
        wrong += [name for name in plain.state_dict() if got and name not in got]
        found.append((wrong, count[0]))
    return found


PLANS: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "zero2"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"strategy": "hsdp", "dp_replicate": 2},
    {"strategy": "zero3", "tp": 2},
    {"strategy": "zero1", "tp": 2, "sequence_parallel": True},
    {"strategy": "zero3", "pp": 2},
    {"strategy": "ddp", "pp": 2, "tp": 2},
]


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llama-sharded-tied", "gpt2", "llama-half", "llama-base-tied", "unread"])
def test_values_are_those_of_the_whole_model_under_every_plan(name: str, tmp_path: Path) -> None:
    plans = PLANS if name != "llama-base-tied" else PLANS[:1]
    for rank in run_on_ranks(differing, 4, folder_of(name, tmp_path), plans, timeout_s=200):
        assert [wrong for wrong, _ in rank] == [[] for _ in plans]


def test_buffers_that_no_file_has_are_computed_as_transformers_computes_them(tmp_path: Path) -> None:
    """GPT-J's table of positions is of fp32 in a model of bf16."""
    for rank in run_on_ranks(differing, 2, folder_of("gptj-half", tmp_path), PLANS[:1]):
        assert rank[0][0] == []


def test_each_rank_reads_its_share_of_the_files_and_no_more(tmp_path: Path) -> None:
    folder = folder_of("llama-sharded-tied", tmp_path)
    whole = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    ranks = run_on_ranks(differing, 4, folder, PLANS, timeout_s=200)
    read = [[num_bytes for _, num_bytes in rank] for rank in ranks]
    for index, plan in enumerate(PLANS):
        sizes = [rank[index] for rank in read]
        if plan == {"strategy": "ddp"}:
            assert max(sizes) <= whole
        elif plan == {"strategy": "zero3"}:
            assert 0.9 * whole <= sum(sizes) <= whole
            assert max(sizes) <= 0.3 * whole
        else:
            assert max(sizes) <= 0.75 * whole


def test_what_transformers_rearranges_is_loaded_whole_and_a_line_says_so(tmp_path: Path, capfd) -> None:
    folder = folder_of("mixtral", tmp_path)
    for rank in run_on_ranks(differing, 2, folder, [{"strategy": "zero3"}, {"strategy": "zero3", "ep": 2}]):
        assert [wrong for wrong, _ in rank] == [[], []]
    model, weights = defer_model(resolved_for(folder, 1), CPU)
    assert weights is None
    assert not next(model.parameters()).is_meta
    said = capfd.readouterr().err
    assert f"every rank loads model.hf={folder} whole, since transformers makes model.layers.0.mlp.experts." in said


def from_both(folders: list[str]) -> list[bool]:
    """For each folder, whether rank 0 gathers from shards what transformers loads whole."""
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    found = []
    for folder in folders:
        model = sw.from_pretrained(folder, strategy="zero3")
        kind = AutoModelForImageClassification if folder.endswith("vit") else AutoModelForCausalLM
        got, plain = sw.full_state_dict(model), kind.from_pretrained(folder, dtype="auto").state_dict()
        assert sum(own(each).numel() for each in model.parameters()) < 0.6 * sum(
            each.numel() for each in plain.values()
        )
        found.append(not got or (got.keys() == plain.keys() and all(same(got[name], plain[name]) for name in plain)))
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)


def test_a_loop_of_ones_own_loads_a_folder_into_shards(tmp_path: Path) -> None:
    folders_ = [folder_of(name, tmp_path) for name in ("llama-sharded-tied", "llama-half", "mixtral", "vit")]
    assert run_on_ranks(from_both, 2, folders_) == [[True] * 4] * 2
    with pytest.raises(ConfigError, match=r"the model in .*nowhere cannot be loaded: no readable"):
        sw.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vit", "architectures": ["Trainer"]}')
    with pytest.raises(ConfigError, match="this version of transformers has no model 'Trainer'"):
        sw.from_pretrained(tmp_path / "vit")


def test_what_ends_a_generation_is_read_beside_the_weights(tmp_path: Path) -> None:
    import transformers as hf

    folder = folder_of("gpt2", tmp_path)
    hf.GenerationConfig(eos_token_id=[7, 8]).save_pretrained(folder)
    model, _ = deferred_from_folder(Path(folder))
    assert isinstance(model, hf.GPT2LMHeadModel)
    assert model.generation_config.eos_token_id == [7, 8]


@pytest.mark.parametrize("name", ["BartForQuestionAnswering", "T5EncoderModel"])
def test_a_head_for_another_task_and_half_a_model_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    import transformers as hf

    kind = getattr(hf, name)
    sizes = {"d_model": 16, "vocab_size": 64, "encoder_layers": 1, "decoder_layers": 1, "num_layers": 1, "num_heads": 2}
    plain = kind(kind.config_class(**sizes, encoder_attention_heads=2, decoder_attention_heads=2))
    plain.save_pretrained(tmp_path)
    model, files = deferred_from_folder(tmp_path, of_any_task=True)
    assert (type(model), files is None) == (kind, False)
    with pytest.raises(ConfigError, match=r"(made for another task|not one of AutoModelForCausalLM); .*--spec mine.py"):
        deferred_from_folder(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"patch_size": 0},
        {"hidden_size": "wide"},
        {"dtype": "nothing"},
        {"architectures": ["CLIPModel"]},
        {"architectures": ["ViTPreTrainedModel"]},
        {"model_type": "clip", "architectures": ["CLIPModel"], "text_config": {"num_hidden_layers": 10**8}},
    ],
)
def test_a_configuration_that_cannot_be_built_is_refused_by_name(wrong: dict[str, Any], tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": ["ViTModel"], **SIZES, **wrong}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"the model in {re.escape(str(tmp_path))} cannot be loaded"):
        deferred_from_folder(tmp_path, of_any_task=True)


def test_missing_weights_are_drawn_as_transformers_draws_them(tmp_path: Path, capfd) -> None:
    folder = folder_of("llama-base", tmp_path)  # without a head
    for rank in run_on_ranks(differing, 2, folder, [{"strategy": "zero3"}]):
        assert rank[0][0] == []
    defer_model(resolved_for(folder, 1), CPU)
    assert "lm_head.weight is not in its files and will be drawn anew" in capfd.readouterr().err


def test_two_tensors_in_the_files_are_tied_only_where_they_are_equal(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(folder_of("llama-tied", tmp_path))
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head in (embedding.clone(), embedding + 1):
        save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
        model: Any = defer_model(resolved_for(str(folder), 1), CPU)[0]
        plain: Any = build_model(resolved_for(str(folder), 1), CPU)
        is_tied = plain.lm_head.weight is plain.model.embed_tokens.weight
        assert is_tied == torch.equal(head, embedding)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
        assert run_on_ranks(differing, 2, str(folder), [{"strategy": "zero3"}])[0][0][0] == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = Path(folder_of("llama", tmp_path))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors is not a safetensors file that can be read: .* bytes"
    ):
        defer_model(resolved_for(str(folder), 1), CPU)


def test_a_range_of_a_slice_is_cast_in_small_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr("shardwise.checkpoint.weights._CAST_BYTES", 8)
    values = torch.randn(7, 6, dtype=torch.float64).bfloat16()
    save_file({"there": values}, tmp_path / "model.safetensors")
    files = WeightFiles.open(tmp_path)
    assert files is not None
    columns, target = (Cut(1, ((1, 3),)),), torch.empty(11)
    part = Extent("here", (7, 6), "fp32", 3, 14, cuts=columns)
    with StorageCount("cpu", sees_arguments=False) as seen:
        files.named({"here": "there"}, {"here": torch.bfloat16}).read([(part, target)])
    assert torch.equal(target, values[:, 1:3].reshape(-1)[3:14].float())
    assert seen.peak_bytes == target.nbytes + 8  # four elements as they are stored


STORED = """
model: {hf: FOLDER}
data: {source: random, seq_len: 8}
train: {steps: 3, micro_batch_size: 1, eval_every: null}
"""


def test_a_folder_stored_in_16_bit_trains_with_fp32_masters_and_says_so(tmp_path: Path, capsys) -> None:
    folder = folder_of("llama-half", tmp_path)
    config = STORED.replace("FOLDER", folder)
    keeps = "parallel.mp_policy={param_dtype: bf16, master_dtype: bf16}"
    raised, kept = train_well(
        tmp_path, 2, ("--run-dir", "raised"), ("--run-dir", "kept", "--set", keeps), config=config
    )
    said = "weights are stored in bf16: the optimizer updates fp32 masters (parallel.mp_policy.master_dtype"
    assert said in raised
    assert said not in kept
    dtypes = {}
    for run in ("raised", "kept"):
        path = tmp_path / run / "checkpoints" / "step-00000003"
        dtypes[run] = {extent.dtype for extent in open_checkpoint(path).tensors.values() if extent.dtype != "uint8"}
        assert main(["generate", str(tmp_path / run), "--tokens", "1 2 3", "--max-new-tokens", "2"]) == 0
    assert dtypes == {"raised": {"fp32"}, "kept": {"bf16"}}
    train_well(tmp_path, 2, ("--run-dir", "raised", "--resume", "--set", "train.steps=4"), config=config)
    policy = yaml.safe_load((tmp_path / "raised" / "config.yaml").read_text())["parallel"]["mp_policy"]
    assert policy == {"param_dtype": "bf16", "master_dtype": "fp32"}


def devices_of_an_adapter(folder: str) -> set[str]:
    """Of the parameters that the trainer makes at once, for a GPU."""
    base = {"model": {"hf": folder}, "lora": {"rank": 4}, "data": {"source": "random", "seq_len": 8}}
    resolved = resolve(read_config(None, base=base, title="test"), 1, raises_masters=False)
    with streams.pretended_cuda():
        model, _ = defer_model(resolved, torch.device("cuda", 0))
        return {p.device.type for name, p in model.named_parameters() if "lora" in name}


@pytest.mark.preload("peft")
def test_an_adapter_lies_on_the_device_that_trains(tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    config = hf.LlamaConfig(**SHARE, num_key_value_heads=4, vocab_size=512)
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert run_on_ranks(devices_of_an_adapter, 1, str(tmp_path), timeout_s=200) == [{"cuda"}]


SHARE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 16, "num_attention_heads": 4}


def peak_of_building(folder: str, strategy: str) -> tuple[int, int, int]:
    """Bytes of the whole model, and the most bytes of tensors here while it is built; and what is left."""
    resolved = resolved_for(folder, int(os.environ["WORLD_SIZE"]), strategy=strategy)
    seed_all(3)
    with peak_of_tensors(CPU) as before:
        pass
    with peak_of_tensors(CPU) as memory:
        model, weights = defer_model(resolved, CPU)
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        model = sw.parallelize(model, resolved.plan, init=weights)
    with peak_of_tensors(CPU) as after:
        pass
    del model
    return num_bytes, memory.num_bytes - before.num_bytes, after.num_bytes - before.num_bytes


@pytest.mark.parametrize("has_weights", [True, False])
def test_no_rank_ever_holds_more_than_its_shards_and_one_unit(has_weights: bool, tmp_path: Path) -> None:
    import transformers as hf

    config = hf.LlamaConfig(**SHARE, num_key_value_heads=4, vocab_size=512)
    if has_weights:
        hf.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="10MB")
    else:
        config.save_pretrained(tmp_path)
    largest_unit = 4 * (4 * 256 * 256 + 3 * 256 * 688 + 2 * 256)
    for num_bytes, peak, left in run_on_ranks(peak_of_building, 4, str(tmp_path), "zero3"):
        assert num_bytes > 16 * largest_unit
        assert peak <= num_bytes / 4 + 3.2 * largest_unit  # two units are there when the last one is filled
        assert peak < 0.5 * num_bytes
        assert left <= peak


def positions_of_pictures(folder: str) -> list[list[int]]:
    from transformers import CLIPVisionModel

    model = sw.parallelize(sw.deferred_init(lambda: CLIPVisionModel.from_pretrained(folder)), strategy="ddp")
    (buffer,) = model.buffers()
    return buffer.tolist()


def test_a_folder_that_transformers_loads_inside_of_deferred_init_has_the_buffers_that_no_file_has(tmp_path):
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    CLIPVisionModel(CLIPVisionConfig(image_size=16, patch_size=8, **sizes)).save_pretrained(tmp_path)
    assert run_on_ranks(positions_of_pictures, 1, str(tmp_path)) == [[[0, 1, 2, 3, 4]]]
