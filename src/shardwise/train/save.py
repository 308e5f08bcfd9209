"""Checkpoints of a run: writing, pointing at the newest, letting go of old ones, and taking a run up again."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import CHECKPOINTS, open_checkpoint, publish_latest, retain, step_directory
from shardwise.optim.average import ExponentialMovingAverage
from shardwise.spec.errors import CheckpointError, StorageError
from shardwise.train import random_state
from shardwise.train.control import Control


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        saved_step: The newest step that has been saved, 0 for none.
        failures: One line for each save that the disk refused.
    """

    def __init__(self, run_dir: Path, *, run_id: str, keep: int, control: Control, device: torch.device) -> None:
        self.saved_step = 0
        self.failures: list[str] = []
        self._run_dir, self._run_id, self._keep = run_dir, run_id, keep
        self._control, self._device = control, device
        self._known_good: list[Path] = []

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: ExponentialMovingAverage | None = None,
        *,
        step: int,
        state: dict[str, Any],
    ) -> str | None:
        """Save a step, publish it, and remove what is older than the kept ones.

        A disk that refuses does not end the run: the earlier checkpoints stay, and the failure is counted.

        Returns:
            What went wrong, for printing; ``None`` where nothing did.

        Collective:
            Those of ``sw.save``, and small JSON. All ranks must call in the same order.
        """
        path = step_directory(self._run_dir, step)
        if self.saved_step == step:
            return None
        held = {**state, "step": step, "run_id": self._run_id}
        own = {"random": random_state.capture(self._device)}
        try:
            sw.save(path, model, optimizer, state=held, average=average, rank_state=own)
            refused = self._control.on_first(lambda: self._publish(path))
        except StorageError as error:
            kept = f"step {self.saved_step} is kept" if self.saved_step else "there is no earlier checkpoint"
            self.failures.append(f"step {step}: {str(error).splitlines()[0]}")
            return f"WARNING: step {step} was not saved; {kept}. {error}"
        self.saved_step = step
        return "\n".join(f"WARNING: checkpoint {line}" for line in refused) or None

    def load(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: ExponentialMovingAverage | None = None,
    ) -> dict[str, Any]:
        """Fill model, optimizer and average from a checkpoint and return its state.

        Raises:
            CheckpointError: It is damaged, or of another model or optimizer.
        """
        state = sw.load(path, model, optimizer, average=average)
        if not isinstance(state.get("step"), int) or not isinstance(state.get("progress"), dict):
            raise CheckpointError(
                f"{path} was not saved by `shardwise train`: it has no step or progress.\n  Load it with sw.load()."
            )
        self.saved_step = state["step"] if path.parent.parent.absolute() == self._run_dir.absolute() else 0
        return state

    def set_aside_later(self, path: Path, step: int) -> list[str]:
        """Rename checkpoints of this run that come after the one it continues from: their steps are made again.

        Only rank 0 calls this. Nothing is deleted; ``LATEST`` points to ``path`` afterwards where that is the run's.

        Raises:
            StorageError: A folder cannot be renamed.
        """
        folder = (self._run_dir / CHECKPOINTS).absolute()
        later = [held for held in folder.glob("step-*") if held.name[5:].isdecimal() and int(held.name[5:]) >= step]
        later = [held for held in sorted(later) if held != path.absolute()]
        try:
            for held in later:
                held.rename(held.with_name(f"superseded-{held.name}-{secrets.token_hex(4)}"))
        except OSError as error:
            raise StorageError(f"{error.filename} cannot be renamed: {error.strerror}.\n  Move it away.") from None
        if later and path.absolute().parent == folder:
            publish_latest(self._run_dir, path)
        return [f"{held.name} is set aside as superseded-{held.name}-*" for held in later]

    def _publish(self, path: Path) -> list[str]:
        publish_latest(self._run_dir, path)
        open_checkpoint(path).check_files()
        result = retain(self._run_dir, self._keep, known_good=self._known_good, run_id=self._run_id)
        self._known_good = list(result.good)
        return [f"{name.name}: {reason}" for name, reason in result.refused]
