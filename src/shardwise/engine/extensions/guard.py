"""Guards of a parallelized model: calls that would see a shard instead of the parameter are refused or gathered.

* A module that is called outside its unit's forward would compute with a shard, which raises (``storage.part``). For
  modules that use parameters of the root unit (embeddings, heads, the encoder of an encoder-decoder model, which
  ``generate`` calls directly) the root is gathered for the call. These guards are installed only while the root is
  sharded, so that a step has no overhead.
* ``state_dict``, ``load_state_dict``, ``copy.deepcopy`` and pickling are refused; the error says what to use instead.
* Methods of other libraries that rebuild weights (:data:`_REBUILDS`) are refused; the error says what to do instead.
* Hooks on the gradients of parameters are refused, because they would never run.
* ``.to()``, ``.half()`` and similar methods are refused if they would change a parameter.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.engine.attach import Observer
from shardwise.engine.hooks import without_parameters
from shardwise.engine.storage.attachment import engine_of_unit, group_and_index, mark_of
from shardwise.engine.storage.part import Part
from shardwise.spec.errors import StateError, Uncopyable
from shardwise.spec.order import EntryPoint
from shardwise.spec.replacement import Replacement

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.group import Group
    from shardwise.engine.unit import Member, Unit

_MERGE_ADVICE = (
    "Call it, and save what it gives, inside `with sw.full_parameters(model):`; or before sw.parallelize(), on a plain"
    " model that sw.full_state_dict(model) was loaded into."
)

_RESIZE_ADVICE = (
    "Resize before sw.parallelize(). For weights trained here load sw.full_state_dict(model), or a state_dict() taken"
    " inside `with sw.full_parameters(model):`, into a plain model, and resize that."
)

#: Methods that make new weights from those in the modules: what to do instead, and whether ``sw.full_parameters`` is
#: enough for them.
_REBUILDS: dict[str, tuple[str, bool]] = {
    "resize_token_embeddings": (_RESIZE_ADVICE, False),  # of transformers; the others are of peft
    "merge_and_unload": (_MERGE_ADVICE, True),
    "merge_adapter": (_MERGE_ADVICE, True),
    "unmerge_adapter": (_MERGE_ADVICE, True),
}


def install_guards(root: nn.Module, engine: Engine) -> None:
    """Install every guard on the modules below ``root``."""
    _guard_shards(engine)
    _replace_methods(engine)
    members = [(unit, member) for unit in engine.units for member in unit.members]
    unit_modules = {id(member.module()) for _, member in members}
    for unit, member in members:
        owners = [(owner, module) for owner in member.owners if (module := owner.module()) is not None]
        if unit.parent is None:
            member.set_guards(
                [
                    (torch_private.forward_pre_hooks_of(module), _EntryGuard(engine, unit, path))
                    for path, module in _entries(root, unit)
                    if id(module) not in unit_modules
                ]
            )
        for owner, module in owners:
            if not owner.is_guarded:
                owner.is_guarded = True
                _guard_state(module, unit, owner.path)
    _guard_containers(root, members)
    if "_apply" not in root.__dict__:
        root.__dict__["_apply"] = _GuardedApply(root, engine.units[0])
    for module in root.modules():
        for name in _REBUILDS.keys() - module.__dict__.keys():
            if callable(getattr(type(module), name, None)):
                _RebuildGuard(module, engine.units[0], name).install()


def _entries(root: nn.Module, unit: Unit) -> list[tuple[str, nn.Module]]:
    """The modules through which parameters of the root unit can be reached without calling the root."""
    paths = {owner.path for owner in unit.owners}
    return [
        (path, module)
        for path, module in root.named_modules()
        if path and any(owned == path or owned.startswith(f"{path}.") for owned in paths)
    ]


def _guard_shards(engine: Engine) -> None:
    for group in engine.groups:
        for index, shard in enumerate(group.shards):
            if not shard.is_floating_point():
                continue
            is_trained = shard.requires_grad
            shard.requires_grad_()  # torch refuses hooks on a frozen parameter, which may be trained later
            if group.facts.has_part_grads:
                hook = _refuse_on_shard(weakref.ref(group), index)
            else:
                hook = _UseOutside(group, index)
                engine.hooks.append(Tensor.register_hook(shard, hook.begin))
            engine.hooks.append(Tensor.register_post_accumulate_grad_hook(shard, hook))
            shard.requires_grad_(is_trained)


def _replace_methods(engine: Engine) -> None:
    """Replace methods of the parameters.

    Hooks on their gradients are refused, because they would never run: autograd sees the full parameters. A whole
    parameter is pickled as a plain one, without the engine's attributes.
    """
    for group in engine.groups:
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            shard.__dict__["__reduce_ex__"] = functools.partial(_pickle, weakref.ref(shard))
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                shard.__dict__[name] = functools.partial(_refuse_hook, spec.name)


def _pickle(parameter: weakref.ref[nn.Parameter], proto: Any) -> Any:
    whole = parameter()
    if isinstance(whole, Part):
        return Part.__reduce_ex__(whole, proto)
    assert whole is not None
    return nn.Parameter(whole.detach(), whole.requires_grad).__reduce_ex__(proto)


def _refuse_hook(name: str, hook: object) -> NoReturn:  # noqa: ARG001 - torch's signature
    raise StateError(
        f"a hook on the gradient of {name!r}, which is parallelized, would never run: the gradients arrive on a"
        " stand-in and are summed over the ranks.\n"
        "  Work on .grad after backward(). To step inside of backward, use sw.optimizer_in_backward(model, optimizer)."
    )


class _UseOutside(Uncopyable):
    """Hook that takes the gradient of a shard that is the full parameter, and has it reduced.

    The gradient is not reduced yet, because the parameter was used outside of its unit's forward. The ``.grad`` of
    earlier backwards has been reduced, so it is put aside while autograd accumulates.
    """

    def __init__(self, group: Group, index: int) -> None:
        self._group = weakref.ref(group)
        self._index = index
        self._before: list[Tensor | None] = []

    def begin(self, _grad: Tensor) -> None:
        """Put ``.grad`` aside before a gradient is added to it, or is returned by ``torch.autograd.grad``."""
        group = self._group()
        if group is None or group.form.is_shown:
            return
        shard = group.shards[self._index]
        self._restore(shard)  # if an earlier backward has raised, or was torch.autograd.grad
        if shard.grad is not None:
            torch_private.at_end_of_backward(functools.partial(self._restore, shard))  # __call__ may never run
        self._before = [shard.grad]
        shard.grad = None

    def __call__(self, shard: Tensor) -> None:
        """Pass the accumulated gradient to the engine, and restore ``.grad``."""
        group, grad = self._group(), shard.grad
        engine = engine_of_unit(group.unit) if group is not None else None
        if group is None or engine is None or grad is None or not self._before:
            return
        self._restore(shard)
        engine.on_use_outside(group, self._index, grad)

    def _restore(self, shard: Tensor) -> None:
        if self._before:
            shard.grad = self._before.pop()


def _refuse_on_shard(group_ref: weakref.ref[Group], index: int) -> Callable[[Tensor], None]:
    """Make a hook that refuses a gradient of a shard, which was used outside of its unit's forward."""

    def refuse(parameter: Tensor) -> None:
        group = group_ref()
        if group is None or group.form.is_shown:
            return
        parameter.grad = None
        spec = group.layout.params[index]
        raise StateError(
            f"a gradient came for this rank's shard of {spec.name!r} (logical shape {list(spec.logical_shape)}): the"
            " loss was computed with the parameter outside of its unit's forward (a penalty, a method of the module),"
            " where each rank has a part of its values.\n"
            "  Compute it inside the forward of the unit, have the method gathered with"
            " sw.register_fsdp_forward_method(module, name), or use the optimizer's weight_decay."
        )

    return refuse


