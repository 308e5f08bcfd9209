"""What a run writes and says of itself: metrics.jsonl, TensorBoard, Weights & Biases, the terminal, summary.json."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from shardwise.cost.hardware import gpu_of_device
from shardwise.launch.environment import environment
from shardwise.launch.file import replace
from shardwise.report import read_run, run_page
from shardwise.report.scale import thin
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.spec.run_files import (
    CONFIG,
    ENVIRONMENT,
    EVENTS,
    MEMORY,
    METRICS,
    MODEL,
    PLAN,
    PREDICTED,
    REPORT,
    SUMMARY,
    WANDB_ID,
)
from shardwise.spec.text import printable, size
from shardwise.train.config import Config
from shardwise.train.folder import replace_json, replace_text
from shardwise.train.prediction import describe
from shardwise.train.resolve import RunConfig
from shardwise.train.step_time import PredictedStep

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Record:
    """What ``metrics.jsonl`` holds for one step.

    Attributes:
        step: From 1: steps done after this one.
        loss: Mean training loss of the step over all ranks and microbatches.
        grad_norm: Global norm of the gradient before clipping. Not finite in a step that fp16's loss scaling skipped;
            ``None`` where backward updates, as all gradients are never there at once.
        lr: Learning rate of the step.
        tokens: Tokens trained on so far, over all ranks.
        tokens_per_s: Tokens of this step over its time, over all ranks.
        step_time_s: Wall time of the step.
        data_time_s: Part of it that was spent waiting for data.
        mfu: Share of the devices' dense peak, per GPU; ``None`` where the peak is unknown.
        peak_memory_bytes: Most bytes of tensors held at once so far, the largest over the ranks.
        collective_bytes: Bytes that rank 0 sent in this step.
        exposed_time_s: Part of ``step_time_s`` in which rank 0 waited for communication of the model (gathers,
            reductions, ``tp``, ``pp``, ``cp``, ``ep``), a wait for a rank that comes later included; measured by the
            host where it waits. ``None`` on a GPU, where the host does not wait: ``--profile-steps`` shows it there.
        optimizer_time_s: Part of ``step_time_s`` for clipping and the optimizer's step, on rank 0; ``None`` where
            backward updates.
        loss_scale: What the loss was multiplied by for the backward; ``None`` where nothing is in fp16.
        eval_loss: The held-out loss after this step, left out of the line where it was not taken. The one before the
            first step is in ``summary.json``.
    """

    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_s: float
    step_time_s: float
    data_time_s: float
    mfu: float | None
    peak_memory_bytes: int
    collective_bytes: int
    loss_scale: float | None = None
    optimizer_time_s: float | None = None
    exposed_time_s: float | None = None
    eval_loss: float | None = None


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line, each line written whole."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open the file; of an earlier run, records after step ``keep_steps`` are dropped: they are made again.

        Raises:
            StorageError: The file cannot be written.
        """
        self.path = path
        with self._refusals():
            kept = [line for line in _lines(path) if _step(line) <= keep_steps]
            replace(path, "".join(f"{line}\n" for line in kept))
            self._file: TextIO = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append one record."""
        with self._refusals():
            self._file.write(to_line(record))

    def close(self) -> None:
        """Close the file. What could not be written is refused a second time, which is no news."""
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
    """A record as its line of the file."""
    values: dict[str, Any] = asdict(record)
    if record.eval_loss is None:
        del values["eval_loss"]
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None  # JSON has no infinity
    return json.dumps(values) + "\n"


def peak_flops(device_name: str, dtype: str, *, uses_tf32: bool) -> float | None:
    """Dense peak in FLOP/s of a device for matrix products in ``dtype``; ``None`` where it is unknown.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it; variants (PCIe, NVL) have names of their own.
        dtype: Short name of the dtype that the products take.
        uses_tf32: Products in fp32 go to the TF32 units, where the device has them.
    """
    gpu = gpu_of_device(device_name)
    if gpu is None or dtype not in {"bf16", "fp16", "fp32"}:
        return None
    if dtype == "fp32" and uses_tf32 and "tf32" in gpu.peaks:
        return gpu.peaks["tf32"]
    return gpu.peaks.get(dtype)


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; lines cut short by a crash count as after everything."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


_SHOWN = (
    "loss", "grad_norm", "lr", "loss_scale", "tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes",
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
        self._send(record.step, values)

    def held_out(self, step: int, loss: float) -> None:
        """Write a held-out loss."""
        self._send(step, {"eval_loss": loss})

    def close(self) -> None:
        """Write what is buffered and close."""
        self._file.close()
        if self._board is not None:
            with contextlib.suppress(OSError):
                self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _send(self, step: int, values: dict[str, float]) -> None:
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)


class Progress:
    """Lines and a bar. Ranks other than 0 show nothing."""

    def __init__(self, *, steps: int, start: int, every: int, is_shown: bool) -> None:
        self._steps = steps
        self._every = every
        self._is_shown = is_shown
        self._bar: Any = None
        if is_shown and sys.stdout.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("training", total=steps, completed=start, numbers="")
            self._bar.start()

    def step(self, record: Record) -> None:
        """Show a step."""
        if not self._is_shown:
            return
        norm = "norm n/a" if record.grad_norm is None else f"norm {record.grad_norm:.3f}"
        if record.grad_norm is not None:
            norm = norm if math.isfinite(record.grad_norm) else "skipped"
            norm += "" if record.loss_scale is None else f"  scale {record.loss_scale:g}"
        numbers = f"loss {record.loss:.4f}  {norm}  {record.tokens_per_s:,.0f} tok/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, numbers=numbers)
        elif record.step % self._every == 0 or record.step in (1, self._steps):
            mfu = "n/a" if record.mfu is None or math.isnan(record.mfu) else f"{100 * record.mfu:.1f}%"
            self.say(
                f"step {record.step:>{len(str(self._steps))}}/{self._steps}  loss {record.loss:.4f}  "
                f"{norm}  lr {record.lr:.2e}  {record.step_time_s * 1000:.0f} ms  "
                f"{record.tokens_per_s:,.0f} tok/s  mfu/GPU {mfu}"
            )

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        if not self._is_shown:
            return
        safe = printable(text, is_block=True)
        if self._bar is not None:
            self._bar.console.print(safe, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stdout.write(safe + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )


@dataclass(slots=True)
class Progressed:
    """How far a run has come: what checkpoints hold beside tensors."""

    step: int = 0
    tokens: int = 0
    first_loss: float | None = None
    final_loss: float | None = None
    eval_loss_first: float | None = None
    eval_loss_final: float | None = None

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    reason: str


@dataclass(slots=True)
class Speed:
    """What this process has measured of its steps.

    Attributes:
        tokens: Tokens of the steps that are timed, over all ranks.
        seconds: Time of these steps.
        timed_steps: How many they are.
        made_steps: Steps of this process.
        timed_from: The first so many of them are not timed.
        own_peak_bytes: The most bytes of tensors that this rank has held.
        data_s: Seconds of the newest step that the host spent on data.
        steps_s: Seconds of all steps, those that are not timed included.
        eval_s: Seconds between steps that held-out losses took.
        checkpoint_s: Seconds between steps that saves took.
        began_at: When this process began, by ``time.perf_counter``.
    """

    tokens: int = 0
    seconds: float = 0.0
    timed_steps: int = 0
    made_steps: int = 0
    timed_from: int = 0
    own_peak_bytes: int = 0
    data_s: float = 0.0
    steps_s: float = 0.0
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    began_at: float = field(default_factory=time.perf_counter)

    @property
    def tokens_per_s(self) -> float | None:
        """``None`` before the first timed step."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def step_time_s(self) -> float | None:
        """The mean time of the timed steps; ``None`` before the first one."""
        return self.seconds / self.timed_steps if self.timed_steps else None


