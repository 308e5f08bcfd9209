"""The ranges of a model's tensors that a rank stores: of groups, buffers and ignored parameters.

If an ignored parameter differs between ranks, checkpoints store each rank's values as ``rank-00003/<name>``, with
optimizer state, and these load on the same rank of as many ranks. If it is equal on all ranks, it is stored once. If
the ranks have slices of it (``spec.slice``), it is stored as the logical tensor, and loads with any complete slicing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.axes import Comms
from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.comm.digest import digest_of
from shardwise.comm.dtype import dtype_name
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.storage.ignored import Ignored, ignored_of
from shardwise.spec.errors import CheckpointError
from shardwise.spec.extent import Extent
from shardwise.spec.layout import Piece
from shardwise.spec.slice import Slice, simplest, slice_of
from shardwise.weights.state.extents import Pairs, StoredRanges

#: Prefix of the names of buffers in checkpoints.
BUFFER = "buffer/"


# -- the parameters of a group


def of_group(group: Group, pieces: Iterable[Piece] | None = None) -> StoredRanges:
    """Return this rank's ranges of a group's parameters, or only those of ``pieces``."""
    chosen = tuple(group.pieces if pieces is None else pieces)
    specs, dtype = group.layout.params, dtype_name(group.dtype)
    copies = group.comms.replicate if group.placements.shards_optimizer else group.comms.control

    def fetch() -> tuple[Tensor, list[Tensor]]:
        flat = group.values()
        return flat, [elements_of(group, piece, flat) for piece in chosen]

    extents = tuple(specs[piece.index].extent(piece.start, piece.stop, dtype=dtype) for piece in chosen)
    return StoredRanges(group.unit.name, extents, fetch, group.set_values, copies)


def elements_of(group: Group, piece: Piece, flat: Tensor) -> Tensor:
    """Return the elements of ``piece`` in ``flat``, a tensor with the layout of the group's master."""
    start = piece.offset
    if not group.placements.shards_optimizer:
        start = group.layout.offsets[piece.index] + piece.start
    return flat[start : start + piece.numel]


def pairs_of(group: Group, pieces: Iterable[Piece], flat: Tensor, prefix: str = "") -> Pairs:
    """Return the ranges of ``pieces`` with their elements in ``flat``; names get the prefix ``prefix``."""
    found = []
    for piece in pieces:
        spec = group.layout.params[piece.index]
        extent = spec.extent(piece.start, piece.stop, name=f"{prefix}{spec.name}", dtype=dtype_name(flat.dtype))
        found.append((extent, elements_of(group, piece, flat)))
    return found


def owned_pieces(engine: Engine, group: Group) -> list[Piece]:
    """Return the pieces that this rank writes to a checkpoint: over all ranks every element once, evenly divided."""
    if group.comms.replica:
        return []
    return [piece for piece in group.layout.owned_by_param(group.rank) if _is_owned(engine, group, piece)]


def gathered_pieces(engine: Engine, group: Group) -> list[Piece]:
    """Return the pieces that this rank contributes to a gather: every element once, of replicas those of rank 0."""
    if group.placements.shards_optimizer:
        return owned_pieces(engine, group)
    pieces = group.layout.whole if group.comms.control.rank == 0 else ()
    return [piece for piece in pieces if engine.comms.counts(group.layout.params[piece.index].slice)]


def _is_owned(engine: Engine, group: Group, piece: Piece) -> bool:
    spec = group.layout.params[piece.index]
    is_there = piece.numel > 0 or (spec.numel == 0 and group.rank == 0)
    return is_there and engine.comms.counts(spec.slice)


def gather_order(engine: Engine) -> list[Group]:
    """Return every group, experts last, in the order in which groups are gathered and scattered."""
    return sorted(engine.groups, key=lambda group: group.comms is not engine.comms)


# -- buffers and ignored parameters


def of_tensor(
    name: str, tensor: Tensor, *, copies: Comm | None, part: Slice | None = None, flat: Tensor | None = None
) -> StoredRanges:
    """Make the range of a buffer or ignored parameter, or of its slice ``part``; ``flat`` replaces its memory."""
    value = tensor.detach()
    flat = value.contiguous().view(-1) if flat is None else flat

    def store(content: Tensor) -> None:
        if content.data_ptr() != value.data_ptr() or content.dtype is not value.dtype:
            value.copy_(content.view(value.shape))

    return StoredRanges(
        f"tensor {name}", (make_extent(name, flat, value.shape, part),), lambda: (flat, [flat]), store, copies
    )


