"""Activation checkpointing: a module's forward is run again in backward instead of storing its intermediate results.

The module's ``forward`` is replaced, not the module: names and classes stay, and the hooks around it (gathers, casts,
tickets) run once. When backward reaches the module's outputs, its ticket gathers the unit's parameters before the
recomputation. The recomputation gathers only the units inside the module (:func:`enclosing`), which stay gathered until
their own backward. Buffers that a forward writes (running statistics) and dropout masks are those of a single run.
"""

from __future__ import annotations

import contextlib
import copy
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
from shardwise.engine.storage.attachment import attachment_of, engine_of_unit, mark_of
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
    if policy.save and any(_uses_flex_attention(module) for module in model.modules()):
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


def _uses_flex_attention(module: nn.Module) -> bool:
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
                f"{field} {_VERBS[field]} units, but the model has none below its root.\n"
                f"  Choose an auto_wrap_policy, or name modules: {field}=sw.wrap_by_class({{Block}})."
            )
    else:
        assert not isinstance(modules, Mapping)  # the policy has replaced it
        found = find_units(model, modules)
        for name in found:
            outer = enclosing(name, found)
            if outer is not None:
                raise PlanError(
                    f"{field} names {outer!r} and, inside it, {name!r}, {_WHY_NOT_TWICE[field]}.\n  Name one of them."
                )
    return dict(list(found.items())[::every])


_VERBS = {"activation_checkpointing": "recomputes", "offload_activations": "offloads"}
_WHY_NOT_TWICE = {
    "activation_checkpointing": "which would be computed three times",
    "offload_activations": "whose tensors would be copied twice",
}


class _Recomputed(Replacement):
    def __init__(self, module: nn.Module, context_fn: _ContextFn) -> None:
        super().__init__(module)
        self._context_fn = _Buffers(module, context_fn) if _has_any_buffer(module) else context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        args, kwargs = _without_caches(self.module, args, kwargs)
        found = {
            key: each for key, value in (*enumerate(args), *kwargs.items()) if (each := _copied(value)) is not value
        }
        has_run = False

        # The keywords are passed as one argument, because torch looks there for devices whose generators it must save.
        def run(keywords: dict[str, Any], *positional: Any) -> Any:
            nonlocal has_run
            if torch_private.current_backward() != -1:
                _gather_if_released(self.module)
            if has_run and found:
                positional = tuple(_copied(found.get(index, each)) for index, each in enumerate(positional))
                keywords = {name: _copied(found.get(name, each)) for name, each in keywords.items()}
            has_run = True
            return self.original(*positional, **keywords)

        return checkpoint(run, kwargs, *args, use_reentrant=False, context_fn=self._context_fn)


def _copied(value: Any, levels: int = 16) -> Any:
    """Copy a list, dict or other object that the model may change between a call and its recomputation.

    So a list of skipped activations, to which a block appends, is the same in both. Tensors are not copied.
    """
    if type(value) in (list, tuple) and levels:
        items = [_copied(each, levels - 1) for each in value]
        is_same = type(value) is tuple and all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    if type(value) is dict and levels:
        return {key: _copied(each, levels - 1) for key, each in value.items()}
    if not hasattr(value, "__dict__") or isinstance(value, (Tensor, nn.Module, type)):
        return value
    with contextlib.suppress(Exception):  # an object that cannot be copied, such as a process group
        return copy.copy(value)
    return value


def _gather_if_released(module: nn.Module) -> None:
    """Gather the unit of a module that backward reaches by a value kept on it, not by its outputs: by no ticket."""
    attachment = attachment_of(module)
    marks = (mark_of(parameter) for parameter in module.parameters())
    group = next((mark.group for mark in marks if mark is not None), None)
    unit = attachment.unit if attachment is not None else group.unit if group is not None else None
    engine = engine_of_unit(unit) if unit is not None else None
    if unit is not None and engine is not None and not unit.all_use_unsharded:
        engine.regather(unit)


def _has_any_buffer(module: nn.Module) -> bool:
    return any(torch_private.buffers_of(m) for m in module.modules())


def _without_caches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Remove key-value caches from arguments, as transformers' checkpointing does: recomputation would refill them."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or getattr(module, "_can_checkpoint_with_cache", False):
        return args, kwargs
    values = [*args, *kwargs.values()]
    found = [value for value in values if isinstance(value, caches.Cache)]
    if not found:
        return args, kwargs
    if any(cache.get_seq_length() for cache in found):
        raise StateError(
            f"{type(module).__name__} is recomputed in backward, but was given a key-value cache that holds tokens.\n"
            "  Pass use_cache=False and no cache in training, or set activation_checkpointing='none'."
        )

    def without_cache(value: Any) -> Any:
        return None if isinstance(value, caches.Cache) else value

    remaining = {name: without_cache(value) for name, value in kwargs.items()}
    if remaining.get("use_cache"):
        remaining["use_cache"] = False
    return tuple(without_cache(value) for value in args), remaining


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
        forward, recomputation = self._context_fn()
        found: list[_Snapshot] = []
        return self._recording(forward, found), _RestoreBuffers(recomputation, found)

    @contextlib.contextmanager
    def _recording(self, inner: AbstractContextManager[Any], found: list[_Snapshot]) -> Iterator[None]:
        mode = getattr(self._module(), "training", True)
        is_first, known = mode not in self._written, self._written.get(mode, self._counted)
        snapshots = {
            (index, name): _Snapshot(
                holder, name, buffer, is_copied=(index, name) in known or _is_small(buffer, is_first=is_first)
            )
            for index, holder in enumerate(self._holders)
            for name, buffer in holder.items()
        }
        with inner:
            yield
        for index, holder in enumerate(self._holders):
            snapshots |= {
                (index, name): _Snapshot(holder, name, _ABSENT) for name in holder if (index, name) not in snapshots
            }
        written = {place for place, at in snapshots.items() if at.is_written(compares=is_first)} | known
        self._written[mode] = written
        found.extend(at for place, at in snapshots.items() if place in written)


def _is_small(buffer: Tensor | None, *, is_first: bool) -> bool:
    """Whether a call copies a buffer that no call is known to write. Large integer buffers are masks, or weights."""
    if buffer is None:
        return False
    return buffer.numel() <= 2**12 or (is_first and (buffer.numel() <= 2**20 or buffer.is_floating_point()))


_ABSENT = object()


class _Snapshot:
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

    def restore(self) -> None:
        """Put the buffer back, with its content."""
        if self.buffer is _ABSENT:
            self.holder.pop(self.name, None)
            return
        self.holder[self.name] = self.buffer
        if self.content is not None:
            with torch.no_grad():
                self.buffer.copy_(self.content)


class _RestoreBuffers(contextlib.ExitStack):
    """Context of a recomputation, maybe one of several: installs its call's buffers, then restores the present ones."""

    def __init__(self, inner: AbstractContextManager[Any], found: Sequence[_Snapshot]) -> None:
        super().__init__()
        self._inner, self._found = inner, found

    def __enter__(self) -> Self:
        in_place = {id(each.buffer) for each in self._found if each.content is not None}
        for each in self._found:
            buffer = each.holder.get(each.name, _ABSENT)
            self.callback(_Snapshot(each.holder, each.name, buffer, is_copied=id(buffer) in in_place).restore)
        for each in self._found:
            each.restore()
        self.enter_context(self._inner)
        return self


def _context_fn(policy: RecomputePolicy) -> _ContextFn:
    return selective.contexts(policy.save) if policy.save else noop_context_fn
