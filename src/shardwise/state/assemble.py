"""Logical tensors on world rank 0, put together from slices and stages, and taken apart again, group by group.

Of every coordinate of ``tp`` and ``pp`` the first data-parallel rank is the *root*: it has a group gathered from the
ranks that share it, and passes it on, or gets it and shares it out (of experts, the first rank that holds the same
ones)::

    pp 0, tp 0    root: world rank 0    <-- its data-parallel ranks
    pp 0, tp 1    root --> rank 0       <-- its data-parallel ranks
    pp 1, tp 0    root --> rank 0       <-- ...

Without tensor, pipeline and expert parallelism world rank 0 is the only root, and nothing is exchanged here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.pool import contiguous_stride
from shardwise.spec.errors import StateError
from shardwise.spec.extent import logical_stride, tiling_problems
from shardwise.spec.layout import ParamSpec
from shardwise.spec.slice import Cut, Slice, simplest, slice_of


@dataclass(frozen=True)
class Part:
    """A parameter in the flat tensor of a group.

    Attributes:
        spec: As the root holds it: whole, or a slice.
        offset: Where it begins.
        counts: Of the roots that hold the same, this is the first.
        is_trained: It requires a gradient now.
    """

    spec: ParamSpec
    offset: int
    counts: bool
    is_trained: bool = True

    def _view(self, flat: Tensor) -> Tensor:
        stride = self.spec.stride or contiguous_stride(self.spec.shape)
        return flat.as_strided(self.spec.shape, stride, flat.storage_offset() + self.offset)

    def _boxes(self) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        held = self.spec.slice or Slice(self.spec.shape)
        for logical, local in held.boxes():
            yield tuple(slice(*side) for side in logical), tuple(slice(*side) for side in local)

    def put_into(self, whole: Tensor, flat: Tensor) -> None:
        """Copy from the group's flat tensor into the logical one."""
        view = self._view(flat)
        for logical, local in self._boxes():
            whole[logical].copy_(view[local])

    def take_from(self, whole: Tensor, flat: Tensor) -> None:
        """Copy from the logical tensor into the group's flat one."""
        view = self._view(flat)
        for logical, local in self._boxes():
            view[local].copy_(whole[logical])

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Room for the logical tensor, on the CPU."""
        spec = self.spec
        stride = logical_stride(spec.logical_shape, spec.stride) if spec.slice is not None else spec.stride
        return torch.empty_strided(spec.logical_shape, stride or contiguous_stride(spec.logical_shape), dtype=dtype)


@dataclass(frozen=True)
class Parcel:
    """What a root passes on as one message: the flat tensor of a group, or an ignored parameter.

    Attributes:
        unit: Whose.
        dtype: Short name.
        numel: Padding included.
        parts: The parameters in it.
    """

    unit: str
    dtype: str
    numel: int
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, engine: Engine, group: Group) -> Parcel:
        """What a root has of a group."""
        layout, counts = group.layout, engine.comms.counts
        parts = tuple(
            Part(spec, offset, counts(spec.slice), shard.requires_grad)
            for spec, offset, shard in zip(layout.params, layout.offsets, group.shards, strict=True)
        )
        return cls(group.unit.name, dtype_name(group.dtype), layout.numel, parts)

    @classmethod
    def alone(cls, name: str, parameter: nn.Parameter, held: Slice) -> Parcel:
        """An ignored parameter of which this rank holds a slice."""
        spec = ParamSpec(name, tuple(parameter.shape), dtype_name(parameter.dtype), slice=held)
        return cls(f"ignored {name}", spec.dtype, spec.numel, (Part(spec, 0, held.counts, parameter.requires_grad),))

    @property
    def counts(self) -> bool:
        """Some of it is this root's to give."""
        return any(part.counts for part in self.parts)

    def only_trained(self) -> Parcel:
        """The same message; only trained parameters are taken from it."""
        return dataclasses.replace(self, parts=tuple(part for part in self.parts if part.is_trained))

    def room(self, device: torch.device) -> Tensor:
        """Memory for it; what no parameter takes is zero."""
        return torch.zeros(self.numel, dtype=torch_dtype(self.dtype), device=device)


