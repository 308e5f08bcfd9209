"""The board of reliability: which scenarios there are, how one is run and scored."""

from __future__ import annotations

import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.reliability.box import Box, Check, Hung, Kind, Oracles, Seen

#: Sections with their titles and how many scenarios they have.
SECTIONS = {
    "A": ("Process faults", 18),
    "B": ("Checkpoint writes", 13),
    "C": ("Checkpoint reads", 16),
    "D": ("Collectives and numbers", 10),
    "E": ("Bad input", 10),
}
IDS = tuple(f"{section}{number}" for section, (_, count) in SECTIONS.items() for number in range(1, count + 1))
#: A scenario has so long, also on a busy machine; a wait that is not over by then counts as a hang.
LIMIT_S = 600.0
IS_IN = "the run is in"


@dataclass(frozen=True)
class Scenario:
    """One line of the board.

    Attributes:
        name: Its id, such as ``A1``.
        fault: What goes wrong.
        required: What the user has to see, and what must not be lost.
        code: The exit codes that are right; the first is the usual one.
        run: Makes it go wrong and checks what came of it.
        limit_s: How long it may take.
    """

    name: str
    fault: str
    required: str
    code: tuple[int, ...]
    run: Callable[[Box], Seen]
    limit_s: float = LIMIT_S


@dataclass
class Result:
    """What came of a scenario; the form of bench/results/reliability.json."""

    fault: str
    required: str
    seen: str
    code: int | None
    seconds: float
    score: int
    failed: list[str] = field(default_factory=list)
    checks: int = 0

    def as_json(self) -> dict[str, Any]:
        """What is kept: without the folder of this time."""
        return asdict(self) | {"failed": [name for name in self.failed if not name.startswith(IS_IN)]}


SCENARIOS: dict[str, Scenario] = {}
BASELINES: dict[str, Callable[[Box], Seen]] = {}


def scenario(
    name: str, *, fault: str, required: str, code: int | tuple[int, ...], limit_s: float = LIMIT_S
) -> Callable[[Callable[[Box], Seen]], Callable[[Box], Seen]]:
    """Register a function as the scenario ``name``."""
    assert name in IDS, name
    assert name not in SCENARIOS, name

    def register(run: Callable[[Box], Seen]) -> Callable[[Box], Seen]:
        codes = (code,) if isinstance(code, int) else code
        SCENARIOS[name] = Scenario(name, fault, required, codes, run, limit_s)
        return run

    return register


def baseline(name: str) -> Callable[[Callable[[Box], Seen]], Callable[[Box], Seen]]:
    """Register a function as the scenario ``name`` for torchrun with FSDP2 and DCP."""
    assert name not in BASELINES, name

    def register(run: Callable[[Box], Seen]) -> Callable[[Box], Seen]:
        BASELINES[name] = run
        return run

    return register


def score_of(checks: list[Check]) -> int:
    """2: all hold; 1: only words or the exit code are wrong; 0: a hang or a loss; -5: a wrong number without error."""
    return min((check.kind.value for check in checks if not check.holds), default=2)


def play(held: Scenario, run: Callable[[Box], Seen], oracles: Oracles) -> Result:
    """Run a scenario in a folder of its own and score it."""
    folder = Path(tempfile.mkdtemp(prefix=f"board-{held.name}-")).resolve()
    box = Box(folder, oracles, deadline=time.monotonic() + held.limit_s)
    begin = time.monotonic()
    seen = Seen("", None)
    try:
        seen = run(box)
        codes = " or ".join(map(str, held.code))
        box.check(f"exit code {codes}, got {seen.code}", seen.code in held.code, Kind.WORDS)
    except Hung as hung:
        seen = Seen(str(hung), None)
        box.check(str(hung), holds=False)
    except Exception:  # noqa: BLE001  a scenario that cannot be played out is not as specified
        seen = Seen("the scenario could not be played out", None)
        box.check(traceback.format_exc(limit=-3).strip(), holds=False)
    finally:
        seconds = time.monotonic() - begin
        box.check("no process is left", not box.end_all())
    failed = [check.name for check in box.checks if not check.holds]
    if not failed or len(failed) == len(box.checks):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        failed.append(f"{IS_IN} {folder}")
    return Result(
        held.fault, held.required, seen.text, seen.code, round(seconds, 1), score_of(box.checks), failed,
        len(box.checks),
    )  # fmt: skip


def summary(results: Mapping[str, Result]) -> str:
    """How many of those that were run are as specified, how many were not run, and how many are silently wrong."""
    as_specified = sum(result.score == 2 for result in results.values())
    wrong = sum(result.score < 0 for result in results.values())
    left_out = f" ({len(IDS) - len(results)} of the {len(IDS)} were not run)" if len(results) < len(IDS) else ""
    return f"{as_specified} of {len(results)} as specified{left_out}; silently wrong: {wrong}"
