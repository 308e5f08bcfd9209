"""The peak of tensor bytes on this rank, predicted before the first step and measured in the first steps.

The engine's bytes follow from its layout (``sw.summary(model).footprint``). All other bytes in forward and backward are
found by ``sw.dry_run``, which runs a step of the real engine without values.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.api import summary
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.measure.storage import StorageCount, buffer_bytes
from shardwise.spec.errors import ShardwiseError
from shardwise.spec.memory.eight_bit import eight_bit_bytes
from shardwise.spec.memory.footprint import StateBytes
from shardwise.train.config.resolve import RunConfig
from shardwise.train.control import Control
from shardwise.train.model.build import blank_batch, for_dry_run, objective_of
from shardwise.train.predicted.workload import optimizer_of
from shardwise.weights.state.average import ExponentialMovingAverage


@contextlib.contextmanager
def _active_unit(engine: Engine) -> Iterator[Callable[[], str]]:
    """Yield a function that names the unit whose forward is running, including recomputation in backward."""
    names: list[str] = []

    def begin(name: str, *_call: Any) -> None:
        names.append(name)

    def end(*_call: Any) -> None:
        if names:
            names.pop()

    with contextlib.ExitStack() as stack:
        for unit in engine.units:
            for module in filter(None, (member.module() for member in unit.members)):
                stack.callback(module.register_forward_pre_hook(functools.partial(begin, unit.name)).remove)
                stack.callback(module.register_forward_hook(end, always_call=True).remove)
        yield lambda: names[-1] if names else "backward and update"


@dataclass(slots=True)
class Peak:
    """The peak of tensor bytes."""

    num_bytes: int = 0  # peak bytes, including those at entry
    #: On a CPU: bytes allocated since entry, at the peak, by the unit whose forward allocated them
    by_unit: dict[str, int] = field(default_factory=dict)
    #: On a CPU: ``time.perf_counter`` and live bytes, at entry and after every change
    history: list[tuple[float, int]] = field(default_factory=list)


@contextlib.contextmanager
def peak_of_tensors(device: torch.device, engine: Engine | None = None) -> Iterator[Peak]:
    """Measure the peak in the block; on a CPU also by unit of ``engine``."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        try:
            yield peak
        finally:
            peak.num_bytes = torch.cuda.max_memory_allocated(device)
        return
    count = StorageCount(device.type)
    count.see_all_objects()
    count.history = peak.history = [(time.perf_counter(), count.live_bytes)]
    try:
        with contextlib.ExitStack() as stack:
            if engine is not None:
                count.owner = stack.enter_context(_active_unit(engine))
            stack.enter_context(count)
            # Under a dispatch mode torch refuses fullgraph=True (torchao's AdamW8bit), and runs all else eagerly.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield peak
    finally:
        peak.num_bytes, peak.by_unit = count.peak_bytes, count.peak_by_owner
        count.forget()


def tensor_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on the device."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    count = StorageCount(device.type)
    count.see_all_objects()
    count.forget()
    return count.live_bytes


def predict(
    resolved: RunConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: ExponentialMovingAverage | None,
    *,
    control: Control,
    device: torch.device,
) -> dict[str, int]:
    """Predict bytes by category on the rank with the most; their sum is the predicted peak.

    Offloaded bytes (``host``) count in the peak only if device and host are the same. ``activations`` is missing if the
    model cannot run without values, and for ``data_parallel``, which a dry run does not support.

    Collective:
        One all-gather of small JSON.
    """
    engine = engine_of(model, "predict")
    accumulation = resolved.batch.accumulation
    num_states = _state_bytes(resolved, engine, optimizer)
    num_bytes = summary.predict(engine, optimizer_tensors=num_states, num_microbatches=accumulation).as_dict()
    if device.type == "cuda":
        num_bytes["workspaces"] = 2 * _workspace_bytes(device)  # forward and backward run in different threads
    num_bytes["buffers"] = buffer_bytes(model, device.type)
    if average is not None:
        num_bytes["average"] = average.num_bytes - average.num_host_bytes
        num_bytes["host"] += average.num_host_bytes
    try:
        if not resolved.plan.placements.is_threaded:
            num_bytes |= _run_dry(resolved, control, device)
    except (ShardwiseError, RuntimeError, NotImplementedError, TypeError, AssertionError):
        pass  # a model that cannot run without values
    return max(control.all_json(num_bytes), key=lambda counts: sum(counts.values()))


def _workspace_bytes(device: torch.device) -> int:
    """Return the bytes of torch's cuBLAS workspace for each thread that multiplies, unless it is configured.

    Source: docs.nvidia.com/cuda/cublas, cublasSetWorkspace: 32 MiB from Hopper on; torch's own 4096:2:16:8 KiB before.
    """
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(kib) * int(count) for kib, count in sizes) << 10
    return (32 << 20) if torch.cuda.get_device_capability(device) >= (9, 0) else (8 << 20) + (128 << 10)


def least_checkpoint_bytes(resolved: RunConfig, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return a lower bound of a checkpoint's bytes: trained parameters and optimizer state of this rank's stage."""
    engine, total = engine_of(model, "least_checkpoint_bytes"), 0
    states = _state_bytes(resolved, engine, optimizer)
    for group in engine.groups:
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            if shard.requires_grad:
                num_bytes = spec.numel * shard.dtype.itemsize
                extra = states(spec.name, spec.numel, shard.dtype.itemsize) if callable(states) else states * num_bytes
                total += num_bytes + extra
    return total


def _state_bytes(resolved: RunConfig, engine: Engine, optimizer: torch.optim.Optimizer) -> int | StateBytes:
    """Return the number of state tensors per parameter; for Muon and 8-bit states a function that returns bytes."""
    name = optimizer_of(resolved.config.optimizer, resolved.spec.optimizer)
    if name == "adamw8bit":
        return eight_bit_bytes
    if name != "muon":
        return {"sgd": 0, "sgd-momentum": 1}.get(name, 2)
    matrices = {id(p) for group in optimizer.param_groups if group["kind"] == "muon" for p in group["params"]}
    names = {name for name, p in ignored_of(engine).parameters.items() if id(p) in matrices}
    for group in engine.groups:
        shards = zip(group.layout.params, group.shards, strict=True)
        names |= {spec.name for spec, shard in shards if id(shard) in matrices}
    return lambda name, numel, item: numel * item if name in names else 2 * numel * item + 4


def _run_dry(resolved: RunConfig, control: Control, device: torch.device) -> dict[str, int]:
    """Return the memory categories that only a dry run of a full step can predict, at the peak on this rank."""
    batch, objective, plan, section = resolved.batch, objective_of(resolved), resolved.plan, resolved.config.optimizer
    is_foreign = resolved.spec.optimizer is not None or section.name == "adamw8bit"  # may not run without values
    build, make_optimizer = for_dry_run(resolved)
    with torch.random.fork_rng(devices=[]):
        found = sw.dry_run(
            build,
            plan,
            world_size=control.size,
            rank=control.rank,
            batch=blank_batch(resolved, torch.device("meta")),
            loss_fn=objective.scalar,
            forward=objective.forward,
            backend="nccl" if device.type == "cuda" else "gloo",
            num_microbatches=batch.accumulation
            if plan.pp > 1
            else min(batch.accumulation, 2),  # those in the middle are alike
            optimizer="adamw" if is_foreign else make_optimizer,
            in_backward=section.in_backward,
        )
    return {name: found.bytes_by_category[name] for name in ("gradients", "gathered", "reduce", "activations")}
