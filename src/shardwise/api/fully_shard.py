"""``sw.fully_shard``, as FSDP2's function of this name: shards one module at a time, children first."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwise import torch_private
from shardwise.api.shard import finish, nest, start, unit_maker
from shardwise.comm.axes import Comms, MeshRanks
from shardwise.comm.base import Done
from shardwise.engine import build
from shardwise.engine.engine import Engine
from shardwise.engine.extensions import batch_norm, precision
from shardwise.engine.extensions.wrap import assign_parameters, check_parameters, refuse_embeddings
from shardwise.engine.storage import heap
from shardwise.engine.storage.attachment import attachment_of, mark_of
from shardwise.engine.storage.flat_parameters import group_of
from shardwise.engine.storage.host import refuse_no_offload
from shardwise.engine.storage.ignored import find_ignored
from shardwise.engine.storage.waiting import set_gradient_sync
from shardwise.engine.unit import Unit
from shardwise.launch.log_once import log_once
from shardwise.optim import checks
from shardwise.optim.in_backward import refuse, refuse_sums
from shardwise.spec.errors import MeshError, PlanError, StateError, Uncopyable
from shardwise.spec.module_chain import merged_name
from shardwise.spec.placement import PRESETS
from shardwise.spec.plan import check_inner_size
from shardwise.spec.policies import FULL_PRECISION, OffloadPolicy, PrecisionPolicy, translated
from shardwise.spec.policies import offload_policy as parse_offload
from shardwise.spec.replacement import Replacement
from shardwise.spec.unit_facts import EngineOptions
from shardwise.weights.init.sync import synchronise

_ModuleOrList = TypeVar("_ModuleOrList", nn.Module, Sequence[nn.Module])


def fully_shard(
    module: _ModuleOrList,
    *,
    mesh: dist.ProcessGroup | dist.DeviceMesh | None = None,
    reshard_after_forward: str | bool | int = "auto",
    mp_policy: PrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | str = "none",
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> _ModuleOrList:
    """Make ``module`` a separate unit, as FSDP2's function of this name: children first, the root last.

    Parameters that earlier calls put into units below ``module`` stay in those units; all others belong to this unit.
    The module keeps its class and gains FSDP2's methods ``unshard()``, ``reshard()``,
    ``set_requires_gradient_sync(bool)`` and others. ``set_requires_gradient_sync`` must be called on the outermost
    module: after ``False`` backward sends nothing, and every rank accumulates its gradients in full-size buffers, until
    a backward after ``True`` reduces the sums.

    A list of modules becomes one unit, as with FSDP2: ``sw.fully_shard([model.norm, model.output])``. The unit is
    gathered when the first of these modules runs, and released when forward continues with another unit; if one of the
    modules runs after that, the unit is gathered again. In backward it is released after all of the modules have
    finished. A module inside another module of the list counts as part of that module. ``sw.fully_shard`` must also be
    called for a module that contains all modules of the list.

    As with FSDP2, buffers are not synchronized: the running statistics of batch norm differ between ranks. Convert
    batch norm with ``sw.convert_sync_batchnorm`` before this call, or use ``sw.parallelize``, which synchronizes them.

    Args:
        module: Any module with plain dense parameters on one device, or a list of such modules.
        mesh: The ranks to shard over: a process group, a ``DeviceMesh``, or ``None`` for the world. A mesh of two
            dimensions is (replicate, shard): hybrid sharding. By default that of the units inside.
        reshard_after_forward: Whether parameters are released between forward and backward. ``"auto"``: yes, except for
            the outermost unit. A number: parameters are kept sharded over so many neighbouring ranks.
        mp_policy: Dtypes in which this unit computes and reduces; ``None``: the dtype of its parameters. Units below
            keep their own policies. torch's ``MixedPrecisionPolicy`` is accepted.
        offload_policy: The part of this unit that is kept on the host: ``"none"``, ``"cpu"`` or an ``OffloadPolicy``.
            torch's ``CPUOffloadPolicy`` is accepted.
        ignored_params: Parameters that are not sharded (``ParallelPlan.ignored``); parameters outside ``module`` have
            no effect. As with FSDP2, a call for an enclosing module shards them unless they are ignored there as well.

    Returns:
        The argument ``module``.

    Collective:
        Compares the values over the ranks and sends rank 0's if they differ. All ranks must call in the same order.

    Raises:
        MeshError: The mesh cannot be used for sharding.
        PlanError: An argument is not supported here, or a batch norm does not work on several ranks.
        StateError: A parameter is used both inside a unit made earlier and outside of it (tied weights).
    """
    mp_policy, offload_policy = _translate_policy(mp_policy), _translate_policy(offload_policy)
    if mp_policy is not None and mp_policy.overrides:
        raise PlanError(
            "fully_shard(mp_policy=...) takes the policy of one unit, without overrides.\n"
            "  Call fully_shard on the modules that differ first, each with its policy; or use sw.parallelize."
        )
    modules = _modules_of(module)
    _refuse_compiled(modules.values())
    root = modules[""] if "" in modules else nn.ModuleList(modules.values())
    paths = {id(below): path for path, below in root.named_modules()}
    inner = _engines_below(root, modules.values(), paths)
    inside = {id(parameter) for parameter in root.parameters()}
    ignored = find_ignored(root, [p for p in ignored_params or () if id(p) in inside])
    fresh = assign_parameters(root, [], ignored)[""]
    own = _not_in_units({other for engine in inner for other in engine.units}, fresh, paths)
    check_parameters(own)
    offload = _unit_offload(offload_policy, own)
    device = next((e.parameter.device for e in fresh), torch.device("cpu"))
    ranks = MeshRanks.of(mesh, device)
    comms = _comms_for(mesh, ranks, device, inner)
    _check_for_several(root, own, device, comms.num_ranks)
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        check_inner_size(reshard_after_forward, comms.gather.size)
    synchronise(root, {id(entry.parameter) for entry in own}, comms.control, mode="warn")
    placements = PRESETS["hsdp" if comms.replicate is not None else "zero3"]
    options = EngineOptions(
        policy=mp_policy or FULL_PRECISION,
        reshard_after_forward=reshard_after_forward,
        accumulates_sharded=False,
        offload=offload,
    )
    checks.install_checks()
    if device.type == "cpu":
        heap.keep_freed_memory()
    policies = precision.Policies(root, options.policy, comms.gather.device)
    in_units = [path for path, below in root.named_modules() if attachment_of(below) is not None]
    in_units = [name for name, _ in root.named_buffers() if any(name.startswith(f"{path}.") for path in in_units)]
    policies.cast_buffers(root, in_units)
    for part in modules.values():
        precision.install_casts(part, policies.at(""), casts_output=True)
    owned = _by_module(own, modules)
    make_unit = unit_maker(placements, comms, options, policies)
    unit = make_unit(modules, owned, offload=offload)
    is_list = "" not in modules
    units = [make_unit({"": root}, {"": []}), unit] if is_list else [unit]
    for engine in inner:
        below = _units_of(engine)
        if below[0] is engine.units[0]:
            below[0].reshards_after_forward |= engine.options.reshard_after_forward is not False
        engine.remove()
        new_paths = {member.path: paths[id(member.module())] for other in below for member in other.members}
        for other in below:
            rename(other, new_paths)
        units += below
    engine = start(root, nest(units), placements, comms, options, ignored=ignored)
    if is_list:
        engine.extras.add(_Rootless())
        engine.extras.guards.insert(0, _Rootless.refuse)
    finish(root, engine, lambda: ranks.open_samples(device), sync_buffers="none")
    for part in modules.values():
        part.__dict__.update({name: _UnitMethod(part, name) for name in _METHODS})
    return module


def _units_of(engine: Engine) -> list[Unit]:
    """Return the units of an engine, without the root unit that contains a list of modules."""
    return engine.units[engine.extras.find(_Rootless) is not None :]


class _Rootless:
    """Marks an engine whose outermost unit is a list of modules, because no enclosing module is a unit yet."""

    @staticmethod
    def refuse(engine: Engine, call: str) -> None:
        """Refuse a forward pass; other calls are allowed.

        Raises:
            StateError: ``call`` is a forward.
        """
        if call != "a forward":
            return
        names = ", ".join(unit.type_name for unit in engine.units[1:] if unit.depth == 1)
        raise StateError(
            f"a forward of {names}: sw.fully_shard made one unit of these modules, but no module around them is a"
            " unit.\n"
            "  Call sw.fully_shard(model) for the model that holds them before the first forward."
        )


def _check_for_several(
    root: nn.Module, own: Sequence[build.OwnedParameter], device: torch.device, num_ranks: int
) -> None:
    batch_norm.check(root, device, num_ranks, "sw.fully_shard()")
    if num_ranks > 1:
        refuse_embeddings(own)


def _modules_of(given: nn.Module | Sequence[nn.Module]) -> dict[str, nn.Module]:
    """Return the modules by path (``""``), or by number for a list, without modules inside another one of the list."""
    if isinstance(given, nn.Module):
        return {"": given}
    modules = list(dict.fromkeys(given))
    inner = {id(below) for module in modules for below in module.modules() if below is not module}
    modules = [module for module in modules if id(module) not in inner]
    if not modules:
        raise PlanError("fully_shard([]): expected a module, or a list of at least one.\n  Leave the call out.")
    return {"": modules[0]} if len(modules) == 1 else {str(i): module for i, module in enumerate(modules)}


def _refuse_compiled(modules: Iterable[nn.Module]) -> None:
    """Refuse modules whose calls are compiled, because the compiler would trace the unit's hooks.

    Raises:
        PlanError: A module is compiled.
    """
    for module in modules:
        if torch_private.is_compiled_module(module):
            raise PlanError(
                f"fully_shard got a {type(module).__name__} that torch.compile() has made or changed: calling it would"
                " trace the engine's messages.\n"
                "  Leave torch.compile() out and call sw.parallelize(model, sw.ParallelPlan(compile=True)), which"
                " compiles unit by unit; or compile functions that the module calls."
            )


def _translate_policy(value: Any) -> Any:
    """Translate an object of torch's FSDP2 into ours and print a note about it; return anything else unchanged."""
    meant, note = translated(value)
    if note is not None:
        log_once(note)
    return meant