@dataclass(frozen=True)
class Survey:
    """What all ranks hold, as far as world rank 0 must know it.

    Attributes:
        groups: By world rank of the root, its groups in order. Without an exchange only this rank's own.
        alone: By world rank, the ignored parameters of which the rank holds a slice.
        more: By world rank of the root, what it said of itself beside that.
    """

    groups: dict[int, tuple[Parcel, ...]]
    alone: dict[int, tuple[Parcel, ...]]
    more: dict[int, Any]

    @property
    def parts(self) -> Iterator[Part]:
        """Every parameter as every root holds it."""
        for parcels in (*self.groups.values(), *self.alone.values()):
            for parcel in parcels:
                yield from parcel.parts


def is_root(engine: Engine) -> bool:
    """Whether this rank passes on what its data-parallel ranks hold."""
    return engine.comms.control.rank == 0


def is_root_of(group: Group) -> bool:
    """The same of one group."""
    return group.comms.control.rank == 0


def is_first_of_stage(engine: Engine) -> bool:
    """Whether this rank speaks for its stage: of buffers and names, which all ranks of a stage have alike."""
    return is_root(engine) and (engine.comms.tp is None or engine.comms.tp.rank == 0)


def _in_order(engine: Engine) -> list[Group]:
    """Every group, experts last: a root of experts that waits for rank 0 has done its part for all other groups."""
    return sorted(engine.groups, key=lambda group: group.comms is not engine.comms)


def sliced_alone(engine: Engine) -> dict[str, nn.Parameter]:
    """The ignored parameters of which each rank holds a slice."""
    return {name: p for name, p in engine.ignored.parameters.items() if slice_of(p) is not None}


def survey(engine: Engine, more: Any = None) -> Survey:
    """Learn what every root holds.

    Args:
        engine: Of the model.
        more: What else a root has to say, as JSON holds it.

    Collective:
        With ``tp``, ``pp``, ``ep`` or slices of ignored parameters, an all-gather of JSON over the world. All
        ranks must call.

    Raises:
        StateError: What the ranks hold does not make whole tensors; on every rank alike.
    """
    world = engine.comms.world
    groups = tuple(Parcel.of(engine, group) for group in _in_order(engine) if is_root_of(group))
    own = sliced_alone(engine)
    alone = tuple(Parcel.alone(name, p, held) for name, p in own.items() if (held := slice_of(p)) is not None)
    if not (engine.comms.across or engine.comms.ep or alone):
        return Survey({world.rank: groups}, {}, {world.rank: more})
    told = all_gather_json(
        world,
        [
            [dataclasses.asdict(parcel) for parcel in groups],
            [dataclasses.asdict(parcel) for parcel in alone],
            more if is_root(engine) else None,
        ],
    )
    found = Survey(
        {rank: tuple(map(_parcel, said[0])) for rank, said in enumerate(told) if said[0]},
        {rank: tuple(map(_parcel, said[1])) for rank, said in enumerate(told) if said[1]},
        {rank: said[2] for rank, said in enumerate(told) if said[2] is not None},
    )
    problems = list(_problems(found))
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:12])
        raise StateError(f"what the ranks hold does not make the whole model:\n{shown}")
    return found


def _problems(found: Survey) -> Iterator[str]:
    shapes: dict[str, tuple[int, ...]] = {}
    slices: dict[str, list[tuple[Cut, ...]]] = {}
    for part in found.parts:
        spec = part.spec
        if shapes.setdefault(spec.name, spec.logical_shape) != spec.logical_shape:
            yield f"{spec.name}: of shape {list(spec.logical_shape)} on one rank, {list(shapes[spec.name])} on another"
        if part.counts and spec.numel:
            held = spec.slice
            slices.setdefault(spec.name, []).append(() if held is None else simplest(held.shape, held.cuts))
    for name, held in slices.items():
        yield from tiling_problems(name, shapes[name], held)


