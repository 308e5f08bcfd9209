"""Every method of peft, with and without whole modules that it trains, saved from shards and loaded by peft alone."""

from __future__ import annotations

import contextlib
import json
import warnings

import pytest
import torch

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "attention_bias": True,
}
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
METHODS = {
    "lora": ("LoraConfig", {"r": 2, **TARGETS}),
    "lora embedding": ("LoraConfig", {"r": 2, "target_modules": ["q_proj", "embed_tokens"]}),
    "lora tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": [3, 4], **TARGETS}),
    "lora biases": ("LoraConfig", {"r": 2, "bias": "lora_only", **TARGETS}),
    "lora all biases": ("LoraConfig", {"r": 2, "bias": "all", **TARGETS}),
    "lora bias of B": ("LoraConfig", {"r": 2, "lora_bias": True, **TARGETS}),
    "lora head": ("LoraConfig", {"r": 2, "target_modules": ["q_proj", "lm_head"]}),
    "dora": ("LoraConfig", {"r": 2, "use_dora": True, **TARGETS}),
    "adalora": ("AdaLoraConfig", {"init_r": 2, "target_r": 2, "total_step": 10, **TARGETS}),
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "loha": ("LoHaConfig", {"r": 2, **TARGETS}),
    "lokr": ("LoKrConfig", {"r": 2, **TARGETS}),
    "oft": ("OFTConfig", {"r": 0, "oft_block_size": 4, **TARGETS}),
    "boft": ("BOFTConfig", {"boft_block_size": 4, **TARGETS}),
    "vera": ("VeraConfig", {"r": 2, "target_modules": ["q_proj"]}),
    "layer norm": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "fourier": ("FourierFTConfig", {"n_frequency": 8, **TARGETS}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}
TOKENS = torch.tensor([[3, 4, 5, 6], [7, 3, 9, 4]])


def build(method, whole, base):
    import peft
    import transformers

    torch.manual_seed(0)
    if whole == "head":  # peft trains a new classification head whole without being asked
        config = transformers.LlamaConfig(**SIZES, num_labels=3, pad_token_id=0)
        model, kind, extra = transformers.LlamaForSequenceClassification(config), "SEQ_CLS", {}
    else:
        model, kind = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), "CAUSAL_LM"
        extra = {"modules_to_save": ["lm_head"]} if whole == "asked" else {}
    model.save_pretrained(base)
    name, options = METHODS[method]
    return peft.get_peft_model(model, getattr(peft, name)(task_type=kind, **options, **extra))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits.clone()


