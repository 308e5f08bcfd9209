"""From a plain module to units: who owns which parameter, and the groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm
from shardwise.comm.dtype import dtype_name
from shardwise.engine import attach, torch_private
from shardwise.engine.group import Group
from shardwise.engine.ignore import NOTHING, Ignored
from shardwise.engine.options import EngineOptions
from shardwise.engine.unit import Member, Owner, Unit
from shardwise.engine.view import is_dense
from shardwise.engine.wrap import chain_of
from shardwise.features.precision import Policies
from shardwise.forms.frozen import FrozenGroup, is_quantizable
from shardwise.spec.errors import StateError
from shardwise.spec.granularity import ELEMENT, assign
from shardwise.spec.layout import GroupLayout, ParamSpec
from shardwise.spec.merge import Mergeable, default_limit, merge, merged_name
from shardwise.spec.placement import PRESETS, Placements
from shardwise.spec.quantize import NO_QUANTIZATION, Quantization
from shardwise.spec.slice import slice_of

#: Name of the root unit in traces and summaries.
ROOT = "root"

#: What the parameters of one group have in common: dtypes of master, compute and reduction, trainability, the form in
#: which frozen ones are held, and whether they are experts, which fewer ranks share.
Kind = tuple[tuple[torch.dtype, torch.dtype, torch.dtype], bool, str, bool]


@dataclass
class OwnedParameter:
    """A parameter and every place in the model that uses it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    uses: list[tuple[nn.Module, str, str]] = field(default_factory=list)  # module, its path, attribute


def assign_parameters(
    root: nn.Module, unit_names: Iterable[str], ignored: Ignored = NOTHING
) -> dict[str, list[OwnedParameter]]:
    """Which unit owns which parameter: the lowest one that covers all uses. ``""`` is the root. No unit: ``ignored``.

    Tied parameters are found by identity. Order within a unit is the order of registration.
    """
    units = sorted(unit_names, key=len)
    owned: dict[int, OwnedParameter] = {}
    paths_of: dict[int, list[str]] = {}  # a module may be registered in several places
    for path, module in root.named_modules(remove_duplicate=False):
        paths_of.setdefault(id(module), []).append(path)
        for attribute, parameter in torch_private.parameters_of(module).items():
            if parameter is None or parameter in ignored:
                continue
            entry = owned.setdefault(id(parameter), OwnedParameter(parameter))
            entry.names.append(f"{path}.{attribute}" if path else attribute)
            entry.uses.append((module, path, attribute))
    places = {name: paths_of[id(root.get_submodule(name))] for name in units}
    result: dict[str, list[OwnedParameter]] = {"": [], **{name: [] for name in units}}
    for entry in owned.values():
        covering = [
            name
            for name in units
            if all(any(is_below(path, place) for place in places[name]) for _, path, _ in entry.uses)
        ]
        result[covering[-1] if covering else ""].append(entry)
    return result


def is_below(path: str, unit: str) -> bool:
    """``path`` is that of the unit, or of a module in it."""
    return path == unit or path.startswith(f"{unit}.")


def check_parameters(parameters: Iterable[OwnedParameter], *, allows_meta: bool = False) -> None:
    """Refuse what a flat buffer cannot hold, with the parameter's name.

    Raises:
        StateError: Meta tensors, tensor subclasses, views with holes, gradients or hooks that would be lost.
    """
    for entry in parameters:
        parameter, name = entry.parameter, entry.names[0]
        if parameter.is_meta and not allows_meta:
            raise StateError(
                f"parameter {name!r} is on the meta device: it has no values to shard.\n"
                "  Build the model on a real device, or give the weights on rank 0 and set sync='rank0'."
            )
        if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            raise StateError(
                f"parameter {name!r} is a {type(parameter.data).__name__} ({parameter.layout}); only plain, dense"
                " tensors can be sharded.\n  Convert it before sw.parallelize()."
            )
        if not is_dense(parameter):
            raise StateError(
                f"parameter {name!r} has shape {list(parameter.shape)} with strides {list(parameter.stride())}: a view"
                " with holes or overlaps.\n  Replace it by nn.Parameter(p.detach().contiguous())."
            )
        held = slice_of(parameter)
        if held is not None and held.local_shape != tuple(parameter.shape):
            raise StateError(
                f"parameter {name!r} has shape {list(parameter.shape)}, but is marked as the part of shape"
                f" {list(held.local_shape)} of a tensor of shape {list(held.shape)}.\n"
                "  Mark it with the ranges that it holds (spec.slice.set_slice)."
            )
        if parameter.grad is not None:
            raise StateError(
                f"parameter {name!r} holds a gradient, which would be lost.\n"
                "  Call model.zero_grad() before sw.parallelize()."
            )
        if torch_private.has_gradient_hooks(parameter):
            raise StateError(
                f"parameter {name!r} carries a hook, which would never fire: gradients arrive on its stand-in.\n"
                "  Remove the hook, or work on .grad after backward()."
            )
        if attach.mark_of(parameter) is not None:
            raise StateError(
                f"parameter {name!r} is sharded already.\n"
                "  Parallelize a model once; to change the plan, build it again."
            )


