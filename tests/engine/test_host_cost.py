"""What the engine does in a step at a world of one is what it does at a world of two.

So its cost there (the ``host`` case on one rank, less one plain process) is the engine's own: hooks, changes of state
and calls of the Comm are all made, and only the messages are missing.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from pathlib import Path
from types import FrameType
from unittest import mock

import torch

import shardwise as sw
from bench.compare.request import CASES
from shardwise.comm.gloo import GlooComm
from shardwise.engine.engine import Engine
from shardwise.engine.unit import Unit
from shardwise.testing import run_on_ranks
from tests.common.oracle import PRESETS
from tests.common.ranks import on_ranks

WATCHED: dict[type, tuple[str, ...]] = {
    Engine: ("before_forward", "after_forward", "pre_backward", "end_backward"),
    Unit: ("move_to",),
    GlooComm: ("all_gather", "reduce_scatter", "all_reduce"),
}


def do(preset: str) -> list[tuple[str, ...]]:
    """Everything that the engine does in the third step of the ``host`` case, in order."""
    case = CASES["host"]
    torch.manual_seed(0)
    tokens_BT = torch.zeros(case.batch, case.seq_len, dtype=torch.int64)
    done: list[tuple[str, ...]] = []

    def noting(owner: type, name: str):
        method = getattr(owner, name)

        def call(self, *args, **named):
            units = [arg.name for arg in (self, *args) if isinstance(arg, Unit)]
            done.append((name, *units, *(arg for arg in (*args, *named.values()) if isinstance(arg, str))))
            return method(self, *args, **named)

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as stack:
        for owner, names in WATCHED.items():
            for name in names:
                stack.enter_context(noting(owner, name))
        model = sw.parallelize(sw.models.gpt("gpt-tiny", **case.model), sw.ParallelPlan(strategy=preset))
        for _ in range(3):
            done.clear()
            model(tokens_BT, tokens_BT).backward()
            model.zero_grad()
    return done


def calls(done: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Hooks and calls of the Comm, in order."""
    return [entry for entry in done if entry[0] != "move_to"]


def moves(done: list[tuple[str, ...]]) -> dict[str, list[str]]:
    """The states that each unit goes through. Between ranks an all-reduce ends one unit later than on one alone."""
    found: dict[str, list[str]] = {}
    for entry in done:
        if entry[0] == "move_to":
            found.setdefault(entry[1], []).append(entry[2])
    return found


def do_all() -> dict[str, list[tuple[str, ...]]]:
    return {preset: do(preset) for preset in PRESETS}


@functools.cache
def on_one_rank() -> dict[str, list[tuple[str, ...]]]:
    return run_on_ranks(do_all, 1)[0]


def test_a_world_of_one_does_everything_that_a_world_of_two_does():
    """A step calls the same at 1 and 2 ranks: 1 can be timed."""
    one, (two, other) = on_one_rank(), run_on_ranks(do_all, 2)
    for preset in PRESETS:
        assert calls(one[preset]) == calls(two[preset]) == calls(other[preset]), preset
        assert moves(one[preset]) == moves(two[preset]) == moves(other[preset]), preset
        kinds = {entry[0] for entry in one[preset]}
        assert kinds >= {"before_forward", "after_forward", "pre_backward", "end_backward", "move_to"}
        assert kinds & {"reduce_scatter", "all_reduce"}


#: Of a unit in a step: sharded, unsharding and unsharded, on the way to forward, and once more for backward; reducing.
MOST_MOVES = 8


def test_a_step_calls_each_hook_once_for_a_call_and_moves_a_unit_no_more_than_eight_times():
    """pytorch#173680: hooks that take half of a step. Here their number follows from the number of modules alone."""
    for preset, done in on_one_rank().items():
        count = collections.Counter((entry[0], entry[1] if len(entry) > 1 else "") for entry in done)
        assert count["end_backward", ""] == 1
        units = {unit for _, unit in count} - {""}
        assert len(units) == 9  # eight of six blocks each, and the root
        for unit in units:
            num_modules = 1 if unit == "root" else 6
            for hook in ("before_forward", "after_forward", "pre_backward"):
                assert count[hook, unit] == num_modules, (preset, hook, unit)
            assert count["move_to", unit] <= MOST_MOVES, (preset, unit)
            assert count["all_gather", unit] <= 2, (preset, unit)
            assert count["reduce_scatter", unit] + count["all_reduce", unit] == 1, (preset, unit)


def count_calls(**plan: object) -> tuple[float, int]:
    """Python functions of the engine that the third step calls, for each block; calls of hooks on parameters."""
    case = CASES["host"]
    model = sw.parallelize(sw.models.gpt("gpt-tiny", **case.model), sw.ParallelPlan(**plan))
    tokens_BT = torch.zeros(case.batch, case.seq_len, dtype=torch.int64)
    calls = on_parameters = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls, on_parameters
        calls += event == "call" and frame.f_code.co_filename.startswith(ENGINE)
        on_parameters += event == "call" and frame.f_code.co_filename == GUARDS

    for step in range(3):
        sys.setprofile(profile if step == 2 else None)
        model(tokens_BT, tokens_BT).backward()
        sys.setprofile(None)
        model.zero_grad()
    return calls / case.model["num_layers"], on_parameters


GUARDS = str(Path(sw.__file__).parent / "engine" / "extensions" / "guard.py")
FLOORS = ("engine", "optim", "comm", "spec")
ENGINE = tuple(str(Path(sw.__file__).parent / floor) for floor in FLOORS)


@on_ranks(1)
def test_a_step_makes_a_bounded_number_of_python_calls_for_each_block_and_none_for_each_parameter() -> None:
    """pytorch#173680, pytorch#134191. Counted, so that a busy machine changes nothing: 87 and 188 (ddp 87) once."""
    ((merged, *on_parameters), (alone, _), (ddp, in_ddp)) = (
        count_calls(strategy="zero3"),
        count_calls(strategy="zero3", merge_units=False),
        count_calls(strategy="ddp"),
    )
    assert [*on_parameters, in_ddp] == [0, 0]
    assert 20 < merged < 110
    assert merged < alone < 230
    assert 20 < ddp < 95
