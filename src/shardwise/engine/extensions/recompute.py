"""Activation checkpointing: a module's forward is run again in backward instead of keeping what it computed.

What is wrapped is the module's ``forward``, not the module: names and classes stay, and the hooks around it (gathers,
casts, tickets) run once. When backward reaches the module's outputs its ticket has brought the unit's parameters back;
the recomputation finds them there. It gathers only the units inside the module (:func:`enclosing`), which stay until
their own backward. Running statistics of batch norms are those of one run, as is dropout.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from shardwise import torch_private
from shardwise.engine.extensions.wrap import find_units
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.policies import RecomputePolicy, WrapPolicy
from shardwise.spec.replacement import Replacement

#: Operators by family. Which of them an attention or a product becomes depends on device, dtype and torch's version.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten._addmm_activation",
        "aten._scaled_mm",
        "aten._grouped_mm",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
}

_ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def find(model: nn.Module, units: Mapping[str, nn.Module], policy: RecomputePolicy | None) -> dict[str, nn.Module]:
    """The modules of ``model`` that ``policy`` recomputes, by name."""
    if policy is None:
        return {}
    found = choose_modules(model, units, policy.modules, policy.every, field="activation_checkpointing")
    _context_fn(policy)
    for name in found if policy.save else ():
        inside = [unit for unit in units if unit.startswith(f"{name}.")]
        if inside:
            raise PlanError(
                f"activation_checkpointing keeps outputs of operators in {name!r}, which encloses the unit"
                f" {inside[0]!r}: operators of its gather would be counted with those of the model.\n"
                "  Name modules without units inside, or use 'full'."
            )
    return found


def install(found: Mapping[str, nn.Module], policy: RecomputePolicy | None) -> None:
    """Recompute the modules that :func:`find` has found."""
    if policy is not None:
        context_fn = _context_fn(policy)
        for module in found.values():
            _Recomputed(module, context_fn).install()


def enclosing(name: str, recomputed: Iterable[str]) -> str | None:
    """The recomputed module that encloses unit ``name``, if there is one."""
    return next((path for path in recomputed if name.startswith(f"{path}.")), None)


def choose_modules(
    model: nn.Module,
    units: Mapping[str, nn.Module],
    modules: str | WrapPolicy | Mapping[str, Any],
    every: int,
    *,
    field: str,
) -> dict[str, nn.Module]:
    """Modules that a policy of the plan's ``field`` names, by name, each ``every``-th of them.

    Args:
        model: The root.
        units: The other units.
        modules: ``"units"``, or a wrap policy.
        every: 1: all.
        field: For messages.

    Raises:
        PlanError: There are none, or one lies inside another.
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
        norms = [weakref.ref(m) for m in module.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._context_fn = functools.partial(_keeping_statistics, norms, context_fn) if norms else context_fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.own(*args, **kwargs)
        args, kwargs = _without_caches(self.module, args, kwargs)

        # The keywords go through as an argument: there torch looks for the devices whose generators it has to keep.
        def run(keywords: dict[str, Any], *positional: Any) -> Any:
            return self.own(*positional, **keywords)

        return checkpoint(run, kwargs, *args, use_reentrant=False, context_fn=self._context_fn)


def _without_caches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments without transformers' key-value caches, which a second run would fill a second time.

    transformers' own checkpointing leaves them out as well.
    """
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


class _Statistics(contextlib.ExitStack):
    """Around a recomputation: what batch norms have counted is afterwards what it was."""

    def __init__(self, norms: Sequence[weakref.ref[_NormBase]], inner: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._norms = norms
        self._inner = inner

    def __enter__(self) -> Self:
        buffers = [buffer for ref in self._norms if (norm := ref()) is not None for buffer in norm.buffers()]
        self.callback(_restore, [(buffer, buffer.clone()) for buffer in buffers])
        self.enter_context(self._inner)
        return self


def _restore(copies: Sequence[tuple[Tensor, Tensor]]) -> None:
    for buffer, copy in copies:
        buffer.copy_(copy)


def _keeping_statistics(
    norms: Sequence[weakref.ref[_NormBase]], context_fn: _ContextFn
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    forward, again = context_fn()
    return forward, _Statistics(norms, again)


# -- operators


def _context_fn(policy: RecomputePolicy) -> _ContextFn:
    if not policy.save:
        return noop_context_fn
    saved = {operator for name in policy.save for operator in operators(name)}

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        def decide(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if operator in saved:
                draws = _draws(operator, args, kwargs)
                return CheckpointPolicy.PREFER_RECOMPUTE if draws else CheckpointPolicy.MUST_SAVE
            # What is changed in place (a T5's scores += bias) the recomputation would change once more.
            changed = tree_leaves(args[:1]) if operator.overloadpacket.__name__.endswith("_") else ()
            if not all(torch_private.keep_no_longer(keeping, each) for each in changed):
                raise StateError(
                    f"{operator} changes in place what activation_checkpointing keeps: a recomputation would change it"
                    " once more.\n  Use 'full', or torch 2.13, with which it is computed again."
                )
            return CheckpointPolicy.PREFER_RECOMPUTE

        keeping, giving = create_selective_checkpoint_contexts(decide)
        return keeping, giving

    return contexts


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers, as attention with dropout does.

    A recomputation that skipped it would leave its numbers to the next operator that draws: other masks, and gradients
    that are wrong without an error.
    """
    names = [name for name, *_ in torch_private.schema_of(operator)[1]]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rates = [given.get(name, 0.0) for name in names if name in _RATES]
    if rates:  # operators of others rarely have the tag
        return any(isinstance(rate, float) and rate > 0 for rate in rates)
    return torch.Tag.nondeterministic_seeded in operator.tags


#: What operators call the probability with which they drop numbers.
_RATES = {"dropout_p", "p_dropout", "dropout", "dropout_rate", "dropout_prob"}


def operators(name: str) -> list[Any]:
    """Every overload of the operators that ``name`` means: ``"matmul"``, ``"attention"``, or an operator's name."""
    if name in _FAMILIES:
        return [operator for member in _FAMILIES[name] for operator in _overloads(member)]
    found = _overloads(name)
    if not found:
        raise PlanError(
            f"activation_checkpointing: torch has no operator {name!r}.\n"
            "  Names are those under torch.ops: 'aten.gelu', 'aten.gelu.default', 'my_library.my_op'."
        )
    return found


def _overloads(name: str) -> list[Any]:
    library, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, library), operator, None)
    if packet is None:
        return []
    if overload:
        only = getattr(packet, overload, None)
        return [] if only is None else [only]
    return [getattr(packet, known) for known in packet.overloads()]