def _not_in_units(
    units: Collection[Unit], fresh: Iterable[build.OwnedParameter], paths: Mapping[int, str]
) -> list[build.OwnedParameter]:
    """Return the parameters that belong to none of ``units``, which are units below the new one.

    Raises:
        StateError: A parameter of one of these units is also used outside of the unit.
    """
    own = []
    for entry in fresh:
        group = group_of(entry.parameter)
        if group is None or group.unit not in units:
            own.append(entry)
            continue
        inside = {id(owner.module()) for owner in group.unit.owners}
        outside = [use for (user, _, _), use in zip(entry.uses, entry.names, strict=True) if id(user) not in inside]
        if outside:
            name = merged_name([paths[id(member.module())] for member in group.unit.members])
            raise StateError(
                f"parameter {outside[0]!r} is tied to one of unit {name!r}, which does not cover all its uses.\n"
                "  Use sw.parallelize(model, plan), which finds the lowest unit that covers them, or do not make that"
                " module a unit."
            )
    return own


def _by_module(
    own: Iterable[build.OwnedParameter], modules: Mapping[str, nn.Module]
) -> dict[str, list[build.OwnedParameter]]:
    """Group the parameters of a unit by the first of its modules that uses them."""
    owned: dict[str, list[build.OwnedParameter]] = {path: [] for path in modules}
    for entry in own:
        _, user, _ = entry.uses[0]
        owned[next(path for path in modules if path == "" or build.is_below(user, path))].append(entry)
    return owned


