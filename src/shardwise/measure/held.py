"""The bytes that an engine and its optimizers hold, counted: what ``spec.memory.footprint`` says by arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.optim.flat_parameters import group_of


def held_bytes(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, int]:
    """Bytes of this rank's distinct storages, by category.

    Returns:
        ``parameters`` (what optimizers update, and what strategies keep whole), ``gradients`` (``.grad`` and sums that
        wait), ``optimizer`` (of ``optimizers``), ``gathered`` (slots), ``reduce`` (buffers in which gradients are
        collected and received) and ``host`` (of the first three, what is offloaded).
    """
    seen: set[int] = set()

    def take(tensors: Iterable[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:  # noqa: SLF001 - the storage's identity; it has no public name
                seen.add(storage._cdata)  # noqa: SLF001
                total += storage.nbytes()
        return total

    groups, ignored = list(engine.groups), engine.ignored.parameters.values()
    offloaded = [group for group in groups if group.offload is not None]
    state: dict[bool, list[Tensor]] = {True: [], False: []}  # of what is offloaded, and of the rest
    for parameter, held in (item for optimizer in optimizers for item in optimizer.state.items()):
        owner = group_of(parameter)
        is_offloaded = owner is not None and owner.offload is not None
        state[is_offloaded] += [value for value in held.values() if isinstance(value, Tensor)]
    stages = engine.transfers.stages if engine.transfers is not None else ()
    host = take([*state[True], *(t for g in offloaded for t in (g.master, *g.gradient.home_buffers))])
    return {
        "parameters": take(t for group in groups for t in (group.master, group.replica, group.resident))
        + take(ignored),
        "gradients": take(tensor for group in groups for tensor in group.gradient.held_buffers)
        + take(parameter.grad for parameter in ignored),
        "optimizer": take(state[False]),
        "gathered": take([*(slot.buffer for slot in engine.slots.slots), *stages])
        + take(group.inner.buffer for group in groups if group.inner is not None)
        + engine.packed.total_bytes,
        "reduce": engine.gradients.total_bytes + sum(comm.held_bytes for comm in engine.comms),
        "host": host,
    }
