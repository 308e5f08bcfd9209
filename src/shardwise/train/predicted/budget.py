"""Checks before any process starts whether a run fits into the memory of its devices, and what would make it fit.

The bytes are the planner's, from the model's shape alone. Models of unknown shape, and devices of unknown memory, are
not checked.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.cost.workload import Workload
from shardwise.launch.process import num_gpus
from shardwise.planner.explain import gib
from shardwise.planner.memory import MemoryEstimate, memory_on
from shardwise.spec.errors import MemoryBudgetError, ShardwiseError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape
from shardwise.spec.text import size
from shardwise.train.config.resolve import RunConfig
from shardwise.train.predicted.workload import resolved_plan, shape_of, workload_of

#: Bytes of a CPU process apart from tensors: 240 MiB are resident after torch (2.13) and the trainer are loaded.
PROCESS_BYTES = 240 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a rank."""

    device_type: str  # ``cuda`` or ``cpu``
    memory_bytes: int  # of its GPU, or its share of the machine's available memory


def check_budget(resolved: RunConfig, device: Device | None) -> None:
    """Refuse a run that does not fit into its devices' memory, unless ``train.check_memory`` is false."""
    if device is None or not resolved.config.train.check_memory or resolved.plan.placements.is_threaded:
        return
    try:
        shape = shape_of(resolved)
        workload = workload_of(resolved, shape)
        found = memory_on(device.device_type, shape, resolved_plan(resolved), workload)
    except (ShardwiseError, ArithmeticError, LookupError):
        return  # the model's shape is not known
    needed = _needed_bytes(found, device)
    if needed <= device.memory_bytes:
        return
    name, num_bytes = max(found.by_category.items(), key=lambda item: item[1])
    if device.device_type == "cpu" and found.host_bytes > num_bytes:
        name, num_bytes = "what is offloaded to the host", found.host_bytes
    show = gib if device.device_type == "cuda" else size
    what = "GPU" if device.device_type == "cuda" else "process"
    has = "has" if device.device_type == "cuda" else "can have"
    ranks = resolved.mesh.world_size
    remedies = [f"{words} ({show(bytes_)})" for words, bytes_ in _remedies(resolved, shape, workload, device)]
    advice = f"Fits with: {'; '.join(remedies)}." if remedies else "Nothing tried makes it fit: use a smaller model."
    raise MemoryBudgetError(
        f"{shape.name} under {resolved.plan.strategy} on {ranks} rank{'s' if ranks != 1 else ''} needs"
        f" {show(needed)} on the fullest {what}, which {has} {show(device.memory_bytes)}; the largest part is {name}"
        f" with {show(num_bytes)}.\n  {advice}\n"
        "  `shardwise plan` ranks every plan; train.check_memory=false tries this one all the same."
    )


def find_device(num_ranks: int) -> Device | None:
    """Return the device of each of ``num_ranks`` ranks on this machine; ``None`` if its memory is unknown."""
    if num_gpus():
        return _gpu()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
    return Device("cpu", min(available, _container_bytes() or available) // max(num_ranks, 1))


def _container_bytes() -> int | None:
    """Return the free memory of this container; ``None`` if it has no limit."""
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii")) for name in ("max", "current"))
    except (OSError, ValueError):
        return None  # the content is "max" if there is no limit
    return max(limit - used, 0)


def _gpu() -> Device | None:
    """Return the smallest GPU, by asking the driver without creating a context."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return Device("cuda", min(int(line) for line in answer.stdout.split()) << 20)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _needed_bytes(found: MemoryEstimate, device: Device) -> int:
    if device.device_type == "cpu":
        return found.allocated_bytes + found.host_bytes + PROCESS_BYTES
    return found.device_bytes


def _remedies(resolved: RunConfig, shape: ModelShape, workload: Workload, device: Device) -> list[tuple[str, int]]:
    """Return changes with which the run fits, and the bytes it then needs; first on these ranks, then on more."""
    plan = resolved_plan(resolved)
    attempt = functools.partial(_attempt, shape, plan, workload, device)
    zero3: dict[str, Any] = {} if plan.placements.shards_parameters else {"strategy": "zero3"}
    least: dict[str, Any] = {"recompute": "full", "micro_batch": 1}
    together = "zero3, activation_checkpointing=full and micro_batch_size=1"
    changes: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("parallel.strategy=zero3", zero3, {}),
        ("train.micro_batch_size=1", {}, {"micro_batch": 1}),
        ("parallel.activation_checkpointing=full", {}, {"recompute": "full"}),
        ("parallel.offload_policy=cpu", {"offload_policy": "cpu"}, {}),
        ("parallel.offload_activations=true", {"offload_activations": True}, {}),
        (f"{together} together", zero3, least),
    ]
    found = [
        (words, needed)
        for words, options, work in changes
        if options or any(getattr(workload, name) != value for name, value in work.items())
        if (needed := attempt(options, **work)) is not None
    ]
    options, words = zero3, "zero3, activation_checkpointing=full, micro_batch_size=1"
    for fields in _HOST if not found else ():  # the first combination with host memory that fits
        options = {**options, **fields}
        written = " and ".join(f"{field}={str(value).lower()}" for field, value in fields.items())
        if (needed := attempt(options, **least)) is not None:
            found.append((f"{words} and {written} together", needed))
            break
        words += f", {written}"
    tried = itertools.product(
        [1 << power for power in range(1, 7)], (("", {}, {}), (f" with {together}", zero3, least))
    )
    for times, (words, options, work) in tried if device.device_type == "cuda" else ():
        needed = attempt({"dp_shard": plan.dp_shard * times, **options}, times=times, **work)
        if needed is not None:
            return [*found, (f"{resolved.mesh.world_size * times} ranks{words}", needed)]
    return found


_HOST: tuple[dict[str, Any], ...] = (
    {"offload_policy": "cpu"},
    {"offload_activations": True},
    {"forward_prefetch": 0, "backward_prefetch": 0},
)


def _attempt(
    shape: ModelShape,
    plan: ParallelPlan,
    workload: Workload,
    device: Device,
    options: dict[str, Any],
    *,
    times: int = 1,
    **work: Any,
) -> int | None:
    """Return the bytes with changed options on ``times`` as many ranks; ``None`` if that does not fit either."""
    changed = replace(workload, global_batch=workload.global_batch * times, **work)
    try:
        needed = _needed_bytes(memory_on(device.device_type, shape, replace(plan, **options), changed), device)
    except ShardwiseError:
        return None
    return needed if needed <= device.memory_bytes else None
