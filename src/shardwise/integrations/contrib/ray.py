"""Checkpoints in Ray Train.

Tested with two workers on the CPUs of one machine. It has never run on a GPU, on several machines, or with storage
other than a file system.

::

    from shardwise.integrations.contrib.ray import report, restore

    def train(config):  # what TorchTrainer calls on every worker
        model = sw.parallelize(build().to(ray.train.torch.get_device()), sw.ParallelPlan(strategy="zero3"))
        optimizer = torch.optim.AdamW(model.parameters())
        state = restore(model, optimizer) or {"step": 0}
        for step in range(state["step"], config["steps"]):
            ...
            report({"loss": loss.item()}, model, optimizer, state={"step": step + 1})

The workers of a ``TorchTrainer`` have a process group, which ``sw.parallelize`` uses; ``ray.train.torch.prepare_model``
is not called.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train  # pyrefly: ignore[missing-import]
import ray.train.collective  # pyrefly: ignore[missing-import]
import torch
from ray.train import Checkpoint, CheckpointUploadMode  # pyrefly: ignore[missing-import]
from torch import nn

import shardwise as sw
from shardwise.spec.errors import CheckpointError

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def report(
    metrics: dict[str, Any],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    state: dict[str, Any] | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> None:
    """Save a checkpoint and pass it to ``ray.train.report`` with these metrics.

    All workers write into one folder below the run's storage path, where the checkpoint stays: nothing is copied. Ray
    removes old checkpoints by its ``CheckpointConfig(num_to_keep=...)``.

    Args:
        metrics: As for ``ray.train.report``.
        model: A parallelized model.
        optimizer: As for ``sw.save``.
        state: As for ``sw.save``; returned by :func:`restore`.
        scratch: If the storage path is not a file system (``s3://...``): a folder that all workers share. The
            checkpoint is written there, rank 0 uploads it, and Ray removes the local copy.

    Collective:
        As ``sw.save``. All workers must call.

    Raises:
        CheckpointError: The storage path is not a file system and ``scratch`` is missing; or as ``sw.save``.
    """
    context = ray.train.get_context()
    storage = context.get_storage()
    if scratch is None and storage.storage_filesystem.type_name != "local":
        raise CheckpointError(
            f"report(): the run's storage is {storage.storage_filesystem.type_name!r}, no file system.\n"
            "  Pass scratch=FOLDER, a folder that all workers see; Ray uploads the checkpoint from there."
        )
    now = f"checkpoint_{dt.datetime.now(dt.UTC):%Y-%m-%d_%H-%M-%S.%f}"
    name = ray.train.collective.broadcast_from_rank_zero(now)  # a restarted worker group uses a new name
    folder = sw.save(Path(scratch or storage.experiment_fs_path, name), model, optimizer, state=state)
    if scratch is None:
        mode, is_reporting = CheckpointUploadMode.NO_UPLOAD, True
    else:
        mode, is_reporting = CheckpointUploadMode.SYNC, context.get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(folder) if is_reporting else None,
        checkpoint_dir_name=name,
        checkpoint_upload_mode=mode,
        delete_local_checkpoint_after_upload=scratch is not None,
    )


def restore(
    model: nn.Module, optimizer: Optimizers | None = None, checkpoint: Checkpoint | None = None
) -> dict[str, Any] | None:
    """Fill a model and its optimizer from a reported checkpoint of any number of workers and any strategy.

    Args:
        model: A parallelized model.
        optimizer: As for ``sw.load``.
        checkpoint: Another run's checkpoint (``result.checkpoint``), used if this run has none yet, as it has after Ray
            has restarted its workers. A remote one is downloaded, once for each machine.

    Returns:
        The ``state`` given to :func:`report`; ``None`` if there is no checkpoint yet.

    Collective:
        As ``sw.load``. All workers must call.

    Raises:
        CheckpointError: As ``sw.load``.
    """
    found = ray.train.get_checkpoint() or checkpoint
    if found is None:
        return None
    with found.as_directory() as folder:
        return sw.load(folder, model, optimizer)
