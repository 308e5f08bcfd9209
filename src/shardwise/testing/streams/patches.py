"""Temporary replacement of attributes of modules and classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaces attributes, and restores them."""

    def __init__(self) -> None:
        self._undone: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute. An inherited attribute of a class is shadowed."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._undone.append(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))

    def undo(self) -> None:
        """Restore all attributes, the newest first."""
        while self._undone:
            self._undone.pop()()
