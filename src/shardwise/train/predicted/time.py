"""The time of a step that the planner predicts for a run, where it knows the model and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.cost.hardware import Cluster, gpu_of_device
from shardwise.launch.world import read_world
from shardwise.planner import Estimate, estimate
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.text import printable
from shardwise.train.config.resolve import RunConfig
from shardwise.train.predicted.workload import shape_of, workload_of

if TYPE_CHECKING:
    import torch


class PredictedStep(NamedTuple):
    """The predicted time of a step."""

    seconds: float | None  # ``None`` where the planner does not know the device, the model, or an option of the plan
    reason: str  # of which device the prediction is, or why there is none
    made: Estimate | None = None  # the whole prediction


def predict_step(resolved: RunConfig, device: torch.device, world_size: int) -> PredictedStep:
    """Predict the time of a step on these devices."""
    try:
        gpu = resolved.config.log.hardware or _known_device(device)
        made = estimate(shape_of(resolved), resolved.plan, _cluster(gpu, world_size), workload_of(resolved))
    except ShardwiseError as error:
        return PredictedStep(None, printable(str(error).splitlines()[0]))
    name = made.cluster.device.name
    return PredictedStep(made.step_time_s, f"{name}: {made.reason}" if made.fits else name, made)


def _known_device(device: torch.device) -> str:
    import torch

    if device.type != "cuda":
        raise ConfigError(
            "this machine is not measured: run `shardwise calibrate --out FILE` and set log.hardware=FILE"
        )
    name = torch.cuda.get_device_name(device)
    gpu = gpu_of_device(name)
    if gpu is None:
        raise ConfigError(f"{name} is not known: run `shardwise calibrate --out FILE` and set log.hardware=FILE")
    return gpu.name


def _cluster(gpu: str, world_size: int) -> Cluster:
    return Cluster(gpu=gpu, num_gpus=world_size, gpus_per_node=read_world().ranks_per_machine or world_size)
