"""Planted bugs: patches of functions of this package, by name, from a text file.

A bug is there while :meth:`Patch.planted` is open, in this process alone. A patch that no longer applies is an error.
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
from typing import Any, TypeVar

import shardwise

SOURCE = Path(shardwise.__file__).parent


class PatchError(AssertionError):
    """A patch does not apply to the source as it is: it has to follow the source."""


@dataclass(frozen=True)
class Patch:
    """A named change of one file. Subclasses add what else their text files say of a bug.

    Attributes:
        name: What the bug is called.
        edits: Lines that occur once in the file, and the lines in their place.
        file: The file, below ``shardwise``.
    """

    name: str
    edits: tuple[tuple[str, str], ...]
    file: str

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Change the functions of this process inside.

        Raises:
            PatchError: The patch does not apply.
        """
        source = (SOURCE / self.file).read_text()
        changed = source
        for old, new in self.edits:
            if source.count(old) != 1:
                raise PatchError(
                    f"{self.name}: the text occurs {source.count(old)} times in {self.file}, expected once:\n{old}"
                )
            changed = changed.replace(old, new)
        module = importlib.import_module("shardwise." + self.file.removesuffix(".py").replace("/", "."))
        before, after = (dict(_functions(compile(text, str(SOURCE / self.file), "exec"))) for text in (source, changed))
        places = [name for name, code in after.items() if _body(code) != _body(before[name])]
        if not places:
            raise PatchError(f"{self.name}: the patch changes no function of {self.file}")
        with contextlib.ExitStack() as stack:
            for place in places:
                function = _function(module, place)
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = after[place]
            yield


P = TypeVar("P", bound=Patch)


def read(text: str, kind: type[P]) -> dict[str, P]:
    """The bugs of a text, by name.

    A bug begins with ``# name``. Lines of fields follow, divided by `` | `` or by the end of a line: the file, and then
    what ``kind`` has beyond :class:`Patch`. Then come the lines to replace, each behind ``-``, and those in their
    place, each behind ``+``; as often as needed.
    """
    found = {}
    for part in re.split(r"^# ", text, flags=re.MULTILINE)[1:]:
        name, *lines = part.rstrip().split("\n")
        is_edit = [line[:1] in {"-", "+"} for line in lines]
        head = is_edit.index(True) if True in is_edit else len(lines)
        file, *fields = " | ".join(lines[:head]).split(" | ")
        edits: list[tuple[str, str]] = []
        for is_old, group in itertools.groupby(lines[head:], key=lambda line: line.startswith("-")):
            changed = "".join(f"{line[1:]}\n" for line in group)
            if is_old:
                edits.append((changed, ""))
            else:
                edits[-1] = edits[-1][0], changed
        found[name] = kind(name, tuple(edits), file, *fields)
    return found


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
