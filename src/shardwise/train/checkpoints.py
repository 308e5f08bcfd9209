"""Checkpoints of a run: which one to continue from, whether the configuration allows it, writing and keeping them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import CHECKPOINTS, find_latest, open_checkpoint, publish_latest, retain, step_directory
from shardwise.spec.errors import CheckpointError, ConfigError, StorageError
from shardwise.spec.text import aligned, printable, similar
from shardwise.state.average import ExponentialMovingAverage
from shardwise.train import random_state
from shardwise.train.config import Config
from shardwise.train.control import Control

#: Keys that may differ, and what may where ``--set`` asks for it: a change in a file may be an oversight.
_FREE = (
    "train.steps",
    "train.eval_every",
    "train.eval_batches",
    "train.check_memory",
    "log",
    "checkpoint",
    "parallel",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "optimizer.flat",  # the same numbers either way
    "optimizer.in_backward",
)
_ON_REQUEST = ("optimizer.lr", "schedule", "train.clip_grad_norm")
#: What differs of these is said.
_SAID = (
    "parallel",
    "train.micro_batch_size",
    "train.gradient_accumulation_steps",
    "train.eval_every",
    "train.eval_batches",
)


def find_checkpoint(run_dir: Path, wanted: str) -> Path:
    """The checkpoint that ``--resume WANTED`` means.

    Args:
        run_dir: The run's folder.
        wanted: ``latest``, ``latest-good``, a checkpoint's folder, or a name such as ``step-00000100`` in the run.

    Raises:
        CheckpointError: There is none, or ``latest`` is damaged.
    """
    if wanted in {"latest", "latest-good"}:
        return find_latest(run_dir, verify=wanted == "latest-good").require(allow_older=wanted == "latest-good")
    for path in (Path(wanted).expanduser(), run_dir / CHECKPOINTS / wanted):
        if path.is_dir():
            if (path / CHECKPOINTS).is_dir():
                return find_latest(path).require()
            return path
    there = [path.name for path in (run_dir / CHECKPOINTS).glob("step-*")] if run_dir.is_dir() else []
    parent = Path(wanted).expanduser().parent
    there += [path.name for path in parent.glob("step-*")] if parent.is_dir() else []
    close = similar(Path(wanted).name, there)
    hint = f" Near: {', '.join(close)}." if close else ""
    raise CheckpointError(
        f"--resume {printable(wanted)}: there is no such checkpoint.{printable(hint)}\n"
        "  Use latest, latest-good, or the path of a step-* folder."
    )


def saved_config(path: Path) -> Mapping[str, Any]:
    """The configuration that a checkpoint holds.

    Raises:
        CheckpointError: The checkpoint is damaged, or was not saved by a training run.
    """
    held = open_checkpoint(path).data
    state = held.get("state", held)
    config = state.get("config") if isinstance(state, Mapping) else None
    if not isinstance(config, Mapping):
        raise CheckpointError(
            f"{printable(path)} was not saved by `shardwise train`: it has no configuration.\n  Load it with sw.load()."
        )
    return config


def check_config(saved: Mapping[str, Any], config: Config, asked: Collection[str] = ()) -> list[str]:
    """Compare a run's configuration with the one it is to continue under.

    ``train.steps`` and everything in ``log`` and ``checkpoint`` may differ, and how often the held-out loss is taken.
    The strategy, the cut of the global batch over ranks and how the optimizer's update comes about may too, as
    checkpoints load on any of them. The learning rate, its schedule and clipping may where ``--set`` asks for it. What
    changes is returned, to be printed.

    Args:
        saved: The run's.
        config: What it is to continue under.
        asked: Keys that ``--set`` gave.

    Returns:
        One line for each change of ``parallel``, of the cut of the batch, of evaluation, and of what was asked for.

    Raises:
        ConfigError: Anything else differs; a table of all differences.
    """
    changed = differences(saved, config.model_dump(mode="json"))
    changed = [entry for entry in changed if entry[0] != "name"]
    requested = [key for key in _ON_REQUEST if any(_is_in(name, (key,)) for name in asked)]
    wrong = [entry for entry in changed if not _is_in(entry[0], (*_FREE, *requested))]
    if wrong:
        rows = [("key", "the run has", "now"), *((key, _shown(old), _shown(new)) for key, old, new in wrong)]
        table = "\n".join(f"  {line}" for line in aligned(rows, words=range(3)))
        raise ConfigError(
            f"the configuration is not that of the run:\n{table}\n"
            f"  Only {', '.join(_FREE)} may differ, and {', '.join(_ON_REQUEST)} where --set asks for it (--set"
            " optimizer.lr=1e-4). Restore the others, or start a new run."
        )
    return [f"{key}: {_shown(old)} -> {_shown(new)}" for key, old, new in changed if _is_in(key, (*_SAID, *requested))]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Dotted key, old value and new value of everything that differs between two nested mappings."""
    result: list[tuple[str, Any, Any]] = []
    for key in [*old, *(k for k in new if k not in old)]:
        left, right = old.get(key), new.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            result += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            result.append((f"{prefix}{key}", left, right))
    return result


def _is_in(key: str, keys: Iterable[str]) -> bool:
    """``key`` is one of ``keys``, or a field of one."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _shown(value: Any) -> str:
    text = printable("(not set)" if value is None else value)
    return text if len(text) <= 60 else text[:57] + "..."


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
