"""Activation checkpointing: a module's forward is run again in backward instead of storing its intermediate results.

The module's ``forward`` is replaced, not the module: names and classes stay, and the hooks around it (gathers, casts,
tickets) run once. When backward reaches the module's outputs, its ticket gathers the unit's parameters before the
recomputation. The recomputation gathers only the units inside the module (:func:`enclosing`), which stay gathered until
their own backward. Buffers that a forward writes (running statistics) and dropout masks are those of a single run.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint, noop_context_fn

from shardwise import torch_private
from shardwise.engine.extensions import selective
from shardwise.engine.extensions.wrap import find_units
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.policies import RecomputePolicy, WrapPolicy
from shardwise.spec.replacement import Replacement

_ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def find(model: nn.Module, units: Mapping[str, nn.Module], policy: RecomputePolicy | None) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that ``policy`` recomputes, by name."""
    if policy is None:
        return {}
    found = choose_modules(model, units, policy.modules, policy.every, field="activation_checkpointing")
    _context_fn(policy)
    if policy.save and any(_attends_flexibly(module) for module in model.modules()):
        raise PlanError(
            "activation_checkpointing keeps outputs of operators, but the model attends by flex_attention, which torch"
            " compiles: watched, it would not be compiled.\n"
            "  Use activation_checkpointing='full', or load the model with attn_implementation='sdpa'."
        )
    for name in found if policy.save else ():
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        if inside:
            raise PlanError(
                f"activation_checkpointing keeps outputs of operators in {name!r}, which encloses the unit"
                f" {inside[0]!r}: operators of its gather would be counted with those of the model.\n"
                "  Name modules without units inside, or use 'full'."
            )
    return found


def _attends_flexibly(module: nn.Module) -> bool:
    """Whether a module is a transformers model that uses ``flex_attention``."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "flex_attention"


def install(found: Mapping[str, nn.Module], policy: RecomputePolicy | None) -> None:
    """Replace the forward of the modules that :func:`find` has returned."""
    if policy is not None:
        context_fn = _context_fn(policy)
        for module in found.values():
            _Recomputed(module, context_fn).install()


def enclosing(name: str, recomputed: Iterable[str]) -> str | None:
    """The recomputed module that encloses the module ``name``, if there is one."""
    return next((path for path in recomputed if name.startswith(f"{path}.")), None)


def choose_modules(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    modules: str | WrapPolicy | Mapping[str, Any],
    every: int,
    *,
    field: str,
) -> dict[str, nn.Module]:
    """Return every ``every``-th module that the policy in the plan's ``field`` selects, by name.

    Raises:
        PlanError: There are none, or one is inside another.
    """
    if isinstance(modules, str):
        found = {name: module for name, module in units.items() if not any(name.startswith(f"{u}.") for u in units)}
        if not found:
            raise PlanError(
                f"{field} {_DOES[field]} units, but the model has none below its root.\n"
                f"  Choose an auto_wrap_policy, or name modules: {field}=sw.wrap_by_class({{Block}})."
            )
    else:
        assert not isinstance(modules, Mapping)  # the policy has replaced it
        found = find_units(model, modules)
        for name in found:
            outer = enclosing(name, found)
            if outer is not None:
                raise PlanError(
                    f"{field} names {outer!r} and, inside it, {name!r}, {_TWICE[field]}.\n  Name one of them."
                )
    return dict(list(found.items())[::every])


_DOES = {"activation_checkpointing": "recomputes", "offload_activations": "offloads"}
_TWICE = {
    "activation_checkpointing": "which would be computed three times",
    "offload_activations": "whose tensors would be copied twice",
}


class _Recomputed(Replacement):
    def __init__(self, module: nn.Module, context_fn: _ContextFn) -> None:
        super().__init__(module)
        self._context_fn = _Buffers(module, context_fn) if _has_buffers(module) else context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        args, kwargs = _without_caches(self.module, args, kwargs)

        # The keywords are passed as one argument, because torch looks there for devices whose generators it must save.
        def run(keywords: dict[str, Any], *positional: Any) -> Any:
            return self.own(*positional, **keywords)

        return checkpoint(run, kwargs, *args, use_reentrant=False, context_fn=self._context_fn)


def _has_buffers(module: nn.Module) -> bool:
    return any(torch_private.buffers_of(m) for m in module.modules())


def _without_caches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove key-value caches from arguments, as transformers' checkpointing does: recomputation would refill them."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    values = [*args, *kwargs.values()]
    held = [value for value in values if isinstance(value, caches.Cache)]
    if not held:
        return args, kwargs
    if any(cache.get_seq_length() for cache in held):
        raise StateError(
            f"{type(module).__name__} is recomputed in backward, but was given a key-value cache that holds tokens.\n"
            "  Pass use_cache=False and no cache in training, or set activation_checkpointing='none'."
        )

    def keep(value: Any) -> Any:
        return None if isinstance(value, caches.Cache) else value

    kept = {name: keep(value) for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(keep(value) for value in args), kept


class _Buffers:
    """Restores a module's buffers around recomputations.

    A recomputation sees the buffers that its call saw. Afterwards they have the values that they had before the
    recomputation. So statistics and counters (of batch norms, quantizers, routers) are updated once for each call, and
    results that depend on them are the same in the recomputation.
    """

    def __init__(self, module: nn.Module, context_fn: _ContextFn) -> None:
        modules = list(module.modules())
        self._module = weakref.ref(module)
        self._holders = [torch_private.buffers_of(m) for m in modules]
        norms = [index for index, m in enumerate(modules) if isinstance(m, _NormBase)]
        # Norm kernels write statistics without incrementing a version counter.
        self._counted = {(index, name) for index in norms for name in self._holders[index]}
        self._context_fn = context_fn
        self._written: dict[bool, set[tuple[int, str]]] = {}  # by training mode: buffers that calls wrote

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Make the contexts of a call and of its recomputation."""
        forward, again = self._context_fn()
        found: list[_Found] = []
        return self._watching(forward, found), _Returning(again, found)

    @contextlib.contextmanager
    def _watching(self, inner: AbstractContextManager[Any], found: list[_Found]) -> Iterator[None]:
        mode = getattr(self._module(), "training", True)
        is_first, known = mode not in self._written, self._written.get(mode, self._counted)
        held = {
            (index, name): _Found(
                holder, name, buffer, is_copied=(index, name) in known or _is_small(buffer, is_first=is_first)
            )
            for index, holder in enumerate(self._holders)
            for name, buffer in holder.items()
        }
        with inner:
            yield
        for index, holder in enumerate(self._holders):
            held |= {(index, name): _Found(holder, name, _ABSENT) for name in holder if (index, name) not in held}
        written = {place for place, at in held.items() if at.is_written(compares=is_first)} | known
        self._written[mode] = written
        found.extend(at for place, at in held.items() if place in written)


