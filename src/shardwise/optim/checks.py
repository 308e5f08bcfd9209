"""Checks of an optimizer before its step on shards.

An element-wise optimizer computes bitwise the same on shards as on full parameters. An optimizer that uses blocks, rows
or full matrices does so only if the plan's granularity keeps these on one rank. Otherwise it would silently compute
something else, and is refused.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import torch_private
from shardwise.comm.control import all_gather_json, refuse_different
from shardwise.comm.digest import digest_of
from shardwise.engine.attach import Observer
from shardwise.engine.storage import flat_parameters, part
from shardwise.engine.storage.attachment import engine_of_unit, group_and_index
from shardwise.engine.storage.flat_parameters import FlatParameter, group_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.optimizer import Content, bits_of, content_of, engines_of, needed_by, shards_of
from shardwise.engine.storage.waiting import refuse_sums
from shardwise.engine.unit import replaced_after
from shardwise.launch.log_once import log_once
from shardwise.spec.errors import StateError
from shardwise.spec.granularity import ELEMENT, TENSOR, Granularity, keeps
from shardwise.spec.order import EntryPoint
from shardwise.spec.slice import Slice, slice_of

if TYPE_CHECKING:
    from shardwise.comm.base import Comm
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group

#: The content of each optimizer when it was last checked.
_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Content] = weakref.WeakKeyDictionary()
#: Optimizers whose ``state_dict()`` is guarded.
_guarded: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_installed = False


def _check_bits(optimizer: torch.optim.Optimizer) -> None:
    """Refuse 8-bit state of bitsandbytes on shards."""
    cls = type(optimizer)
    if not cls.__module__.startswith("bitsandbytes.optim") or bits_of(optimizer) != 8:
        return
    parameters = (p for settings in optimizer.param_groups for p in settings["params"])
    if any((owner := group_of(p)) is not None and owner.placements.shards_optimizer for p in parameters):
        raise StateError(
            f"bitsandbytes' {cls.__name__} keeps its state in blocks of 8 bit, with one scale each, and chooses by a"
            " tensor's size which state is kept so: on shards it would round differently than on whole parameters, and"
            " its state could not be saved by name.\n"
            "  Use torchao.optim.AdamW8bit, or a 32-bit optimizer (bitsandbytes' with optim_bits=32, torch's with"
            " fused=True); offload_policy='cpu' keeps the state on the host. Under strategy='ddp' it works as it is."
        )


def install_checks() -> None:
    """Install a hook that checks every optimizer of this process before its steps."""
    global _installed  # noqa: PLW0603 - torch's hooks are global as well
    _seen.clear()  # check optimizers again that stepped before their model was parallelized
    if _installed:
        return
    _installed = True
    register_optimizer_step_pre_hook(_before_step)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check ``optimizer`` now, without its state, which is about to be loaded."""
    _check_bits(optimizer)
    _check(optimizer)
    _seen[optimizer] = content_of(optimizer)


@torch_private.never_compiled
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    torch_private.break_graph()
    engines = engines_of(optimizer)
    is_inside_backward = False
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    for engine in engines:
        if any(observer.updates_in_backward for observer in engine.extras.observers):
            found_inf, _ = (vars(optimizer).pop(name, None) for name in ("found_inf", "grad_scale"))
            if found_inf is not None:
                raise StateError(
                    "a gradient scaler came after sw.optimizer_in_backward() had updated the parameters with scaled"
                    " gradients.\n  Compute in bf16, which needs no scaler, or step after backward."
                )
            if _is_stepping(engine):
                is_inside_backward = True
                continue
        engine.wait_for_host()  # masters on the host are about to be written
        _check_moment(engine, has_closure=has_closure)
        for notify in tuple(engine.extras.before_step):
            notify(engine, optimizer)
    if not is_inside_backward and _seen.get(optimizer) != (content := content_of(optimizer)):
        _check_bits(optimizer)
        _check(optimizer)
        _check_state(optimizer)
        if _check_outside(optimizer, engines):
            _seen[optimizer] = content
    if has_closure and flat_parameters.flats_of(optimizer):
        raise StateError(
            f"{type(optimizer).__name__}.step(closure) with flat parameters: the gradients that the closure makes come"
            " too late to see which parameters have none.\n"
            "  Call the closure before optimizer.step(), or build the optimizer on model.parameters()."
        )
    if engines:
        torch_private.hook_innermost(optimizer, _step_begins, _step_ends)