def make_unit(
    modules: Mapping[str, nn.Module],
    owned: Mapping[str, Sequence[OwnedParameter]],
    row: Placements,
    comms: Comms,
    options: EngineOptions,
    *,
    policies: Policies,
    ranks: Mapping[int, int] | None = None,
    is_offloaded: bool = False,
) -> Unit:
    """Shard the parameters of one unit: their storage is replaced by this rank's slice.

    Args:
        modules: The unit's modules by path, the root's under ``""``.
        owned: What each of them owns, by the same paths.
        row: Placements of the strategy.
        comms: On each axis.
        options: How the engine is to work.
        policies: In which dtypes to compute and reduce.
        ranks: With granularity ``tensor``: those of :func:`assign_ranks`.
        is_offloaded: It is one of the units of which the options' offload policy keeps something on the host.
    """
    is_root = tuple(modules) == ("",)
    reshards, inner_size = options.reshards(default=not row.keeps_gathered and not is_root)
    unit = Unit(merged_name(tuple(modules)) or ROOT, modules, reshards=reshards, inner_size=inner_size)
    quantization, offload = options.quantization, options.offload if is_offloaded else None
    kinds: dict[Kind, list[OwnedParameter]] = {}
    for path in modules:
        for entry in owned[path]:
            kinds.setdefault(_kind(entry, policies, quantization), []).append(entry)
    fulls: dict[int, tuple[Group, int]] = {}
    for (dtypes, is_trainable, form, _), found in kinds.items():
        over = comms.of(slice_of(found[0].parameter))
        # Matrices before vectors: what weight decay acts on, as a rule, is then one run (optim.flat_parameters).
        entries = sorted(found, key=lambda entry: entry.parameter.dim() < 2)
        specs = [_spec(entry, dtypes[0]) for entry in entries]
        in_blocks = quantization if dtypes[0].is_floating_point and form == "none" else NO_QUANTIZATION
        packed_in = {form, in_blocks.gather, in_blocks.reduce} - {"none"}
        held_in = [*(dtype_name(dtype) for dtype in dtypes), *sorted(packed_in)]
        # Frozen parameters of a replicated row never change: they stay whole, and nothing is sent for them.
        group_row = row if is_trainable or row.shards_parameters else PRESETS["ddp"]
        is_cut = group_row.shards_optimizer and form == "none"  # no optimizer cares how quantized weights are cut
        layout = GroupLayout.build(
            specs,
            over.gather.size,
            dtypes=held_in,
            granularity=options.granularity if is_cut else ELEMENT,
            owners=[ranks[id(entry.parameter)] for entry in entries] if ranks and is_cut else None,
        )
        shards = [entry.parameter for entry in entries]
        given = unit, layout, group_row, shards
        # The loss is a mean over all ranks, whoever computes with a parameter: experts get the gradients of tokens from
        # all ranks of ep, so their sums over fewer ranks are divided by the same number.
        place = {"rank": over.gather.rank, "num_ranks": comms.num_ranks}
        kept = offload if offload is not None and offload.covers(group_row, is_trainable=is_trainable) else None
        if form == "none":
            group = Group(
                *given, **place, is_trainable=is_trainable, dtypes=dtypes, quantization=in_blocks, offload=kept
            )
        else:
            group = FrozenGroup(*given, **place, form=form, dtypes=dtypes, offload=kept)
        unit.groups.append(group)
        for index, entry in enumerate(entries):
            fulls[id(entry.parameter)] = (group, index)
            attach.mark(entry.parameter, group, index)
    owners: dict[Member, dict[int, Owner]] = {member: {} for member in unit.members}
    for owning in unit.members:
        for entry in owned[owning.path]:
            for user, path, attribute in entry.uses:
                # A parameter may be tied to one of another member (sw.fully_shard of a list).
                member = next((other for other in unit.members if is_below(path, other.path)), owning)
                owner = owners[member].setdefault(id(user), Owner(user, path, {}))
                owner.shards[attribute] = entry.parameter
    for member in unit.members:
        member.owners = list(owners[member].values())
    unit.reshards_after_forward &= any(group.uses_slot for group in unit.groups) or row.shards_parameters
    return unit


