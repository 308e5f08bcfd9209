"""Worlds and processes: which rank this is, starting workers, what they leave behind, exit codes."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """The package, which can be called: ``sw.launch`` is ``shardwise.launch.function.launch``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # whose signature and words help() and inspect show
        from shardwise.launch.function import launch

        return launch


sys.modules[__name__].__class__ = _Package
