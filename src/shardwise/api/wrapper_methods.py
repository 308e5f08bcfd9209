"""Methods that torch's wrappers ``DistributedDataParallel`` and ``FullyShardedDataParallel`` add to a model.

Programs call these methods on the model that the wrapper returned. Here nothing is wrapped, so the model itself gets
the methods, unless it has an attribute of that name.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager

from torch import Tensor, nn

from shardwise.api.model import gradient_sync
from shardwise.optim.clip import clip_grad_norm
from shardwise.spec.errors import Uncopyable


def add_wrapper_methods(model: nn.Module, counted: _NumParameters | None) -> None:
    """Give a parallelized model ``no_sync``, ``clip_grad_norm_``, and a ``num_parameters`` counted before sharding."""
    if counted is not None:
        model.__dict__["num_parameters"] = counted
    for name, method in (("no_sync", _NoSync(model)), ("clip_grad_norm_", _ClipGradNorm(model))):
        if not hasattr(model, name):
            model.__dict__[name] = method


def count_parameters(model: nn.Module) -> _NumParameters | None:
    """Return a replacement for a plain model's ``num_parameters``; ``None`` if the model has no such method.

    The method of transformers counts elements of the parameters, which after sharding would be this rank's only.
    """
    return _NumParameters(model) if callable(getattr(model, "num_parameters", None)) else None


class _Method(Uncopyable):
    """A method of the model, which it references weakly, so that deleting the model frees its memory."""

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
        """Accumulate gradients in a ``with`` block, as ``sw.gradient_sync(model, False)``."""
        return gradient_sync(self._model, is_enabled=False)


class _ClipGradNorm(_Method):
    """``model.clip_grad_norm_(max_norm)``, which FSDP1 has."""

    def __call__(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the global norm, as ``sw.clip_grad_norm(model, max_norm, norm_type)``.

        Collective:
            As ``sw.clip_grad_norm``.
        """
        return clip_grad_norm(self._model, max_norm, norm_type)


class _NumParameters(_Method):
    """``model.num_parameters()`` of transformers models, with the counts from before sharding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        self._held = [(name, p.numel(), p.requires_grad, name in tables) for name, p in model.named_parameters()]

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:  # noqa: FBT001, FBT002  transformers' form
        """Return the number of parameters of the whole model: all, the trained ones, or those outside of embeddings."""
        now = {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
        return sum(
            numel
            for name, numel, was_trained, is_table in self._held
            if (now.get(name, was_trained) or not only_trainable) and not (is_table and exclude_embeddings)
        )
