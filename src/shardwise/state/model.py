"""A parallelized model's weights as logical tensors, and as the ranges that checkpoints hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.pool import is_dense, memory_order
from shardwise.engine.unit import engine_of
from shardwise.features.precision import saved_dtypes
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent
from shardwise.spec.layout import Piece
from shardwise.state.assemble import Survey, collect, is_first_of_stage, is_root, sliced_alone, spread, survey, value_of
from shardwise.state.stages import (
    StageState,
    as_bytes,
    beside_siblings,
    in_module_order,
    is_json,
    later_stages,
    refuse_opaque,
    whole_tensors_in,
)

#: Begins the names of buffers in checkpoints.
BUFFER = "buffer/"

# -- whole state dicts


def full_state_dict(model: nn.Module, *, trainable_only: bool = False) -> dict[str, Any]:
    """The plain model's ``state_dict()``: its keys, shapes and dtypes, tied names and buffers included, on the CPU.

    Slices and stages are put together: the result is that of the whole model, whatever the mesh.

    Args:
        model: A parallelized model.
        trainable_only: Leave out parameters that require no gradient (as torch's ``ignore_frozen_params`` does), such
            as the base below adapters; what is frozen is not gathered.

    Returns:
        The whole of it on rank 0 of the world, ``{}`` elsewhere.

    Collective:
        One gather to the first data-parallel rank per group, unit by unit: every other rank that shares its
        ``dp_shard`` sends its shards once. With ``tp``, ``pp`` or ``ep`` it is sent on to rank 0 of the world,
        which is told in JSON what belongs where. Besides the result, rank 0 holds one group at a time. All ranks must
        call.

    Raises:
        StateError: Modules of a later stage have extra state that JSON does not hold; on every rank alike.
    """
    engine = engine_of(model, "sw.full_state_dict")
    engine.refuse_unfilled("sw.full_state_dict()")
    engine.follow_shards()
    engine.sync_buffers()
    world = engine.comms.world
    told = StageState(model, engine)
    found = survey(engine, told.entries)
    refuse_opaque(found)
    whole = collect(engine, found, trainable_only=trainable_only)
    if world.rank > 0:
        told.send(world)
        return {}
    with whole_tensors_in(engine, _left_out(engine, whole) | whole):
        state = model.state_dict()
    if trainable_only:
        frozen = {name for name, p in engine.ignored.parameters.items() if not p.requires_grad}
        state = {key: value for key, value in state.items() if key not in frozen and not _is_meta(value)}
    copies = {tensor.untyped_storage().data_ptr() for tensor in whole.values()}
    taken = {key: _taken(value, copies) if isinstance(value, Tensor) else value for key, value in state.items()}
    taken |= {key: taken[key].to(dtype) for key, dtype in saved_dtypes(model).items() if key in taken}
    taken |= {name: whole[name] for name in sliced_alone(engine) if name in whole}
    later = later_stages(world, found, whole)
    state = in_module_order(model, later | taken) if later else taken
    if engine.comms.ep is None:
        return state
    foreign = {name: tensor for name, tensor in whole.items() if name not in state}  # experts that others hold
    return beside_siblings(state, foreign)


def _left_out(engine: Engine, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stand-ins on meta for parameters that were not gathered."""
    specs = [spec for group in engine.groups for spec in group.layout.params if spec.name not in whole]
    return {spec.name: torch.empty(spec.logical_shape, device="meta") for spec in specs}


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _taken(tensor: Tensor, copies: Collection[int]) -> Tensor:
    """``tensor`` on the CPU, in memory that the model does not use."""
    is_live = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in copies
    return tensor.clone() if is_live else tensor.cpu()


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a plain model's state dict from rank 0 into every rank's shards and buffers, of every slice and stage.

    Args:
        model: A parallelized model.
        state: On rank 0 of the world the logical tensors by name; not looked at on the other ranks.
        strict: Refuse missing and unexpected names.

    Collective:
        A verdict of rank 0, then one scatter (broadcast where whole parameters are held) per group, and a broadcast on
        ``dp_replicate`` where there are replicas, one broadcast per buffer, and the modules' extra state as JSON. With
        ``tp`` or ``pp`` rank 0 first sends each group and buffer to the first data-parallel rank that needs it. Besides
        ``state``, rank 0 holds one group at a time. All ranks must call.

    Raises:
        StateError: Names are missing or unexpected, shapes differ, or extra state is none that JSON holds; on all
            ranks, and nothing is loaded.
    """
    engine = engine_of(model, "sw.load_full_state_dict")
    engine.follow_shards()
    world = engine.comms.world
    # Every rank holds these whole: buffers, and parameters that are left alone.
    sliced = sliced_alone(engine)
    wholes = {name: p.detach() for name, p in engine.ignored.parameters.items() if name not in sliced}
    wholes |= _buffers(model)
    found = survey(
        engine,
        [[[name, list(tensor.shape), dtype_name(tensor.dtype)] for name, tensor in wholes.items()], _names(model)],
    )
    problems = _misfits(found, state, strict=strict) if world.rank == 0 else []
    told = [problems, list(state), _extra_state(state)] if world.rank == 0 and not problems else [problems, [], {}]
    verdict, names, extra = all_gather_json(world, told)[0]
    if verdict:
        shown = "\n".join(f"  {problem}" for problem in verdict[:12])
        more = f"\n  and {len(verdict) - 12} more" if len(verdict) > 12 else ""
        raise StateError(
            f"the state dict does not fit the model ({len(verdict)} differences):\n{shown}{more}\n"
            "  Load a state dict of this very model, or pass strict=False to skip missing and unexpected names."
        )
    spread(engine, found, state, names)
    present = set(names)
    for name, tensor in wholes.items():
        if name in present:
            _load_whole(engine, name, tensor, state)
    if world.rank == 0:
        for target in sorted(found.more.keys() - {0}):
            for name, _, dtype in found.more[target][0]:
                if name in present:
                    value = state[name].detach().to(world.device, torch_dtype(dtype))
                    world.send(as_bytes(value), to=target, unit=f"buffer {name}").wait()
    _load_extra_state(model, extra, is_stage=engine.comms.pp is not None)
    if engine.unfilled is not None:
        engine.unfilled.fill(names)
    engine.invalidate()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, by name, each once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for key, buffer in torch_private.buffers_of(module).items():
            if buffer is None or not torch_private.is_persistent(module, key) or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{path}.{key}" if path else key] = buffer
    return found


def _names(model: nn.Module) -> list[str]:
    """Every name under which the modules know a parameter or buffer."""
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return [name for name, _ in (*parameters, *buffers)]


def _misfits(found: Survey, state: Mapping[str, Any], *, strict: bool) -> list[str]:
    """One line for each difference between the model and the state dict."""
    expected = {part.spec.name: (part.spec.logical_shape, value_of(state, part.spec)) for part in found.parts}
    known = {name for part in found.parts for name in (part.spec.name, *part.spec.aliases)}
    for wholes, names in found.more.values():
        expected |= {name: (tuple(shape), state.get(name)) for name, shape, _ in wholes}
        known.update(names)
    problems = [
        f"{name}: extra state that JSON cannot hold; call set_extra_state() on every rank"
        for name, value in _extra_state(state).items()
        if not is_json(value)
    ]
    for name, (shape, value) in expected.items():
        if value is None:
            if strict:
                problems.append(f"{name}: missing (expected {list(shape)})")
        elif not isinstance(value, Tensor):
            problems.append(f"{name}: expected a tensor of shape {list(shape)}, got {type(value).__name__}")
        elif tuple(value.shape) != shape:
            problems.append(f"{name}: expected {list(shape)}, got {list(value.shape)}")
    if strict:
        unknown = [name for name in state if name not in known and not name.endswith("_extra_state")]
        problems += [f"{name}: unexpected" for name in unknown]
    return problems


def _load_whole(engine: Engine, name: str, tensor: Tensor, state: Mapping[str, Any]) -> None:
    """Bring a buffer, or a parameter that every rank holds whole, from rank 0 to the ranks that hold it."""
    comms = engine.comms
    if comms.world.rank == 0:
        tensor.copy_(state[name])
    elif is_root(engine):
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=comms.world.device)
        comms.world.receive(as_bytes(sent), source=0, unit=f"buffer {name}").wait()
        tensor.copy_(sent)
    flat = tensor.detach().contiguous().view(-1)
    travels = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
    comms.control.broadcast(travels, root=0, unit=f"buffer {name}").wait()
    tensor.copy_(flat.view(tensor.shape))


def _extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``get_extra_state`` of the modules gave."""
    return {name: value for name, value in state.items() if name.endswith("_extra_state")}


def _load_extra_state(model: nn.Module, state: Mapping[str, Any], *, is_stage: bool) -> None:
    for path, module in model.named_modules():
        key = f"{path}._extra_state" if path else "_extra_state"
        is_stand_in = is_stage and type(module).set_extra_state is nn.Module.set_extra_state
        if key in state and not is_stand_in:
            module.set_extra_state(state[key])


# -- ranges, for checkpoints


def owned_extents(model: nn.Module) -> list[tuple[Extent, Tensor]]:
    """What this rank writes to a checkpoint: ranges that cover every element exactly once over the ranks.

    Of the groups along ``dp_replicate``, which hold the same, the first writes; likewise of the ranks along ``tp`` and
    ``pp`` that hold copies.

    Parameters by name, buffers as ``buffer/<name>`` (of the first rank that has one). (``state.optimizer`` has
    those of optimizers.)

    Every tensor is a flat view of live memory: copy before changing the model. Quantized weights are what is read from
    them, in fresh memory.

    Collective:
        With ``pp``, an all-gather of the names of buffers.
    """
    engine = engine_of(model, "sw.save")
    engine.refuse_unfilled("sw.save()")
    engine.follow_shards()
    buffers = _own_buffers(model, engine)
    if engine.comms.replica:
        return []
    found: list[tuple[Extent, Tensor]] = []
    for group in engine.groups:
        views = group.value_views(group.values())
        for index, piece in owned_pieces(engine, group):
            found.append(extent_of(group, index, group.layout.params[index].name, piece, views[index]))
    dtypes = saved_dtypes(model)
    for name, buffer in buffers.items():
        flat = buffer.detach().to(dtypes.get(name, buffer.dtype)).contiguous().view(-1)
        extent = Extent(f"{BUFFER}{name}", tuple(buffer.shape), dtype_name(flat.dtype), 0, flat.numel())
        found.append((extent, flat))
    return found


def _own_buffers(model: nn.Module, engine: Engine) -> dict[str, Tensor]:
    """The buffers that this rank writes: of its stage's, those that no earlier stage has."""
    held, pp = _buffers(model), engine.comms.pp
    if pp is not None:
        before = {name for names in all_gather_json(pp, list(held))[: pp.rank] for name in names}
        held = {name: buffer for name, buffer in held.items() if name not in before}
    return held if is_first_of_stage(engine) else {}


def frozen_names(model: nn.Module) -> set[str]:
    """The names of parameters that require no gradient, of those that the engine holds on this rank."""
    engine = engine_of(model, "sw.save")
    return {
        spec.name
        for group in engine.groups
        for spec, shard in zip(group.layout.params, group.shards, strict=True)
        if not shard.requires_grad
    }


def owned_pieces(engine: Engine, group: Group) -> Iterator[tuple[int, Piece]]:
    """Of each parameter that counts here, its index and the piece that this rank writes; none where that is empty."""
    rank = group.rank
    for index, piece in enumerate(group.layout.owned_by_param(rank)):
        spec = group.layout.params[index]
        if engine.comms.counts(spec.slice) and (piece.numel or (spec.numel == 0 and rank == 0)):
            yield index, piece


def extent_of(group: Group, index: int, name: str, piece: Piece, held: Tensor) -> tuple[Extent, Tensor]:
    """The range ``piece`` of a tensor that is held like parameter ``index``: whole, or this rank's slice of it."""
    flat = memory_order(held) if is_dense(held) else held.detach().reshape(-1)
    if not group.row.shards_optimizer:
        flat = flat[piece.start : piece.stop]
    spec = group.layout.params[index]
    return spec.extent(piece.start, piece.stop, name=name, dtype=dtype_name(held.dtype)), flat


class HeldValues:
    """Everything that this rank holds of parameters and buffers, as targets to load into.

    They are the live tensors, but for quantized weights and cast buffers: :meth:`install` makes those of what was read.

    Args:
        model: A parallelized model.
        stored: What will be read. Buffers that are there in the dtype to which they were cast are taken as they are.

    Attributes:
        extents: This rank's ranges, with the tensors.
    """

    def __init__(self, model: nn.Module, stored: Mapping[str, Extent] | None = None) -> None:
        engine = engine_of(model, "sw.load")
        engine.follow_shards()
        self.extents: list[tuple[Extent, Tensor]] = []
        self._flats: list[tuple[Group, Tensor]] = []
        for group in engine.groups:
            self._flats.append((group, group.values()))
            views = group.value_views(self._flats[-1][1])
            for spec, piece, view in zip(group.layout.params, group.held, views, strict=True):
                self.extents.append((spec.extent(piece.start, piece.stop), memory_order(view)))
        self._casts: list[tuple[Tensor, Tensor]] = []
        dtypes = saved_dtypes(model)
        for name, buffer in _buffers(model).items():
            if not buffer.is_contiguous():
                raise StateError(f"buffer {name!r} is not contiguous and cannot be loaded in place.")
            live, saved = buffer.detach().view(-1), (stored or {}).get(f"{BUFFER}{name}")
            is_as_stored = saved is not None and saved.dtype == dtype_name(buffer.dtype)
            flat = live if is_as_stored else live.to(dtypes.get(name, buffer.dtype))
            if flat is not live:
                self._casts.append((live, flat))
            extent = Extent(f"{BUFFER}{name}", tuple(buffer.shape), dtype_name(flat.dtype), 0, flat.numel())
            self.extents.append((extent, flat))

    def install(self) -> None:
        """Everything has been loaded."""
        for group, flat in self._flats:
            group.set_values(flat)
        for live, flat in self._casts:
            live.copy_(flat)


def load_ranges(model: nn.Module, read: Callable[[list[tuple[Extent, Tensor]]], None]) -> None:
    """Replace this rank's ranges of every parameter that the engine holds by what ``read`` puts into them."""
    held = HeldValues(model)
    with torch.no_grad():
        read([(extent, flat) for extent, flat in held.extents if not extent.name.startswith(BUFFER)])
        held.install()
    engine_of(model, "sw.load").invalidate()
