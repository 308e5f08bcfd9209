"""The planner's prediction of a run's step, made before the first step, and the MFU of a step."""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import torch
from torch import nn

import shardwise as sw
from shardwise.cost.hardware import Cluster, gpu_of_device
from shardwise.launch.world import read_world
from shardwise.planner import Estimate, estimate
from shardwise.planner.estimate import simulated, simulated_spans
from shardwise.planner.memory import memory_on
from shardwise.sim.step import SimulatedStep
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.text import first_line, printable
from shardwise.train.config.resolve import RunConfig
from shardwise.train.predicted.workload import flops_per_step, resolved_plan, shape_of, workload_of


class PredictedStep(NamedTuple):
    """The predicted time of a step."""

    seconds: float | None  # ``None`` if the planner does not know the device, the model, or an option of the plan
    reason: str  # the device of the prediction, or why there is none
    estimate: Estimate | None = None  # the full prediction


def predict_step(resolved: RunConfig, device: torch.device, world_size: int) -> PredictedStep:
    """Predict the time of a step on these devices."""
    try:
        gpu = resolved.config.log.hardware or _known_device(device)
        cluster = Cluster(gpu=gpu, num_gpus=world_size, gpus_per_node=read_world().ranks_per_machine or world_size)
        shape = shape_of(resolved)
        result = estimate(shape, resolved.plan, cluster, workload_of(resolved, shape))
    except ShardwiseError as error:
        return PredictedStep(None, first_line(error))
    name = result.cluster.device.name
    return PredictedStep(result.step_time_s, f"{name}: {result.reason}" if result.fits else name, result)


def _known_device(device: torch.device) -> str:
    if device.type != "cuda":
        raise ConfigError(
            "this machine is not measured: run `shardwise calibrate --out FILE` and set log.hardware=FILE"
        )
    name = torch.cuda.get_device_name(device)
    gpu = gpu_of_device(name)
    if gpu is None:
        raise ConfigError(f"{name} is not known: run `shardwise calibrate --out FILE` and set log.hardware=FILE")
    return gpu.name


def describe(resolved: RunConfig, device_type: str, step: PredictedStep) -> dict[str, Any]:
    """Return the content of predicted.json: memory and time of a step, or why they are unknown (``reason``)."""
    return _memory(resolved, device_type) | _time(step)


def _memory(resolved: RunConfig, device_type: str) -> dict[str, Any]:
    """Return ``memory_timeline``: the moments of a step, with name and bytes by category on the fullest rank."""
    try:
        shape = shape_of(resolved)
        found = memory_on(device_type, shape, resolved_plan(resolved), workload_of(resolved, shape))
    except (ShardwiseError, ArithmeticError, LookupError) as error:
        lines = printable(error, is_block=True).splitlines()
        return {"memory_reason": lines[0] if lines else "the planner does not know this model"}
    return {"memory_timeline": [[name, dict(num_bytes)] for name, num_bytes in found.timeline]}


def _time(step: PredictedStep) -> dict[str, Any]:
    """Return seconds by category, and the streams' activity: ``spans`` of stream, begin, end, unit."""
    found = step.estimate
    if found is None:
        return {"reason": step.reason}
    values = {
        "device": found.cluster.device.name,
        "step_time_s": found.step_time_s,
        "by_category": dict(found.time.by_category),
        "sent_bytes": sum(found.time.sent_bytes.values()) or None,  # unknown on a calibrated machine
    }
    try:
        drawn = simulated(found)
    except (ShardwiseError, ArithmeticError, LookupError) as error:
        return values | {"reason": first_line(error)}
    if not isinstance(drawn, SimulatedStep):
        return values | {"reason": "inside the stages of a pipeline streams are not drawn"}
    spans, note = simulated_spans(drawn)
    return values | {"spans": [list(span) for span in spans], "note": note}


def mfu_of_step(resolved: RunConfig, model: nn.Module, device: torch.device, num_ranks: int) -> float | None:
    """Return the model FLOPs utilization (MFU) of a step that takes one second; ``None`` if unknown."""
    if device.type != "cuda":
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    peak = peak_flops(torch.cuda.get_device_name(device), product_dtype(model), uses_tf32=uses_tf32)
    needed = flops_per_step(resolved)
    return None if peak is None or needed is None else needed / (peak * num_ranks)


def product_dtype(model: nn.Module) -> str:
    """Return the dtype name in which most elements of weights with two or more dimensions are used."""
    counts: collections.Counter[str] = collections.Counter()
    for unit in sw.summary(model).units:
        for group in unit.groups:
            shapes = [shape for _, shape, _ in group.parameters]
            counts[group.compute_dtype] += sum(math.prod(shape) for shape in shapes if len(shape) >= 2)
    return max(counts, key=counts.__getitem__, default="fp32")


def peak_flops(device_name: str, dtype: str, *, uses_tf32: bool) -> float | None:
    """Return a device's dense peak in FLOP/s for matrix products in ``dtype`` (a short name); ``None`` if unknown.

    Variants of a device (PCIe, NVL) have separate names. With ``uses_tf32`` products in fp32 run on TF32 units.
    """
    gpu = gpu_of_device(device_name)
    if gpu is None or dtype not in {"bf16", "fp16", "fp32"}:
        return None
    if dtype == "fp32" and uses_tf32 and "tf32" in gpu.peaks:
        return gpu.peaks["tf32"]
    return gpu.peaks.get(dtype)
