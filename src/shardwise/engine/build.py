"""Construction of units, groups and the engine from modules and the parameters that they own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.dtype import dtype_name
from shardwise.engine.engine import Engine
from shardwise.engine.group import Form, Group
from shardwise.engine.hooks import AfterForward, BeforeForward
from shardwise.engine.unit import Member, Owner, Unit
from shardwise.spec.granularity import ELEMENT
from shardwise.spec.layout import GroupLayout, ParamSpec, spread
from shardwise.spec.module_chain import merged_name
from shardwise.spec.placement import PRESETS, Placements
from shardwise.spec.policies import OffloadPolicy
from shardwise.spec.slice import slice_of
from shardwise.spec.unit_facts import EngineOptions, GroupFacts

#: Name of the root unit in traces and summaries.
ROOT = "root"


@dataclass(frozen=True, slots=True)
class GroupKind:
    """The properties that all parameters of one group share.

    Attributes:
        dtypes: Dtypes of the master, of computation and of reduction.
        is_trainable: Whether they require grad.
        frozen_as: Form in which frozen parameters are stored; ``"none"``: their own dtype.
        is_expert: Whether fewer ranks share them than share other parameters.
    """

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    is_trainable: bool
    frozen_as: str
    is_expert: bool


@dataclass
class OwnedParameter:
    """A parameter, its names, and every module attribute that refers to it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    uses: list[tuple[nn.Module, str, str]] = field(default_factory=list)  # module, its path, attribute


def is_below(path: str, unit: str) -> bool:
    """Whether ``path`` is the path of ``unit`` or of a module inside it."""
    return path == unit or path.startswith(f"{unit}.")


def make_unit(
    modules: Mapping[str, nn.Module],
    owned: Mapping[str, Sequence[OwnedParameter]],
    placements: Placements,
    comms: Comms,
    options: EngineOptions,
    *,
    kind_of: Callable[[OwnedParameter], GroupKind],
    form_of: Callable[[GroupFacts, OffloadPolicy | None], Form],
    as_part: Callable[[Tensor, Tensor | None], Tensor],
    offload: OffloadPolicy | None = None,
    ranks: Mapping[int, int] | None = None,
    is_divided: bool = False,
) -> Unit:
    """Shard the parameters of one unit: their storage is replaced by this rank's slice.

    Args:
        modules: The unit's modules by path; the root's path is ``""``.
        owned: The parameters that each module owns, by the same paths.
        placements: Placements of the strategy.
        comms: The Comm of each axis.
        options: Options of the engine.
        kind_of: Returns the properties that a parameter must share with the others of its group.
        form_of: Returns the form in which a group is stored and moved.
        as_part: Wraps a gradient (of a shard) whose other parts are on other ranks, so that it refuses norms.
        offload: Policy that says which tensors of the unit are stored on the host; ``None``: none.
        ranks: With granularity ``tensor``, the rank that owns each parameter, by the parameter's ``id``.
        is_divided: Whether tp, pp, cp or ep divides some parameters of the model over the ranks.
    """
    is_root = tuple(modules) == ("",)
    reshards, inner_size = options.reshards(default=not placements.keeps_gathered and not is_root)
    unit = Unit(merged_name(tuple(modules)) or ROOT, modules, reshards=reshards, inner_size=inner_size)
    unit.ahead = options.prefetch
    kinds: dict[GroupKind, list[OwnedParameter]] = {}
    for path in modules:
        for entry in owned[path]:
            kinds.setdefault(kind_of(entry), []).append(entry)
    for kind, found in kinds.items():
        over = comms.of(slice_of(found[0].parameter))
        # Frozen parameters never change. Where the strategy replicates parameters, nothing needs to be sent for them.
        own_placements = placements if kind.is_trainable or placements.shards_parameters else PRESETS["ddp"]
        dtype, compute_dtype, reduce_dtype = map(dtype_name, kind.dtypes)
        stored_as, gathered_as, reduced_as = options.quantization.forms(
            frozen_as=kind.frozen_as,
            is_float=kind.dtypes[0].is_floating_point,
            compute_dtype=compute_dtype,
            is_sharded=own_placements.shards_optimizer,
        )
        is_offloaded = offload is not None and offload.covers(own_placements, is_trainable=kind.is_trainable)
        packed_in = {form for form in (stored_as, gathered_as, reduced_as) if form is not None}
        is_cut = own_placements.shards_optimizer and stored_as is None  # frozen weights have no optimizer
        shapes = [tuple(entry.parameter.shape) for entry in found]
        entries = [found[index] for index in spread(shapes, over.gather.size if is_cut else 1)]
        layout = GroupLayout.build(
            [_spec(entry, dtype) for entry in entries],
            over.gather.size,
            dtypes=[dtype, compute_dtype, reduce_dtype, *sorted(packed_in)],
            granularity=options.granularity if is_cut else ELEMENT,
            owners=[ranks[id(entry.parameter)] for entry in entries] if ranks and is_cut else None,
        )
        is_part = bool(over.model_parallel) or over.ep is not None or is_divided
        facts = GroupFacts(
            unit=unit.index,
            layout=layout,
            placements=own_placements,
            depth=0,
            reshards=reshards,
            is_trainable=kind.is_trainable,
            compute_dtype=compute_dtype,
            reduce_dtype=reduce_dtype,
            stored_as=stored_as,
            gathered_as=gathered_as,
            reduced_as=reduced_as,
            inner_size=unit.inner_size or 0,
            is_offloaded=is_offloaded,
            keeps_shard=offload is not None and is_offloaded and not stored_as and offload.keeps_shard(own_placements),
            ep=1 if over is comms or comms.ep is None else comms.ep.size,
            # The loss is a mean over all ranks. Experts receive the gradients of tokens from all ranks of ep, so their
            # sums over fewer ranks are divided by the same number as other sums.
            num_ranks=comms.num_ranks,
            has_part_grads=is_part or (own_placements.shards_optimizer and layout.size > 1),
            num_ahead=max(options.prefetch),
        )
        shards = [entry.parameter for entry in entries]
        group = Group(unit, facts, form_of(facts, offload), over, shards, as_part=as_part)
        unit.groups.append(group)
    owners: dict[Member, dict[int, Owner]] = {member: {} for member in unit.members}
    for owning in unit.members:
        for entry in owned[owning.path]:
            for user, path, attribute in entry.uses:
                # A tied parameter may be used in another member than its owner (sw.fully_shard of a list).
                member = next((other for other in unit.members if is_below(path, other.path)), owning)
                owner = owners[member].setdefault(id(user), Owner(user, path, {}))
                owner.shards[attribute] = entry.parameter
    for member in unit.members:
        member.owners = list(owners[member].values())
    unit.reshards_after_forward &= any(not group.is_resident for group in unit.groups) or placements.shards_parameters
    return unit