def _comms_for(
    mesh: dist.ProcessGroup | dist.DeviceMesh | None, ranks: MeshRanks, device: torch.device, children: Iterable[Engine]
) -> Comms:
    """Return the Comms of the units below, or open new ones over ``mesh``, which ``ranks`` describes."""
    below = next((engine.comms for engine in children), None)
    if below is None:
        return ranks.open(device, is_replicated=isinstance(mesh, dist.DeviceMesh) and mesh.ndim == 2)
    if mesh is not None and (ranks.mesh.dp_replicate, ranks.mesh.dp_shard) != tuple(below.sizes.values()):
        raise MeshError(
            f"the mesh is {ranks.mesh}, but units below lie on"
            f" {' x '.join(f'{k}={n}' for k, n in below.sizes.items())}.\n"
            "  Give every call of sw.fully_shard on a model the same mesh."
        )
    return below


def _unit_offload(given: OffloadPolicy | str, owned: Sequence[build.OwnedParameter]) -> OffloadPolicy | None:
    """Return the policy that ``fully_shard(offload_policy=...)`` means; ``None`` if the unit owns no elements."""
    policy = parse_offload(given)
    if policy is None or not any(entry.parameter.numel() for entry in owned):
        return None
    if policy.ratio != 1:
        raise PlanError(
            f"fully_shard(offload_policy=...) with ratio={policy.ratio}: a ratio chooses among the units of a model.\n"
            "  Give the policy to the units that are to be offloaded, or use sw.parallelize."
        )
    refuse_no_offload([entry.parameter for entry in owned], PRESETS["zero3"], policy)
    return policy


