"""Shapes of models: parameters as the real models have them, on meta; names, files and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.spec.errors import ConfigError
from shardwise.spec.shape import FAMILIES, KNOWN
from shardwise.spec.shape.gpt import PRESETS, GPTConfig

CLASSIFIERS = {"llama": "Llama", "gpt2": "GPT2", "opt": "OPT", "gpt_neox": "GPTNeoX", "mixtral": "Mixtral"}
CLASSIFIERS |= {"gemma2": "Gemma2", "deepseek_v3": "DeepseekV3"}
VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    *((family, {}, "") for family in FAMILIES),
    ("llama", {"attention_bias": True}, ""),
    ("llama", {"mlp_bias": True, "tie_word_embeddings": True}, ""),
    ("qwen3", {"attention_bias": True}, ""),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, ""),
    ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 2}, ""),
    ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, ""),
    ("gpt_neox", {"attention_bias": False}, ""),
    ("opt", {"enable_bias": False}, ""),
    ("bert", {}, "BertModel"),
    ("bert", {"num_labels": 5}, "BertForSequenceClassification"),
    *((family, {"num_labels": 5}, f"{name}ForSequenceClassification") for family, name in CLASSIFIERS.items()),
    ("vit", {"qkv_bias": False}, "ViTModel"),
]


@pytest.mark.parametrize(("family", "changes", "class_name"), VARIANTS, ids=str)
def test_a_config_has_as_many_parameters_as_its_model(family: str, changes: dict[str, Any], class_name: str) -> None:
    pytest.importorskip("transformers")
    from tests.common.shapes import on_meta, small_config

    model, config = on_meta(small_config(family, **changes), class_name)
    assert sw.ModelShape.from_config(config).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["LlamaForTokenClassification", "T5ForSequenceClassification"])
def test_a_head_that_is_not_known_is_refused(name: str) -> None:
    """They were counted with a language model's head."""
    fields = {"model_type": "llama" if name[0] == "L" else "t5", "architectures": [name], "d_model": 64, "num_heads": 4}
    with pytest.raises(ConfigError, match=f"architectures='{name}': its head is not known"):
        sw.ModelShape.from_config({**DECODER, **fields})


def test_deepseek_v3_is_the_one_of_transformers_and_a_token_meets_37_billion_of_it() -> None:
    """arXiv 2412.19437; without the module that predicts a second token."""
    transformers = pytest.importorskip("transformers")
    shape = sw.ModelShape.from_config("deepseek-v3")
    assert shape.stacks == sw.ModelShape.from_config(transformers.AutoConfig.for_model("deepseek_v3")).stacks
    assert shape.num_active_parameters == pytest.approx(37.5e9, rel=0.01)