def _spec(entry: OwnedParameter, dtype: str) -> ParamSpec:
    parameter, named_slice = entry.parameter, slice_of(entry.parameter)
    names = named_slice.names if named_slice is not None and named_slice.names else entry.names
    return ParamSpec(
        name=names[0],
        shape=tuple(parameter.shape),
        dtype=dtype,
        is_trainable=parameter.requires_grad,
        stride=None if parameter.is_contiguous() else tuple(parameter.stride()),
        aliases=tuple(names[1:]),
        slice=named_slice,
    )


def start_engine(
    units: Sequence[Unit],
    placements: Placements,
    comms: Comms,
    options: EngineOptions,
) -> Engine:
    """Make the engine of ``units`` (the root first), and install its hooks on their modules."""
    engine = Engine(units, placements, comms, options)
    _number_units(engine)
    _set_families(units)
    for unit in units:
        unit.is_resident = not placements.shards_parameters and all(group.is_resident for group in unit.groups)
        _make_buffers(engine, unit)
        _install_hooks(engine, unit)
        _link_unsharded(unit)
    return engine


def _number_units(engine: Engine) -> None:
    for index, unit in enumerate(engine.units):
        unit.index = index
        for group in unit.groups:
            group.update_facts(
                unit=index,
                depth=unit.depth,
                reshards=unit.reshards_after_forward,
                recomputed_in=unit.recomputed_in,
            )


def _set_families(units: Sequence[Unit]) -> None:
    """Set the ``family`` of every unit."""
    for unit in units:
        above, ancestor = set(), unit.parent
        while ancestor is not None:
            above.add(ancestor.index)
            ancestor = ancestor.parent
        unit.family = frozenset({unit.index, *above})
    for unit in units:
        below = {other.index for other in units if unit.index in other.family}
        unit.family |= below


def _make_buffers(engine: Engine, unit: Unit) -> None:
    """Make the full parameters of a unit, and prepare its gathers and reductions."""
    for group in unit.groups:
        group.comms = engine.comms.of(group.layout.params[0].slice)  # each call of sw.fully_shard opened separate ones
        group.make_unsharded()
        group.form.start(group, engine)


def _install_hooks(engine: Engine, unit: Unit) -> None:
    for member in unit.members:
        module = member.module()
        assert module is not None
        before = BeforeForward(engine.before_forward, unit, member)
        after = AfterForward(engine.after_forward, unit, member)
        engine.hooks.append(module.register_forward_pre_hook(before, prepend=True))
        engine.hooks.append(module.register_forward_hook(after, always_call=True))


def _link_unsharded(unit: Unit) -> None:
    """Set the full parameters that replace the shards in the unit's modules."""
    pairs = (pair for group in unit.groups for pair in zip(group.shards, group.unsharded, strict=True))
    by_shard = {id(shard): full for shard, full in pairs}
    for owner in unit.owners:
        owner.unsharded = {attribute: by_shard[id(shard)] for attribute, shard in owner.shards.items()}
