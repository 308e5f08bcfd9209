"""Iteration over full parameters, unit by unit: for exports and for sending weights to an inference engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.comm.dtype import memory_order, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.spec.extent import Extent
from shardwise.spec.slice import slice_of
from shardwise.weights.state.extents import (
    RankMetadata,
    StoredRanges,
    as_bytes,
    decode_extent,
    empty,
    encode_extent,
    gather_metadata,
    gather_ranges,
    refuse_gaps,
    whole_extent,
)
from shardwise.weights.state.stored_ranges import (
    gather_order,
    gathered_pieces,
    is_first_of_stage,
    of_group,
    of_sliced,
    of_tensor,
)


def iterate_full_parameters(model: nn.Module, dtype: torch.dtype | str | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter in full, one unit after another, on every rank.

    On every mesh (shards, slices, pipeline stages), names and shapes are those of the plain model. Use it to send
    weights to an inference engine, or to write another file format::

        for name, tensor in sw.iterate_full_parameters(model, dtype="bf16"):
            inference_engine.load_weight(name, tensor)

    Args:
        model: A parallelized model.
        dtype: Floating-point parameters are cast to it before they are sent; by default they keep the masters' dtype.

    Yields:
        Name and full tensor, in the order of the units; of tied names only the first. The tensor has separate memory,
        on the device with which the ranks communicate.

    Collective:
        First a gather of JSON (about 100 bytes for each range of a parameter that a rank owns) and a broadcast of the
        names. Then for each unit one message to rank 0 for each range that another rank owns, and a broadcast of each
        parameter, cast. Rank 0 stores one full unit, other ranks one parameter, in addition to those that the caller
        keeps. All ranks must iterate to the end, and change no parameter meanwhile.

    Raises:
        StateError: The ranks do not store full tensors, or parameters have no values yet; on every rank.
    """
    engine = engine_of(model, "sw.iterate_full_parameters")
    engine.need_values("sw.iterate_full_parameters()")
    world, cast = engine.comms.world, torch_dtype(dtype) if isinstance(dtype, str) else dtype
    units = Units(engine)
    for extents, full_tensors in zip(units.extents, units.gathered(), strict=True):
        for extent in extents:
            dtype = torch_dtype(extent.dtype)
            target_dtype = cast if cast is not None and dtype.is_floating_point else dtype
            if world.rank == 0:
                value = full_tensors.pop(extent.name).to(world.device, target_dtype)
            else:
                value = empty(extent, world.device, target_dtype)
            world.broadcast(as_bytes(memory_order(value)), root=0, unit=f"whole {extent.name}").wait()
            yield extent.name, value
            del value  # frees it before the next one is allocated


class Units:
    """The parameters of a model, and its saved buffers, unit by unit.

    Attributes:
        extents: The full extents of each unit's tensors, the same on every rank.

    Args:
        engine: Engine of the model.
        buffers: The buffers that this rank contributes, by name; each buffer on exactly one rank.

    Collective:
        A gather of JSON (about 100 bytes for each range) and a broadcast of the names. All ranks must make one.

    Raises:
        StateError: The ranks do not store full tensors; on every rank.
    """

    def __init__(self, engine: Engine, buffers: Mapping[str, Tensor] | None = None) -> None:
        engine.apply_user_changes()
        self._world = engine.comms.world
        self._stored = _owned(engine)
        self._stored += [of_tensor(name, each, copies=None) for name, each in (buffers or {}).items()]
        self._metadata, units = gather_metadata(self._world, self._stored, _units)
        self._names = [unit for unit, _ in units]
        self.extents: list[list[Extent]] = [[decode_extent(extent) for extent in extents] for _, extents in units]

    def gathered(self) -> Iterator[dict[str, Tensor]]:
        """Yield the full tensors of each unit by name, on the CPU of rank 0; ``{}`` on other ranks.

        Collective:
            A message to rank 0 for each range that another rank owns. All ranks must iterate to the end.
        """
        for unit in self._names:
            own = [each for each in self._stored if each.unit == unit]
            of_unit = [RankMetadata([one for one in each.stored if one[0] == unit], None) for each in self._metadata]
            yield gather_ranges(self._world, own, of_unit)


def _owned(engine: Engine) -> list[StoredRanges]:
    """Return the elements that this rank sends: over all ranks, every element of every parameter once."""
    found = [of_group(group, gathered_pieces(engine, group)) for group in gather_order(engine)]
    found += of_sliced(engine, lambda _, part: part.is_counted)
    if is_first_of_stage(engine):
        ignored = ignored_of(engine).parameters.items()
        found += [of_tensor(name, each, copies=None) for name, each in ignored if slice_of(each) is None]
    return found


def _units(metadata: list[RankMetadata]) -> list[tuple[str, list[object]]]:
    """Return the units in order, each with the full extents of its tensors."""
    refuse_gaps(metadata)
    found: dict[str, dict[str, list[object]]] = {}
    for rank_metadata in metadata:
        for unit, extents in rank_metadata.stored:
            for extent in extents:
                found.setdefault(unit, {}).setdefault(extent.name, encode_extent(whole_extent(extent)))
    return [(unit, list(extents.values())) for unit, extents in found.items()]
