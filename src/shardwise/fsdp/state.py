"""A parallelized model's weights as logical tensors, and as the ranges that checkpoints hold."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.control import agree, all_gather_json
from shardwise.comm.dtype import dtype_name
from shardwise.fsdp import attach, torch_private
from shardwise.fsdp.group import Group
from shardwise.fsdp.runtime import Runtime
from shardwise.fsdp.view import contiguous_stride, is_dense, memory_order
from shardwise.spec.errors import StateError
from shardwise.spec.extent import Extent
from shardwise.spec.layout import Piece

# -- whole state dicts


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The plain model's ``state_dict()``: its keys, shapes and dtypes, tied names and buffers included, on the CPU.

    Returns:
        The whole of it on rank 0, ``{}`` elsewhere.

    Collective:
        One gather to rank 0 per group, unit by unit: every other rank that shares its ``dp_shard`` sends its shards
        once. Besides the result, rank 0 holds one group at a time. All ranks must call.
    """
    runtime = attach.runtime_of(model, "sw.full_state_dict")
    runtime.sync_buffers()
    if runtime.comms.replica:
        return {}
    is_root = runtime.comms.gather.rank == 0
    whole: dict[int, Tensor] = {}
    for group in runtime.groups:
        flat = gather_to_root(runtime, group)
        if flat is None:
            continue
        for shard, spec, offset in zip(group.shards, group.layout.params, group.layout.offsets, strict=True):
            stride = spec.stride or contiguous_stride(spec.shape)
            view = flat.as_strided(spec.shape, stride, flat.storage_offset() + offset)
            whole[id(shard)] = torch.empty_strided(spec.shape, stride, dtype=flat.dtype).copy_(view)
    if not is_root:
        return {}
    with _whole_tensors_in(runtime, whole):
        state = model.state_dict()
    copies = {tensor.untyped_storage().data_ptr() for tensor in whole.values()}
    return {key: _taken(value, copies) if isinstance(value, Tensor) else value for key, value in state.items()}


def _taken(tensor: Tensor, copies: Collection[int]) -> Tensor:
    """``tensor`` on the CPU, in memory that the model does not use."""
    is_live = tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in copies
    return tensor.clone() if is_live else tensor.cpu()


def gather_to_root(runtime: Runtime, group: Group) -> Tensor | None:
    """The group's flat parameters on rank 0 (padding included), ``None`` elsewhere."""
    if runtime.comms.replica:
        return None
    comm = runtime.comms.gather
    if not group.row.shards_optimizer:
        return group.values() if comm.rank == 0 else None
    out = None
    if comm.rank == 0:
        out = torch.empty(group.layout.numel, dtype=group.dtype, device=group.device)
    held = group.values().to(group.device)  # from the host, where it is offloaded
    comm.gather(held, out, root=0, unit=group.unit.name, cuts=group.layout.uneven_cuts).wait()
    return out


@contextlib.contextmanager
def _whole_tensors_in(runtime: Runtime, whole: Mapping[int, Tensor]) -> Iterator[None]:
    """Let the modules show whole parameters, so that torch's own ``state_dict`` walks them, hooks and all."""
    for unit in runtime.units:
        unit.shows_logical_state = True
        for owner in unit.owners:
            owner.parameters.update(
                {
                    attribute: nn.Parameter(whole[id(shard)], requires_grad=shard.requires_grad)
                    for attribute, shard in owner.shards.items()
                }
            )
    try:
        yield
    finally:
        for unit in runtime.units:
            unit.shows_logical_state = False
            for member in unit.members:
                for owner in member.owners:
                    owner.parameters.update(owner.fulls if member.is_swapped else owner.shards)