def _parcel(packed: dict[str, Any]) -> Parcel:
    parts = tuple(
        Part(_spec(part["spec"]), part["offset"], part["counts"], part["is_trained"]) for part in packed["parts"]
    )
    return Parcel(packed["unit"], packed["dtype"], packed["numel"], parts)


def _spec(packed: dict[str, Any]) -> ParamSpec:
    held = packed["slice"]
    if held is not None:
        cuts = tuple(Cut(cut["dim"], tuple((a, b) for a, b in cut["ranges"])) for cut in held["cuts"])
        held = Slice(
            tuple(held["shape"]),
            cuts,
            held["copy"],
            held["copies"],
            tuple(held["names"]),
            is_expert=held["is_expert"],
        )
    stride = packed["stride"]
    return ParamSpec(
        packed["name"],
        tuple(packed["shape"]),
        packed["dtype"],
        is_trainable=packed["is_trainable"],
        stride=None if stride is None else tuple(stride),
        aliases=tuple(packed["aliases"]),
        slice=held,
    )


# -- to world rank 0


def collect(engine: Engine, found: Survey, *, trainable_only: bool = False) -> dict[str, Tensor]:
    """Every parameter that is not ignored, or of which ranks hold slices, by name, whole and on the CPU.

    Args:
        engine: Of the model.
        found: What all ranks hold.
        trainable_only: Leave out frozen parameters. Groups of them alone are neither gathered nor sent.

    Returns:
        All of them on world rank 0, ``{}`` elsewhere.

    Collective:
        A gather per group to its root, which sends it on to world rank 0. Besides the result, world rank 0 holds one
        group at a time. All ranks must call.
    """
    world = engine.comms.world
    whole: dict[str, Tensor] = {}
    for parcel, flat in _gathered(engine, found, trainable_only=trainable_only):
        if world.rank == 0:
            _put(parcel, flat, whole)
        elif parcel.counts:
            world.send(flat, to=0, unit=parcel.unit).wait()
    if world.rank == 0:
        for source, held in _foreign(found):
            parcel = held.only_trained() if trainable_only else held
            if parcel.counts:
                flat = parcel.room(world.device)
                world.receive(flat, source=source, unit=parcel.unit).wait()
                _put(parcel, flat, whole)
    return whole


def _gathered(engine: Engine, found: Survey, *, trainable_only: bool) -> Iterator[tuple[Parcel, Tensor]]:
    """What this rank passes on, if it is a root, one at a time."""
    for group in _in_order(engine):
        if trainable_only and not any(shard.requires_grad for shard in group.shards):
            continue
        flat = gather_to_root(group)
        if flat is not None and is_root_of(group):
            parcel = Parcel.of(engine, group)
            yield parcel.only_trained() if trainable_only else parcel, flat
    for parcel, parameter in _own_alone(engine, found):
        yield parcel.only_trained() if trainable_only else parcel, parameter.detach().contiguous().view(-1)


def _own_alone(engine: Engine, found: Survey) -> Iterator[tuple[Parcel, nn.Parameter]]:
    parcels = found.alone.get(engine.comms.world.rank, ())
    return zip(parcels, sliced_alone(engine).values(), strict=True)


def _foreign(found: Survey) -> Iterator[tuple[int, Parcel]]:
    """What other ranks than the first hold, in the order in which each passes it on."""
    for rank in sorted({*found.groups, *found.alone} - {0}):
        for parcel in (*found.groups.get(rank, ()), *found.alone.get(rank, ())):
            yield rank, parcel


def _put(parcel: Parcel, flat: Tensor, whole: dict[str, Tensor]) -> None:
    for part in parcel.parts:
        if part.counts:
            name = part.spec.name
            if name not in whole:
                whole[name] = part.empty(flat.dtype)
            part.put_into(whole[name], flat)