def train(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(2):
        model(input_ids=TOKENS).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(model)


def far(got, wanted):
    return (got - wanted).abs().max().item() > 1e-6


def save_each(folder, methods):
    """What is wrong, by method and whole modules; and which exports are refused, with the advice."""
    import transformers

    warnings.simplefilter("ignore")  # those of peft and transformers
    sw.parallelize(torch.nn.Linear(1, 1), "zero3")  # joins the world
    rank = torch.distributed.get_rank()
    wrong, refused = [], {}
    for method in methods:
        for whole in ("none", "head", "asked"):
            place = f"{folder}/{method}-{whole}"
            base = f"{place}-base-{rank}"
            plain = train(build(method, whole, base))
            model = sw.parallelize(build(method, whole, base), "zero3")
            trained = train(model)
            kind = "SequenceClassification" if whole == "head" else "CausalLM"
            load = getattr(transformers, f"AutoModelFor{kind}").from_pretrained
            labels = {"num_labels": 3} if whole == "head" else {}
            for path, module in model.named_modules():
                if path.endswith(".modules_to_save.default"):
                    assert refusal(sw.StateError, module.state_dict).endswith(
                        "Use sw.full_state_dict(model) or sw.save(path, model, optimizer)."
                    )
            state = sw.full_state_dict(model, trainable_only=True)
            computes = method == "prompt"  # what peft saves
            with sw.full_parameters(model.prompt_encoder) if computes else contextlib.nullcontext(), torch.no_grad():
                if rank == 0:
                    model.save_pretrained(f"{place}-saved", state_dict=state)
            written = ["saved"]
            for form in ("adapter", "merged"):
                try:
                    sw.export(f"{place}-{form}", model, merge_adapter=form == "merged")
                    written.append(form)
                except sw.ConfigError as error:
                    refused[method, whole, form] = str(error)
            if rank == 0:
                found = {"trained": trained} | {
                    form: logits(with_adapter(load(base, **labels), f"{place}-{form}"))
                    for form in written
                    if form != "merged"
                }
                if "merged" in written:
                    found["merged"] = logits(load(f"{place}-merged", **labels))
                wrong += [(method, whole, form) for form, got in found.items() if far(got, plain)]
    return wrong, refused


def with_adapter(base, folder):
    import peft

    return peft.PeftModel.from_pretrained(base, folder)


def test_an_adapter_has_the_files_that_peft_writes(tmp_path):
    from safetensors.torch import load_file

    from shardwise.api.export_form import form_of

    warnings.simplefilter("ignore")
    for method in ("lora", "lora all biases", "lora biases", "lora bias of B", "dora"):
        model = build(method, "none", tmp_path / "base")
        model.peft_config["default"].task_type = None
        model.save_pretrained(tmp_path / method)
        tensors = form_of(model).convert(dict(model.named_parameters()))
        assert tensors.keys() == load_file(tmp_path / method / "adapter_model.safetensors").keys(), method
        form_of(model).write_config(tmp_path / method / "form", torch.float32)
        got, wanted = (
            json.loads((tmp_path / method / part / "adapter_config.json").read_text()) for part in ("form", "")
        )
        for each in (got, wanted):
            each["target_modules"].sort()  # of a set
        assert got == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"trainable_token_indices": [64, 65]},
        {},
    ],
    ids=["embeddings", "head", "both as one", "new tokens", "untrained"],
)
def test_tied_and_resized_embeddings_are_those_that_were_trained(options, tmp_path):
    import peft
    import transformers

    warnings.simplefilter("ignore")
    load = transformers.AutoModelForCausalLM.from_pretrained
    sizes = SIZES | {"tie_word_embeddings": True}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path / "base")
    base = load(tmp_path / "base")
    base.resize_token_embeddings(66, mean_resizing=False)
    model = sw.parallelize(peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **TARGETS, **options)))
    tokens = torch.tensor([[3, 64, 5, 65]])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    with torch.no_grad():
        wanted = model.eval()(input_ids=tokens).logits
        sw.export(tmp_path / "adapter", model)
        anew = load(tmp_path / "base")
        anew.resize_token_embeddings(66, mean_resizing=False)  # other values in the new rows
        assert not far(with_adapter(anew, tmp_path / "adapter").eval()(input_ids=tokens).logits, wanted)
        if "trainable_token_indices" not in options:
            sw.export(tmp_path / "merged", model, merge_adapter=True)
            merged = load(tmp_path / "merged")
            assert not far(merged.eval()(input_ids=tokens).logits, wanted)
            is_one = merged.lm_head.weight is merged.model.embed_tokens.weight
            assert is_one == merged.config.tie_word_embeddings == (len(options) != 1)


@pytest.mark.parametrize("change", ["tied", "replicated"])
def test_an_adapter_of_a_weight_that_other_layers_have_too_is_not_merged(change):
    import peft
    import transformers

    from shardwise.api.export_form import form_of

    if change == "tied":
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"tie_word_embeddings": True}))
        options = {"target_modules": ["lm_head"]}
    else:
        base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        options = {"layer_replication": [[0, 1], [0, 1]], **TARGETS}
    warnings.simplefilter("ignore")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, **options))
    with pytest.raises(sw.ConfigError, match="also another layer's"):
        form_of(sw.parallelize(model), merges=True)


@pytest.mark.parametrize(
    "methods",
    [("lora", "lora biases", "dora", "ia3"), pytest.param(tuple(METHODS), marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_peft_loads_what_was_trained_on_shards_with_and_without_whole_modules(methods, tmp_path):
    wrong, refused = run_on_ranks(save_each, 2, str(tmp_path), methods, timeout_s=280)[0]
    assert wrong == []
    for (method, _, form), text in refused.items():
        assert method not in {"lora", "lora biases", "lora all biases", "lora head"}
        if "of kind" in text:  # what it says has just been done, and is right
            assert "model.save_pretrained(folder, state_dict=state)" in text
            assert ("inside of sw.full_parameters(model.prompt_encoder)" in text) == (method == "prompt")
        else:
            assert (form, method) in {
                ("merged", each) for each in ("dora", "lora embedding", "lora tokens", "lora bias of B")
            }
