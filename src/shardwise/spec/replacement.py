"""Replacements of a module's methods."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from shardwise.spec.errors import Uncopyable


class Replacement(Uncopyable):
    """Stands for a method of a module, with its signature; it holds the module by weak reference.

    So deleting the model frees its memory without a garbage collection.

    Attributes:
        method: Its name.
    """

    def __init__(self, module: Any, method: str = "forward") -> None:
        self.method = method
        self._module = weakref.ref(module)
        self._replaced = module.__dict__.get(method)  # somebody else's replacement of the class's method
        self.__signature__ = inspect.signature(getattr(module, method))

    def install(self) -> None:
        """Put this into the place of the method."""
        self.module.__dict__[self.method] = self

    @property
    def module(self) -> Any:
        """The module, which whoever calls its method holds."""
        return self._module()

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method that this stands for."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        module = self.module
        return getattr(type(module), self.method)(module, *args, **kwargs)