@torch_private.never_compiled
def _step_begins(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Show plain tensors to the step, inside all its hooks. Allowed, because the granularity has been checked."""
    torch_private.break_graph()
    flat_parameters.before_step(optimizer)
    part.hide_parts(optimizer)

    def with_parts(argument: Any) -> Any:
        if isinstance(optimizer, torch.optim.LBFGS) and callable(argument):
            argument = functools.partial(_mean_of, argument, engines_of(optimizer)[0])
        return functools.partial(part.call_with_parts, optimizer, argument) if callable(argument) else argument

    return (optimizer, *map(with_parts, args[1:])), {name: with_parts(argument) for name, argument in kwargs.items()}


def _mean_of(closure: Callable[[], Any], engine: Engine) -> Tensor:
    """Return a closure's loss as its mean over ranks, whose gradients the ranks have: LBFGS decides by both.

    Collective:
        An all-gather of a number over the ranks that train the model.
    """
    loss = torch.as_tensor(closure())
    return loss.new_tensor(all_gather_json(engine.comms.control, loss.item())).mean()


def _check_moment(engine: Engine, *, has_closure: bool) -> None:
    """Refuse a step inside ``full_parameters`` or a pipeline step, or while sums of microbatches wait.

    With a closure, the closure's backward may reduce these sums; if it does not, reading a gradient raises.
    """
    if any(unit.shown_mode is not None for unit in engine.units):
        raise StateError(
            "optimizer.step() inside sw.full_parameters(): the optimizer's state is of shards.\n  Step outside of it."
        )
    engine.window.step.refuse("optimizer.step()")
    if has_closure:
        return
    refuse_sums(engine, "optimizer.step()")
    has_gradients = any(shard.grad is not None for group in engine.groups for shard in group.shards)
    if not has_gradients and any(unit.calls.num_outstanding for unit in engine.units):
        log_once(
            "optimizer.step() found no gradient, though the model has run with grad since the last step. If backward"
            " was called, it was loss.backward(inputs=model.parameters()), which gives a parallelized model none.\n"
            "  Call loss.backward(); requires_grad_(False) keeps gradients from other parameters."
        )


@torch_private.never_compiled
def _step_ends(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    torch_private.break_graph()
    flat_parameters.after_step(optimizer)
    part.restore_parts(optimizer)
    for engine in engines_of(optimizer):
        if not _is_stepping(engine):
            engine.invalidate(shards_of(optimizer))


def _is_stepping(engine: Engine) -> bool:
    """Whether the step is made inside backward."""
    return any(observer.is_stepping for observer in engine.extras.observers)


def _check(optimizer: torch.optim.Optimizer) -> None:
    if optimizer not in _guarded:
        _guarded.add(optimizer)
        with contextlib.suppress(AttributeError):  # of a wrapper that is no whole optimizer; the wrapped one is guarded
            optimizer.register_state_dict_pre_hook(_refuse_parts)
    needed = needed_by(optimizer)
    if needed == ELEMENT:
        return
    is_of_several = needed is None and bits_of(optimizer) == 32  # 8 bit of bitsandbytes look at one parameter
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, FlatParameter):
                raise StateError(
                    f"{type(optimizer).__name__} is not known to work element by element, but sw.flat_parameters() gave"
                    " it several parameters as one tensor.\n"
                    f"  Build it on model.parameters(), or call sw.declare_elementwise({type(optimizer).__name__}) if"
                    " each element's update depends on that element alone."
                )
            own_slice = slice_of(parameter)
            if own_slice is not None and not keeps(own_slice, needed):
                raise _cut_refusal(type(optimizer).__name__, needed, parameter, own_slice)
            place = group_and_index(parameter)
            if place is None or not (place[0].placements.shards_optimizer or (is_of_several and _is_split(place[0]))):
                continue  # every rank has the full parameter; by the layout, so that all ranks decide alike
            if needed is None or not place[0].layout.granularity.covers(needed):
                raise _refusal(type(optimizer).__name__, needed, *place)


def _is_split(group: Group) -> bool:
    """Whether this rank has some of the model's parameters only: of its pipeline stages, or of its experts."""
    engine = engine_of_unit(group.unit)
    return group.comms.pp is not None or (engine is not None and group.comms is not engine.comms)


def _refuse_parts(optimizer: torch.optim.Optimizer) -> None:
    """Refuse ``optimizer.state_dict()`` if it would return the state of one rank's parts."""
    parameters = (p for settings in optimizer.param_groups for p in settings["params"])
    if any((owner := group_of(parameter)) is not None and owner.facts.has_part_grads for parameter in parameters):
        raise StateError(
            f"{type(optimizer).__name__}.state_dict() would give this rank's part of the optimizer's state: the model"
            " is parallelized.\n"
            "  Use sw.save(path, model, optimizer) and sw.load. For torch.distributed.checkpoint run"
            " `shardwise checkpoint export` on what sw.save wrote."
        )


def _cut_refusal(name: str, needed: Granularity | None, parameter: nn.Parameter, owned: Slice) -> StateError:
    """Make the error for an optimizer that cannot work on a slice: of row sharding, tensor or expert parallelism."""
    place = group_and_index(parameter)
    title = f" {owned.names[0]!r}" if owned.names else ""
    if place is not None:
        title = f" {place[0].layout.params[place[1]].name!r}"
    needs = "is not known to work element by element" if needed is None else f"needs every {_part(needed)} on one rank"
    advice = f", or sw.declare_elementwise({name}) if that is what it is" if needed is None else ""
    is_row_sharded = place is None
    ranks = "rank" if is_row_sharded else "rank of the model-parallel axes"
    advice_first = "Leave it out of row_sharded" if is_row_sharded else "Set tp=1 (ep=1)"
    advice_first = f"{_instead(name)}{advice_first}"
    return StateError(
        f"{name} {needs}, but of parameter{title} of logical shape {list(owned.shape)} each {ranks} updates a part,"
        f" this one {list(owned.local_shape)}.\n"
        f"  {advice_first}, or use an element-wise optimizer{advice}."
    )


def _instead(name: str) -> str:
    """Return advice on shardwise's optimizer to use in place of torch's; empty if there is none."""
    return "Use sw.Muon(sw.muon_groups(model)), which does so. Else: " if name == "Muon" else ""


def _part(needed: Granularity) -> str:
    return "parameter whole" if needed == TENSOR else f"{needed} of a parameter"


def _refusal(name: str, needed: Granularity | None, group: Group, index: int) -> StateError:
    """Make the error for an optimizer that cannot work on a parameter at the plan's granularity."""
    spec, granularity = group.layout.params[index], group.layout.granularity
    size = group.layout.size
    owned = f"this rank holds {group.pieces[index].numel} of its {spec.numel} elements."
    if size == 1:
        owned = "dp_shard is 1, so that this rank has all of it, but plans must not depend on that."
    place = f"parameter {spec.name!r} of logical shape {list(spec.shape)} is sharded by {granularity}: {owned}"
    if not group.placements.shards_optimizer:
        granularity = TENSOR
        place = f"ranks have different parameters of the model (stages of pp, experts of ep), this one {spec.name!r}."
    if needed is not None:
        value = f"sw.block({needed.numel})" if needed.kind == "block" else repr(needed.kind)
        return StateError(
            f"{name} needs every {_part(needed)} on one rank, but {place}\n"
            f"  {_instead(name)}Use sw.ParallelPlan(granularity={value}), strategy 'ddp', or an element-wise optimizer."
        )
    ddp = "" if _is_split(group) else "strategy 'ddp', "
    part = {"element": "element by element", "tensor": "parameter by parameter"}.get(granularity.kind)
    part = part or f"{granularity} by {granularity}"
    return StateError(
        f"{name} is not known to work {part}, but {place} An update that looks beyond that would silently differ.\n"
        f"  Use {ddp}an element-wise optimizer, or sw.declare_elementwise({name}) if each element's update depends on"
        f" that element alone. If it depends on nothing beyond its parameter: sw.declare_granularity({name}, 'tensor')"
        " and sw.ParallelPlan(granularity='tensor')."
    )


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        place = group_and_index(parameter)
        if place is None:
            continue
        spec = place[0].layout.params[place[1]]
        for key, value in state.items():
            part.to_plain(value)
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != parameter.shape:
                raise StateError(
                    f"the optimizer was used before sw.parallelize(): its state {key!r} of {spec.name!r} has shape"
                    f" {list(value.shape)}, the shard {list(parameter.shape)}.\n"
                    "  Build it after sw.parallelize(), or without having stepped; to carry state over, sw.save it from"
                    " a run with that optimizer and sw.load it."
                )


# -- parameters outside of the model's units

_engines_seen: weakref.WeakSet[Engine] = weakref.WeakSet()


class RefusesAdded(Observer):
    """Refuses trained parameters that were added to the model after ``sw.parallelize``, in forwards and at steps."""

    def __init__(self, engine: Engine) -> None:
        _engines_seen.add(engine)

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Check the model's parameters, in the first forward with grad through each entry."""
        is_new = engine.forward.trains and not engine.orders.forward_order.is_recorded
        if is_new and not torch_private.is_in_functional_call():  # there the parameters are the caller's
            _refuse_added(engine)
        engine.extras.pause(self)


def _refuse_added(engine: Engine, only: Callable[[nn.Parameter], bool] = lambda _: True) -> None:
    """Refuse trained parameters in the model that belong to no unit, and any that replace one of a unit.

    A unit refuses replaced parameters of its modules itself (``Owner.accept_replaced``), but does not detect a replaced
    module.
    """
    root = engine.units[0].members[0].module()
    if root is None:
        return
    known = {id(p) for group in engine.groups for p in (*group.shards, *group.unsharded)}
    names = {name for group in engine.groups for spec in group.layout.params for name in (spec.name, *spec.aliases)}
    for name, parameter in root.named_parameters():
        if id(parameter) in known or parameter in ignored_of(engine) or not only(parameter):
            continue
        if name in names:
            raise replaced_after(name)
        if parameter.requires_grad:
            raise StateError(
                f"parameter {name!r} of shape {list(parameter.shape)} was added after sw.parallelize(): no rank would"
                " send its gradient, every rank would train its own, and sw.save() would leave it out.\n"
                "  Add it (an adapter, a head) before sw.parallelize(), freeze it, or name it in"
                " sw.ParallelPlan(ignored=[...]) if each rank is to have its own."
            )


def _check_outside(optimizer: torch.optim.Optimizer, engines: list[Engine]) -> bool:
    """Refuse an optimizer that would train parameters on each rank separately.

    Parameters that were added to a parallelized model are refused. Parameters outside of the model may be synchronized
    by other means, so their gradients are compared.

    Returns:
        Whether the check is complete; it is not before parameters outside of the model have gradients.

    Collective:
        With parameters outside of the model, an all-gather of a text over the ranks that train the model, and on
        ``pp``, where a loss function's own parameters get gradients on the last stage only.
    """
    parameters = [p for settings in optimizer.param_groups for p in settings["params"]]
    others = {id(p): p for p in parameters if group_of(p) is None and p.requires_grad}
    if not others:
        return True
    for engine in _live_engines():
        _refuse_added(engine, only=lambda parameter: id(parameter) in others)
    known = {id(p) for engine in engines for p in ignored_of(engine).parameters.values()}
    outside = [p for key, p in others.items() if key not in known and type(p.data) is torch.Tensor]
    comms = (engines[0].comms.pp, engines[0].comms.control) if outside and engines else ()
    complete = [_compare_gradients(outside, comm) for comm in comms if comm is not None and comm.size > 1]
    return all(complete)


def _live_engines() -> list[Engine]:
    """Return the engines of all models that exist."""
    return [engine for engine in tuple(_engines_seen) if engine_of_unit(engine.units[0]) is engine]


def engines_ignoring(parameters: Iterable[Tensor]) -> list[Engine]:
    """Return the engines that ignore some of these parameters, in the order of the parameters."""
    engines = _live_engines()
    return [engine for parameter in parameters for engine in engines if parameter in ignored_of(engine)]


def _compare_gradients(parameters: list[Tensor], comm: Comm) -> bool:
    gradients = [
        p.grad if p.grad.layout is torch.strided else p.grad.to_dense() for p in parameters if p.grad is not None
    ]
    digests = all_gather_json(comm, str(digest_of(gradients).tolist()))
    shapes = ", ".join(str(list(p.shape)) for p in parameters[:3])
    refuse_different(
        comm,
        digests,
        f"the optimizer holds {len(parameters)} parameters (of shape {shapes}) that are in no parallelized model, and"
        " their gradients differ from rank to rank, so that every rank would train its own",
        "Put the modules into one model before sw.parallelize(), or into an optimizer of their own if each rank is to"
        " have its own.",
        error=StateError,
    )
    return bool(gradients)
