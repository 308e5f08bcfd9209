"""What a real step sends is what the simulated step sends, event by event: kind, unit, bytes, axis, order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import shardwise as sw
from shardwise.spec.traffic.data import Collective
from shardwise.testing import Probe, probe, run_on_ranks
from tests.parallel.context.step import ContextStep
from tests.parallel.tensor.step import TensorStep, gpt_elements
from tests.sim.inside import inside

LAYERS, HIDDEN, VOCAB, SEQ, BATCH = 4, 24, 33, 8, 2
Event = tuple[str, str, int, str]


@dataclass(frozen=True)
class Case:
    """A plan on four ranks, and how many microbatches are accumulated."""

    plan: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.plan.items()) + f", {self.microbatches}"


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "shard_grad_op")
CASES = (
    *(Case({"strategy": name}) for name in STRATEGIES),
    *(Case({"strategy": name, "accumulation": "sharded"}, 3) for name in ("ddp", "zero2", "zero3")),
    *(Case({"strategy": name, "accumulation": "unsharded"}, 3) for name in STRATEGIES),
    *(Case({"strategy": name, "dp_replicate": 2}) for name in ("ddp", "hsdp", "hybrid_shard_grad_op")),
    Case({"strategy": "hsdp", "dp_replicate": 2, "accumulation": "defer_replicate"}, 3),
    Case({"strategy": "zero3", "reshard_after_forward": 2, "accumulation": "sharded"}, 2),
    Case({"strategy": "zero3", "reshard_after_forward": False}),
    Case({"strategy": "zero3", "gradient_buffers": 4}),
    Case({"strategy": "zero3", "activation_checkpointing": "full"}),
    *(Case({"strategy": name, "tp": 2}) for name in ("ddp", "zero3")),
    Case({"strategy": "zero1", "tp": 2, "sequence_parallel": True}),
    Case({"strategy": "zero3", "tp": 2, "activation_checkpointing": "full"}),
    *(Case({"strategy": name, "cp": 2}) for name in ("ddp", "zero3")),
)


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt(
        "gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=2, vocab_size=VOCAB, seq_len=SEQ, tied=False
    )


def tokens() -> tuple[Tensor, Tensor]:
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % VOCAB
    return ids, ids


def exchanges(case: Case) -> tuple[list[Collective], list[Collective]]:
    """The collectives inside units, of forward and of backward."""
    mesh = sw.ParallelPlan(**case.plan).mesh(4)
    at = mesh.coordinate(distributed.get_rank())
    is_recomputed = "activation_checkpointing" in case.plan
    if mesh.tp > 1:
        step = TensorStep(
            LAYERS,
            HIDDEN,
            BATCH * SEQ,
            size=mesh.tp,
            rank=at["tp"],
            is_recomputed=is_recomputed,
            divides_sequence=case.plan.get("sequence_parallel", False),
        )
        elements = gpt_elements(LAYERS)
        return step.forward(elements), step.backward(elements)
    if mesh.cp > 1:
        trace = ContextStep(LAYERS, HIDDEN, BATCH, SEQ, size=mesh.cp, rank=at["cp"]).trace()
        loss = [collective.unit for collective in trace].index("loss") + 1
        return trace[:loss], trace[loss:]
    return [], []


def simulated(case: Case, seen: Probe, microbatch: int) -> tuple[list[Event], list[Event]]:
    """In the order of issue, and in the order in which they begin."""
    forward, backward = exchanges(case)
    computed = inside(seen.unit_facts, forward, backward)
    is_last = microbatch == case.microbatches - 1
    timeline = seen.simulated_step(
        is_synchronising=is_last or seen.accumulation == "sharded",
        is_first_of_window=microbatch == 0,
        computation=computed.__getitem__,
    )
    issued = [span.task.collective for span in timeline.spans if span.task.collective is not None]
    return [tuple(each) for each in issued], [tuple(each) for _, each in timeline.collectives]


def record() -> list[list[tuple[list[Event], list[Event], list[Event]]]]:
    """Of each case, for each microbatch of its second step: recorded, simulated as issued, simulated as begun."""
    results = []
    for case in CASES:
        model = sw.parallelize(build(), sw.ParallelPlan(merge_units=False, **case.plan))
        seen, found = probe(model), []
        for step in range(2):
            for microbatch in range(case.microbatches):
                with (
                    sw.gradient_sync(model, microbatch == case.microbatches - 1),
                    sw.record_collectives(model) as events,
                ):
                    model(*tokens()).backward()
                if step:
                    recorded = [(e.kind, e.unit, e.sent_bytes, e.axis) for e in events]
                    found.append((recorded, *simulated(case, seen, microbatch)))
            for parameter in model.parameters():
                parameter.grad = None
        results.append(found)
        distributed.barrier()
    return results


@pytest.fixture(scope="module")
def recorded() -> list[list[list[tuple[list[Event], list[Event], list[Event]]]]]:
    return run_on_ranks(record, 4, timeout_s=100)


@pytest.mark.parametrize("place", range(len(CASES)), ids=lambda place: str(CASES[place]))
def test_a_step_sends_what_its_simulation_sends(recorded, place):
    for rank, results in enumerate(recorded):
        for microbatch, (events, issued, begun) in enumerate(results[place]):
            where = f"rank {rank}, microbatch {microbatch}"
            assert events == issued, where
            for stream in {(kind, axis) for kind, _, _, axis in events}:
                assert [e for e in begun if (e[0], e[3]) == stream] == [e for e in events if (e[0], e[3]) == stream], (
                    where
                )


def test_the_cases_send_something_on_every_axis_and_of_every_kind(recorded):
    events = {(kind, axis) for results in recorded for found in results for e, *_ in found for kind, _, _, axis in e}
    assert {axis for _, axis in events} >= {"dp_shard", "dp_shard_inner", "dp_replicate", "tp", "cp"}
    assert {kind for kind, _ in events} >= {"all_gather", "reduce_scatter", "all_reduce", "send", "receive"}