class _EntryGuard(Uncopyable):
    """Forward pre-hook of a module that uses parameters of the root unit; it gathers the root for the call."""

    def __init__(self, engine: Engine, unit: Unit, path: str) -> None:
        self._engine = weakref.ref(engine)
        self._unit = weakref.ref(unit)
        self._path = path

    def __call__(self, module: nn.Module, _args: object) -> None:
        engine, unit = self._engine(), self._unit()
        if engine is None or unit is None or unit.uses_unsharded:
            return
        engine.before_forward(unit, unit.members[0], self._path)

        def after_call(_module: nn.Module, _args: object, output: object) -> object:
            handle.remove()
            output = without_parameters(unit, output)
            engine.after_forward(unit, unit.members[0], output, self._path)
            return output

        handle = module.register_forward_hook(after_call, always_call=True)


class _StateDictGuard(Uncopyable):
    def __init__(self, units: Sequence[Unit], name: str) -> None:
        self._units = [weakref.ref(unit) for unit in units]
        self._name = name

    def _are_sharded(self) -> bool:
        units = [unit for unit_ref in self._units if (unit := unit_ref()) is not None and not unit.shows_logical_state]
        return any(group.placements.shards_optimizer for unit in units for group in unit.groups)

    def __call__(self, module: nn.Module, *_args: object, **_kwargs: object) -> None:
        if not self._are_sharded():
            return
        ours, instead = {
            "state_dict": ("would give slices", "sw.full_state_dict(model) or sw.save(path, model, optimizer)"),
            "load_state_dict": ("would need slices", "sw.load_full_state_dict(model, state) or sw.load(path, model)"),
        }[self._name]
        raise StateError(
            f"{self._name}() of {type(module).__name__} {ours}: its parameters are sharded.\n  Use {instead}."
        )


class _NamesOnly(_StateDictGuard):
    """State-dict hook of a fully trained module (``modules_to_save``), whose names peft needs to save an adapter.

    peft gets meta tensors with the shapes of the plain model, so that it can never save slices.
    """

    def __call__(self, module: nn.Module, *args: Any, **_kwargs: object) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_globals.get("__name__") != "peft.utils.other":
            frame = frame.f_back
        state, prefix = args[:2]
        if frame is None or not self._are_sharded():
            super().__call__(module)
            return
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if (place := group_and_index(parameter)) is not None:
                shape = place[0].layout.params[place[1]].logical_shape
                state[f"{prefix}{name}"] = torch.empty(shape, dtype=parameter.dtype, device="meta")


