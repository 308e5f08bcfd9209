"""Keeping the ``generate()`` of transformers in step over the ranks.

A rank that has finished its sequences must go on calling the model, or its peers would wait for it at the next gather.
transformers does so (``synced_gpus``) for a model that it takes for FSDP's. Some classes, Whisper's among them, have a
``generate`` of their own that does so only where it is asked to.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.fsdp.attach import Uncopyable


def keep_in_step(model: nn.Module) -> None:
    """Have ``model.generate``, where there is one, call the model equally often on every rank."""
    generate = getattr(type(model), "generate", None)
    if not callable(generate):
        return
    model.__dict__["_is_fsdp_managed_module"] = True
    argument = inspect.signature(generate).parameters.get("synced_gpus")
    if argument is not None and argument.default is False:
        model.__dict__["generate"] = _Synced(model, generate)


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
