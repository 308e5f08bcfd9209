"""LoRA in `shardwise train`: adapters alone are trained and saved, peft loads them, and merged they answer the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shardwise.checkpoint.reader import open_checkpoint
from shardwise.cli import main
from shardwise.spec.errors import ConfigError
from shardwise.train.config.sections import LoraSection
from shardwise.train.model.lora import adapt
from tests.common.ranks import refusal
from tests.common.tokenizers import TEMPLATE
from tests.train.chats import all_losses, cache_here, save_chats
from tests.train.train_here import sets, train_here

pytest.importorskip("peft", reason="the lora extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")
pytestmark = [
    pytest.mark.preload("transformers.models.llama.modeling_llama", "datasets", "peft"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),  # peft asks transformers
    pytest.mark.filterwarnings("ignore:.*alpha_pattern keys:RuntimeWarning"),  # peft's own of a mixture's experts
    pytest.mark.filterwarnings("ignore:.*rank_pattern keys:RuntimeWarning"),
]

CONFIG = """
model: {hf: llama}
data: {source: chat.jsonl, seq_len: 160, held_out: 0.4}
lora: {rank: 4, targets: [q_proj, v_proj, up_proj]}
train: {steps: 6, micro_batch_size: 1, global_batch_size: 4, eval_every: 6, eval_batches: 1}
checkpoint: {every: 3}
optimizer: {lr: 5e-2}
schedule: {name: constant}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_chats(tmp_path, num_layers=4)


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("parallel.strategy=ddp",),
        ("parallel.pp=2", "train.gradient_accumulation_steps=4"),
        ("parallel.tp=2",),
        ("parallel.tp=2", "parallel.sequence_parallel=true"),
    ],
)
def test_adapters_train_alike_under_every_plan(folder: Path, settings: tuple[str, ...]) -> None:
    one = train_here(folder, 1, ("--run-dir", "one"), config=CONFIG, before=cache_here)
    two = train_here(folder, 2, ("--run-dir", "two", *sets(*settings)), config=CONFIG, before=cache_here)
    assert [code for code, _ in one + two] == [0, 0], two
    plain, spread = all_losses(folder, "one", "two")
    assert spread == pytest.approx(plain, rel=2e-5)
    assert plain[-2] < 0.98 * plain[0]


def test_a_run_s_adapter_is_saved_without_its_base_goes_on_and_answers_alike_everywhere(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    half = ("--run-dir", "run", *sets("train.steps=3"))
    begun = train_here(folder, 2, half, config=CONFIG, before=cache_here)
    again = train_here(folder, 1, ("--run-dir", "run", "--resume"), config=CONFIG, before=cache_here)
    whole = train_here(folder, 2, ("--run-dir", "whole"), config=CONFIG, before=cache_here)
    assert [code for code, _ in begun + again + whole] == [0, 0, 0], again
    resumed, straight = all_losses(folder, "run", "whole")
    assert resumed == pytest.approx(straight, rel=2e-5)
    (checkpoint,) = (folder / "run" / "checkpoints").glob("step-00000006")
    saved = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    assert saved < (folder / "llama" / "model.safetensors").stat().st_size

    monkeypatch.chdir(folder)
    asked = [{"role": "user", "content": "number_3?"}]
    tokenizer = AutoTokenizer.from_pretrained("llama")
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    assert main(["export", "run", "adapter"]) == 0
    assert main(["export", "run", "merged", "--merge"]) == 0
    capsys.readouterr()
    said, answer = (
        main(["generate", "run", *words, "--max-new-tokens=8"]) == 0 and capsys.readouterr().out
        for words in ([f"--prompt={prompt}"], ["--chat", "--prompt=number_3?"])
    )
    base = AutoModelForCausalLM.from_pretrained("llama")
    found = {
        "base": base.generate(**ids, max_new_tokens=8, do_sample=False),
        "adapter": PeftModel.from_pretrained(base, "adapter").generate(**ids, max_new_tokens=8, do_sample=False),
    }
    found["auto"] = AutoPeftModelForCausalLM.from_pretrained("adapter").generate(
        **ids, max_new_tokens=8, do_sample=False
    )
    merged = AutoModelForCausalLM.from_pretrained("merged")
    found["merged"] = merged.generate(**ids, max_new_tokens=8, do_sample=False)
    answers = {name: tokenizer.decode(tokens[0], skip_special_tokens=True) for name, tokens in found.items()}
    assert answers["adapter"] == answers["auto"] == answers["merged"] == said.rstrip("\n")
    assert answers["base"] != answers["merged"]
    assert said == tokenizer.decode(ids["input_ids"][0], skip_special_tokens=True) + answer  # which is printed alone
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("llama"), "adapter").merge_and_unload()
    assert all(torch.equal(value, merged.state_dict()[name]) for name, value in plain.state_dict().items())
    assert AutoTokenizer.from_pretrained("merged").chat_template == TEMPLATE

    weights = AutoModelForCausalLM.from_pretrained("llama")
    weights.lm_head.weight.data.mul_(1.5)
    weights.save_pretrained("other")
    Path("llama/model.safetensors").rename("kept")
    Path("other/model.safetensors").rename("llama/model.safetensors")
    capsys.readouterr()
    assert main(["export", "run", "wrong", "--merge"]) == 65
    assert "are not those that the adapter was trained on" in capsys.readouterr().err
    on = train_here(
        folder, 2, ("--run-dir", "run", "--resume", *sets("train.steps=7")), config=CONFIG, before=cache_here
    )
    assert on[0][0] == 65, on
    Path("kept").rename("llama/model.safetensors")

    more = train_here(
        folder, 2, ("--run-dir", "more"),
        config=CONFIG.replace("lora: {rank: 4, targets: [q_proj, v_proj, up_proj]}", "lora: {adapter: adapter}"),
        before=cache_here,
    )  # fmt: skip
    assert more[0][0] == 0, more
    assert all_losses(folder, "more")[0][0] < straight[0]


