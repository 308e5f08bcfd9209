"""What a step sends on ``cp`` is what arithmetic predicts from the model's shape, and what a dry run shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed

import shardwise as sw
from shardwise.models.transformer import GPT
from shardwise.testing import probe, run_on_ranks
from tests.parallel.context.step import ContextStep

BATCH, SEQ, HIDDEN, LAYERS = 3, 9, 24, 3
#: By name: the plan, how many ranks share the heads, and what else is known of the step.
CASES: dict[str, tuple[dict, dict]] = {
    "two": ({"cp": 2}, {}),
    "four": ({"cp": 4, "strategy": "ddp"}, {}),
    "16 bit": ({"cp": 2, "mp_policy": sw.PrecisionPolicy(param_dtype="bf16")}, {"item_bytes": 2}),
    "recomputed": ({"cp": 2, "activation_checkpointing": "full"}, {"is_recomputed": True}),
    "heads divided": ({"cp": 2, "tp": 2}, {"kv_width": HIDDEN // 2}),
    "by positions": ({"cp": 2, "tp": 2, "sequence_parallel": True}, {"kv_width": HIDDEN // 2, "multiple": 2}),
}


def build() -> GPT:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=2, vocab_size=33, seq_len=SEQ)


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ)
    return ids, ids


def record() -> dict[str, tuple[list, list]]:
    """The events of each case's second step, and what is predicted of data parallelism."""
    found = {}
    for name, (options, _) in CASES.items():
        model = sw.parallelize(build(), sw.ParallelPlan(**options))
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
    options, known = CASES[name]
    cp, tp = options["cp"], options.get("tp", 1)
    for rank, found in enumerate(recorded):
        events, others = found[name]
        shape = {"kv_width": HIDDEN, "batch": BATCH, "length": SEQ} | known
        step = ContextStep(LAYERS, **shape, size=cp, rank=rank // tp % cp)
        assert [event for event in events if event[3] == "cp"] == [tuple(event) for event in step.trace()]
        assert [event for event in events if event[3] not in {"cp", "tp"}] == others


@pytest.mark.parametrize(("name", "rank"), [("16 bit", 0), ("recomputed", 3)])
def test_a_dry_run_sends_the_same(recorded, name, rank):
    dry = sw.dry_run(build, sw.ParallelPlan(**CASES[name][0]), world_size=4, rank=rank, batch=tokens())
    assert [(e.kind, e.unit, e.sent_bytes, e.axis) for e in dry.events] == recorded[rank][name][0]


STAGES = sw.ParallelPlan(cp=2, pp=2)


def record_stages() -> list[tuple]:
    model = sw.parallelize(build(), STAGES)
    for _ in range(2):
        with sw.record_collectives(model) as events:
            sw.train_step(model, tokens(), num_microbatches=BATCH)
    return [(e.kind, e.unit, e.sent_bytes, e.axis) for e in events if e.axis == "cp"]


def test_stages_send_what_a_dry_run_shows_for_each_microbatch():
    one = tuple(ids[:1] for ids in tokens())
    ranks = run_on_ranks(record_stages, 4)
    for rank, events in ((0, ranks[0]), (3, ranks[3])):
        dry = sw.dry_run(build, STAGES, world_size=4, rank=rank, batch=one, num_microbatches=BATCH)
        assert [(e.kind, e.unit, e.sent_bytes, e.axis) for e in dry.events if e.axis == "cp"] == events
        step = ContextStep(LAYERS, HIDDEN, 1, SEQ, size=2, rank=rank % 2)
        held = {event[1] for event in events}
        expected = BATCH * [tuple(event) for event in step.trace() if event.unit in held]
        assert sorted(events) == sorted(expected)


def test_a_layer_sends_three_times_the_keys_and_values_of_the_other_ranks():
    for size in (2, 4, 8):
        few, more = (ContextStep(layers, 64, 2, 512, size=size) for layers in (3, 4))
        blocks = (size - 1) * 2 * (2 * 512 // size) * 64
        assert more.sent_bytes - few.sent_bytes == 3 * blocks * 4
        assert len(more.trace()) - len(few.trace()) == 2 * 3 * (size - 1)
