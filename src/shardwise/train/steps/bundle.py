"""What is kept of a step whose loss or gradient was not finite, or whose loss stood out: not a checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from shardwise.spec.errors import StorageError
from shardwise.spec.run_files import ODD_STEPS
from shardwise.train.folder import replace_json
from shardwise.train.saves import random_state
from shardwise.train.steps.unread import ReadStep


def bundle_folder(directory: Path, step: int) -> Path:
    """The folder of the files of all ranks about ``step``."""
    return directory / ODD_STEPS / f"step-{step:08d}"


def write_bundle(directory: Path, rank: int, step: int, problem: str, values: ReadStep) -> None:
    """Write this rank's file, if the disk allows it.

    It holds the samples of each of this rank's microbatches, the losses of all ranks, and the states of this rank's
    random number generators before the step.

    Args:
        directory: The run's folder.
        rank: This rank.
        step: The step, as ``metrics.jsonl`` numbers it.
        problem: What is odd about it.
        values: What was read of the step.
    """
    content: dict[str, Any] = {
        "step": step,
        "rank": rank,
        "problem": problem,
        "losses": {str(other): str(loss) for other, loss in values.losses.items()},
        "grad_norm": str(values.norm),
        "lr": values.step.lr,
        "samples": values.step.samples,
        "random": random_state.described(values.step.generators),
    }
    folder = bundle_folder(directory, step)
    with contextlib.suppress(StorageError, OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(folder / f"rank-{rank:05d}.json", content)