def _kind(entry: OwnedParameter, policies: Policies, quantization: Quantization) -> Kind:
    dtypes = policies.group_dtypes(entry.parameter, entry.uses)
    form = quantization.frozen if is_quantizable(entry.parameter, entry.uses, quantization.frozen) else "none"
    held = slice_of(entry.parameter)
    return dtypes, entry.parameter.requires_grad, form, held is not None and held.is_expert


def merge_units(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    owned: Mapping[str, Sequence[OwnedParameter]],
    *,
    policies: Policies,
    quantization: Quantization,
    comm: Comm,
    limit: int | None,
) -> list[tuple[str, ...]]:
    """The names of the units that travel together, the root alone and first.

    Members of one ``ModuleList`` or ``Sequential`` that hold no other unit may be merged, but not alternatives, of
    which a rank may run some only.

    Args:
        root: The model.
        units: The units found in it, without the root.
        owned: The parameters of each.
        policies: In which dtypes they compute and reduce.
        quantization: What is held in 8 bits.
        comm: Gathers the units.
        limit: The most bytes of a merged unit; ``None``: as the size of the model, the device and the ranks say.
    """
    num_bytes = {name: sum(entry.parameter.nbytes for entry in entries) for name, entries in owned.items()}
    if limit is None:
        limit = default_limit(sum(num_bytes.values()), device_type=comm.device_type, num_ranks=comm.size)
    found = []
    for name in units:
        holds_units = any(other != name and is_below(other, name) for other in units)
        kind = frozenset(_kind(entry, policies, quantization) for entry in owned[name])
        found.append(Mergeable(name, None if holds_units else chain_of(root, name), kind, num_bytes[name]))
    return [("",), *merge(found, limit)]


#: What a trained parameter weighs against a frozen one: itself, its gradient and two states of its optimizer.
_TRAINED_WEIGHT = 4


def assign_ranks(owned: Iterable[Sequence[OwnedParameter]], row: Placements, comms: Comms) -> dict[int, int]:
    """A rank for every parameter that will be sharded, whole, over the units: balanced over the whole model.

    Experts that fewer ranks share are balanced by themselves.

    Returns:
        The rank, by ``id`` of the parameter.
    """
    if not row.shards_optimizer:
        return {}
    parameters = [entry.parameter for entries in owned for entry in entries]
    sharded: dict[int, list[nn.Parameter]] = {}
    for p in parameters:
        if p.requires_grad or row.shards_parameters:
            sharded.setdefault(comms.of(slice_of(p)).gather.size, []).append(p)
    ranks: dict[int, int] = {}
    for size, group in sharded.items():
        weights = [p.nbytes * (_TRAINED_WEIGHT if p.requires_grad else 1) for p in group]
        ranks |= {id(p): rank for p, rank in zip(group, assign(weights, size), strict=True)}
    return ranks


def _spec(entry: OwnedParameter, dtype: torch.dtype) -> ParamSpec:
    parameter, held = entry.parameter, slice_of(entry.parameter)
    names = held.names if held is not None and held.names else entry.names
    return ParamSpec(
        name=names[0],
        shape=tuple(parameter.shape),
        dtype=dtype_name(dtype),
        is_trainable=parameter.requires_grad,
        stride=None if parameter.is_contiguous() else tuple(parameter.stride()),
        aliases=tuple(names[1:]),
        slice=held,
    )
