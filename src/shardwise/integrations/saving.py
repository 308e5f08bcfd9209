"""Checkpoints in folders that a trainer writes again and again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch import nn

import shardwise as sw
from shardwise.api.save import Optimizers
from shardwise.engine.storage.attachment import engine_of


def save_over(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, *, frozen: bool = True
) -> None:
    """As ``sw.save``; a checkpoint that is in the folder already stays as it is until the new one is complete.

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
