"""The bugs of the museum: what they are called, where they come from, and how one is run here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.planted import Patch, read
from tests.streams import planted as of_streams

#: Begins the names of programs that run a bug of tests/streams/bugs.txt.
STREAMS = "streams "
#: Begins the names of programs of which the order of collectives is looked at.
ORDER = "order: "


@dataclass(frozen=True)
class Bug(Patch):
    """A bug.

    Attributes:
        program: Which of ``programs.PROGRAMS`` runs with it.
        modules: Patterns of the modules that it is in; ``-`` where it is in none.
        framework: Where it was found.
        source: The address of the report, or where this project's changelog has it.
        story: What it did there.
    """

    program: str
    modules: str
    framework: str
    source: str
    story: str

    @property
    def is_in_modules(self) -> bool:
        """Whether a module can be named at all."""
        return self.modules != "-"

    def is_at(self, module: str) -> bool:
        """Whether a module is one of those that the bug is in."""
        patterns = self.modules.split(", ")
        return any(fnmatchcase(module or "-model-", pattern) for pattern in patterns)

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """As of :class:`~tests.planted.Patch`; a bug of streams has its patch in the other file."""
        patch = of_streams.BUGS[self.program.removeprefix(STREAMS)] if self.program.startswith(STREAMS) else None
        with super().planted() if patch is None else patch.planted():
            yield


BUGS = read((Path(__file__).parent / "bugs.txt").read_text(), Bug)


@dataclass
class Finding:
    """What a tool said.

    Attributes:
        tool: Which one.
        text: Its first words.
        module: The module that it named; ``None`` where it names none.
    """

    tool: str
    text: str
    module: str | None = None


@dataclass
class Result:
    """What came of a bug; the form of bench/results/museum.json.

    Attributes:
        findings: What was found, each tool at most once.
        seconds: How long the tools took.
    """

    findings: list[Finding]
    seconds: float

    @classmethod
    def of_json(cls, value: dict[str, object]) -> Result:
        """From :meth:`as_json`."""
        return cls([Finding(**each) for each in value["findings"]], value["seconds"])  # type: ignore[arg-type, attr-defined]

    def as_json(self) -> dict[str, object]:
        """As plain values."""
        return dataclasses.asdict(self)

    @property
    def is_found(self) -> bool:
        """Some tool has found it."""
        return bool(self.findings)

    def is_located(self, bug: Bug) -> bool | None:
        """Whether a tool named a module that the bug is in; ``None`` where it is in no module."""
        if not bug.is_in_modules:
            return None
        return any(each.module is not None and bug.is_at(each.module) for each in self.findings)
