"""Planted bugs: patches of the source that leave out a wait, free memory too early, or have the host wait.

Each must still apply. The detector must find it, unless the table says which other wait keeps the order as it was.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.errors import CommError
from shardwise.testing import streams
from tests.planted import Patch, read
from tests.streams.plans import CASES, OTHERS


@dataclass(frozen=True)
class Bug(Patch):
    """One patch.

    Attributes:
        case: Which of ``plans.CASES`` runs with it.
        found: ``race``, ``early free`` or ``wait`` (of the host); else it is equivalent, and this says why.
    """

    case: str
    found: str


BUGS = read((Path(__file__).parent / "bugs.txt").read_text(), Bug)

#: The kinds of findings.
KINDS = {"race": streams.Race, "early free": streams.EarlyFree}


def look(case_name: str) -> tuple[streams.Seen, int]:
    """Run a case with the bug that is planted: what is seen, and waits of the host in a steady step beyond its own."""
    case = CASES.get(case_name) or OTHERS[case_name]
    waits = usual = getattr(case, "waits", 0)
    with contextlib.ExitStack() as stack:
        # A wrong number may end the run of a rank, and then of its peer; what was seen before counts.
        stack.enter_context(contextlib.suppress(CommError, UserWarning))
        seen = stack.enter_context(streams.pretended_cuda(**getattr(case, "how", {})))
        _, waits = case(seen)
    return seen, waits - usual


def find(name: str) -> bool:
    """Whether what is seen with a bug is what the table says."""
    bug = BUGS[name]
    with bug.planted():
        seen, waits = look(bug.case)
    if bug.found == "wait":
        return waits > 0 and not seen.findings
    if bug.found in KINDS:
        return any(isinstance(finding, KINDS[bug.found]) for finding in seen.findings)
    return not seen.findings and waits == 0