def test_the_experts_of_a_mixture_are_adapted_alike_on_one_rank_and_two_and_refused_where_they_are_divided(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, MixtralForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    mixture = MixtralConfig(vocab_size=len(tokenizer), **sizes, num_key_value_heads=2, num_local_experts=4)
    MixtralForCausalLM(mixture).save_pretrained(folder / "mixtral")
    tokenizer.save_pretrained(folder / "mixtral")
    get_peft_model(MixtralForCausalLM(mixture), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(
        folder / "of peft"
    )
    monkeypatch.chdir(folder)
    linear = CONFIG.replace("hf: llama", "hf: mixtral").replace(", targets: [q_proj, v_proj, up_proj]", "")
    config = linear.replace("rank: 4", "adapter: of peft")
    one = train_here(folder, 1, ("--run-dir", "one"), config=config, before=cache_here)
    two = train_here(folder, 2, ("--run-dir", "two"), config=config, before=cache_here)
    assert [code for code, _ in one + two] == [0, 0], two
    plain, spread = all_losses(folder, "one", "two")
    assert spread == pytest.approx(plain, rel=2e-5)
    assert plain[-2] < 0.98 * plain[0]

    assert main(["export", "two", "adapter"]) == 0
    capsys.readouterr()
    assert main(["generate", "two", "--tokens=12 7 9", "--max-new-tokens=8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)["tokens"]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("mixtral"), "adapter")
    assert any("experts.base_layer.lora_B" in name for name in adapted.state_dict())
    ids = torch.tensor([[12, 7, 9]])
    found = adapted.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert found[0, 3:].tolist() == answer
    assert main(["export", "two", "merged", "--merge"]) == 78
    assert "Merge it with peft" in capsys.readouterr().err
    merged = adapted.merge_and_unload().generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert merged.tolist() == found.tolist()
    Path("linear.yaml").write_text(linear)
    for degree in ("tp", "ep"):
        capsys.readouterr()
        words = ["--nproc", "2", *sets(f"parallel.{degree}=2")]
        assert main(["validate", "run.yaml", *words]) == 78
        said = capsys.readouterr().err
        assert "peft adapts 'model.layers.0.mlp.experts.base_layer.base_layer.down_proj' as a tensor" in said
        assert main(["validate", "linear.yaml", *words]) == 0


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen2_moe"])
def test_all_linear_layers_of_a_mixture_are_those_of_attention_whatever_peft_makes_of_the_family(family, tmp_path):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_attention_heads": 2}
    latent = {"q_lora_rank": 4, "kv_lora_rank": 4, "first_k_dense_replace": 1}
    config = CONFIG_MAPPING[family](vocab_size=8, num_hidden_layers=2, num_key_value_heads=2, **sizes, **latent)
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    config.save_pretrained(tmp_path)
    model = adapt(AutoModelForCausalLM.from_config(config), LoraSection(rank=2), tmp_path)
    factors = [name for name, p in model.named_parameters() if p.requires_grad]
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lora" not in name]
    assert all(".self_attn." in name for name in factors)
    assert len(factors) == 2 * sum(".self_attn." in name for name in linear)


def test_a_base_in_16_bit_stays_so_and_may_be_held_as_int8(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder / "llama").bfloat16().save_pretrained(folder / "llama")
    found = train_here(folder, 2, ("--run-dir", "half"), ("--run-dir", "eight", *sets("parallel.quantize_frozen=int8")),
                       config=CONFIG, before=cache_here)  # fmt: skip
    assert [code for code, _ in found] == [0, 0], found
    half, eight = all_losses(folder, "half", "eight")
    assert eight[0] == pytest.approx(half[0], rel=0.005)  # of the base as it is held
    assert eight[0] != half[0]
    held = [json.loads((folder / name / "summary.json").read_text()) for name in ("half", "eight")]
    assert held[1]["peak_memory_bytes"] < held[0]["peak_memory_bytes"]
    (checkpoint,) = (folder / "half" / "checkpoints").glob("step-00000006")
    stored = open_checkpoint(checkpoint).tensors
    assert {extent.dtype for name, extent in stored.items() if name.endswith("default.weight")} == {"fp32"}
    assert {extent.dtype for extent in stored.values() if "base_layer" in extent.name} == set()


def test_a_tied_model_with_transposed_layers_is_merged_as_peft_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=256, **quiet)
    ).save_pretrained(folder / "llama")
    config = CONFIG.replace(", targets: [q_proj, v_proj, up_proj]", "")
    zero2 = ("--run-dir", "run", *sets("parallel.strategy=zero2", "parallel.activation_checkpointing=full"))
    one = train_here(folder, 1, ("--run-dir", "one"), config=config, before=cache_here)
    two = train_here(folder, 2, zero2, config=config, before=cache_here)
    assert [code for code, _ in one + two] == [0, 0], two
    plain, spread = all_losses(folder, "one", "run")
    assert spread == pytest.approx(plain, rel=5e-5)
    assert len(set(plain)) > 4  # the tied embedding has its values
    monkeypatch.chdir(folder)
    assert main(["export", "run", "adapter"]) == 0
    assert main(["export", "run", "merged", "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("merged").state_dict()
    base = AutoModelForCausalLM.from_pretrained("llama")
    by_peft = PeftModel.from_pretrained(base, "adapter").merge_and_unload().state_dict()
    assert all(torch.equal(value, merged[name]) for name, value in by_peft.items())


def test_a_target_that_is_no_layer_is_refused_also_beside_one_that_is(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=8, num_key_value_heads=1, num_local_experts=2, **sizes))
    model.save_pretrained(tmp_path)
    section = LoraSection(rank=2, targets=["q_proj", "gate_up_proj"])
    assert "no layer's name ends in 'gate_up_proj'" in refusal(ConfigError, adapt, model, section, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, r"^lora\.adapter=.*lora_magnitude_vector.* is not a factor(?s:.)*with peft"),
        ({"modules_to_save": ["lm_head"]}, r"^lora\.adapter=.*modules_to_save.* is not a factor"),
        ({"init_lora_weights": "pissa"}, r"^lora\.adapter=.* began as a part of the base(?s:.)*weight_conversion"),
    ],
)
def test_an_adapter_that_is_no_plain_product_is_refused_by_its_folder(options, message, tmp_path):
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    LoraConfig(r=2, target_modules=["q_proj"], **options).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        adapt(model, LoraSection(adapter=str(tmp_path)), tmp_path)


def test_a_continued_adapter_is_exported_with_the_base_that_the_run_trained_it_on(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = LoraConfig(r=2, target_modules=["q_proj"])
    adapted = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)), config)
    adapted.peft_config["default"].base_model_name_or_path = "elsewhere"
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    model = adapt(model, LoraSection(adapter=str(tmp_path)), tmp_path / "base")
    assert model.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
