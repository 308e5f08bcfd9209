"""The collectives that a step really issues are those that arithmetic predicts, and those of the strategies' table."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import distributed

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.common import models
from tests.common.oracle import PRESETS

Event = tuple[str, str, int]  # kind, unit, bytes sent by this rank; those recorded and predicted also name the axis


def build(name):
    """``even``: every parameter and every slice is full at 1, 2 and 3 ranks; at 4 a block is padded by 128 elements."""
    if name not in ("even", "merged"):
        return models.build(name)
    torch.manual_seed(0)
    return sw.models.gpt(
        "gpt-tiny", num_layers=5, hidden=64, num_heads=2, ffn=192, vocab_size=47, seq_len=12, bias=False, tied=True
    )


def record(name: str, preset: str, accumulation: str, num_microbatches: int, **options: object) -> tuple[list, list]:
    """What each microbatch of the second step sent, and what was predicted for it."""
    if name == "merged":
        options["merge_units"] = 2 * BLOCK_BYTES
    policy = models.wrap_policy(name)
    plan = sw.ParallelPlan(strategy=preset, accumulation=accumulation, auto_wrap_policy=policy, **options)
    model = sw.parallelize(build(name), plan)
    seen = probe(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    rank = distributed.get_rank()
    recorded: list[list[tuple]] = []
    predicted: list[list[tuple]] = []
    for step in range(2):
        for microbatch in range(num_microbatches):
            is_last = microbatch == num_microbatches - 1
            with sw.gradient_sync(model, is_last), sw.record_collectives(model) as events:
                model(*models.batch(step, microbatch, rank)).backward()
            if step == 1:
                assert {event.dtype for event in events} <= {"fp32"}
                recorded.append([(event.kind, event.unit, event.sent_bytes, event.axis) for event in events])
                trace = seen.predicted_collectives(
                    is_synchronising=is_last or seen.accumulation == "sharded",
                    is_first_of_window=microbatch == 0,
                )
                predicted.append([tuple(collective) for collective in trace])
        optimizer.step()
        optimizer.zero_grad()
    return recorded, predicted


CASES = (("auto", 1), ("sharded", 3), ("unsharded", 3))


def record_everything(names):
    return {
        (name, preset, *case): record(name, preset, *case) for name in names for preset in PRESETS for case in CASES
    }


#: In `make test` four ranks have some cases alone (``"few"``).
WORLDS = (1, 2, 3, "few", pytest.param(4, marks=pytest.mark.long))


@functools.cache
def on_ranks(world):
    if world == "few":
        return run_on_ranks(record_some, 4, timeout_s=150)
    return run_on_ranks(record_everything, world, ("even", "merged", "odd", "frozen"), timeout_s=200)


def record_some():
    return {
        (name, preset, "auto", 1): record(name, preset, "auto", 1)
        for name, preset in (("even", "ddp"), ("even", "zero3"), ("odd", "zero2"))
    }


@pytest.mark.parametrize("world", WORLDS)
def test_the_recorded_collectives_are_the_predicted_ones(world):
    check_predictions(on_ranks(world))


def check_predictions(ranks):
    for rank, results in enumerate(ranks):
        for case, (recorded, predicted) in results.items():
            assert recorded == predicted, f"rank {rank}: {case}"


def record_granularities():
    return {
        (granularity, preset): record("odd", preset, "auto", 1, granularity=granularity)
        for granularity in (("block", 100), "row", "tensor")
        for preset in ("zero1", "zero3")
    }


@pytest.mark.parametrize("world", [2, 3, WORLDS[-1]])
def test_unequal_slices_send_what_is_predicted(world):
    check_predictions(run_on_ranks(record_granularities, world))


# -- the table, by hand
#
# A block of the even model has 41,088 elements in 6 parameters, the root 3,840 in 3: 164,352 and 15,360 bytes; at 4
# ranks a block takes 164,864. To gather a unit a rank sends (n-1)/n of that. A gradient buffer has a header of 64
# elements (256 bytes) for each of its n slices; an all-reduced one has a single header of 64 n elements and sends
# 2 (n-1)/n.

HEADER_BYTES = 256
BLOCK_BYTES = 164_352
GATHER = {1: (0, 0), 2: (82_176, 7_680), 3: (109_568, 10_240), 4: (123_648, 11_520)}  # world: block, root
REDUCE_SCATTER = {1: (0, 0), 2: (82_432, 7_936), 3: (110_080, 10_752), 4: (124_416, 12_288)}
ALL_REDUCE = {1: (0, 0), 2: (164_864, 15_872), 3: (220_160, 21_504), 4: (248_832, 24_576)}


def gather(unit: str, world: int) -> Event:
    return "all_gather", unit, GATHER[world][unit == "root"]


def scatter(unit: str, world: int) -> Event:
    return "reduce_scatter", unit, REDUCE_SCATTER[world][unit == "root"]


def reduce(unit: str, world: int) -> Event:
    return "all_reduce", unit, ALL_REDUCE[world][unit == "root"]


B0, B1, B2, B3, B4 = (f"blocks.{index}" for index in range(5))
FORWARD = ("root", B0, B1, B2, B3, B4)
BACKWARD = (B4, B3, B2, B1, B0, "root")


def zero3_backward(n: int) -> list[Event]:
    """The root and the last block are still there; the others are gathered again, one ahead of their use."""
    return [
        gather(B3, n),
        scatter(B4, n),
        gather(B2, n),
        scatter(B3, n),
        gather(B1, n),
        scatter(B2, n),
        gather(B0, n),
        scatter(B1, n),
        scatter(B0, n),
        scatter("root", n),
    ]


def expected(preset: str, accumulation: str, n: int) -> list[list[Event]]:
    """By microbatch: the table of strategies, as one sees it on the wire."""
    gathers = [gather(unit, n) for unit in FORWARD]
    scatters = [scatter(unit, n) for unit in BACKWARD]
    reduces = [reduce(unit, n) for unit in BACKWARD]
    whole = gathers + zero3_backward(n)
    no_scatter = [event for event in whole if event[0] == "all_gather"]
    table = {
        ("ddp", "auto"): [reduces],
        ("ddp", "sharded"): [reduces, reduces, reduces],
        ("ddp", "unsharded"): [[], [], reduces],
        # Whole parameters are brought up to date once, after the optimizer's step.
        ("zero2", "auto"): [gathers + scatters],
        ("zero2", "sharded"): [gathers + scatters, scatters, scatters],
        ("zero2", "unsharded"): [gathers, [], scatters],
        ("shard_grad_op", "auto"): [gathers + scatters],
        ("shard_grad_op", "sharded"): [gathers + scatters, gathers + scatters, gathers + scatters],
        ("shard_grad_op", "unsharded"): [gathers, gathers, gathers + scatters],
        ("zero3", "auto"): [whole],
        ("zero3", "sharded"): [whole, whole, whole],
        ("zero3", "unsharded"): [no_scatter, no_scatter, whole],
    }
    return table["zero2" if preset == "zero1" else preset, accumulation]


@pytest.mark.parametrize("world", WORLDS)
def test_every_preset_sends_what_its_row_of_the_table_says(world):
    for rank, results in enumerate(on_ranks(world)):
        for (name, preset, accumulation, _), (recorded, _) in results.items():
            if name == "even":
                assert {axis for events in recorded for *_, axis in events} <= {"dp_shard"}
                found = [[event[:3] for event in events] for events in recorded]
                wanted = expected(preset, accumulation, 4 if world == "few" else world)
                assert found == wanted, f"rank {rank}: {preset}, {accumulation}"


P0, P1 = "blocks.0-1", "blocks.2-3"


@pytest.mark.parametrize("world", [1, 2, 3])  # at 4 a pair needs no padding, and a block does
def test_blocks_that_travel_in_pairs_send_the_same_gathers_in_half_the_messages(world):
    """Twelve parameters of a pair still fit one header of 64."""
    for results in on_ranks(world):
        recorded, _ = results["merged", "zero3", "auto", 1]
        assert [(kind, unit) for kind, unit, *_ in recorded[0]] == [
            *(("all_gather", unit) for unit in ("root", P0, P1, B4, P1)),
            ("reduce_scatter", B4),
            ("all_gather", P0),
            *(("reduce_scatter", unit) for unit in (P1, P0, "root")),
        ]
        sent = {(kind, unit): num_bytes for kind, unit, num_bytes, *_ in recorded[0]}
        assert sent["all_gather", P0] == 2 * GATHER[world][0]
        header = (world - 1) * HEADER_BYTES
        assert sent["reduce_scatter", P1] == 2 * REDUCE_SCATTER[world][0] - header
        reduced, _ = results["merged", "ddp", "auto", 1]
        assert [unit for _, unit, *_ in reduced[0]] == [B4, P1, P0, "root"]