def _engines_below(root: nn.Module, modules: Iterable[nn.Module], paths: Mapping[int, str]) -> list[Engine]:
    """Return the engines that earlier calls made below ``root``, which contains ``modules`` or is the only one of them.

    Raises:
        StateError: One of the modules is already a unit, or a unit below has modules outside of ``root``.
    """
    for module in modules:
        if attachment_of(module) is not None:
            raise StateError(
                f"{type(module).__name__} is a unit already.\n  Call sw.fully_shard once per module, children first."
            )
    attached = [attachment for module in root.modules() if (attachment := attachment_of(module)) is not None]
    engines = list(dict.fromkeys(attachment.engine for attachment in attached))
    for engine in engines:
        refuse(engine, "sw.fully_shard() of what encloses a trained model")
        unit = _units_of(engine)[0]
        if any(id(member.module()) not in paths for member in unit.members):
            raise StateError(
                f"sw.fully_shard made one unit of {unit.type_name}, but not all of them are below this"
                f" {type(root).__name__}.\n  Call sw.fully_shard for a module around all of them."
            )
    return engines


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a unit's module gather the unit as its forward does, under FSDP2's name for this function.

    A method that reads parameters (``encode``, ``decode``) would otherwise compute with this rank's shards. As with
    FSDP2, the call has no effect on a module that is not parallelized.

    Args:
        module: A unit's module: from ``sw.fully_shard``, or one that ``auto_wrap_policy`` chose, or the model.
        method_name: Name of a method. It may be called alone, and inside the model's forward.

    Collective:
        None here. A call of the method gathers the unit on ``dp_shard``, and its backward reduces: all ranks must call.

    Raises:
        StateError: The module has no such method, or contains parameters of a unit without being one.
    """
    if not callable(getattr(module, method_name, None)):
        raise StateError(
            f"register_fsdp_forward_method({type(module).__name__}, {method_name!r}): there is no such method.\n"
            "  Pass the name of a method of the module."
        )
    if attachment_of(module) is not None:
        _ForwardMethod(module, method_name).install()
    elif any(mark_of(parameter) is not None for parameter in module.parameters()):
        raise StateError(
            f"register_fsdp_forward_method({type(module).__name__}, {method_name!r}): the module is not a unit, but"
            " holds parameters of one.\n"
            "  Pass the unit around it, or make it a unit (auto_wrap_policy, sw.fully_shard)."
        )


class _ForwardMethod(Replacement):
    """A method of a unit's module; the unit is gathered around the method as around forward."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        if isinstance(self._replaced, _ForwardMethod):
            self._replaced = None  # keep only a replacement that other code installed
        functools.update_wrapper(self, getattr(type(module), name))  # for callers that inspect its signature or code

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        attachment = attachment_of(module)
        if attachment is None:
            return self.original(*args, **kwargs)
        engine, unit = attachment.engine, attachment.unit
        member = next(member for member in unit.members if member.module() is module)
        output = None
        engine.before_forward(unit, member, f"{member.path}.{self.method}()")
        try:
            output = self.original(*args, **kwargs)
        finally:
            engine.after_forward(unit, member, output)
        return output


#: What ``fully_shard`` adds to a module.
_METHODS = (
    "unshard",
    "reshard",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_is_last_backward",
    "set_reshard_after_backward",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
)


