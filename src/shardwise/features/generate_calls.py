"""Keeping the ``generate()`` of transformers in step over the ranks.

A rank that has finished its sequences must go on calling the model, or its peers would wait for it at the next gather.
transformers does so (``synced_gpus``) for a model that it takes for FSDP's. Some classes, Whisper's among them, have a
``generate`` of their own that does so only where it is asked to.

Loops around it stay the user's: where ranks call it unequally often (or a class does, as Whisper for recordings of
unequal length) that ends in ``RankDisagreement``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.spec.errors import Uncopyable


def keep_in_step(model: nn.Module) -> None:
    """Have ``generate``, of the model or of one inside it, call its model equally often on every rank."""
    for module in model.modules():
        generate = getattr(type(module), "generate", None)
        if not callable(generate):
            continue
        module.__dict__["_is_fsdp_managed_module"] = True
        argument = inspect.signature(generate).parameters.get("synced_gpus")
        if argument is not None and argument.default is False:
            module.__dict__["generate"] = _Synced(module, generate)


class _Synced(Uncopyable):
    """Stands for ``model.generate``, with ``synced_gpus`` on unless the caller says otherwise."""

    def __init__(self, model: nn.Module, generate: Callable[..., Any]) -> None:
        self._model = weakref.ref(model)
        self._generate = generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None
        if "synced_gpus" not in inspect.signature(self._generate).bind_partial(model, *args, **kwargs).arguments:
            kwargs["synced_gpus"] = model.__dict__["_is_fsdp_managed_module"]  # not inside sw.join
        return self._generate(model, *args, **kwargs)
