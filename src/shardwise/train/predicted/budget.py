"""Whether a run fits into the memory of its devices, said before any process starts, and what would make it fit.

The bytes are the planner's, from the model's shape alone. A model whose shape is not known by arithmetic, and a device
whose memory is not known, are not judged.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
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

#: Bytes of a process on a CPU besides tensors: 240 MiB are resident once torch (2.13) and the trainer are loaded.
PROCESS_BYTES = 240 << 20

#: More ranks that are tried, as a multiple of those of the run.
MOST_TIMES = 64


@dataclass(frozen=True, slots=True)
class Device:
    """Where ranks compute.

    Attributes:
        device_type: ``cuda`` or ``cpu``.
        memory_bytes: Memory that one rank can have: of its GPU, or its part of what the machine has available.
    """

    device_type: str
    memory_bytes: int


def check_budget(resolved: RunConfig, device: Device | None) -> None:
    """Refuse a run that its devices cannot hold; ``train.check_memory: false`` lets it try.

    Args:
        resolved: The run.
        device: Its devices; ``None``: not known.

    Raises:
        MemoryBudgetError: It cannot fit. The message has the largest category, and changes with which the run fits.
    """
    if device is None or not resolved.config.train.check_memory or resolved.plan.placements.is_threaded:
        return
    try:
        shape = shape_of(resolved)
        workload = workload_of(resolved)
        found = memory_on(device.device_type, shape, resolved_plan(resolved), workload)
    except (ShardwiseError, ArithmeticError, LookupError):
        return  # a model that no arithmetic knows
    needed = _needed(found, device)
    if needed <= device.memory_bytes:
        return
    name, held = max(found.by_category.items(), key=lambda item: item[1])
    if device.device_type == "cpu" and found.host_bytes > held:
        name, held = "what is offloaded to the host", found.host_bytes
    show = gib if device.device_type == "cuda" else size
    what = "GPU" if device.device_type == "cuda" else "process"
    has = "has" if device.device_type == "cuda" else "can have"
    ranks = resolved.mesh.world_size
    remedies = [f"{words} ({show(bytes_)})" for words, bytes_ in _remedies(resolved, shape, workload, device)]
    advice = f"Fits with: {'; '.join(remedies)}." if remedies else "Nothing tried makes it fit: use a smaller model."
    raise MemoryBudgetError(
        f"{shape.name} under {resolved.plan.strategy} on {ranks} rank{'s' if ranks != 1 else ''} needs"
        f" {show(needed)} on the fullest {what}, which {has} {show(device.memory_bytes)}; the largest part is {name}"
        f" with {show(held)}.\n  {advice}\n"
        "  `shardwise plan` ranks every plan; train.check_memory=false tries this one all the same."
    )


def find_device(num_ranks: int) -> Device | None:
    """The device of each of ``num_ranks`` ranks of this machine; ``None``: its memory is not known."""
    if num_gpus():
        return _gpu()
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None
    return Device("cpu", min(available, _container_bytes() or available) // max(num_ranks, 1))


def _container_bytes() -> int | None:
    """What a container leaves to its processes; ``None``: it sets no limit."""
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text("ascii")) for name in ("max", "current"))
    except (OSError, ValueError):
        return None  # "max" where there is none
    return max(limit - used, 0)


def _gpu() -> Device | None:
    """The smallest GPU, as the driver tells without a context on it."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return Device("cuda", min(int(line) for line in answer.stdout.split()) << 20)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _needed(found: MemoryEstimate, device: Device) -> int:
    if device.device_type == "cpu":
        return found.allocated_bytes + found.host_bytes + PROCESS_BYTES
    return found.device_bytes


@dataclass(frozen=True, slots=True)
class _Change:
    """What is written differently, and what that is to the plan and the workload."""

    words: str
    plan: dict[str, Any]
    work: dict[str, Any]


def _remedies(resolved: RunConfig, shape: ModelShape, workload: Workload, device: Device) -> Iterator[tuple[str, int]]:
    """Changes with which the run fits, and what it then needs: of the plan on these ranks, then more ranks."""
    plan = resolved_plan(resolved)
    zero3: dict[str, Any] = {} if plan.placements.shards_parameters else {"strategy": "zero3"}
    least: dict[str, Any] = {"recompute": "full", "micro_batch": 1}
    together = "zero3, activation_checkpointing=full and micro_batch_size=1"
    changes = [
        _Change("parallel.strategy=zero3", zero3, {}),
        _Change("train.micro_batch_size=1", {}, {"micro_batch": 1}),
        _Change("parallel.activation_checkpointing=full", {}, {"recompute": "full"}),
        _Change("parallel.offload_policy=cpu", {"offload_policy": "cpu"}, {}),
        _Change("parallel.offload_activations=true", {"offload_activations": True}, {}),
        _Change(f"{together} together", zero3, least),
    ]
    fits = False
    for change in changes:
        if not change.plan and all(getattr(workload, name) == value for name, value in change.work.items()):
            continue
        needed = _attempt(replace(workload, **change.work), plan, change.plan, shape, device)
        if needed is not None and needed <= device.memory_bytes:
            fits = True
            yield change.words, needed
    if not fits:
        yield from _last_resort(plan, zero3, replace(workload, **least), shape, device)
    times = 2
    while device.device_type == "cuda" and times <= MOST_TIMES:
        for change in (_Change("", {}, {}), _Change(f" with {together}", zero3, least)):
            larger = replace(workload, global_batch=workload.global_batch * times, **change.work)
            options = {"dp_shard": plan.dp_shard * times, **change.plan}
            needed = _attempt(larger, plan, options, shape, device)
            if needed is not None and needed <= device.memory_bytes:
                yield f"{resolved.mesh.world_size * times} ranks{change.words}", needed
                return
        times *= 2


_NO_PREFETCH = {"forward_prefetch": 0, "backward_prefetch": 0}


def _last_resort(
    plan: ParallelPlan, options: dict[str, Any], workload: Workload, shape: ModelShape, device: Device
) -> Iterator[tuple[str, int]]:
    """What fits with everything that saves memory and goes to the host, the least of it that is enough."""
    words = "zero3, activation_checkpointing=full, micro_batch_size=1"
    for fields in ({"offload_policy": "cpu"}, {"offload_activations": True}, _NO_PREFETCH):
        options = {**options, **fields}
        written = " and ".join(f"{field}={str(value).lower()}" for field, value in fields.items())
        needed = _attempt(workload, plan, options, shape, device)
        if needed is not None and needed <= device.memory_bytes:
            yield f"{words} and {written} together", needed
            return
        words += f", {written}"


def _attempt(
    workload: Workload, plan: ParallelPlan, options: dict[str, Any], shape: ModelShape, device: Device
) -> int | None:
    try:
        return _needed(memory_on(device.device_type, shape, replace(plan, **options), workload), device)
    except ShardwiseError:
        return None