def make_extent(name: str, flat: Tensor, shape: Sequence[int], part: Slice | None) -> Extent:
    """Return the extent of the elements in ``flat``: the full tensor of ``shape``, or the slice ``part``."""
    whole, cuts = (tuple(shape), ()) if part is None else (part.shape, simplest(part.shape, part.cuts))
    return Extent(name, whole, dtype_name(flat.dtype), 0, flat.numel(), cuts=cuts)


def sliced_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """The ignored parameters of which each rank has a slice, by name."""
    return {name: p for name, p in ignored_of(engine).parameters.items() if slice_of(p) is not None}


def of_sliced(engine: Engine, is_chosen: Callable[[nn.Parameter, Slice], bool] | None = None) -> list[StoredRanges]:
    """Return the stored ranges of this rank's slices of ignored parameters; ``is_chosen`` may select some."""
    return [
        of_tensor(name, parameter, copies=None, part=part)
        for name, parameter in ignored_of(engine).parameters.items()
        if (part := slice_of(parameter)) is not None and (is_chosen is None or is_chosen(parameter, part))
    ]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in a model's state dict, by name, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, buffer in torch_private.buffers_of(module).items():
            if buffer is None or not torch_private.is_persistent(module, key) or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{path}.{key}" if path else key] = buffer
    return found


def is_first_of_stage(engine: Engine) -> bool:
    """Whether this rank is the first of its pipeline stage, which sends buffers and names for the stage."""
    return engine.comms.control.rank == 0 and (engine.comms.tp is None or engine.comms.tp.rank == 0)


#: The name under which a checkpoint stores each ignored parameter.
Names = Mapping[nn.Parameter, str]


def written_names(ignored: Ignored, optimizers: Sequence[torch.optim.Optimizer], comms: Comms) -> Names:
    """Return the ignored parameters that this rank writes, with their names in the checkpoint.

    Collective:
        If there are ignored parameters, or pipeline stages that may have some, an all-gather of a hash of each.
    """
    if not ignored.parameters and comms.pp is None:
        return {}
    rank = comms.world.rank
    states = {parameter: state for each in optimizers for parameter, state in each.state.items()}
    own = {name: _digest(parameter, states.get(parameter, {})) for name, parameter in ignored.parameters.items()}
    everyone = all_gather_json(comms.world, own)
    found: dict[nn.Parameter, str] = {}
    for name, parameter in ignored.parameters.items():
        part = slice_of(parameter)
        digests = {other: of_rank[name] for other, of_rank in enumerate(everyone) if name in of_rank}
        if part is None and len(set(digests.values())) > 1:
            found[parameter] = _own_name(name, rank)
        elif rank == min(digests) if part is None else part.is_counted:
            found[parameter] = name
    return found


def _digest(parameter: nn.Parameter, state: Mapping[str, Any]) -> str:
    """Return a text that is equal on ranks with the same values and optimizer state."""
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    numbers = {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
    }
    return f"{digest_of([parameter, *tensors]).tolist()} {sorted(numbers.items())}"


def stored_names(ignored: Ignored, comms: Comms, holders: Mapping[str, int], stored: Collection[str]) -> Names:
    """Return the ignored parameters, with the names of this rank's values in a checkpoint."""
    found: dict[nn.Parameter, str] = {}
    for name, parameter in ignored.parameters.items():
        num_own = sum(other.startswith("rank-") and other.partition("/")[2] == name for other in stored)
        if num_own not in {0, holders[name]}:
            raise CheckpointError(
                f"ignored parameter {name!r} was each rank's own and was saved by {num_own} ranks, but this world has"
                f" {holders[name]}.\n"
                f"  Load on {num_own} ranks, or build the model so that it is not ignored on both sides."
            )
        found[parameter] = _own_name(name, comms.world.rank) if num_own else name
    return found


def ignored_ranges(names: Names) -> list[StoredRanges]:
    """Return this rank's ranges of ignored parameters."""
    return [of_tensor(name, parameter, copies=None, part=slice_of(parameter)) for parameter, name in names.items()]


def count_holders(ignored: Ignored, comms: Comms) -> dict[str, int]:
    """Return the number of ranks that have each ignored parameter of this rank.

    Collective:
        With ``pp``, an all-gather of their names; otherwise none, because all ranks have the same parameters.
    """
    if comms.pp is None:
        return dict.fromkeys(ignored.parameters, comms.world.size)
    everyone = all_gather_json(comms.world, list(ignored.parameters))
    return {name: sum(name in names for names in everyone) for name in ignored.parameters}


def _own_name(name: str, rank: int) -> str:
    return f"rank-{rank:05d}/{name}"
