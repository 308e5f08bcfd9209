"""Worlds and processes: finding this rank, starting workers, their notes and logs, exit codes."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """The package as a callable: ``sw.launch(...)`` calls ``shardwise.launch.function.launch``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:  # help() and inspect show its signature and docstring
        from shardwise.launch.function import launch

        return launch


sys.modules[__name__].__class__ = _Package
