"""What the engine does in a step at a world of one is what it does at a world of two.

So its cost there (the ``host`` case on one rank, less one plain process) is the engine's own: hooks, changes of state
and calls of the Comm are all made, and only the messages are missing.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import torch

import shardwise as sw
from shardwise.comm.gloo import GlooComm
from shardwise.fsdp.runtime import Runtime
from shardwise.fsdp.unit import Unit
from shardwise.testing import run_on_ranks
from shardwise.train.compare.case import CASES
from tests.parity.training import PRESETS

WATCHED: dict[type, tuple[str, ...]] = {
    Runtime: ("before_forward", "after_forward", "on_ticket", "end_backward"),
    Unit: ("move_to",),
    GlooComm: ("all_gather", "reduce_scatter", "all_reduce"),
}


def do(preset: str) -> list[tuple[str, ...]]:
    """Everything that the engine does in the third step of the ``host`` case, in order."""
    case = CASES["host"]
    torch.manual_seed(0)
    model = sw.parallelize(sw.models.gpt("gpt-tiny", **case.model), sw.ParallelPlan(strategy=preset))
    tokens_BT = torch.zeros(case.batch, case.seq_len, dtype=torch.int64)
    done: list[tuple[str, ...]] = []

    def noting(owner: type, name: str):
        method = getattr(owner, name)

        def call(self, *args, **named):
            units = [arg.name for arg in (self, *args) if isinstance(arg, Unit)]
            done.append((name, *units, *(arg for arg in (*args, *named.values()) if isinstance(arg, str))))
            return method(self, *args, **named)

        return mock.patch.object(owner, name, call)

    for step in range(3):
        with contextlib.ExitStack() as stack:
            for owner, names in WATCHED.items():
                for name in names if step == 2 else ():
                    stack.enter_context(noting(owner, name))
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


def test_a_world_of_one_does_everything_that_a_world_of_two_does():
    """pytorch#173680: hooks that take half of a step. A step calls the same at 1 and 2 ranks: 1 can be timed."""
    (one,), (two, other) = run_on_ranks(do_all, 1), run_on_ranks(do_all, 2)
    for preset in PRESETS:
        assert calls(one[preset]) == calls(two[preset]) == calls(other[preset]), preset
        assert moves(one[preset]) == moves(two[preset]) == moves(other[preset]), preset
        kinds = {entry[0] for entry in one[preset]}
        assert kinds >= {"before_forward", "after_forward", "on_ticket", "end_backward", "move_to"}
        assert kinds & {"reduce_scatter", "all_reduce"}
