"""Worlds and processes: which rank this is, starting workers, what they leave behind, exit codes."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Package(types.ModuleType):
    """The package, which can be called: ``sw.launch(...)`` is ``shardwise.launch.function.launch``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from shardwise.launch.function import launch

        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
