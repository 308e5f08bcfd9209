"""Methods that torch's wrappers ``DistributedDataParallel`` and ``FullyShardedDataParallel`` add to a model.

Programs call them on the model that the wrapper returned. Here nothing is wrapped, so the model itself gets them,
unless it has a method or attribute of that name.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

from torch import Tensor, nn

from shardwise.api.model import gradient_sync
from shardwise.optim.clip import clip_grad_norm
from shardwise.spec.errors import Uncopyable


def add_wrapper_methods(model: nn.Module) -> None:
    """Give a parallelized model ``no_sync`` and ``clip_grad_norm_``."""
    for name, method in (("no_sync", _NoSync(model)), ("clip_grad_norm_", _ClipGradNorm(model))):
        if not hasattr(model, name):
            model.__dict__[name] = method


class _Method(Uncopyable):
    """A method of the model. Its reference to the model is weak: deleting the model frees its memory."""

    def __init__(self, model: nn.Module) -> None:
        self._reference = weakref.ref(model)

    @property
    def _model(self) -> nn.Module:
        model = self._reference()
        assert model is not None
        return model


class _NoSync(_Method):
    """``model.no_sync()``."""

    def __call__(self) -> AbstractContextManager[None]:
        """Accumulate gradients inside, as ``sw.gradient_sync(model, False)``."""
        return gradient_sync(self._model, is_enabled=False)


class _ClipGradNorm(_Method):
    """``model.clip_grad_norm_(max_norm)``, which FSDP1 has."""

    def __call__(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the global norm, as ``sw.clip_grad_norm(model, max_norm, norm_type)``.

        Collective:
            As ``sw.clip_grad_norm``.
        """
        return clip_grad_norm(self._model, max_norm, norm_type)
