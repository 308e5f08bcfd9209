"""Checks of an optimizer before its step on shards.

An optimizer that updates each element by itself computes the same bits on shards as on whole parameters. One that uses
blocks, rows or whole matrices does so where the plan's granularity keeps these on one rank. Elsewhere it would silently
compute something else, and is refused.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwise.engine.hooks import Observer
from shardwise.engine.unit import mark_of
from shardwise.features import guard
from shardwise.features.waiting import refuse_sums
from shardwise.optim import flat_parameters, partial
from shardwise.optim.flat_parameters import FlatParameter, group_of
from shardwise.spec.errors import StateError
from shardwise.spec.granularity import ELEMENT, TENSOR, Granularity, block, keeps, resolve_granularity
from shardwise.spec.slice import Slice, slice_of

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Unit

#: The lists of parameters that an optimizer holds, by identity and length.
Content = tuple[tuple[int, int], ...]

#: What each optimizer must have whole. Classes of other packages by name, so that nothing is imported for them.
_NEEDS: dict[type | str, Granularity] = {
    torch.optim.Adam: ELEMENT,
    torch.optim.AdamW: ELEMENT,
    torch.optim.SGD: ELEMENT,
    torch.optim.Adagrad: ELEMENT,
    torch.optim.RMSprop: ELEMENT,
    torch.optim.Adadelta: ELEMENT,
    torch.optim.Adamax: ELEMENT,
    torch.optim.NAdam: ELEMENT,
    torch.optim.RAdam: ELEMENT,
    torch.optim.ASGD: ELEMENT,
    torch.optim.Rprop: ELEMENT,
    torch.optim.Muon: TENSOR,  # orthogonalises each matrix
    torch.optim.Adafactor: TENSOR,  # the step's size follows from norms of the whole parameter and of its update
    "transformers.optimization.Adafactor": TENSOR,
}

#: Optimizers with one scale for each ``block_size`` elements of their state.
_BLOCKWISE = frozenset({"torchao.optim.adam.Adam8bit", "torchao.optim.adam.AdamW8bit"})

#: What each optimizer that has been checked held then.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Content] = weakref.WeakKeyDictionary()
_installed = False

#: What :func:`engines_of` has found, and in which lists of parameters.
_engines: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[Content, list[weakref.ref[Engine]]]] = (
    weakref.WeakKeyDictionary()
)


def declare_granularity(
    cls: type[torch.optim.Optimizer], granularity: str | Granularity | tuple[str, int]
) -> type[torch.optim.Optimizer]:
    """Declare that ``cls`` updates each such part of a parameter from the gradients of that part alone.

    Optimizers of this class are then accepted on shards under a plan with that granularity, or with one that never cuts
    inside such a part either.

    Args:
        cls: A class of optimizers.
        granularity: ``"row"``, ``sw.block(n)`` or ``"tensor"``.

    Returns:
        ``cls``.

    Raises:
        TypeError: ``cls`` is not a class.
        PlanError: There is no such granularity.
    """
    if not isinstance(cls, type):
        raise TypeError(f"an optimizer class is expected, got {cls!r}.")
    _NEEDS[cls] = resolve_granularity(granularity)
    return cls


def declare_elementwise(cls: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Declare that ``cls`` updates each element from the gradients of that element alone. Usable as a class decorator.

    Optimizers of this class are then accepted on all shards. Returns ``cls``.

    Raises:
        TypeError: ``cls`` is not a class.
    """
    return declare_granularity(cls, ELEMENT)


def needed_by(optimizer: torch.optim.Optimizer) -> Granularity | None:
    """The granularity that an optimizer needs; ``None`` if it is unknown."""
    cls = type(optimizer)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name in _BLOCKWISE:
        return block(optimizer.__dict__["block_size"])
    return _NEEDS.get(cls) or _NEEDS.get(name) or _needed_by_bitsandbytes(optimizer, name)


def _needed_by_bitsandbytes(optimizer: torch.optim.Optimizer, name: str) -> Granularity | None:
    """Its optimizers with 32-bit state work element by element, unless an update is scaled by a tensor's norm."""
    settings = vars(optimizer).get("args")
    if not name.startswith("bitsandbytes.optim.") or settings is None:
        return None
    if getattr(settings, "max_unorm", 0) > 0 or getattr(settings, "percentile_clipping", 100) < 100:
        return TENSOR
    return ELEMENT if _bits_of(optimizer) == 32 else None


