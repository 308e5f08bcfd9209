"""Tied weights of real models: what other engines got wrong, each under the name of the report."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.spec.errors import StateError
from tests.common.families import FAMILIES, LLAMA, PRELOAD, T5, VOCAB, build_transformers
from tests.common.oracle import compare, compare_each, presets
from tests.common.ranks import on_ranks

pytestmark = PRELOAD

TIED = "model.embed_tokens.weight"


def llama():
    return build_transformers("LlamaForCausalLM", "LlamaConfig", LLAMA)


def qwen3():
    sizes = {**LLAMA, "head_dim": 8}
    return build_transformers("Qwen3ForCausalLM", "Qwen3Config", sizes)


def tied_t5():
    """Four uses of one weight: the embedding, both stacks' own, and the head."""
    return build_transformers("T5ForConditionalGeneration", "T5Config", {**T5, "tie_word_embeddings": True})


@on_ranks(2, 3, 4, timeout_s=150)
def test_pytorch_176076_every_rank_updates_its_part_of_a_tied_weight_of_uneven_size():
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert VOCAB % world
    found = compare_each(llama, FAMILIES["Llama"].loss, presets(), steps=2)  # gradients of every rank's rows, too
    for strategy, trained in found.items():
        fresh = dict(llama().named_parameters())[TIED]
        for shard in trained.probe.shards:
            if shard.name != TIED:
                continue
            assert shard.values.numel() == shard.numel
            assert (shard.values != shard.part_of(fresh)).all(), (
                f"{strategy}: rank {rank} holds elements that were never updated"
            )
        model = trained.model
        assert model.lm_head.weight is model.model.embed_tokens.weight
        state = sw.full_state_dict(model)
        if rank == 0:
            assert torch.equal(state["lm_head.weight"], state[TIED])


@on_ranks(2, timeout_s=120)
def test_pytorch_176257_a_parameter_shared_by_several_units_belongs_to_the_lowest_that_covers_them():
    warnings.simplefilter("ignore")
    for build, units in (
        (llama, ("model.embed_tokens", "lm_head", "model.norm", "model.layers.*")),
        (tied_t5, ("encoder", "decoder", "encoder.block.*", "decoder.block.*", "lm_head", "shared")),
    ):
        loss = FAMILIES["T5" if build is tied_t5 else "Llama"].loss
        compare_each(build, loss, ("ddp", "zero2", "zero3"), steps=2, auto_wrap_policy=sw.wrap_by_name(*units))


@on_ranks(2, timeout_s=120)
def test_accelerate_4171_tied_embeddings_train_however_the_tail_of_the_model_is_cut():
    """The units that accelerate makes, recomputed; and one by one, where the tie cannot be seen in time."""
    warnings.simplefilter("ignore")
    policy = sw.wrap_by_name("model.layers.*", "model.norm", "model.embed_tokens")
    for checkpointing in ("none", "full"):
        trained = compare(
            qwen3,
            FAMILIES["Qwen3"].loss,
            "zero3",
            steps=2,
            auto_wrap_policy=policy,
            activation_checkpointing=checkpointing,
        )
        seen = trained.probe
        (owner,) = (shard.unit for shard in seen.shards if shard.parameter is trained.model.lm_head.weight)
        assert owner == seen.units[0].name
    model = qwen3()
    sw.fully_shard(model.model.embed_tokens)
    with pytest.raises(StateError, match=r"'lm_head.weight' is tied to one of unit 'model.embed_tokens'"):
        sw.fully_shard(model)