class _UnitMethod(Uncopyable):
    """A method that ``fully_shard`` adds to a module; the module is referenced weakly.

    Two of FSDP2's settings are accepted and ignored, because they always hold here: every backward waits for its
    reductions (``set_is_last_backward``) and releases the units (``set_reshard_after_backward``).
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        attachment = attachment_of(module) if module is not None else None
        if attachment is None:
            return None
        return getattr(self, f"_{self._name}")(attachment.engine, attachment.unit, *args, **kwargs)

    def _unshard(self, engine: Engine, unit: Unit, async_op: bool = False) -> Done | None:  # noqa: FBT001, FBT002 - FSDP2's
        engine.unshard_now(unit)
        return Done() if async_op else None  # the unit is gathered already

    def _reshard(self, engine: Engine, unit: Unit) -> None:
        engine.reshard_now(unit)

    def _set_requires_gradient_sync(
        self,
        engine: Engine,
        unit: Unit,
        requires_gradient_sync: bool,  # noqa: FBT001 - FSDP2's
        *,
        recurse: bool = True,
    ) -> None:
        self._check_root(unit, recurse=recurse)
        if not requires_gradient_sync:
            refuse_sums(engine, f"{self._name}(False)")
        mode = engine.options.accumulation(engine.placements)
        set_gradient_sync(engine, is_enabled=bool(requires_gradient_sync), mode=mode)

    def _set_requires_all_reduce(
        self,
        engine: Engine,
        unit: Unit,
        requires_all_reduce: bool,  # noqa: FBT001 - FSDP2's
        *,
        recurse: bool = True,
    ) -> None:
        """After ``False`` each backward is reduced over ``dp_shard`` only, as ``accumulation="defer_replicate"``."""
        self._check_root(unit, recurse=recurse)
        if engine.comms.replicate is None:
            return  # there is no all-reduce
        if not requires_all_reduce:
            refuse_sums(engine, f"{self._name}(False)")
        set_gradient_sync(engine, is_enabled=bool(requires_all_reduce), mode="defer_replicate")

    def _set_is_last_backward(self, engine: Engine, unit: Unit, is_last_backward: bool) -> None:  # noqa: FBT001 - FSDP2's
        """Ignored: every backward waits for its reductions."""

    def _set_reshard_after_backward(
        self,
        engine: Engine,
        unit: Unit,
        reshard_after_backward: bool,  # noqa: FBT001 - FSDP2's
        *,
        recurse: bool = True,
    ) -> None:
        """Ignored: units are released after backward, and gathered again by the next forward."""

    def _set_modules_to_forward_prefetch(self, engine: Engine, unit: Unit, modules: Sequence[nn.Module]) -> None:
        """Gather these units while ``unit`` computes, in the order that was recorded in the first step.

        Units that come before one of them are gathered first. An empty list gathers none ahead.
        """
        engine.require_idle(self._name)
        listed = []
        for module in modules:
            attachment = attachment_of(module)
            if attachment is None or attachment.engine is not engine:
                raise StateError(
                    f"{self._name}() of unit {unit.name!r} got a {type(module).__name__} that is not a unit of the same"
                    " model.\n"
                    "  Pass modules that sw.fully_shard was called for, after the call for the outermost module."
                )
            listed.append(attachment.unit.index)
        for group in engine.groups:
            group.update_facts(num_ahead=max(group.facts.num_ahead, len(listed)))
        forward, backward = unit.ahead
        is_backward = "backward" in self._name
        unit.ahead = (forward, frozenset(listed)) if is_backward else (frozenset(listed), backward)

    _set_modules_to_backward_prefetch = _set_modules_to_forward_prefetch

    def _check_root(self, unit: Unit, *, recurse: bool) -> None:
        if unit.parent is not None or not recurse:
            raise StateError(
                f"{self._name}() of unit {unit.name!r}{'' if recurse else ' with recurse=False'}: the units of a model"
                " are reduced together.\n"
                "  Call it on the outermost module that sw.fully_shard was called for."
            )


def rename(unit: Unit, new_paths: Mapping[str, str]) -> None:
    """Change a unit's names after its model became part of a larger model.

    ``new_paths`` maps the old path of each unit's module (``""``: the model so far) to its new path.
    """

    def moved(path: str) -> str:
        part = max((other for other in new_paths if other == "" or build.is_below(path, other)), key=len)
        rest = path[len(part) :].removeprefix(".")
        return f"{new_paths[part]}.{rest}" if rest else new_paths[part]

    for group in unit.groups:
        params = tuple(
            dataclasses.replace(spec, name=moved(spec.name), aliases=tuple(map(moved, spec.aliases)))
            for spec in group.layout.params
        )
        group.relabel(dataclasses.replace(group.layout, params=params))
    for named in (*unit.members, *unit.owners):
        named.path = moved(named.path)
    unit.name = merged_name([member.path for member in unit.members])