def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load a plain model's state dict from rank 0 into every rank's shards and buffers.

    Args:
        model: A parallelized model.
        state: On rank 0 the logical tensors by name; not looked at on the other ranks.
        strict: Refuse missing and unexpected names.

    Collective:
        A verdict of rank 0, then one scatter (broadcast where whole parameters are held) per group, and a broadcast on
        ``dp_replicate`` where there are replicas, one broadcast per buffer, and the modules' extra state as JSON.
        Besides ``state``, rank 0 holds one group at a time. All ranks must call.

    Raises:
        StateError: Names are missing or unexpected, shapes differ, or extra state is none that JSON holds; on all
            ranks, and nothing is loaded.
    """
    runtime = attach.runtime_of(model, "sw.load_full_state_dict")
    comm = runtime.comms.control
    # Every rank holds these whole: buffers, and parameters that are left alone.
    wholes = {name: parameter.detach() for name, parameter in runtime.ignored.parameters.items()} | _buffers(model)
    problems = _misfits(model, runtime, wholes, state, strict=strict) if comm.rank == 0 else []
    verdict = all_gather_json(comm, problems)[0]
    if verdict:
        shown = "\n".join(f"  {problem}" for problem in verdict[:12])
        more = f"\n  and {len(verdict) - 12} more" if len(verdict) > 12 else ""
        raise StateError(
            f"the state dict does not fit the model ({len(verdict)} differences):\n{shown}{more}\n"
            "  Load a state dict of this very model, or pass strict=False to skip missing and unexpected names."
        )
    for group in runtime.groups:
        has_it = comm.rank == 0 and all(_value(state, spec) is not None for spec in group.layout.params)
        if not strict and not agree(comm, int(has_it))[0]:
            _load_partly(runtime, group, state)
            continue
        _load_group(runtime, group, state)
    for name, buffer in wholes.items():
        is_there = agree(comm, int(name in state))[0] if not strict else 1
        if is_there:
            if comm.rank == 0:
                buffer.copy_(state[name])
            flat = buffer.detach().contiguous().view(-1)
            travels = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
            comm.broadcast(travels, root=0, unit=f"buffer {name}").wait()
            buffer.copy_(flat.view(buffer.shape))
    _load_extra_state(model, all_gather_json(comm, _extra_state(state) if comm.rank == 0 else {})[0])
    runtime.invalidate()


def _value(state: Mapping[str, Any], spec: Any) -> Tensor | None:
    """The tensor of a parameter, under its name or that of an alias."""
    for name in (spec.name, *spec.aliases):
        if name in state:
            return state[name]
    return None


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


def _misfits(
    model: nn.Module, runtime: Runtime, wholes: Mapping[str, Tensor], state: Mapping[str, Any], *, strict: bool
) -> list[str]:
    """One line for each difference between the model and the state dict."""
    expected = [(spec.name, spec.shape, _value(state, spec)) for g in runtime.groups for spec in g.layout.params]
    expected += [(name, tuple(whole.shape), state.get(name)) for name, whole in wholes.items()]
    problems = [
        f"{name}: extra state that JSON cannot hold; call set_extra_state() on every rank"
        for name, value in _extra_state(state).items()
        if not _is_json(value)
    ]
    for name, shape, value in expected:
        if value is None:
            if strict:
                problems.append(f"{name}: missing (expected {list(shape)})")
        elif not isinstance(value, Tensor):
            problems.append(f"{name}: expected a tensor of shape {list(shape)}, got {type(value).__name__}")
        elif tuple(value.shape) != shape:
            problems.append(f"{name}: expected {list(shape)}, got {list(value.shape)}")
    if strict:
        known = {name for g in runtime.groups for spec in g.layout.params for name in (spec.name, *spec.aliases)}
        known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        known |= {name for name, p in model.named_parameters(remove_duplicate=False) if p in runtime.ignored}
        unknown = [name for name in state if name not in known and not name.endswith("_extra_state")]
        problems += [f"{name}: unexpected" for name in unknown]
    return problems


def _load_group(runtime: Runtime, group: Group, state: Mapping[str, Any]) -> None:
    flat = None
    if runtime.comms.control.rank == 0:
        flat = torch.zeros(group.layout.numel, dtype=group.dtype, device=group.device)
        for spec, offset in zip(group.layout.params, group.layout.offsets, strict=True):
            value = _value(state, spec)
            assert value is not None
            _put(flat, spec, offset, value)
    send_group(runtime, group, flat)


def _load_partly(runtime: Runtime, group: Group, state: Mapping[str, Any]) -> None:
    """As :func:`_load_group`, for a group of which some parameters keep what they hold."""
    flat = gather_to_root(runtime, group)
    if flat is not None:
        flat = flat.clone()
        for spec, offset in zip(group.layout.params, group.layout.offsets, strict=True):
            value = _value(state, spec)
            if value is not None:
                _put(flat, spec, offset, value)
    send_group(runtime, group, flat)


def _put(flat: Tensor, spec: Any, offset: int, value: Tensor) -> None:
    stride = spec.stride or contiguous_stride(spec.shape)
    flat.as_strided(spec.shape, stride, offset).copy_(value)


def send_group(runtime: Runtime, group: Group, flat: Tensor | None) -> None:
    """Replace the group's parameters on every rank by rank 0's ``flat`` (padding included; ``None`` elsewhere)."""
    comms, unit, cuts = runtime.comms, group.unit.name, group.layout.uneven_cuts
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


def _extra_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """What ``get_extra_state`` of the modules gave."""
    return {name: value for name, value in state.items() if name.endswith("_extra_state")}


def _is_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _load_extra_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    for path, module in model.named_modules():
        key = f"{path}._extra_state" if path else "_extra_state"
        if key in state:
            module.set_extra_state(state[key])


# -- ranges, for checkpoints


def owned_extents(model: nn.Module) -> list[tuple[Extent, Tensor]]:
    """What this rank writes to a checkpoint: ranges that cover every element exactly once over the ranks.

    Of the groups along ``dp_replicate``, which hold the same, the first writes.

    Parameters by name, buffers as ``buffer/<name>`` (rank 0's). (``fsdp.optimizer_state`` has those of optimizers.)

    Every tensor is a flat view of live memory: copy before changing the model. Quantized weights are what is read from
    them, in fresh memory.
    """
    runtime = attach.runtime_of(model, "sw.save")
    if runtime.comms.replica:
        return []
    rank = runtime.comms.gather.rank
    found: list[tuple[Extent, Tensor]] = []
    for group in runtime.groups:
        owned, views = group.layout.owned_by_param(rank), group.value_views(group.values())
        for index, piece in enumerate(owned):
            spec = group.layout.params[index]
            if piece.numel == 0 and not (spec.numel == 0 and rank == 0):
                continue
            found.append(extent_of(group, index, spec.name, piece, views[index]))
    if rank == 0:
        for name, buffer in _buffers(model).items():
            flat = buffer.detach().contiguous().view(-1)
            extent = Extent(f"buffer/{name}", tuple(buffer.shape), dtype_name(buffer.dtype), 0, flat.numel())
            found.append((extent, flat))
    return found


def extent_of(group: Group, index: int, name: str, piece: Piece, held: Tensor) -> tuple[Extent, Tensor]:
    """The range ``piece`` of a tensor that is held like parameter ``index``: whole, or this rank's slice of it."""
    spec = group.layout.params[index]
    flat = memory_order(held) if is_dense(held) else held.detach().reshape(-1)
    if not group.row.shards_optimizer:
        flat = flat[piece.start : piece.stop]
    stride = spec.stride
    return Extent(name, spec.shape, dtype_name(held.dtype), piece.start, piece.stop, stride), flat


class HeldValues:
    """Everything that this rank holds of parameters and buffers, as targets to load into.

    They are the live tensors, but for quantized weights, which :meth:`install` makes of what was loaded.

    Attributes:
        extents: This rank's ranges, with the tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        runtime = attach.runtime_of(model, "sw.load")
        self.extents: list[tuple[Extent, Tensor]] = []
        self._flats: list[tuple[Group, Tensor]] = []
        for group in runtime.groups:
            self._flats.append((group, group.values()))
            views = group.value_views(self._flats[-1][1])
            for spec, piece, view in zip(group.layout.params, group.held, views, strict=True):
                extent = Extent(spec.name, spec.shape, spec.dtype, piece.start, piece.stop, spec.stride)
                self.extents.append((extent, memory_order(view)))
        for name, buffer in _buffers(model).items():
            if not buffer.is_contiguous():
                raise StateError(f"buffer {name!r} is not contiguous and cannot be loaded in place.")
            flat = buffer.detach().view(-1)
            extent = Extent(f"buffer/{name}", tuple(buffer.shape), dtype_name(buffer.dtype), 0, flat.numel())
            self.extents.append((extent, flat))

    def install(self) -> None:
        """Everything has been loaded."""
        for group, flat in self._flats:
            group.set_values(flat)
