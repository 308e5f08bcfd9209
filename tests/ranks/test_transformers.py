"""Models of the transformers library, where it is installed: tiny ones, from their configurations alone."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

import pytest
import torch
import torch.distributed as dist

from shardwise.testing import run_on_ranks
from tests.ranks.oracle import compare, seeded

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (the extra `hf`)"
)

#: Small enough for seconds, five layers so that slots are evicted.
# fmt: off
SIZES = {
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 40, "num_layers": 5, "dropout_rate":
        0.0, "decoder_start_token_id": 0,
    }),
    "bart": ("BartConfig", "BartForConditionalGeneration", {
        "d_model": 16, "encoder_layers": 5, "decoder_layers": 5, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
        "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 1,
        "forced_eos_token_id": None,
    }),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "n_embd": 16, "n_layer": 5, "n_head": 2, "vocab_size": 40, "n_positions": 32, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
    }),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 40, "tie_word_embeddings": True,
    }),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 40, "num_local_experts": 3, "num_experts_per_tok": 1,
        "output_router_logits": True,
    }),
    "bert": ("BertConfig", "BertForMaskedLM", {
        "hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 32,
        "vocab_size": 40, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }),
}
# fmt: on


def make(kind, **more):
    library = importlib.import_module("transformers")
    config, model, sizes = SIZES[kind]
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(library, model)(getattr(library, config)(**sizes, **more)).train()


def tokens(rank, step, salt=0):
    return torch.randint(3, 40, (2, 7), generator=seeded(rank, step, salt))


def train(model, rank, step):
    return model(input_ids=tokens(rank, step), labels=tokens(rank, step, 1)).loss


def train_checkpointed(model, rank, step):
    if step == 0:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return train(model, rank, step)


def generate_and_train(model, rank, step):
    """Generation before and after the training step, greedy, so that ranks stop at different lengths or not."""
    model.eval()
    first = model.generate(input_ids=tokens(rank, step), max_new_tokens=3 + rank, do_sample=False)
    model.train()
    loss = train(model, rank, step)
    loss.backward()
    yield first[:, :4], loss


def families(kinds, strategies):
    warnings.simplefilter("ignore")
    for kind in kinds:
        for strategy in strategies:
            trained = compare(lambda kind=kind: make(kind), train, strategy, steps=3)
            assert len(trained.runtime.units) >= 6, kind


@pytest.mark.parametrize("kind", list(SIZES))
def test_families_of_models_train_like_one_process(kind):
    run_on_ranks(families, 2, (kind,), ("zero1", "zero3"), timeout_s=120)


def test_odd_worlds_train_encoders_with_decoders():
    run_on_ranks(families, 3, ("t5", "bart"), ("zero3",), timeout_s=120)


def checkpointed():
    warnings.simplefilter("ignore")
    for kind in ("t5", "llama"):
        compare(lambda kind=kind: make(kind), train_checkpointed, "zero3", steps=3)


def test_gradient_checkpointing_of_the_library_works():
    run_on_ranks(checkpointed, 2, timeout_s=120)


def generation():
    warnings.simplefilter("ignore")
    for kind in ("t5", "bart", "gpt2"):
        for strategy in ("zero1", "zero3"):
            trained = compare(lambda kind=kind: make(kind), generate_and_train, strategy, steps=3)
            assert trained.model._is_fsdp_managed_module
    dist.barrier()


def test_generate_calls_the_encoder_alone_and_keeps_ranks_in_step():
    run_on_ranks(generation, 2, timeout_s=120)