@dataclass(frozen=True, slots=True)
class Report:
    """The facts of a run, and how they are told. Files are rank 0's.

    Attributes:
        resolved: The run's configuration.
        directory: The run's folder.
        world_size: Number of ranks.
        device: This rank's device.
        model: What ``sw.summary`` says of the model.
        predicted_bytes: Bytes by category on the rank that holds most.
        units: Each unit's name, class and elements, and how many of these each rank owns.
        predicted_step: The predicted time of a step, or why there is none.
    """

    resolved: RunConfig
    directory: Path
    world_size: int
    device: torch.device
    model: str
    predicted_bytes: dict[str, int]
    units: list[dict[str, Any]]
    predicted_step: PredictedStep

    @property
    def predicted_total(self) -> int:
        """Predicted bytes of what is measured: on CUDA only what the device holds."""
        return sum(held for name, held in self.predicted_bytes.items() if name != "host" or self.device.type == "cpu")

    @property
    def predicted_peak(self) -> int | None:
        """The predicted peak; ``None`` where the model's activations are not known beforehand."""
        return self.predicted_total if "activations" in self.predicted_bytes else None

    def write_start(self) -> None:
        """Write config.yaml, model.txt, environment.json, predicted.json and plan.json."""
        config, batch = self.resolved.config, self.resolved.batch
        replace_text(self.directory / CONFIG, config.to_yaml())
        replace_text(self.directory / MODEL, f"{self.model}\n")
        replace_json(self.directory / ENVIRONMENT, environment())
        replace_json(self.directory / PREDICTED, describe(self.resolved, self.device.type, self.predicted_step))
        replace_json(
            self.directory / PLAN,
            {
                "world_size": self.world_size,
                "mesh": self.resolved.mesh.sizes,
                "parallel": config.parallel.model_dump(mode="json"),
                "batch": {"micro": batch.micro, "accumulation": batch.accumulation, "global": batch.total},
                "predicted_bytes_per_rank": self.predicted_bytes,
                "predicted_peak_memory_bytes": self.predicted_peak,
                "predicted_step_time_s": self.predicted_step.seconds,
                "units": self.units,
            },
        )

    def write_summary(
        self, done: Progressed, outcome: Outcome, speed: Speed, *, peak_bytes: int, failed_saves: list[str]
    ) -> None:
        """Write summary.json, if the disk allows it: the run's own outcome is what matters by then."""
        values = {
            "steps": done.step,
            "first_loss": done.first_loss,
            "final_loss": done.final_loss,
            "eval_loss_first": done.eval_loss_first,
            "eval_loss_final": done.eval_loss_final,
            "tokens_per_s": speed.tokens_per_s,
            "peak_memory_bytes": peak_bytes or None,
            "predicted_peak_memory_bytes": self.predicted_peak,
            "step_time_s": speed.step_time_s,
            "timed_steps": speed.timed_steps,
            "predicted_step_time_s": self.predicted_step.seconds,
            "world_size": self.world_size,
            "strategy": self.resolved.config.parallel.strategy,
            "exit_code": outcome.exit_code,
            "reason": outcome.reason,
            "failed_saves": failed_saves,
            "wall_time_s": time.perf_counter() - speed.began_at,
            "steps_time_s": speed.steps_s,
            "eval_time_s": speed.eval_s,
            "checkpoint_time_s": speed.checkpoint_s,
        }
        with contextlib.suppress(StorageError):
            replace_json(self.directory / SUMMARY, values)

    def write_memory(self, step: int, history: Sequence[tuple[float, int]], held: Mapping[str, int]) -> None:
        """Write memory.json: the bytes of tensors of this rank over one step, and what the engine holds all the time.

        Args:
            step: Its number.
            history: Moments and bytes.
            held: Bytes by category at its end.
        """
        begin = history[0][0]
        points = thin([moment - begin for moment, _ in history], [held for _, held in history], columns=150)
        kept = [point for point in points if point is not None]
        values = {
            "step": step,
            "held_bytes": dict(held),
            "seconds": [round(moment, 6) for moment, _ in kept],
            "bytes": [int(count) for _, count in kept],
        }
        with contextlib.suppress(StorageError):
            replace_json(self.directory / MEMORY, values)

    def write_page(self) -> None:
        """Write report.html from the run's files. Whatever goes wrong there does not change how the run ends."""
        try:
            replace_text(self.directory / REPORT, run_page(read_run(self.directory)))
        except Exception as error:  # noqa: BLE001
            sys.stderr.write(f"{REPORT} was not written: {printable(error)}\n")

    def introduce(self, progress: Progress) -> None:
        """Say what is trained, on what, with which data."""
        batch, source, config, mesh = (
            self.resolved.batch,
            self.resolved.source,
            self.resolved.config,
            self.resolved.mesh,
        )
        import torch

        kind = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        name = config.model.preset or config.model.hf
        axes = f" on {mesh}" if mesh.ep > 1 or mesh.dp_shard != mesh.world_size else ""
        where = printable(self.directory)
        progress.say(f"run {where}: {name} on {self.world_size} x {kind}, {config.parallel.strategy}{axes}")
        tokens = f"{source.num_tokens:,} tokens in {len(source.files)} files" if source.files else "random tokens"
        if source.streams:
            tokens = f"{source.num_tokens:,} bytes in {len(source.files)} files, tokenized on the way"
        seq_len, longer = self.resolved.seq_len, self.resolved.positions or 0
        more = f" (data.seq_len; the model takes up to {longer:,})" if longer > seq_len else ""
        progress.say(f"model {self.model.splitlines()[0]}; more in {printable(self.directory / MODEL)}")
        progress.say(f"data {printable(source.name)}: {tokens}; samples of {seq_len:,} tokens{more}")
        progress.say(str(batch))
        if (stored := self.resolved.raised_from) is not None:
            progress.say(
                f"weights are stored in {stored}: the optimizer updates fp32 masters"
                f" (parallel.mp_policy.master_dtype; {stored} there keeps 16 bit)"
            )

    def conclude(self, progress: Progress, done: Progressed, speed: Speed, *, peak_bytes: int) -> None:
        """Say how fast it went, what the loss became, and which peak was predicted and measured."""
        pace = speed.tokens_per_s
        progress.say(f"finished {done.step} steps" + (f", {pace:,.0f} tokens/s" if pace else ""))
        if done.eval_loss_first and done.eval_loss_final is not None:
            fall = 100 * (1 - done.eval_loss_final / done.eval_loss_first)
            losses = f"{done.eval_loss_first:.4f} -> {done.eval_loss_final:.4f}"
            progress.say(f"held-out loss {losses} ({fall:.0f}% lower)")
        names = ", ".join(f"{name} {size(held)}" for name, held in self.predicted_bytes.items() if held)
        total = self.predicted_total
        ratio = f"{peak_bytes / total:.2f} of the prediction" if total and peak_bytes else "not measured"
        if self.predicted_peak is None:
            names += "; activations of this model are not known beforehand"
            ratio = "activations included"
        progress.say("peak memory of tensors, per rank")
        progress.say(f"  predicted  {size(total):>9}  {names}")
        progress.say(f"  measured   {size(peak_bytes):>9}  {ratio}")
        self._say_time(progress, speed)

    def _say_time(self, progress: Progress, speed: Speed) -> None:
        """Say which time of a step was predicted and measured."""
        found = self.predicted_step
        progress.say("time of a step")
        if found.seconds is None:
            progress.say(f"  predicted        n/a  {found.reason}")
        else:
            progress.say(f"  predicted  {found.seconds * 1e3:>6,.0f} ms  {found.reason}")
        if speed.step_time_s is not None:
            ratio = "" if not found.seconds else f"  {speed.step_time_s / found.seconds:.2f} of the prediction"
            progress.say(f"  measured   {speed.step_time_s * 1e3:>6,.0f} ms{ratio}")
