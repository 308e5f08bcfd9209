"""bench/results/reliability.md, written from bench/results/reliability.json."""

from __future__ import annotations

import json
from typing import Any

from tests.common.page import RESULTS, table
from tests.reliability.board import IDS, SECTIONS, Result, summary

PAGE, DATA = RESULTS / "reliability.md", RESULTS / "reliability.json"

_INTRODUCTION = """# What a run survives

Every scenario below was run, not reasoned about: `make board` starts `shardwise train` with its launcher and two ranks
on CPU, injects the fault, and checks what comes of it. `python -m tests.reliability A1 B3` runs single scenarios.

{summary}.

Score 2: as specified. 1: safe, but the message or the exit code is not as specified. 0: a hang, a loss, a process left
behind, or a failure without the block that says what happened, what is safe and what to do next. -5: a wrong number
without an error. After a fault and its restart or resume, losses, parameters, optimizer state and the list of samples
are compared with an uninterrupted run, bit for bit.

What 200 random kills and a run of 300 steps that loses a rank every 50 came to is in
[2026-11-24-goodput.md](2026-11-24-goodput.md).
"""
_BASELINE = """
## torchrun with FSDP2 and DCP

The same faults, as far as they can be injected there, in a script that trains a model of the same kind with FSDP2,
saves with `torch.distributed.checkpoint` into a folder a step, and is started by `torchrun`
([the script](../../tests/reliability/baseline_train.py)). Scored by the same checks and codes where they apply.
"""


def read() -> dict[str, dict[str, Result]]:
    """Results by id: ``shardwise`` and ``baseline``."""
    held: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    return {
        name: {key: Result(**value) for key, value in held.get(name, {}).items()} for name in ("shardwise", "baseline")
    }


def merge(new: dict[str, Result], *, is_baseline: bool = False) -> None:
    """Put results among those that are there, and write the page."""
    held = read()
    held["baseline" if is_baseline else "shardwise"].update(new)
    data = {name: {key: results[key].as_json() for key in IDS if key in results} for name, results in held.items()}
    DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(render(read()))


def render(held: dict[str, dict[str, Result]]) -> str:
    """The page."""
    results, beside = held["shardwise"], held["baseline"]
    parts = [_INTRODUCTION.format(summary=summary(results))]
    for section, (title, _) in SECTIONS.items():
        names = [name for name in IDS if name[0] == section and name in results]
        if names:
            parts.append(f"\n## {section}. {title}\n\n{_table(names, results)}\n")
    if beside:
        names = [name for name in IDS if name in beside]
        parts += [_BASELINE, f"\n{summary(beside)}.\n\n{_table(names, beside)}\n"]
    return "".join(parts)


def _table(names: list[str], results: dict[str, Result]) -> str:
    rows = []
    for name in names:
        held = results[name]
        code = "" if held.code is None else held.code
        rows.append((name, held.fault, held.required, held.seen, code, f"{held.seconds:.0f}", held.score))
    return table(("", "fault", "required", "seen", "exit", "seconds", "score"), rows)
