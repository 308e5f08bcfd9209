"""What hybrid sharding and inner groups send, axis by axis: recorded, predicted, and by hand."""

from __future__ import annotations

import functools

import pytest

from shardwise.testing import run_on_ranks
from tests.common.oracle import PRESETS
from tests.engine.test_trace_of_steps import B0, B1, B2, B3, B4, CASES, FORWARD, GATHER, REDUCE_SCATTER, record

HYBRID = ("hsdp", "hybrid_shard_grad_op")
Event = tuple[str, str, int, str]  # kind, unit, bytes sent by this rank, axis

GROUPS, INNER = (("dp_replicate", 2),), (("reshard_after_forward", 2),)
#: Model, preset, accumulation, microbatches, further fields of the plan.
QUICK = [
    *(("even", "hsdp", *case, GROUPS) for case in (*CASES, ("defer_replicate", 3))),
    ("even", "hybrid_shard_grad_op", "auto", 1, GROUPS),
    ("even", "zero2", "sharded", 3, GROUPS),
    ("even", "zero3", "sharded", 3, INNER),
    *((name, "hsdp", "defer_replicate", 3, GROUPS) for name in ("odd", "frozen")),
    *((name, "ddp", "auto", 1, GROUPS) for name in ("odd", "frozen")),
    *((name, "zero3", "unsharded", 3, INNER) for name in ("odd", "frozen")),
]


def record_all(cases):
    return {case: record(*case[:4], **dict(case[4])) for case in cases}


@functools.cache
def on_four_ranks():
    return run_on_ranks(record_all, 4, QUICK, timeout_s=200)


@pytest.mark.slow
def test_the_recorded_collectives_are_the_predicted_ones():
    for rank, results in enumerate(on_four_ranks()):
        for case, (recorded, predicted) in results.items():
            assert recorded == predicted, f"rank {rank}: {case}"


@pytest.mark.long
@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 2), (6, 3)])
def test_the_recorded_collectives_are_the_predicted_ones_on_every_mesh(world, replicate):
    fields = (("dp_replicate", replicate), ("dp_shard", world // replicate))
    cases = [
        (name, preset, *case, fields)
        for name in ("even", "odd", "frozen")
        for preset in (*HYBRID, *(PRESETS if replicate > 1 else ()))
        for case in (*CASES, ("defer_replicate", 3))
        if case[0] != "defer_replicate" or preset not in {"ddp", "zero1"}
    ]
    if world == 4:
        cases += [
            (name, preset, *case, INNER)
            for name in ("even", "odd", "frozen")
            for preset in ("zero3", "shard_grad_op")
            for case in CASES
        ]
    for rank, results in enumerate(run_on_ranks(record_all, world, cases, timeout_s=280)):
        for case, (recorded, predicted) in results.items():
            assert recorded == predicted, f"rank {rank}: {case}"


# -- by hand, for the even model of ``test_trace``
#
# On 2 x 2 ranks a group of two gathers and scatters what two ranks do. A rank then holds half of a unit's gradient with
# its header, 82,432 bytes of a block; of that it sends one half to be added and one half of the sums.


def gather(unit: str) -> Event:
    return "all_gather", unit, GATHER[2][unit == "root"], "dp_shard"


def scatter(unit: str) -> Event:
    return "reduce_scatter", unit, REDUCE_SCATTER[2][unit == "root"], "dp_shard"


def across(unit: str) -> Event:
    return "all_reduce", unit, {True: 7_936, False: 82_432}[unit == "root"], "dp_replicate"


FIRST = [gather(unit) for unit in FORWARD]
WHOLE = [gather(B3), scatter(B4), gather(B2), across(B4), scatter(B3), gather(B1), across(B3), scatter(B2), gather(B0)]
WHOLE += [across(B2), scatter(B1), across(B1), scatter(B0), across(B0), scatter("root"), across("root")]
INSIDE = [event for event in WHOLE if event[3] == "dp_shard"]
SILENT = [event for event in WHOLE if event[0] == "all_gather"]
KEPT_WHOLE = [event for event in WHOLE if event[0] != "all_gather"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "accumulation", "expected"),
    [
        ("hsdp", "auto", [FIRST + WHOLE]),
        ("hsdp", "sharded", [FIRST + WHOLE] * 3),
        ("hsdp", "unsharded", [FIRST + SILENT, FIRST + SILENT, FIRST + WHOLE]),
        ("hsdp", "defer_replicate", [FIRST + INSIDE, FIRST + INSIDE, FIRST + WHOLE]),
        ("hybrid_shard_grad_op", "auto", [FIRST + KEPT_WHOLE]),
        ("zero2", "sharded", [FIRST + KEPT_WHOLE, KEPT_WHOLE, KEPT_WHOLE]),
    ],
)
def test_a_step_on_two_groups_of_two(preset, accumulation, expected):
    microbatches = len(expected)
    for results in on_four_ranks():
        recorded, _ = results["even", preset, accumulation, microbatches, GROUPS]
        assert recorded == expected


#: On four ranks a block is padded to 4 * 41,216 = 164,864 bytes: a rank sends its quarter to three others, and for
#: backward its half to one neighbour.
QUARTERS, HALF = {True: 11_520, False: 123_648}, {True: 7_680, False: 82_432}


@pytest.mark.slow
def test_units_kept_over_two_of_four_ranks_are_gathered_from_the_neighbour():
    for results in on_four_ranks():
        recorded, _ = results["even", "zero3", "sharded", 3, INNER]
        gathers = [[event for event in events if event[0] == "all_gather"] for events in recorded]
        everyone = [("all_gather", unit, QUARTERS[unit == "root"], "dp_shard") for unit in FORWARD]
        neighbour = {unit: ("all_gather", unit, HALF[unit == "root"], "dp_shard_inner") for unit in FORWARD}
        # The last block is still there when backward begins, so nothing of it is kept.
        backward = [neighbour[unit] for unit in ("root", B3, B2, B1, B0)]
        assert gathers[0] == everyone + backward
        # What is kept serves the forwards of later microbatches too: the parameters are the same.
        again = [neighbour[unit] for unit in FORWARD[:-1]]
        assert gathers[1] == gathers[2] == [*again, everyone[-1], *backward]
