"""Shared code of the adapters for other projects' trainers: supported plans, optimizers by model, checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.api.save import Optimizers
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.optimizer import engines_of
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan

_DIVIDES_SAMPLES = ("tp", "pp", "cp")


def check_samples(plan: ParallelPlan, trainer: str) -> None:
    """Refuse a plan that divides one sample over ranks, because the trainer gives each rank different samples.

    Raises:
        PlanError: The plan has a ``tp``, ``pp`` or ``cp`` of more than 1.
    """
    for axis in _DIVIDES_SAMPLES:
        _check_degree(axis, getattr(plan, axis), trainer)


def check_axes(model: nn.Module, trainer: str) -> None:
    """Check a parallelized model as :func:`check_samples`.

    Raises:
        PlanError: Its ranks divide the computation of a sample.
    """
    comms = engine_of(model, trainer).comms
    for axis in _DIVIDES_SAMPLES:
        comm = getattr(comms, axis)
        _check_degree(axis, 1 if comm is None else comm.size, trainer)


def _check_degree(axis: str, degree: int, trainer: str) -> None:
    if degree > 1:
        raise PlanError(
            f"{axis}={degree}: {trainer} gives every rank different samples.\n"
            "  Use a data-parallel plan here, or `shardwise train` and sw.train_step for tp, pp and cp."
        )


def check_alone(trainer: str) -> None:
    """Refuse a trainer whose arguments, or whose ``accelerate launch``, make another engine shard the model too.

    Accelerate also sets these variables for its own plugins, when an Accelerator is created.

    Raises:
        PlanError: Another engine is configured.
    """
    for name, engine in (("FSDP", "FSDP"), ("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise PlanError(
                f"ACCELERATE_USE_{name}=true: {engine} would shard the model of {trainer} too.\n"
                f"  Take {engine} out of the trainer's arguments and of the configuration of accelerate, or start the"
                " program with torchrun."
            )


def check_ddp_options(names: Collection[str], strategy: str) -> None:
    """Refuse options of ``DistributedDataParallel``, which is not used here.

    Raises:
        PlanError: There are some.
    """
    if names:
        raise PlanError(
            f"{strategy} got {', '.join(sorted(names))}: DistributedDataParallel is not used here.\n"
            "  Leave them out: layers that a step does not use need no option, and the rest is in sw.ParallelPlan."
        )


def optimizers_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return those ``optimizers`` that update parameters of ``model`` (also flat ones), in the given order.

    Raises:
        StateError: The model is not parallelized.
    """
    engine = engine_of(model, "optimizers_of")
    return [each for each in optimizers if engine in engines_of(each)]


def save_over(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, *, frozen: bool = True
) -> None:
    """Save as ``sw.save``; an existing checkpoint in the folder is kept until the new one is complete.

    Collective:
        As ``sw.save``. All ranks must call.
    """
    world, folder = engine_of(model, "a trainer's checkpoint").comms.world, Path(path)
    part = folder.with_name(f"{folder.name}.new")
    if world.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
    world.barrier()
    sw.save(part, model, optimizer, frozen=frozen)
    if world.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
    world.barrier()
