"""A module's forward that talks to other ranks: it stands on the instance in place of the class's own.

It reads its parameters from the module at each call: between steps those are other objects (``engine.unit``).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from shardwise.spec.errors import Uncopyable


class Forward(Uncopyable, ABC):
    """What is called instead of ``module.forward``.

    Args:
        module: The module; held weakly.
        name: Its path, in traces.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self.name = name

    @property
    def module(self) -> Any:
        """The module. Whoever calls its forward has it."""
        return self._module()

    def install(self) -> None:
        """Be the module's forward from now on."""
        self.module.__dict__["forward"] = self

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""


def only(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one argument of a layer, given by position or by whatever name its class has for it."""
    (given,) = (*args, *kwargs.values())
    return given
