"""Writers of step metrics on rank 0: metrics.jsonl, TensorBoard, Weights & Biases, MLflow, Trackio."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from shardwise.launch.file import replace
from shardwise.launch.log_once import log_once
from shardwise.spec.errors import ConfigError, ShardwiseError, StorageError
from shardwise.spec.run_files import EVENTS, METRICS, SAMPLES
from shardwise.spec.text import first_line, printable
from shardwise.train.callback import Record
from shardwise.train.config.sections import Config
from shardwise.train.folder import replace_text


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line; each line is written at once."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open the file; drop an earlier run's records after step ``keep_steps``, because these steps are repeated."""
        self.path = path
        with self._refusals():
            lines = [line for line in _lines(path) if _step(line) <= keep_steps]
            replace(path, "".join(f"{line}\n" for line in lines))
            self._file: TextIO = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append one record."""
        with self._refusals():
            self._file.write(to_line(record))

    def close(self) -> None:
        """Close the file. Ignores errors, because a failed write was already raised."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{printable(self.path)} cannot be written: {error.strerror}.\n  Free space on the disk."
            ) from None


def to_line(record: Record) -> str:
    """Return a record as a line of the file."""
    values: dict[str, Any] = asdict(record)
    values |= values.pop("values")
    if record.eval_loss is None:
        del values["eval_loss"]
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None  # JSON has no infinity
    return json.dumps(values) + "\n"


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """Return the step of a line, or infinity for a line that a crash cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


_SHOWN = (
    "loss", "eval_loss", "grad_norm", "lr", "loss_scale", "tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes",
    "collective_bytes",
)  # fmt: skip


def check_extras(config: Config) -> None:
    """Refuse a configuration that needs a package which is not installed."""
    for name in ("tensorboard", *TRACKERS):
        if getattr(config.log, name) is True and importlib.util.find_spec(name) is None:
            raise ConfigError(f"log.{name}=true, but {name} is not installed.\n  Install shardwise[{name}].")


#: A function that sends a step's values, and one that ends the tracker's run with an exit code.
_Tracker = tuple[Callable[[int, Mapping[str, float]], object], Callable[[int], object]]


def _load_id(directory: Path, tracker: str) -> str:
    """Return the id of this folder's run at a tracker, for a resume; empty before the first start."""
    path = directory / f"{tracker}-id"
    return path.read_text("utf-8").strip() if path.is_file() else ""


def _save_id(directory: Path, tracker: str, chosen: str) -> str:
    """Store the id for later starts, and return it."""
    replace_text(directory / f"{tracker}-id", chosen + "\n")
    return chosen


def _wandb(directory: Path, config: dict[str, Any]) -> _Tracker:
    import wandb  # pyrefly: ignore[missing-import]

    chosen = os.environ.get("WANDB_RUN_ID") or _load_id(directory, "wandb") or secrets.token_hex(6)
    run = wandb.init(
        dir=str(directory), id=_save_id(directory, "wandb", chosen), name=directory.name, config=config, resume="allow"
    )
    return lambda step, values: run.log(dict(values), step=step), run.finish


def _mlflow(directory: Path, config: dict[str, Any]) -> _Tracker:
    import mlflow  # pyrefly: ignore[missing-import]

    run = mlflow.start_run(run_id=_load_id(directory, "mlflow") or None, run_name=directory.name)
    chosen = _save_id(directory, "mlflow", run.info.run_id)
    mlflow.log_dict(config, "config.json")

    def end(exit_code: int) -> None:
        mlflow.flush_async_logging()
        mlflow.end_run("FAILED" if exit_code else "FINISHED")

    return lambda step, values: mlflow.log_metrics(dict(values), step=step, run_id=chosen, synchronous=False), end


def _trackio(directory: Path, config: dict[str, Any]) -> _Tracker:
    import trackio  # pyrefly: ignore[missing-import]

    chosen = _load_id(directory, "trackio") or f"{directory.name}-{secrets.token_hex(3)}"
    project = os.environ.get("TRACKIO_PROJECT", "shardwise")
    name = _save_id(directory, "trackio", chosen)
    run = trackio.init(project=project, name=name, config=config, resume="allow", embed=False)
    return lambda step, values: run.log(dict(values), step=step), lambda _exit_code: run.finish()


#: Experiment trackers, by field of ``log:``, which is also the name of the package.
TRACKERS = {"wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


def _start_tracker(name: str, directory: Path, config: Config) -> _Tracker:
    try:
        return TRACKERS[name](directory, config.model_dump(mode="json"))
    except (OSError, ShardwiseError):
        raise
    except Exception as error:
        raise ConfigError(
            f"log.{name}=true, but {name} did not begin a run: {first_line(error)}\n"
            f"  Look at its address and credentials ({name.upper()}_* variables), or set log.{name}=false."
        ) from error


class Recorder:
    """Writes a step's metrics to all destinations, on rank 0."""

    def __init__(self, directory: Path, config: Config, step: int) -> None:
        """Open all destinations; drop an earlier run's records after ``step``."""
        self._trackers = [_start_tracker(name, directory, config) for name in TRACKERS if getattr(config.log, name)]
        self._file = MetricsFile(directory / METRICS, keep_steps=step)
        if (samples := directory / SAMPLES).exists():
            MetricsFile(samples, keep_steps=step).close()
        self._board: Any = None
        is_wanted = config.log.tensorboard
        if is_wanted is True or (is_wanted == "auto" and importlib.util.find_spec("tensorboard") is not None):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(directory / EVENTS), purge_step=step + 1 if step else None)

    def step(self, record: Record) -> None:
        """Write one step."""
        self._file.write(record)
        values = {name: getattr(record, name) for name in _SHOWN if getattr(record, name) is not None}
        self.send(record.step, values | record.values)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Send values of a step to all destinations except metrics.jsonl."""
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        for send, _ in self._trackers:
            send(step, values)

    def close(self, exit_code: int = 0) -> None:
        """Flush and close. Errors of trackers are printed."""
        self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        for _, end in self._trackers:
            try:
                end(exit_code)
            except Exception as error:  # noqa: BLE001 - an error of another package; the run itself has ended
                log_once(f"values may be missing at a tracker: {first_line(error)}")
