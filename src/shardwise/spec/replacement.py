"""Callables that replace methods of a module."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from shardwise.spec.errors import Uncopyable


class Replacement(Uncopyable):
    """Base class of callables that replace a method of a module, and have its signature.

    The reference to the module is weak, so that deleting the model frees its memory without a garbage collection.

    Attributes:
        method: Name of the replaced method.
    """

    def __init__(self, module: Any, method: str = "forward") -> None:
        self.method = method
        self._module = weakref.ref(module)
        self._replaced = module.__dict__.get(method)  # another replacement, installed earlier
        self.__signature__ = inspect.signature(getattr(module, method))

    def install(self) -> None:
        """Replace the module's method by this object."""
        self.module.__dict__[self.method] = self

    @property
    def module(self) -> Any:
        """The module. It exists during a call, because the caller has a reference to it."""
        return self._module()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replaced method."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        module = self.module
        return getattr(type(module), self.method)(module, *args, **kwargs)