def _guard_state_dicts(module: nn.Module, units: Sequence[Unit], path: str) -> None:
    if ".modules_to_save." in f".{path}.":
        module.register_state_dict_post_hook(_NamesOnly(units, "state_dict"))
    else:
        module.register_state_dict_pre_hook(_StateDictGuard(units, "state_dict"))
    module.register_load_state_dict_pre_hook(_StateDictGuard(units, "load_state_dict"))


def _guard_containers(root: nn.Module, members: Sequence[tuple[Unit, Member]]) -> None:
    """Guard the modules that enclose owners of parameters, so that an error names the module that was called."""
    paths: set[str] = set()
    below: dict[str, dict[int, Unit]] = {}
    for unit, member in members:
        for owner in member.owners:
            place = owner.path
            paths.add(place)
            while place:
                place = place.rpartition(".")[0]
                below.setdefault(place, {})[id(unit)] = unit
    for path, module in root.named_modules():
        if path in below and path not in paths:
            _guard_state_dicts(module, list(below[path].values()), path)


def _guard_state(module: nn.Module, unit: Unit, path: str) -> None:
    _guard_state_dicts(module, [unit], path)
    if "_apply" not in module.__dict__:
        _GuardedApply(module, unit).install()


class _RebuildGuard(Replacement):
    """Replacement of a method in :data:`_REBUILDS`, which makes new weights from the module's parameters."""

    def __init__(self, module: nn.Module, root: Unit, name: str) -> None:
        super().__init__(module, name)
        self._root = weakref.ref(root)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        root = self._root()
        advice, allows_full_parameters = _REBUILDS[self.method]
        if root is not None and not (allows_full_parameters and root.shows_logical_state):
            raise StateError(
                f"{self.method}() of {type(self.module).__name__}, which is parallelized: it would make new weights"
                f" from this rank's shards.\n  {advice}"
            )
        return self.original(*args, **kwargs)


class _GuardedApply(Replacement):
    """Replacement of ``module._apply``, which ``.to()``, ``.half()``, ``.cuda()`` and similar methods call."""

    def __init__(self, module: nn.Module, unit: Unit) -> None:
        super().__init__(module, "_apply")
        self._unit = weakref.ref(unit)

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - torch's signature
        unit = self._unit()
        if unit is not None:
            for group in unit.groups:
                probe = torch.empty(0, dtype=group.dtype, device=group.master.device)
                result = fn(probe)
                if result.dtype != probe.dtype or result.device != probe.device:
                    raise StateError(
                        f"{type(self.module).__name__} is parallelized: its parameters cannot go from {probe.dtype} on"
                        f" {probe.device} to {result.dtype} on {result.device}.\n"
                        "  Convert or move the model before sw.parallelize()."
                    )
        return self.original(fn, recurse)


def refuse_wrappers(root: nn.Module) -> None:
    """Make ``DistributedDataParallel`` and torch's FSDP refuse ``root`` when it is passed to them."""
    torch_private.set_ignored_by_ddp(root, _RefusesDDP(root))
    torch_private.set_refusal_of_fsdp(root, functools.partial(_refuse_fsdp, type(root).__name__))


class InsideDDP(Observer):
    """Refuses forwards inside a ``DistributedDataParallel`` that has parameters of the model."""

    def forward_begins(self, engine: Engine, entry: EntryPoint) -> None:  # noqa: ARG002
        """Check the parameters of the ``DistributedDataParallel`` whose forward is running."""
        if any(mark_of(parameter) is not None for parameter in torch_private.parameters_of_ddp_forward()):
            root = engine.units[0].members[0].module()
            _refuse_ddp(type(root).__name__)
        engine.extras.pause(self)


def _refuse_ddp(name: str) -> NoReturn:
    raise StateError(
        f"torch's DistributedDataParallel around {name}, which is parallelized: it would send rank 0's shards to the"
        " other ranks.\n"
        "  Leave it out: sw.parallelize() sums gradients over the ranks. If it has been built, build the model again."
    )


def _refuse_fsdp(name: str) -> NoReturn:
    raise StateError(
        f"torch's FSDP around {name}, which is parallelized: it would cut this rank's shards once more.\n"
        "  Leave out FullyShardedDataParallel, torch's fully_shard and replicate: sw.parallelize() shards the model as"
        " its strategy says. In place of torch.distributed.checkpoint's get_model_state_dict and get_state_dict, which"
        " ask the same of a model, call sw.full_state_dict(model) or sw.save(path, model, optimizer)."
    )


class _RefusesDDP(Uncopyable):
    """Stands in for the names that ``DistributedDataParallel(model)`` ignores; it raises when DDP reads them."""

    def __init__(self, root: nn.Module) -> None:
        self._name = type(root).__name__

    def __iter__(self) -> Iterator[str]:
        _refuse_ddp(self._name)