DECODER = {"model_type": "new", "architectures": ["NewForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
DECODER |= {"num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}


def test_a_decoder_of_a_family_that_is_not_known_is_counted_as_a_llama_and_named_so() -> None:
    shape = sw.ModelShape.from_config(DECODER)
    assert shape.name == "new (counted as a Llama)"
    assert shape.num_parameters == sw.ModelShape.from_config({**DECODER, "model_type": "llama"}).num_parameters
    plain = sw.ModelShape.from_config({**DECODER, "hidden_act": "relu2"})
    assert shape.num_parameters - plain.num_parameters == 2 * 64 * 96  # no second projection up


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intermediate_size": None, "vocab_size": None}, "its configuration has no intermediate_size, vocab_size"),
        ({"mamba_d_state": 16}, "mamba_d_state says that its blocks are not attention and feed-forwards alone"),
    ],
)
def test_a_configuration_of_something_else_says_which_field_shows_it(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sw.ModelShape.from_config({**DECODER, **changes})


@pytest.mark.parametrize("preset", ["gpt-nano", "gpt-tiny"])
@pytest.mark.parametrize("changes", [{}, {"tied": False, "bias": False}, {"num_experts": 4}], ids=str)
def test_a_preset_has_as_many_parameters_as_our_gpt(preset: str, changes: dict[str, Any]) -> None:
    model = sw.models.gpt(preset, device="meta", **changes)
    shape = sw.ModelShape.from_config(model.config)
    assert shape.num_parameters == model.config.num_parameters == sum(p.numel() for p in model.parameters())


#: What the makers publish, in parameters; exact where the model card or safetensors' metadata on the hub says it.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 671_026_404_352,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "t5-small": 60_506_624,
    "t5-3b": 2_851_598_336,
    "bert-base": 109_514_298,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_well_known_model_has_the_published_size(name: str) -> None:
    assert sw.ModelShape.from_config(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("opt-66b", 66), ("opt-175b", 175), ("gpt-neox-20b", 20.6), ("t5-11b", 11.3), ("gpt-175b", 175), ("gpt-1t", 1008)],
)
def test_a_well_known_model_has_the_size_of_its_name(name: str, billions: float) -> None:
    assert sw.ModelShape.from_config(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_token_meets_as_many_parameters_of_a_mixture_as_published() -> None:
    assert sw.ModelShape.from_config("mixtral-8x7b").num_active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)
    assert sw.ModelShape.from_config("qwen3-30b-a3b").num_active_parameters / 1e9 == pytest.approx(3.3, abs=0.06)


def test_our_gpt2_is_the_one_that_the_hub_has_and_the_only_one_of_that_name() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    ours, theirs = sw.ModelShape.from_config("gpt2"), sw.ModelShape.from_config(config)
    assert ours.num_parameters == theirs.num_parameters
    assert not set(PRESETS) & set(KNOWN)
    assert [name for name in KNOWN if name != name.lower()] == []


def test_names_folders_files_dicts_and_configurations_mean_the_same(tmp_path: Path) -> None:
    content = KNOWN["llama-3-8b"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    expected = sw.ModelShape.from_config("llama-3-8b").stacks
    for source in ("LLAMA-3-8B", "meta-llama/Llama-3-8b", tmp_path, str(tmp_path), tmp_path / "config.json", content):
        assert sw.ModelShape.from_config(source).stacks == expected
    assert sw.ModelShape.from_config(tmp_path).name == tmp_path.name
    shape = sw.ModelShape.from_config("gpt2")
    assert sw.ModelShape.from_config(shape) is shape
    assert sw.ModelShape.from_config(PRESETS["gpt2"], "gpt2") == shape


def test_a_decoder_by_its_sizes_is_a_llama_where_gated_and_our_gpt_where_not() -> None:
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "vocab": 128256, "seq_len": 8192}
    llama = sw.ModelShape.decoder(**sizes, kv_heads=8, ffn=14336)
    assert llama.num_parameters == sw.ModelShape.from_config("llama-3-8b").num_parameters
    gpt = sw.ModelShape.decoder(**sizes, gated=False, tied=True)
    config = GPTConfig(num_layers=32, hidden=4096, num_heads=32, vocab_size=128256, seq_len=8192)
    assert gpt.num_parameters == config.num_parameters


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("lama-3-8b", ["'lama-3-8b' is neither", "Did you mean 'llama-3-8b'?", "config.json"]),
        ("no/such-thing-at-all", ["Known are: gpt-nano", "qwen3-30b-a3b"]),
        (7, ["a int is not a description", "sw.trace_model(module, example_batch)"]),
        ({"model_type": "lamma"}, ["model_type='lamma'", "Did you mean 'llama'?", "sw.trace_model()"]),
        ({"model_type": "llama", "hidden_size": 8}, ["configuration of llama has no field", "use_diff=False"]),
        (Path("nowhere/at/all"), ["does not exist", "Hugging Face folder"]),
    ],
)
def test_what_names_no_model_is_refused_with_what_to_do(source: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        sw.ModelShape.from_config(source)
    for word in words:
        assert word in str(error.value)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for content, words in (("{", "cannot be read as JSON"), ("[]", "holds a list")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=words):
            sw.ModelShape.from_config(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 3}, "heads=3 does not divide hidden=64"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide heads=8"),
        ({"layers": 0}, "layers=0; expected a whole number of at least 1"),
        ({"vocab": True}, "vocab=True"),
    ],
)
def test_sizes_that_make_no_decoder_are_refused(changes: dict[str, Any], words: str) -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "vocab": 100, "seq_len": 32, **changes}
    with pytest.raises(ConfigError, match=words):
        sw.ModelShape.decoder(**sizes)


_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


#: A published file leaves out heads, vocabulary and which layers have the window.
_GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "sliding_window": 32,
}


@pytest.mark.parametrize(
    ("config", "parameters"),  # as transformers' language model of that configuration has them
    [
        ({"model_type": "gemma3", "text_config": _GEMMA3}, 19_668_288),
        ({"model_type": "qwen2_vl", **_SMALL, "vision_config": {}}, 78_400),
        ({"model_type": "qwen2_5_vl", "text_config": _SMALL, "tie_word_embeddings": True}, 70_208),
    ],
)
def test_of_text_and_pictures_the_language_model_is_taken_and_named_so(config: dict[str, Any], parameters: int) -> None:
    shape = sw.ModelShape.from_config(config)
    assert shape.name == f"{config['model_type']} (language model alone)"
    assert shape.num_parameters == parameters


def test_attention_of_gpt_oss_has_biases_where_the_file_does_not_say() -> None:
    config = {**_SMALL, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert sw.ModelShape.from_config({**config, "intermediate_size": 32}).num_parameters == 92_368
