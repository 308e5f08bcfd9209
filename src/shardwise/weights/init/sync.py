"""Makes the values of all ranks equal before sharding, so that ranks with different seeds cannot train a mixture."""

from __future__ import annotations

import warnings
from collections.abc import Collection

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_int, check_same, digest_text
from shardwise.comm.digest import Digester
from shardwise.comm.dtype import memory_order
from shardwise.launch.environment import code_versions
from shardwise.spec.errors import ConfigError, StateError
from shardwise.spec.layout import is_dense
from shardwise.weights.init.materialize import become, fill_buffers


def synchronise(
    module: nn.Module,
    parameter_ids: Collection[int] | None,
    comm: Comm,
    *,
    mode: str,
    groups: dict[str, list[str]] | None = None,
    is_deferred: bool = False,
    ignored: Collection[str] = (),
) -> None:
    """Make parameters and buffers of ``module`` equal to rank 0's.

    Args:
        module: The model, not sharded yet.
        parameter_ids: ``id`` of the parameters to compare; ``None`` for all.
        comm: Comm over the ranks that must agree.
        mode: ``"warn"``: units that differ are broadcast, with one warning. ``"error"``: they are refused. ``"rank0"``:
            rank 0's values are broadcast without a comparison; other ranks may have meta tensors.
        groups: Names of the tensors by unit; a unit is compared and broadcast together. ``None``: tensor by tensor.
        is_deferred: Whether meta tensors are initialized later, equal on every rank; then only others are compared.
        ignored: Names of the tensors that are neither compared nor sent. They must have values.

    Collective:
        The layouts are compared first (all-gather of a text), then one hash per unit (all-gather of 16 bytes each);
        units that differ are broadcast from rank 0. All ranks must call.
    """
    every = _tensors(module, parameter_ids)
    _refuse_sparse(every)
    _refuse_meta({name: tensor for name, tensor in every.items() if name in ignored}, comm)
    tensors = {name: tensor for name, tensor in every.items() if name not in ignored}
    _compare_layouts(tensors, comm)
    if is_deferred:
        tensors = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    elif mode == "rank0":
        tensors = _materialize(module, tensors, comm)
        for name, tensor in tensors.items():
            _send(name, tensor, comm)
        return
    else:
        _refuse_meta(tensors, comm)
    if comm.size > 1:
        _compare_values(tensors, comm, mode, groups)


def _compare_values(tensors: dict[str, Tensor], comm: Comm, mode: str, groups: dict[str, list[str]] | None) -> None:
    """Compare hashes over the ranks, and broadcast the units that differ."""
    units = groups or {name: [name] for name in tensors}
    units = {unit: [name for name in names if name in tensors] for unit, names in units.items()}
    moved = torch.zeros(comm.size, len(units), 2, dtype=torch.int64, device=comm.device)
    digester = Digester()
    for index, names in enumerate(units.values()):
        moved[comm.rank, index] = digester.of([tensors[name] for name in names], comm.device)
    comm.all_gather(moved.view(-1), unit="sync").wait()
    digests = moved.cpu()
    differs = (digests != digests[0]).any(dim=2).any(dim=0).tolist()
    odd = [unit for unit, is_odd in zip(units, differs, strict=True) if is_odd]
    if not odd:
        return
    shown = ", ".join(repr(name) for name in odd[:4]) + (f" and {len(odd) - 4} more" if len(odd) > 4 else "")
    if mode == "error":
        raise StateError(
            f"the ranks hold different values for {shown}.\n"
            "  Seed every rank alike, load the same weights everywhere, or set sync='warn' to take rank 0's."
        )
    for unit in odd:
        for name in units[unit]:
            _send(name, tensors[name], comm)
    if comm.rank == 0:
        warnings.warn(
            f"the ranks held different values for {shown}; rank 0's were sent to all. Seed every rank alike to avoid"
            " this.",
            stacklevel=3,
        )


def _tensors(module: nn.Module, parameter_ids: Collection[int] | None) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter_ids is None or id(parameter) in parameter_ids
    }
    return found | dict(module.named_buffers())


def _refuse_sparse(tensors: dict[str, Tensor]) -> None:
    """Refuse sparse buffers; sparse parameters are refused elsewhere."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided:
            raise StateError(
                f"buffer {name!r} of shape {list(tensor.shape)} is {tensor.layout}; only dense buffers can be compared,"
                " sent and saved.\n"
                "  Register its indices and values as buffers and build the sparse tensor in forward, or set it as a"
                " plain attribute (self.name = tensor), which every rank must build alike."
            )


def _compare_layouts(tensors: dict[str, Tensor], comm: Comm) -> None:
    versions = [f"{name} {version}" for name, version in code_versions().items()]
    check_same(
        comm,
        digest_text("\n".join(versions)),
        "the ranks run different programs",
        "Install the same versions on every machine, and start all ranks from the same code.",
        show=lambda: versions,
        error=ConfigError,
    )
    own_lines = [f"{name} {list(t.shape)} {t.dtype} {list(t.stride())}" for name, t in tensors.items()]
    check_same(
        comm,
        digest_text("\n".join(own_lines)),
        "the ranks hold different models",
        "Build the same model, in the same dtype, on every rank.",
        show=lambda: own_lines,
    )


def _refuse_meta(tensors: dict[str, Tensor], comm: Comm) -> None:
    if not tensors:
        return
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    if any(all_gather_int(comm, len(empty))):
        shown = f"{empty[0]!r}" if empty else "a tensor of another rank"
        raise StateError(
            f"{shown} is on the meta device: it has no values to shard.\n"
            "  Give all of it values, or none: sw.deferred_init(build_model), sw.parallelize(..., init=...); or give"
            " the weights on rank 0 and set sync='rank0'."
        )


def _send(name: str, tensor: Tensor, comm: Comm) -> None:
    if tensor.numel() == 0:
        return
    data = tensor.detach()
    flat = memory_order(data) if is_dense(data.shape, data.stride()) else data.contiguous().view(-1)
    travels = flat.view(torch.uint8) if flat.dtype is torch.bool else flat
    comm.broadcast(travels, root=0, unit=f"sync {name}").wait()
    if flat.data_ptr() != data.data_ptr():
        data.copy_(flat.view(data.shape))


def _materialize(module: nn.Module, tensors: dict[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Allocate memory for the meta tensors of ranks other than 0, on the Comm's device."""
    is_bad = comm.rank == 0 and any(tensor.is_meta for tensor in tensors.values())
    if any(all_gather_int(comm, int(is_bad))):
        raise StateError("sync='rank0' needs real weights on rank 0, but some are on the meta device there.")

    def like(tensor: Tensor, _name: str = "") -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=comm.device)

    for parameter in module.parameters():
        if parameter.is_meta:
            become(parameter, like(parameter))
    fill_buffers(module, like)
    all_tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: all_tensors[name] for name in tensors}
