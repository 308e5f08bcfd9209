"""Model FLOPs utilization: which part of the devices' dense peak a run's tokens take."""

from __future__ import annotations

import collections
import math

import torch
from torch import nn

import shardwise as sw
from shardwise.cost.hardware import gpu_of_device
from shardwise.train.config.resolve import RunConfig
from shardwise.train.predicted.workload import flops_per_token


def mfu_of_token(resolved: RunConfig, model: nn.Module, device: torch.device, num_ranks: int) -> float | None:
    """The share of all devices' peaks that one token a second takes."""
    peak, needed = _peak_flops(model, device), flops_per_token(resolved)
    return None if peak is None or needed is None else needed / (peak * num_ranks)


def _peak_flops(model: nn.Module, device: torch.device) -> float | None:
    """The device's dense peak for the dtype that the model's matrix products run in."""
    if device.type != "cuda":
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), product_dtype(model), uses_tf32=uses_tf32)


def product_dtype(model: nn.Module) -> str:
    """Short name of the dtype in which most of a parallelized model's weights of two or more dimensions compute."""
    counts: collections.Counter[str] = collections.Counter()
    for unit in sw.summary(model).units:
        for group in unit.groups:
            shapes = [shape for _, shape, _ in group.parameters]
            counts[group.compute_dtype] += sum(math.prod(shape) for shape in shapes if len(shape) >= 2)
    return max(counts, key=counts.__getitem__, default="fp32")


def peak_flops(device_name: str, dtype: str, *, uses_tf32: bool) -> float | None:
    """Dense peak in FLOP/s of a device for products in ``dtype`` (a short name); ``None`` where it is unknown.

    Variants of a device (PCIe, NVL) have names of their own. With ``uses_tf32`` products in fp32 go to TF32 units.
    """
    gpu = gpu_of_device(device_name)
    if gpu is None or dtype not in {"bf16", "fp16", "fp32"}:
        return None
    if dtype == "fp32" and uses_tf32 and "tf32" in gpu.peaks:
        return gpu.peaks["tf32"]
    return gpu.peaks.get(dtype)