def gather_to_root(group: Group) -> Tensor | None:
    """The group's flat parameters on the root (padding included), ``None`` elsewhere."""
    if group.comms.replica:
        return None
    comm = group.comms.gather
    if not group.row.shards_optimizer:
        return group.values() if comm.rank == 0 else None
    out = None
    if comm.rank == 0:
        out = torch.empty(group.layout.numel, dtype=group.dtype, device=group.device)
    held = group.values().to(group.device)  # from the host, where it is offloaded
    comm.gather(held, out, root=0, unit=group.unit.name, cuts=group.layout.uneven_cuts).wait()
    return out


# -- from world rank 0


def spread(engine: Engine, found: Survey, state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Replace what every rank holds by its part of the logical tensors on world rank 0.

    Args:
        engine: Of the model.
        found: What all ranks hold.
        state: On world rank 0: tensors by name.
        names: What is in it, on every rank. Parameters that are not keep their values.

    Collective:
        A message to every other root and a scatter (broadcast where whole parameters are held) per group. Besides
        ``state``, world rank 0 holds one group at a time. All ranks must call.
    """
    world, present = engine.comms.world, set(names)
    for group in _in_order(engine):
        _spread_group(engine, group, state, present)
    for parcel, parameter in _own_alone(engine, found):
        if _is_in(present, parcel.parts[0].spec):
            with torch.no_grad():
                parameter.copy_(_arrived(world, parcel, state, parameter.device).view(parameter.shape))
    if world.rank == 0:
        for target, parcel in _foreign(found):
            if any(_is_in(present, part.spec) for part in parcel.parts):
                world.send(_filled(parcel, state, parcel.room(world.device)), to=target, unit=parcel.unit).wait()


def _spread_group(engine: Engine, group: Group, state: Mapping[str, Any], present: set[str]) -> None:
    parcel = Parcel.of(engine, group)
    there = [part for part in parcel.parts if _is_in(present, part.spec)]
    if not there:
        return
    is_partly = len(there) < len(parcel.parts)
    flat = gather_to_root(group) if is_partly else None
    if is_root_of(group):
        arrived = _arrived(engine.comms.world, parcel, state, group.device)
        if flat is not None:
            flat = flat.clone()
            for part in there:
                span = slice(part.offset, part.offset + part.spec.numel)
                flat[span] = arrived[span]
        send_group(group, arrived if flat is None else flat)
    else:
        send_group(group, None)


def _arrived(world: Comm, parcel: Parcel, state: Mapping[str, Any], device: torch.device) -> Tensor:
    """This rank's part of the logical tensors on rank 0."""
    flat = parcel.room(device)
    if world.rank == 0:
        return _filled(parcel, state, flat)
    world.receive(flat, source=0, unit=parcel.unit).wait()
    return flat


def _is_in(names: set[str], spec: ParamSpec) -> bool:
    return any(name in names for name in (spec.name, *spec.aliases))


def value_of(state: Mapping[str, Any], spec: ParamSpec) -> Tensor | None:
    """The tensor of a parameter, under its name or that of an alias."""
    for name in (spec.name, *spec.aliases):
        if name in state:
            return state[name]
    return None


def _filled(parcel: Parcel, state: Mapping[str, Any], flat: Tensor) -> Tensor:
    for part in parcel.parts:
        value = value_of(state, part.spec)
        if value is not None:
            part.take_from(value, flat)
    return flat


def send_group(group: Group, flat: Tensor | None) -> None:
    """Replace the group's parameters on every rank by the root's ``flat`` (padding included; ``None`` elsewhere)."""
    comms, unit, cuts = group.comms, group.unit.name, group.layout.uneven_cuts
    with torch.no_grad():
        held = group.values().to(group.device)  # from the host, where it is offloaded
        if not group.row.shards_optimizer:
            if flat is not None:
                held.copy_(flat)
            comms.control.broadcast(held, root=0, unit=unit).wait()
        else:
            if comms.replica == 0:
                comms.gather.scatter(flat, held, root=0, unit=unit, cuts=cuts).wait()
            if comms.replicate is not None:
                comms.replicate.broadcast(held, root=0, unit=unit).wait()
        group.set_values(held)
