"""Tensor parallelism of models of transformers, by their own tables and ours, against one plain process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.styles import translated
from shardwise.testing import run_on_ranks
from tests.common.split import Case, check
from tests.parallel.tensor.test_tensor import SEQUENCE

pytestmark = pytest.mark.preload("transformers.models.t5.modeling_t5", "transformers.models.mixtral.modeling_mixtral")

VOCAB, SEQ = 41, 8
#: Their norms compute in fp32 whatever the dtype.
ROUNDS = ("llama", "qwen3", "mixtral", "t5", "gemma2", "cohere", "apertus")


@dataclass(frozen=True)
class Family(Case):
    """A model of transformers. With labels its own loss (in fp32), else one of its logits."""

    name: str = "llama"
    has_labels: bool = False
    adapts: tuple[str, ...] = ()

    @property
    def exactness(self) -> torch.dtype:
        return torch.float32 if self.name in ROUNDS or self.has_labels else self.dtype

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        model = _build(self.name, dict(self.model))
        if self.adapts:
            import peft

            form = {"fan_in_fan_out": self.name == "gpt2", "init_lora_weights": False}
            form["lora_bias"] = self.name == "gpt2"
            config = peft.LoraConfig(r=2, target_modules=list(self.adapts), **form)
            model = peft.inject_adapter_in_model(config, model)
        return model.to(self.dtype).train()

    def loss(self, model: nn.Module, step: int, microbatch: int, reader: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + reader)
        ids = torch.randint(4, VOCAB, (2, SEQ), generator=generator)
        labels = ids.clone()
        labels[0, reader] = -100
        if self.name == "vit":
            size = dict(self.model).get("image_size", 8)
            output = model(torch.randn(2, 3, size, size, generator=generator, dtype=self.dtype))
            return F.cross_entropy(output.logits, ids[:, 0] % 4)
        inputs = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if self.name == "t5" else {})
        if self.has_labels:
            output = model(input_ids=ids, labels=labels)
            divides = self.name not in {"t5", "bert"} and _is_cut(model)
            if divides and not any("embed_tokens" in name for name in getattr(model, "_tp_plan", None) or {}):
                divides = self.name == "gpt2" or not model.config.tie_word_embeddings  # transformers 5.10
            assert (output.logits is None) == divides
            return output.loss
        return F.cross_entropy(model(**inputs).logits.flatten(0, 1), labels.flatten())


def _is_cut(model: nn.Module) -> bool:
    return any("_shardwise" in module.__dict__ for module in model.modules())


def _build(name: str, changes: dict[str, Any]) -> nn.Module:  # noqa: C901, PLR0911 - one for each family
    import transformers as tf

    decoder = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "use_cache": False,
    } | changes
    if name == "llama":
        return tf.LlamaForCausalLM(tf.LlamaConfig(**decoder, attention_bias=True))
    if name == "qwen3":
        return tf.Qwen3ForCausalLM(tf.Qwen3Config(**decoder, head_dim=8, tie_word_embeddings=True))
    if name == "mixtral":
        sizes = decoder | {"num_local_experts": 3, "num_experts_per_tok": 2}
        return tf.MixtralForCausalLM(tf.MixtralConfig(**sizes))
    if name == "gemma2":  # scales what its embedding gives
        return tf.Gemma2ForCausalLM(tf.Gemma2Config(**decoder, head_dim=4))
    if name == "cohere":  # norms of each head
        return tf.CohereForCausalLM(tf.CohereConfig(**decoder, use_qk_norm=True))
    if name == "apertus":  # its activation learns two slopes
        return tf.ApertusForCausalLM(tf.ApertusConfig(**decoder))
    if name == "doge":  # its mask has a row for every head
        return tf.DogeForCausalLM(tf.DogeConfig(**decoder))
    if name == "gemma3n":  # its activation keeps the largest of all features
        small = {"head_dim": 4, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4}
        small |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.5]}
        return tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**(decoder | small)))
    if name == "gpt2":
        rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        sizes = {"vocab_size": VOCAB, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4, "use_cache": False}
        return tf.GPT2LMHeadModel(tf.GPT2Config(**(sizes | rates | changes)))
    if name == "t5":
        sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4}
        rest = {"dropout_rate": 0.0, "decoder_start_token_id": 0, "use_cache": False}
        return tf.T5ForConditionalGeneration(tf.T5Config(**(sizes | rest | changes)))
    wide = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    wide |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        return tf.BertForMaskedLM(tf.BertConfig(vocab_size=VOCAB, max_position_embeddings=16, **(wide | changes)))
    return tf.ViTForImageClassification(
        tf.ViTConfig(**({"image_size": 8, "patch_size": 4, "num_labels": 4} | wide | changes))
    )


def test_every_family_equals_one_process():
    check(
        2,
        Family(name="gpt2", model=tuple(dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.2).items())),
        Family(name="bert", model=(("attention_probs_dropout_prob", 0.2), ("hidden_dropout_prob", 0.1))),
        Family(name="vit"),
        Family(name="llama", model=(("attention_dropout", 0.2),)),
        Family(name="qwen3", has_labels=True, dtype=torch.float32),
        Family(name="mixtral", has_labels=True, dtype=torch.float32, num_microbatches=2),
        Family(name="gemma2", has_labels=True, dtype=torch.float32),
        Family(name="cohere", has_labels=True, dtype=torch.float32),
        Family(name="apertus", has_labels=True, dtype=torch.float32),
        Family(name="doge", has_labels=True, dtype=torch.float32),
        Family(name="gemma3n", has_labels=True, dtype=torch.float32),
        Family(name="gpt2", has_labels=True, dtype=torch.float32),
        Family(name="t5", has_labels=True, dtype=torch.float32, max_norm=0.3, model=(("dropout_rate", 0.2),)),
        Family(name="t5", model=(("feed_forward_proj", "gated-gelu"), ("tie_word_embeddings", False))),
    )


def test_every_family_whose_positions_are_divided_equals_one_process():
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.2)
    check(
        2,
        Family(name="gpt2", plan=SEQUENCE, model=tuple(rates.items())),
        Family(name="gpt2", plan=SEQUENCE, adapts=("c_attn", "c_proj", "c_fc")),
        Family(name="llama", plan=SEQUENCE, adapts=("q_proj", "k_proj", "o_proj", "up_proj", "down_proj")),
        Family(
            name="bert",
            plan=SEQUENCE,
            model=(("attention_probs_dropout_prob", 0.2), ("hidden_dropout_prob", 0.1)),
        ),
        Family(name="vit", plan=SEQUENCE, model=(("image_size", 12), ("hidden_dropout_prob", 0.1))),
        Family(name="llama", plan=SEQUENCE, model=(("attention_dropout", 0.2),)),
        Family(name="qwen3", plan=SEQUENCE, has_labels=True, dtype=torch.float32, max_norm=0.3),
        Family(name="mixtral", plan=SEQUENCE, has_labels=True, dtype=torch.float32, num_microbatches=2),
        Family(
            name="llama", plan=(*SEQUENCE, ("activation_checkpointing", "full")), model=(("num_key_value_heads", 1),)
        ),
    )


def test_with_fewer_key_heads_than_ranks_the_copies_stay_equal():
    """Two key heads on four ranks, and one; the gradients of the copies are added up."""
    check(
        4,
        Family(tp=4, name="qwen3", has_labels=True, dtype=torch.float32, max_norm=0.3),
        Family(tp=4, name="llama", model=(("num_key_value_heads", 1),)),
        Family(name="llama", model=(("num_key_value_heads", 1),), num_microbatches=2),
    )


def outputs() -> dict[str, Any]:
    """What a Llama gives with labels, without, and where its table is told to gather."""
    ids = torch.arange(6).view(1, 6)
    case = Family(dtype=torch.float32)
    plain = case.build()(input_ids=ids, labels=ids)
    model = sw.parallelize(case.build(), sw.ParallelPlan(tp=2))
    told = sw.parallelize(case.build(), sw.ParallelPlan(tp=2, tp_plan={"lm_head": "colwise_gather_output"}))
    given, without, gathered = model(input_ids=ids, labels=ids), model(input_ids=ids), told(input_ids=ids, labels=ids)
    assert given.logits is None
    assert "logits" not in given
    for output in (without, gathered):
        torch.testing.assert_close(output.logits, plain.logits)
    for output in (given, gathered):
        torch.testing.assert_close(output.loss, plain.loss)
    return {"loss": given.loss.item()}


def test_logits_are_there_without_labels_or_when_asked_for():
    first, second = run_on_ranks(outputs, 2)
    assert first == second


def test_a_module_that_only_holds_cut_parameters_is_left_as_it_is():
    assert translated("layers.*.self_attn", "local_params") == "replicate"
