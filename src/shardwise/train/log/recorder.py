"""Everywhere that rank 0 writes the numbers of a step: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import EVENTS, METRICS, WANDB_ID
from shardwise.train.config.sections import Config
from shardwise.train.folder import replace_text
from shardwise.train.log.metrics import MetricsFile
from shardwise.train.record import Record

_SHOWN = (
    "loss", "eval_loss", "grad_norm", "lr", "loss_scale", "tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes",
    "collective_bytes",
)  # fmt: skip


def check_extras(config: Config) -> None:
    """Refuse a run that asks for a package which is not installed.

    Raises:
        ConfigError: Names the package.
    """
    for name, wanted in (("tensorboard", config.log.tensorboard is True), ("wandb", config.log.wandb)):
        if wanted and importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.{name}=true, but {name} is not installed.\n  Install shardwise[{name}].")


def _wandb_id(directory: Path) -> str:
    """The run's name at Weights & Biases, chosen once and kept in its folder: a resumed run goes on as the same one.

    Raises:
        StorageError: It cannot be kept.
    """
    path = directory / WANDB_ID
    known = os.environ.get("WANDB_RUN_ID") or (path.read_text("utf-8").strip() if path.is_file() else "")
    chosen = known or secrets.token_hex(6)
    replace_text(path, chosen + "\n")
    return chosen


class Recorder:
    """All places that rank 0 writes a step's numbers to."""

    def __init__(self, directory: Path, config: Config, step: int) -> None:
        """Open them; of an earlier run, what comes after ``step`` is dropped from metrics.jsonl."""
        self._file = MetricsFile(directory / METRICS, keep_steps=step)
        self._board: Any = None
        self._wandb: Any = None
        is_wanted = config.log.tensorboard
        if is_wanted is True or (is_wanted == "auto" and importlib.util.find_spec("tensorboard") is not None):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / EVENTS), purge_step=step + 1 if step else None)
        if config.log.wandb:
            import wandb  # pyrefly: ignore[missing-import]

            self._wandb = wandb.init(
                dir=str(directory),
                id=_wandb_id(directory),
                name=directory.name,
                config=config.model_dump(mode="json"),
                resume="allow",
            )

    def step(self, record: Record) -> None:
        """Write one step."""
        self._file.write(record)
        values = {name: getattr(record, name) for name in _SHOWN if getattr(record, name) is not None}
        self.send(record.step, values | record.values)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values of a step to TensorBoard and Weights & Biases."""
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def close(self) -> None:
        """Write what is buffered and close."""
        self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
