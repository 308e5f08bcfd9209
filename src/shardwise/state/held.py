"""The ranges that a rank holds of a model's tensors: of groups, buffers and ignored parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.base import Comm
from shardwise.comm.dtype import dtype_name
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.forms.ignored import ignored_of
from shardwise.spec.extent import Extent
from shardwise.spec.layout import Piece
from shardwise.spec.slice import Slice, simplest, slice_of
from shardwise.state.extents import Holding, Pairs

#: Begins the names of buffers in checkpoints.
BUFFER = "buffer/"


# -- the parameters of a group


def of_group(group: Group, pieces: Iterable[Piece] | None = None) -> Holding:
    """The ranges that a rank holds of a group's parameters, or those of ``pieces`` only."""
    chosen = tuple(group.held if pieces is None else pieces)
    specs, dtype = group.layout.params, dtype_name(group.dtype)
    copies = group.comms.replicate if group.row.shards_optimizer else group.comms.control

    def fetch() -> tuple[Tensor, list[Tensor]]:
        flat = group.values()
        return flat, [part_of(group, piece, flat) for piece in chosen]

    extents = tuple(specs[piece.index].extent(piece.start, piece.stop, dtype=dtype) for piece in chosen)
    return Holding(group.unit.name, extents, fetch, group.set_values, copies)


def part_of(group: Group, piece: Piece, flat: Tensor) -> Tensor:
    """The elements of ``piece`` in a flat tensor that is laid out as the group's master is."""
    start = piece.offset
    if not group.row.shards_optimizer:
        start = group.layout.offsets[piece.index] + piece.start
    return flat[start : start + piece.numel]


def pairs_of(group: Group, pieces: Iterable[Piece], flat: Tensor, prefix: str = "") -> Pairs:
    """The ranges of ``pieces`` with their elements in ``flat``, under names that begin with ``prefix``."""
    found = []
    for piece in pieces:
        spec = group.layout.params[piece.index]
        extent = spec.extent(piece.start, piece.stop, name=f"{prefix}{spec.name}", dtype=dtype_name(flat.dtype))
        found.append((extent, part_of(group, piece, flat)))
    return found


def owned_pieces(engine: Engine, group: Group) -> list[Piece]:
    """The pieces that this rank writes to a checkpoint: over all ranks every element once, shared out evenly."""
    if group.comms.replica:
        return []
    return [piece for piece in group.layout.owned_by_param(group.rank) if _is_owned(engine, group, piece)]


def gathered_pieces(engine: Engine, group: Group) -> list[Piece]:
    """The pieces that this rank sends in a gather: every element once, from rank 0 itself where it holds the whole."""
    if group.row.shards_optimizer:
        return owned_pieces(engine, group)
    pieces = group.layout.whole if group.comms.control.rank == 0 else ()
    return [piece for piece in pieces if engine.comms.counts(group.layout.params[piece.index].slice)]


def _is_owned(engine: Engine, group: Group, piece: Piece) -> bool:
    spec = group.layout.params[piece.index]
    is_there = piece.numel > 0 or (spec.numel == 0 and group.rank == 0)
    return is_there and engine.comms.counts(spec.slice)


def in_order(engine: Engine) -> list[Group]:
    """Every group, experts last: the order in which groups are moved."""
    return sorted(engine.groups, key=lambda group: group.comms is not engine.comms)


# -- tensors that the engine leaves as they are


def of_tensor(
    name: str, tensor: Tensor, *, copies: Comm | None, part: Slice | None = None, flat: Tensor | None = None
) -> Holding:
    """A buffer or ignored parameter, or the slice ``part`` of one; ``flat`` is its memory if not its own."""
    held = tensor.detach()
    flat = held.contiguous().view(-1) if flat is None else flat

    def store(content: Tensor) -> None:
        if content.data_ptr() != held.data_ptr() or content.dtype is not held.dtype:
            held.copy_(content.view(held.shape))

    return Holding(f"tensor {name}", (extent_of(name, flat, held.shape, part),), lambda: (flat, [flat]), store, copies)


def extent_of(name: str, flat: Tensor, shape: Sequence[int], part: Slice | None) -> Extent:
    """The range of a tensor that ``flat`` holds: all of one of ``shape``, or ``part``."""
    whole, cuts = (tuple(shape), ()) if part is None else (part.shape, simplest(part.shape, part.cuts))
    return Extent(name, whole, dtype_name(flat.dtype), 0, flat.numel(), cuts=cuts)


def sliced_parameters(engine: Engine) -> dict[str, nn.Parameter]:
    """The ignored parameters of which each rank holds a slice, by name."""
    return {name: p for name, p in ignored_of(engine).parameters.items() if slice_of(p) is not None}


def of_sliced(engine: Engine, is_chosen: Callable[[nn.Parameter, Slice], bool] | None = None) -> list[Holding]:
    """The slices that this rank holds of ignored parameters."""
    return [
        of_tensor(name, parameter, copies=None, part=part)
        for name, parameter in ignored_of(engine).parameters.items()
        if (part := slice_of(parameter)) is not None and (is_chosen is None or is_chosen(parameter, part))
    ]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state dict holds, by name, each once."""
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
    """Whether this rank gives the buffers and names of its pipeline stage, which all its ranks have alike."""
    return engine.comms.control.rank == 0 and (engine.comms.tp is None or engine.comms.tp.rank == 0)
