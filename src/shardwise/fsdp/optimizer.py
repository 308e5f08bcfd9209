"""Checks at an optimizer's step, where it meets shards.

An optimizer that treats every element by itself gives on slices bitwise what it gives on whole parameters. One that
looks at rows, norms or whole matrices would silently compute something else: it is refused where a parameter is split.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.fsdp import attach, flat
from shardwise.fsdp.flat import FlatParameter, group_of
from shardwise.spec.errors import StateError

if TYPE_CHECKING:
    from shardwise.fsdp.runtime import Runtime

#: Optimizers of torch.optim whose update of an element depends on that element alone.
_ELEMENTWISE: set[type] = {
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
    torch.optim.Rprop,
}

_seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_installed = False


def declare_elementwise(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Vouch that ``cls`` updates every element from that element's own history alone. Usable as a class decorator.

    Raises:
        TypeError: ``cls`` is not a class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"declare_elementwise() takes an optimizer class, got {cls!r}.")
    _ELEMENTWISE.add(cls)
    return cls


def install_checks() -> None:
    """Have every optimizer of this process checked at its next step, and steps counted."""
    global _installed  # noqa: PLW0603 - torch's hooks are global as well
    _seen.clear()  # one that stepped before its model was parallelized is to be looked at again
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def accept(optimizer: torch.optim.Optimizer) -> None:
    """Check ``optimizer`` now, and let the state that it is about to be given pass.

    Raises:
        StateError: It cannot work on shards.
    """
    _check(optimizer)
    _seen.add(optimizer)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for runtime in runtimes_of(optimizer):
        if runtime.update is not None:
            found_inf, _ = (vars(optimizer).pop(name, None) for name in ("found_inf", "grad_scale"))
            if found_inf is not None:
                raise StateError(
                    "a gradient scaler came after sw.optimizer_in_backward() had updated the parameters with scaled"
                    " gradients.\n  Compute in bf16, which needs no scaler, or step after backward."
                )
            if runtime.update.is_stepping:
                continue
        _check_moment(runtime)
        if runtime.join is not None:
            runtime.join.steps(optimizer)
    if optimizer not in _seen:
        _check(optimizer)
        _check_state(optimizer)
        _seen.add(optimizer)
    if any(given is not None for given in (*args[1:], kwargs.get("closure"))) and flat.flats_of(optimizer):
        raise StateError(
            f"{type(optimizer).__name__}.step(closure) with flat parameters: the gradients that the closure makes come"
            " too late to see which parameters have none.\n"
            "  Call the closure before optimizer.step(), or build the optimizer on model.parameters()."
        )
    flat.before_step(optimizer)


def _check_moment(runtime: Runtime) -> None:
    """Refuse a step at a time when the shards or their gradients are not what they should be."""
    if any(unit.whole is not None for unit in runtime.units):
        raise StateError(
            "optimizer.step() inside sw.full_parameters(): the optimizer's state is of shards.\n  Step outside of it."
        )
    if any(group.gradient.is_local for group in runtime.groups):
        raise StateError(
            "optimizer.step() came before the gradients of accumulated microbatches were reduced over the ranks.\n"
            "  Run the last backward of a step outside of sw.gradient_sync(model, False)."
        )


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    flat.after_step(optimizer)
    for runtime in runtimes_of(optimizer):
        if runtime.update is None or not runtime.update.is_stepping:
            runtime.invalidate()


def runtimes_of(optimizer: torch.optim.Optimizer) -> list[Runtime]:
    """The engines whose parameters this optimizer updates."""
    runtimes: dict[int, Runtime] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = group_of(parameter)
            runtime = owner.unit.runtime() if owner is not None and owner.unit.runtime is not None else None
            if runtime is not None:
                runtimes[id(runtime)] = runtime
                break
    return list(runtimes.values())


def _check(optimizer: torch.optim.Optimizer) -> None:
    if type(optimizer) in _ELEMENTWISE:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, FlatParameter):
                raise StateError(
                    f"{type(optimizer).__name__} is not known to work element by element, but sw.flat_parameters() gave"
                    " it several parameters as one tensor.\n"
                    f"  Build it on model.parameters(), or call sw.declare_elementwise({type(optimizer).__name__}) if"
                    " each element's update depends on that element alone."
                )
            mark = attach.mark_of(parameter)
            owner = mark.group if mark is not None else None
            if mark is None or owner is None:
                continue
            spec = owner.layout.params[mark.index]
            if not owner.row.shards_optimizer:
                continue  # whole on every rank; decided by the layout, so that all ranks decide alike
            raise StateError(
                f"{type(optimizer).__name__} is not known to work element by element, but parameter {spec.name!r} of"
                f" logical shape {list(spec.shape)} is split: this rank holds {parameter.numel()} of its {spec.numel}"
                " elements. A row-wise or matrix-wise update would silently differ.\n"
                "  Use strategy 'ddp', an element-wise optimizer, or sw.declare_elementwise("
                f"{type(optimizer).__name__}) if each element's update depends on that element alone."
            )


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        mark = attach.mark_of(parameter)
        owner = mark.group if mark is not None else None
        if mark is None or owner is None:
            continue
        spec = owner.layout.params[mark.index]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                raise StateError(
                    f"the optimizer was used before sw.parallelize(): its state {key!r} of {spec.name!r} has shape"
                    f" {list(value.shape)}, the shard {list(parameter.shape)}.\n"
                    "  Build it after sw.parallelize(), or without having stepped; to carry state over, sw.save it from"
                    " a run with that optimizer and sw.load it."
                )
