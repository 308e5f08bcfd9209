"""The time of a step that the planner predicts for a run, where it knows the model and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import shardwise as sw
from shardwise.cost.hardware import Cluster, gpu_of_device
from shardwise.cost.workload import Workload
from shardwise.launch.world import read_world
from shardwise.planner import Estimate, estimate
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.policies import RecomputePolicy, recompute_policy
from shardwise.spec.text import printable
from shardwise.train.resolve import RunConfig

if TYPE_CHECKING:
    import torch

    from shardwise.spec.shape import ModelShape


class PredictedStep(NamedTuple):
    """The predicted time of a step.

    Attributes:
        seconds: ``None`` where the planner does not know the device, the model, or an option of the plan.
        reason: Of which device the prediction is, or why there is none.
        made: The whole prediction.
    """

    seconds: float | None
    reason: str
    made: Estimate | None = None


def predict_step(resolved: RunConfig, device: torch.device, world_size: int) -> PredictedStep:
    """Predict the time of a step on these devices."""
    try:
        gpu = resolved.config.log.hardware or _known_device(device)
        made = estimate(_shape(resolved), resolved.plan, _cluster(gpu, world_size), _workload(resolved))
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


def _shape(resolved: RunConfig) -> ModelShape:
    source = resolved.model if resolved.model is not None else resolved.config.model.hf
    if source is None:
        raise ConfigError("the shape of this model is not known")
    return sw.ModelShape.from_config(source)


def _workload(resolved: RunConfig) -> Workload:
    config, batch, plan = resolved.config, resolved.batch, resolved.plan
    precision = plan.precision.param_dtype or "fp32"
    return Workload(
        seq_len=resolved.seq_len,
        global_batch=batch.total,
        micro_batch=batch.micro,
        precision=precision,
        optimizer=config.optimizer.name,
        recompute=_recompute(plan.recompute),
        compile=bool(plan.compile),
        in_backward=config.optimizer.in_backward,
    )


def _recompute(policy: RecomputePolicy | None) -> str:
    for word in ("full", "selective"):
        if policy == recompute_policy(word):
            return word
    if policy is not None:
        raise ConfigError("times are not known for this recomputation; they are for none, selective and full")
    return "none"
