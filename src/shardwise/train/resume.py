"""Continuing a run: which checkpoint, whether the configuration allows it, and what to take from it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.spec.text import similar
from shardwise.train.config import Config
from shardwise.train.text import printable

#: Keys that may differ, and what may where ``--set`` asks for it: a change in a file may be an oversight.
_FREE = (
    "train.steps",
    "train.eval_every",
    "train.eval_batches",
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
    from shardwise.checkpoint import CHECKPOINTS, find_latest

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
    from shardwise.checkpoint import open_checkpoint

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
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        table = "\n".join(f"  {key:<{widths[0]}}  {old:<{widths[1]}}  {new}" for key, old, new in rows)
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
