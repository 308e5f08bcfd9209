"""Runs bugs on ranks, many in one start of them."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.spec.errors import ShardwiseError
from shardwise.testing import RankFailure, run_on_ranks
from tests.museum import tools
from tests.museum.catalogue import BUGS, Bug, Finding, Result
from tests.museum.programs import PROGRAMS

#: A bug's tools may take so long.
LIMIT_S = 90.0
#: Bugs in one start of the ranks.
_BATCH = 12


# -- on the ranks


def examine(names: Sequence[str], folder: Path, done: Mapping[str, Sequence[str]], *, is_planted: bool = True) -> None:
    """Run the tools on the programs of some bugs, and write down what each finds.

    Args:
        names: The bugs.
        folder: Where to.
        done: Tools that have run before, by bug.
        is_planted: Otherwise the programs run as they are.
    """
    torch.set_num_threads(1)
    notes = (folder / f"notes-{dist.get_rank()}").open("a")
    for name in names:
        bug, begin = BUGS[name], time.monotonic()
        try:
            with bug.planted() if is_planted else contextlib.nullcontext():
                for tool, found in tools.run(bug, folder, but=done.get(name, ())):
                    _note(notes, name, tool, found, begin)
                    begin = time.monotonic()
        except tools.Ended as ended:  # peers may wait for this rank: the next bug begins with new ranks
            error = ended.error
            kind = "guard" if isinstance(error, ShardwiseError) else "error"
            _note(notes, name, ended.tool, [tools.of_error(kind, error)], begin, ended=True)
            raise


def _note(notes: Any, name: str, tool: str, found: Sequence[Finding], begin: float, *, ended: bool = False) -> None:
    now = time.monotonic()
    entry = {"name": name, "tool": tool, "found": [vars(each) for each in found], "seconds": now - begin}
    entry |= {"at": now, "ended": ended}
    notes.write(json.dumps(entry) + "\n")
    notes.flush()


# -- from outside


def run(names: Sequence[str], *, is_planted: bool = True) -> Iterator[tuple[str, Result]]:
    """Run bugs, or their programs without them; yields what came of each."""
    groups: dict[int, list[str]] = {}
    for name in names:
        groups.setdefault(world_of(BUGS[name]), []).append(name)
    for world, group in groups.items():
        for start in range(0, len(group), _BATCH):
            yield from _run_batch(group[start : start + _BATCH], world, is_planted=is_planted)


def world_of(bug: Bug) -> int:
    """The ranks that a bug's program needs."""
    program = PROGRAMS.get(bug.program)
    return 2 if program is None else program.world


def _run_batch(names: Sequence[str], world: int, *, is_planted: bool) -> Iterator[tuple[str, Result]]:
    with tempfile.TemporaryDirectory(prefix="museum-") as held:
        folder = Path(held)
        left, done = list(names), dict[str, list[str]]()
        while left:
            before = {name: list(tools_done) for name, tools_done in done.items()}
            try:
                run_on_ranks(_examine, world, left, str(folder), done, is_planted, timeout_s=LIMIT_S * len(left))
                ended = []
            except RankFailure as failure:
                ended = [failure.causes[failure.rank]]
            done = _tools_done(folder)
            left = [name for name in left if set(done.get(name, ())) != set(tools.names(BUGS[name]))]
            if ended and done == before:  # it says nothing, or the ranks wait for ever
                tool = next(tool for tool in tools.names(BUGS[left[0]]) if tool not in done.get(left[0], ()))
                with (folder / "notes-0").open("a") as notes:
                    _note(notes, left[0], tool, [Finding("error", ended[0])], time.monotonic() - LIMIT_S)
                done = _tools_done(folder)
                left = [name for name in left if set(done.get(name, ())) != set(tools.names(BUGS[name]))]
        results = _results(folder)
        yield from ((name, results[name]) for name in names)


def _examine(names: list[str], folder: str, done: dict[str, list[str]], is_planted: bool) -> None:
    examine(names, Path(folder), done, is_planted=is_planted)


def _notes(folder: Path) -> Iterator[dict[str, Any]]:
    """All ranks' notes, in the order of time: an error comes before those that follow from it."""
    lines = [line for path in folder.glob("notes-*") for line in path.read_text().splitlines()]
    yield from sorted(map(json.loads, lines), key=lambda entry: entry["at"])


def _tools_done(folder: Path) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {}
    for entry in _notes(folder):
        found.setdefault(entry["name"], {})[entry["tool"]] = None
    return {name: list(told) for name, told in found.items()}


def _results(folder: Path) -> dict[str, Result]:
    """What the ranks have written down; of each kind of finding the first one."""
    findings: dict[str, dict[str, Finding]] = {}
    seconds: dict[tuple[str, str], float] = {}
    ended: set[tuple[str, str]] = set()
    for entry in _notes(folder):
        name, key = entry["name"], (entry["name"], entry["tool"])
        seconds[key] = max(seconds.get(key, 0.0), entry["seconds"])
        held = findings.setdefault(name, {})
        follows = key in ended  # from the end of another rank
        if entry["ended"]:
            ended.add(key)
        for each in () if follows else entry["found"]:
            finding = Finding(**each)
            if finding.tool not in held or (held[finding.tool].module is None and finding.module is not None):
                held[finding.tool] = finding
    return {
        name: Result([*held.values()], round(sum(s for (of, _), s in seconds.items() if of == name), 1))
        for name, held in findings.items()
    }