def _bits_of(optimizer: torch.optim.Optimizer) -> int:
    return int(getattr(vars(optimizer).get("args"), "optim_bits", 32))


def _check_bits(optimizer: torch.optim.Optimizer) -> None:
    """Refuse 8-bit state of bitsandbytes on shards.

    Raises:
        StateError: The optimizer keeps such state, and updates shards.
    """
    cls = type(optimizer)
    if not cls.__module__.startswith("bitsandbytes.optim") or _bits_of(optimizer) != 8:
        return
    given = (p for settings in optimizer.param_groups for p in settings["params"])
    if any((owner := group_of(parameter)) is not None and owner.row.shards_optimizer for parameter in given):
        raise StateError(
            f"bitsandbytes' {cls.__name__} keeps its state in blocks of 8 bit, with one scale each, and chooses by a"
            " tensor's size which state is kept so: on shards it would round otherwise than on whole parameters, and"
            " its state could not be saved by name.\n"
            "  Use torchao.optim.AdamW8bit, or a 32-bit optimizer (bitsandbytes' with optim_bits=32, torch's with"
            " fused=True); offload_policy='cpu' keeps the state on the host. Under strategy='ddp' it works as it is."
        )


def install_checks() -> None:
    """Have every optimizer of this process checked at its next step, and steps counted."""
    global _installed  # noqa: PLW0603 - torch's hooks are global as well
    _seen.clear()  # one that stepped before its model was parallelized is to be looked at again
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


class StepsEnd(Observer):
    """Ends an optimizer's step that has raised, or that calls a backward in its closure."""

    def backward_begins(self, engine: Engine) -> None:  # noqa: ARG002
        """Refuse norms of one rank's part from now on."""
        partial.allow(is_allowed=False)


def accept(optimizer: torch.optim.Optimizer) -> None:
    """Check ``optimizer`` now, and accept the state that it is about to get as state of shards.

    Raises:
        StateError: It cannot work on shards.
    """
    _check_bits(optimizer)
    _check(optimizer)
    _seen[optimizer] = _content_of(optimizer)


def _content_of(optimizer: torch.optim.Optimizer) -> Content:
    return tuple((id(params), len(params)) for params in (settings["params"] for settings in optimizer.param_groups))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    engines = engines_of(optimizer)
    is_inside_backward = False
    for engine in engines:
        engine.wait_for_host()  # masters on the host are about to be written
        if any(observer.updates_in_backward for observer in engine.observers.all):
            found_inf, _ = (vars(optimizer).pop(name, None) for name in ("found_inf", "grad_scale"))
            if found_inf is not None:
                raise StateError(
                    "a gradient scaler came after sw.optimizer_in_backward() had updated the parameters with scaled"
                    " gradients.\n  Compute in bf16, which needs no scaler, or step after backward."
                )
            if _is_stepping(engine):
                is_inside_backward = True
                continue
        _check_moment(engine)
        for tell in engine.observers.before_step:
            tell(engine, optimizer)
    if not is_inside_backward and _seen.get(optimizer) != (content := _content_of(optimizer)):
        _check_bits(optimizer)
        _check(optimizer)
        _check_state(optimizer)
        if guard.check_optimizer(optimizer, engines):
            _seen[optimizer] = content
    if any(given is not None for given in (*args[1:], kwargs.get("closure"))) and flat_parameters.flats_of(optimizer):
        raise StateError(
            f"{type(optimizer).__name__}.step(closure) with flat parameters: the gradients that the closure makes come"
            " too late to see which parameters have none.\n"
            "  Call the closure before optimizer.step(), or build the optimizer on model.parameters()."
        )
    flat_parameters.before_step(optimizer)
    partial.allow(is_allowed=True)  # what an optimizer may look at is its own check above


def _check_moment(engine: Engine) -> None:
    """Refuse a step at a time when the shards or their gradients are not what they should be."""
    if any(unit.whole is not None for unit in engine.units):
        raise StateError(
            "optimizer.step() inside sw.full_parameters(): the optimizer's state is of shards.\n  Step outside of it."
        )
    engine.step.refuse("optimizer.step()")
    refuse_sums(engine, "optimizer.step()")


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    flat_parameters.after_step(optimizer)
    partial.allow(is_allowed=False)
    for engine in engines_of(optimizer):
        if not _is_stepping(engine):
            engine.invalidate()