def _is_small(buffer: Tensor | None, *, is_first: bool) -> bool:
    """Whether a call copies a buffer that no call is known to write. Large integer buffers are masks, or weights."""
    if buffer is None:
        return False
    return buffer.numel() <= 2**12 or (is_first and (buffer.numel() <= 2**20 or buffer.is_floating_point()))


_ABSENT = object()


class _Found:
    """A buffer's entry in its module as a call found it: a tensor and its content, ``None``, or absent."""

    def __init__(self, holder: dict[str, Tensor | None], name: str, buffer: Any, *, is_copied: bool = False) -> None:
        self.holder, self.name, self.buffer = holder, name, buffer
        is_copied = is_copied and isinstance(buffer, Tensor) and not buffer.is_inference()
        self.content = buffer.detach().clone() if is_copied else None
        self._version = torch_private.version_of(buffer) if isinstance(buffer, Tensor) else 0

    def is_written(self, *, compares: bool) -> bool:
        """Whether the call has replaced the buffer or written into it.

        Args:
            compares: Whether to compare the content too, because torch does not count writes to ``.data``. This waits
                for the device.
        """
        is_replaced = self.holder.get(self.name, _ABSENT) is not self.buffer
        if not isinstance(self.buffer, Tensor) or torch_private.version_of(self.buffer) != self._version:
            return is_replaced or isinstance(self.buffer, Tensor)
        if is_replaced:
            self.content = None  # the old tensor is unchanged; writing it would count as a change to saved tensors
            return True
        return compares and not (self.content is None or self.buffer.is_meta or torch.equal(self.content, self.buffer))

    def put(self) -> None:
        """Put the buffer back, with its content."""
        if self.buffer is _ABSENT:
            self.holder.pop(self.name, None)
            return
        self.holder[self.name] = self.buffer
        if self.content is not None:
            with torch.no_grad():
                self.buffer.copy_(self.content)


class _Returning(contextlib.ExitStack):
    """Context of a recomputation, maybe one of several: installs its call's buffers, then restores the present ones."""

    def __init__(self, inner: AbstractContextManager[Any], found: Sequence[_Found]) -> None:
        super().__init__()
        self._inner, self._found = inner, found

    def __enter__(self) -> Self:
        in_place = {id(held.buffer) for held in self._found if held.content is not None}
        for held in self._found:
            buffer = held.holder.get(held.name, _ABSENT)
            self.callback(_Found(held.holder, held.name, buffer, is_copied=id(buffer) in in_place).put)
        for held in self._found:
            held.put()
        self.enter_context(self._inner)
        return self


def _context_fn(policy: RecomputePolicy) -> _ContextFn:
    return selective.contexts(policy.save) if policy.save else noop_context_fn
