"""Planted bugs: patches of the source that leave out a wait, free memory too early, or have the host wait.

Each must still apply. The detector must find it, unless the table says which other wait keeps the order as it was.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import itertools
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shardwise
from shardwise.spec.errors import CommError
from shardwise.testing import streams
from tests.streams.plans import CASES, OTHERS

SOURCE = Path(shardwise.__file__).parent


@dataclass(frozen=True)
class Bug:
    """One patch.

    Attributes:
        file: Below ``shardwise``.
        edits: Lines that occur once in the file, and those in their place.
        case: Which of ``plans.CASES`` runs with it.
        found: ``race``, ``early free`` or ``wait`` (of the host); else it is equivalent, and this says why.
    """

    file: str
    edits: tuple[tuple[str, str], ...]
    case: str
    found: str = "race"


def read(text: str) -> dict[str, Bug]:
    """The bugs of a file, by name."""
    found = {}
    for part in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        name, head, *lines = part.rstrip().split("\n")
        file, case, verdict = head.split(" | ")
        edits = []
        for is_old, group in itertools.groupby(lines, key=lambda line: line.startswith("-")):
            changed = "".join(f"{line[1:]}\n" for line in group)
            if is_old:
                edits.append((changed, ""))
            else:
                edits[-1] = edits[-1][0], changed
        found[name] = Bug(file, tuple(edits), case, verdict)
    return found


BUGS = read((Path(__file__).parent / "bugs.txt").read_text())

# -- planting


#: The kinds of findings.
KINDS = {"race": streams.Race, "early free": streams.EarlyFree}


def find(name: str) -> bool:
    """Run a bug's case with it: whether what is seen is what the table says."""
    with planted(name) as bug:
        case = CASES.get(bug.case) or OTHERS[bug.case]
        waits = 0
        with contextlib.ExitStack() as stack:
            # A wrong number may end the run of a rank, and then of its peer; what was seen before counts.
            stack.enter_context(contextlib.suppress(CommError, UserWarning))
            seen = stack.enter_context(streams.pretended_cuda(**getattr(case, "how", {})))
            _, waits = case(seen)
    usual = getattr(case, "waits", 0)
    if bug.found == "wait":
        return waits > usual and not seen.findings
    if bug.found in KINDS:
        return any(isinstance(finding, KINDS[bug.found]) for finding in seen.findings)
    return not seen.findings and waits == usual


class PatchError(Exception):
    """The source has changed, and the patch with it has to."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[Bug]:
    """Have a bug in the functions of this process inside."""
    found = BUGS[name]
    source = (SOURCE / found.file).read_text()
    changed = source
    for old, new in found.edits:
        if source.count(old) != 1:
            raise PatchError(
                f"{name}: the text occurs {source.count(old)} times in {found.file}, expected once:\n{old}"
            )
        changed = changed.replace(old, new)
    module = importlib.import_module("shardwise." + found.file.removesuffix(".py").replace("/", "."))
    before, after = (dict(_functions(compile(text, str(SOURCE / found.file), "exec"))) for text in (source, changed))
    places = [name for name, code in after.items() if _body(code) != _body(before[name])]
    if not places:
        raise PatchError(f"{name}: the patch changes no function of {found.file}")
    with contextlib.ExitStack() as stack:
        for place in places:
            function = _function(module, place)
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = after[place]
        yield found


def _functions(code: types.CodeType) -> Iterator[tuple[str, types.CodeType]]:
    """The functions and methods that a module or class defines, by qualified name."""
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner.co_qualname, inner
            else:  # a class
                yield from _functions(inner)


def _body(code: types.CodeType) -> Any:
    """What a function does, wherever it stands."""
    constants = tuple(_body(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def _function(module: types.ModuleType, place: str) -> Any:
    found: Any = module
    for part in place.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)
    return inspect.unwrap(found)
