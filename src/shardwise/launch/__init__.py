"""Worlds and processes: finding this rank, starting workers, their notes and logs, exit codes."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


class CallablePackage(types.ModuleType):
    """A package as a callable: ``sw.launch(...)`` calls ``launch`` of ``shardwise.launch.function``."""

    _CALLED_IN = "function"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.__wrapped__(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # pickle and cloudpickle know modules of the plain class only
        return importlib.import_module, (self.__name__,)

    @property
    def __wrapped__(self) -> Any:  # help() and inspect show its signature and docstring
        module = importlib.import_module(f"{self.__name__}.{self._CALLED_IN}")
        return getattr(module, self.__name__.rpartition(".")[2])


sys.modules[__name__].__class__ = CallablePackage
