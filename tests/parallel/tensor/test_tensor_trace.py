"""What a step sends on ``tp`` is what arithmetic predicts from the model's shape, and what a dry run shows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, distributed

import shardwise as sw
from shardwise.models.transformer import GPT
from shardwise.testing import probe, run_on_ranks
from tests.parallel.tensor.step import TensorStep

BATCH, SEQ, HIDDEN, LAYERS = 3, 6, 24, 3
CASES: dict[str, tuple[dict, dict]] = {
    "plain": ({}, {}),
    "16 bit": ({}, {"mp_policy": sw.PrecisionPolicy(param_dtype="bf16")}),
    "recomputed": ({}, {"activation_checkpointing": "full"}),
    "by positions": ({}, {"sequence_parallel": True}),
    "by positions, recomputed": ({"bias": False}, {"sequence_parallel": True, "activation_checkpointing": "full"}),
    "experts": ({"num_experts": 3}, {"strategy": "ddp"}),
    "experts, recomputed": ({"num_experts": 3, "bias": False}, {"activation_checkpointing": "full"}),
}


def build(**changes: object) -> GPT:
    torch.manual_seed(0)
    return sw.models.gpt(
        "gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=2, vocab_size=33, seq_len=SEQ, **changes
    )


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    return ids, ids


def record() -> dict[str, tuple[list, list]]:
    """The events of each case's second step, and what is predicted for the other axes."""
    found = {}
    for name, (changes, options) in CASES.items():
        model = sw.parallelize(build(**changes), sw.ParallelPlan(tp=2, **options))
        for _ in range(2):
            with sw.record_collectives(model) as events:
                model(*tokens()).backward()
            for parameter in model.parameters():
                parameter.grad = None
        predicted = [tuple(collective) for collective in probe(model).predicted_collectives()]
        found[name] = [(e.kind, e.unit, e.sent_bytes, e.axis) for e in events], predicted
    distributed.barrier()
    return found


@pytest.fixture(scope="module")
def recorded() -> list[dict[str, tuple[list, list]]]:
    return run_on_ranks(record, 4)


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_sends_is_what_its_shape_predicts(recorded, name):
    for rank, found in enumerate(recorded):
        events, others = found[name]
        step = TensorStep(
            LAYERS,
            HIDDEN,
            BATCH * SEQ,
            size=2,
            rank=rank % 2,
            item_bytes=2 if name == "16 bit" else 4,
            num_experts=3 if "experts" in name else 0,
            is_recomputed="recomputed" in name,
            divides_sequence="positions" in name,
            has_bias=CASES[name][0].get("bias", True),
        )
        assert [event for event in events if event[3] == "tp"] == [tuple(event) for event in step.trace()]
        assert [event for event in events if event[3] != "tp"] == others


def test_a_layer_adds_up_four_times_batch_by_sequence_by_hidden_elements():
    """In 16 bit each is an all-reduce of ``2 b s h`` bytes, of which a rank sends ``2 (t - 1) / t``."""
    for size in (2, 4, 8):
        few, more = (TensorStep(layers, 64, 512, size=size, item_bytes=2) for layers in (3, 4))
        added = [event for event in more.trace() if event.unit.startswith("blocks.3.")]
        assert len(added) == 4
        assert more.sent_bytes - few.sent_bytes == 4 * 2 * (size - 1) * (2 * 512 * 64) // size
        assert len(few.trace()) == 4 * 3 + 3
        divided = dataclasses.replace(more, divides_sequence=True)
        activations = [event for event in divided.trace() if event.kind in {"all_gather", "reduce_scatter"}]
        moved = sum(event.sent_bytes for event in activations if event.unit.startswith("blocks.3."))
        assert moved == sum(event.sent_bytes for event in added)


@pytest.mark.parametrize("name", ["plain", "recomputed", "by positions"])
def test_a_dry_run_sends_the_same(recorded, name):
    changes, options = CASES[name]
    for rank in (0, 3):
        dry = sw.dry_run(
            lambda: build(**changes), sw.ParallelPlan(tp=2, **options), world_size=4, rank=rank, batch=tokens()
        )
        assert [(e.kind, e.unit, e.sent_bytes, e.axis) for e in dry.events] == recorded[rank][name][0]
