"""bench/results/museum.md, written from bench/results/museum.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.common.page import RESULTS, table
from tests.museum.catalogue import BUGS, Bug, Result

PAGE, DATA = RESULTS / "museum.md", RESULTS / "museum.json"

_INTRODUCTION = """# The museum of silent bugs

Distributed training has bugs that raise no error: the loss falls, and the numbers are wrong. This page plants {count}
of them into this engine, one at a time, and shows which of the tools that a user has finds each. Most were reported of
other frameworks; the table links the report and says what the bug did there. A few are this project's own.

{score}

`make museum` plants and runs all of them and writes this page; `python -m tests.museum NAME ...` runs some. A bug is a
patch of a few lines ([bugs.txt](../../tests/museum/bugs.txt)); a patch that no longer applies fails a test.
Bugs are planted in the engine, under small programs ([programs.py](../../tests/museum/programs.py)) that are correct.
All tools of a program are run on each bug.

## The tools

| tool | how a user calls it | bugs that it finds |
|---|---|---|
"""

#: The tools in the order of the page, and how a user calls each.
TOOLS = {
    "parity": "`sw.parity(..., locate=True)` ([how](../../docs/testing.md#compare-a-plan-with-one-process))",
    "check_replicas": "`sw.check_replicas(model, optimizer, after_backward=True)` in each step of a script",
    "guard": "nothing: the engine raises an error while the script trains",
    "checkpoint": "nothing: `sw.save` or `sw.load` raises an error",
    "resume": "stop a script, resume it, and compare with a run that went on, bit for bit; load under another plan",
    "streams": "`streams.pretended_cuda()` or `--check-streams` ([how](../../docs/testing.md))",
    "order": "`streams.refuse_deadlocks(...)` or `dry-run --check-order`",
    "error": "nothing: torch raises an error, or the ranks hang",
}

_COLUMNS = """
## The bugs

*Module* has the module that a tool named, and whether the bug is in it; it is empty where the bug is in no module
(clipping, checkpoints, samplers). A bug that is in all modules of a kind is at the right one wherever it is found.
*Seconds* are those of all tools of the program together, on two processor cores.

"""

_NOT_FOUND = """
## What no tool finds

{list}
"""

_CLEAN = """
## False alarms

The same tools on {programs} programs without a bug: {alarms}. The programs are {what}. Seconds: {seconds}.
An alarm of *rounding* names a true difference in the last bit: the terms of one gradient are added in another order.
`python -m tests.museum --clean` runs them.
"""

_PEERS = """
## The same bugs in other engines

Some of the bugs were planted in {engines} as well, with the same small models on two ranks over Gloo. The table says
what their own checks said, with `TORCH_DISTRIBUTED_DEBUG=DETAIL`. A bug that is not in the table was not run there:
nothing is said about it. `python -m tests.museum --peers` runs them.

"""


def read() -> dict[str, Any]:
    """The data: ``bugs``, ``clean`` and ``peers``."""
    held: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return {"bugs": {}, "clean": {}, "peers": []} | held


def merge(**parts: Any) -> None:
    """Put new results among those that are there, and write the page."""
    held = read()
    for key, value in parts.items():
        held[key] = held[key] | value if isinstance(value, dict) else value
    held["bugs"] = {name: held["bugs"][name] for name in BUGS if name in held["bugs"]}
    DATA.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(held))


def results_of(held: Mapping[str, Any]) -> dict[str, Result]:
    """What came of each bug that was run, in the order of the catalogue."""
    return {name: Result.of_json(held["bugs"][name]) for name in BUGS if name in held["bugs"]}


def score(results: Mapping[str, Result]) -> str:
    """How many bugs are found, and how many at the right module."""
    found = sum(result.is_found for result in results.values())
    located = [where for name, result in results.items() if (where := result.is_located(BUGS[name])) is not None]
    silent = len(results) - found
    return (
        f"{found} of {len(results)} are found, {silent} are not. Of the {len(located)} that are in modules,"
        f" {sum(located)} are found at the right module."
    )


def render(held: Mapping[str, Any]) -> str:
    """The page."""
    results = results_of(held)
    counts = Counter(finding.tool for result in results.values() for finding in result.findings)
    parts = [_INTRODUCTION.format(count=len(results), score=score(results))]
    parts += [f"| {tool} | {how} | {counts[tool]} |\n" for tool, how in TOOLS.items() if counts[tool]]
    heads = ("bug", "found in", "what it did there", "program here", "found by", "module", "seconds")
    parts += [_COLUMNS, table(heads, (_row(BUGS[name], result) for name, result in results.items())), "\n"]
    missed = [f"- {name}: {BUGS[name].story}\n" for name, result in results.items() if not result.is_found]
    if missed:
        parts.append(_NOT_FOUND.format(list="".join(missed).rstrip()))
    if held["clean"]:
        clean = held["clean"]
        alarms = "; ".join(clean["alarms"]) or "no alarm"
        parts.append(_CLEAN.format(**(clean | {"alarms": alarms, "seconds": f"{clean['seconds']:.0f}"})))
    if held["peers"]:
        engines = " and ".join(dict.fromkeys(entry["engine"] for entry in held["peers"]))
        rows = [tuple(entry[key] for key in ("bug", "engine", "where", "said", "off")) for entry in held["peers"]]
        heads = ("bug", "engine", "where it is", "its checks said", "numbers")
        parts += [_PEERS.format(engines=engines), table(heads, rows), "\n"]
    return "".join(parts)


def _row(bug: Bug, result: Result) -> tuple[str, ...]:
    where = result.is_located(bug)
    said = {None: "", True: "right", False: "no"}[where if result.is_found else None]
    named = next((each.module for each in result.findings if each.module is not None), None)
    module = f"{said}: {named or 'the model'}" if named is not None and said else said
    source = (
        f"[{bug.framework}]({bug.source})" if bug.source.startswith("https:") else f"{bug.framework} ({bug.source})"
    )
    tools = ", ".join(finding.tool for finding in result.findings) or "not found"
    return bug.name, source, bug.story, bug.program, tools, module, f"{result.seconds:.1f}"
