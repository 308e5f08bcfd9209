"""Bytes that an engine holds and sends, counted over a few steps of a model built anew. Nothing here is timed."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

import shardwise as sw
from bench.compare.engine import Engine, Workload
from bench.compare.request import OURS, Entrant, parse
from shardwise.api import summary
from shardwise.engine.storage.attachment import engine_of
from shardwise.measure.storage import StorageCount
from shardwise.train.model.build import TokenBatch


class TensorCount(StorageCount):
    """Also looks inside tensor subclasses (DTensor)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # the subclass computes with plain tensors, and those come here
        return super().__torch_dispatch__(func, types, args, kwargs)

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` once, or those of the tensors that it is made of."""
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self.see(getattr(tensor, name))
            return
        super().see(tensor)


#: Steps to the steady state, and steps of it, under the count.
SETTLE_STEPS, COUNTED_STEPS = 2, 2
AUDIT_STEPS = SETTLE_STEPS + COUNTED_STEPS


def audit(entrant: Entrant, workload: Workload, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The peak of tensors; of our engine also what it sends, and both as the formulas have them.

    Args:
        entrant: Engine and strategy.
        workload: What is trained.
        batches: At least ``AUDIT_STEPS`` of this rank.

    Collective:
        That of the steps. All of the entrant's ranks must call.
    """
    device = workload.device
    result: dict[str, Any] = {"collectives": None, "predicted": None, "activation_bytes": None}
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with TensorCount("cpu") if device.type == "cpu" else contextlib.nullcontext() as count:
        engine = Engine(entrant, workload)
        for batch in batches[:SETTLE_STEPS]:
            engine.step(batch)
        if count is None:
            torch.cuda.reset_peak_memory_stats(device)
        else:
            count.begin_peak()
        for batch in batches[SETTLE_STEPS:AUDIT_STEPS]:
            engine.step(batch)
        if count is None:
            result["peak_tensor_bytes"] = torch.cuda.max_memory_allocated(device)
        else:
            result["peak_tensor_bytes"] = count.peak_bytes
            count.forget()
    if entrant.is_threaded:
        result |= _of_replicas(engine, batches[0])
    elif entrant.engine == OURS:
        result |= _of_ours(engine, batches[0])
        result |= _run_dry(entrant, workload, batches[0])
    del engine
    gc.collect()
    return result


def _of_ours(engine: Engine, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Collectives of one step, and what follows from the layout alone."""
    with sw.record_collectives(engine.model) as events:
        engine.step(batch)
    runtime = engine_of(engine.model, "compare")
    recorded = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]
    trace = [tuple(collective) for collective in summary.predict_trace(runtime)]
    found = sw.summary(engine.model)
    return {
        "collectives": _by_kind((kind, sent) for kind, _, sent, _ in recorded),
        "predicted_collectives": _by_kind((kind, sent) for kind, _, sent, _ in trace),
        "trace_is_predicted": recorded == trace,
        "predicted": found.footprint.as_dict(),
        "num_units": len(found.units) - 1,
    }


def _of_replicas(engine: Engine, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The exchanges of one step between the devices of one process. No formula says what replicas hold."""
    with sw.record_collectives(engine.model) as events:
        engine.step(batch)
    exchanges = [event for event in events if event.axis == "devices"]
    return {"collectives": _by_kind((f"{event.kind} {event.unit}", event.sent_bytes) for event in exchanges)}


def _run_dry(entrant: Entrant, workload: Workload, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The bytes that the engine holds at the peak of a step."""
    plan, meta = parse(entrant.strategy).applied_to(workload.plan), torch.device("meta")
    predicted = sw.dry_run(
        functools.partial(workload.model, meta),
        plan,
        world_size=torch.distributed.get_world_size(),
        rank=torch.distributed.get_rank(),
        batch=TokenBatch(*batch),
        loss_fn=workload.objective.loss_fn,
        forward=workload.objective.forward,
    ).bytes_by_category
    return {"predicted": predicted, "activation_bytes": predicted.pop("activations")}


def _by_kind(events: Iterable[tuple[str, int]]) -> dict[str, dict[str, int]]:
    sent: dict[str, dict[str, int]] = {}
    for kind, num_bytes in events:
        entry = sent.setdefault(kind, {"count": 0, "sent_bytes": 0})
        entry["count"] += 1
        entry["sent_bytes"] += num_bytes
    return sent