def _is_stepping(engine: Engine) -> bool:
    """The step comes from inside backward."""
    return any(observer.is_stepping for observer in engine.observers.all)


def engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    """The engines whose parameters this optimizer updates, in the order of its parameters."""
    lists = [settings["params"] for settings in optimizer.param_groups]
    content = _content_of(optimizer)
    known = _engines.get(optimizer)
    if known is not None and known[0] == content:
        engines = [reference() for reference in known[1]]
        if all(engine is not None and _runtime_of(engine.units[0]) is engine for engine in engines):
            return [engine for engine in engines if engine is not None]
    owners = dict.fromkeys(group_of(parameter) for params in lists for parameter in params)
    found = (_runtime_of(owner.unit) for owner in owners if owner is not None)
    distinct = list(dict.fromkeys(engine for engine in found if engine is not None))
    _engines[optimizer] = content, [weakref.ref(engine) for engine in distinct]
    return distinct


def _runtime_of(unit: Unit) -> Engine | None:
    return unit.engine() if unit.engine is not None else None


def _check(optimizer: torch.optim.Optimizer) -> None:
    needed = needed_by(optimizer)
    if needed == ELEMENT:
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
            held = slice_of(parameter)
            if held is not None and not keeps(held, needed):
                raise _cut_refusal(type(optimizer).__name__, needed, parameter, held)
            mark = mark_of(parameter)
            owner = mark.group if mark is not None else None
            if mark is None or owner is None or not owner.row.shards_optimizer:
                continue  # whole on every rank; decided by the layout, so that all ranks decide alike
            if needed is None or not owner.layout.granularity.covers(needed):
                raise _refusal(type(optimizer).__name__, needed, owner, mark.index)


def _cut_refusal(name: str, needed: Granularity | None, parameter: torch.nn.Parameter, held: Slice) -> StateError:
    """Why the optimizer cannot work on a part of a tensor: of spread rows, or by tensor or expert parallelism."""
    mark = mark_of(parameter)
    title = f" {held.names[0]!r}" if held.names else ""
    if mark is not None and mark.group is not None:
        title = f" {mark.group.layout.params[mark.index].name!r}"
    needs = "is not known to work element by element" if needed is None else f"needs every {_part(needed)} on one rank"
    advice = f", or sw.declare_elementwise({name}) if that is what it is" if needed is None else ""
    is_spread = mark is None
    ranks = "rank" if is_spread else "rank of the model-parallel axes"
    whole = "Leave it out of row_sharded" if is_spread else "Set tp=1 (ep=1)"
    return StateError(
        f"{name} {needs}, but of parameter{title} of logical shape {list(held.shape)} each {ranks} updates a part, this"
        f" one {list(held.local_shape)}.\n"
        f"  {whole}, or use an element-wise optimizer{advice}."
    )


def _part(needed: Granularity) -> str:
    return "parameter whole" if needed == TENSOR else f"{needed} of a parameter"


def _refusal(name: str, needed: Granularity | None, group: Group, index: int) -> StateError:
    """Why the optimizer cannot work on that parameter, and what to do."""
    spec, granularity = group.layout.params[index], group.layout.granularity
    size = group.layout.size
    held = f"this rank holds {group.held[index].numel} of its {spec.numel} elements."
    if size == 1:
        held = "dp_shard is 1, so that this rank has all of it, but plans must not depend on that."
    place = f"parameter {spec.name!r} of logical shape {list(spec.shape)} is sharded by {granularity}: {held}"
    if needed is not None:
        value = f"sw.block({needed.numel})" if needed.kind == "block" else repr(needed.kind)
        return StateError(
            f"{name} needs every {_part(needed)} on one rank, but {place}\n"
            f"  Use sw.ParallelPlan(granularity={value}), strategy 'ddp', or an element-wise optimizer."
        )
    part = {"element": "element by element", "tensor": "parameter by parameter"}.get(granularity.kind)
    part = part or f"{granularity} by {granularity}"
    return StateError(
        f"{name} is not known to work {part}, but {place} An update that looks beyond that would silently differ.\n"
        f"  Use strategy 'ddp', an element-wise optimizer, or sw.declare_elementwise({name}) if each element's update"
        f" depends on that element alone. If it depends on nothing beyond its parameter: sw.declare_granularity({name},"
        " 'tensor') and sw.ParallelPlan(granularity='tensor')."
    )


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        mark = mark_of(parameter)
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
