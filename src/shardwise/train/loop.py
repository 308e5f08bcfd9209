"""One rank's training run, from a checked configuration to an exit code."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.comm.dtype import dtype_name
from shardwise.engine.unit import engine_of
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.notice import tell_once
from shardwise.launch.world import World, join, shutdown
from shardwise.optim.scaler import needs_scaler
from shardwise.pipeline.pipelined import Call, pipelined_of
from shardwise.spec.errors import ConfigError, ShardwiseError, StorageError
from shardwise.spec.text import printable, size
from shardwise.train import folder, random_state
from shardwise.train.build import (
    Loss,
    build_optimizer,
    call_of,
    defer_model,
    loss_of,
    parameter_groups,
    set_lr,
    to_tensors,
)
from shardwise.train.checkpoints import Checkpoints, check_config, find_checkpoint, saved_config
from shardwise.train.control import Control
from shardwise.train.data import DataError, Part, RandomPart, open_data
from shardwise.train.folder import RunLock
from shardwise.train.log import Progress, Record, Recorder, flops_per_token, peak_flops
from shardwise.train.predict import PeakTensorBytes, predict
from shardwise.train.proof import parity_line
from shardwise.train.resolve import Batch, RunConfig
from shardwise.train.sampler import Sampler

#: Finished steps are saved: resubmit.
STOPPED = 75
INTERRUPTED = 128 + signal.SIGINT


class StopRequest:
    """Catches SIGTERM and SIGINT while it is open. A second Ctrl-C ends the process at once.

    Attributes:
        signal_number: The first signal that came, 0 for none.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._kept: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Take over the signals. Only the main thread can; elsewhere nothing is caught."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._kept[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        for number, handler in self._kept.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._kept.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.signal_number == signal.SIGINT:
            os._exit(INTERRUPTED)
        self.signal_number = self.signal_number or number


def exit_code(signal_number: int) -> int:
    """What a run leaves with that was stopped by a signal and has saved its steps."""
    return INTERRUPTED if signal_number == signal.SIGINT else STOPPED


#: Values are read this often at least (in seconds), so that a request to stop or a loss of NaN is noticed in time.
LONGEST_UNREAD_S = 10.0


class StepTime:
    """How long a step takes, without waiting for its end."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """The step has been issued."""
        self._seconds = time.perf_counter() - self._begin
        if self._events is not None:
            self._events[1].record()

    def seconds(self) -> float:
        """The step's time on its device. Asked for after the device has finished it."""
        return self._seconds if self._events is None else self._events[0].elapsed_time(self._events[1]) / 1000


@dataclass(slots=True)
class UnreadStep:
    """One step whose values are on the device.

    Attributes:
        loss: The sum over ``num_losses`` microbatches of this rank; ``None`` on a rank that has no loss.
        num_losses: Microbatches of a step, the same on every rank.
        norm: The global norm of the gradient; ``None`` where backward updates.
        is_skipped: Loss scaling has left this step out: its norm is not finite, and rightly so.
        time: Of the step.
        lr: Its learning rate.
        scale: Its loss scale; ``None`` where nothing is scaled.
        data_s: Seconds that this rank's host spent on data.
        sent_bytes: Bytes that this rank sent.
    """

    loss: Tensor | None
    num_losses: int
    norm: Tensor | None
    is_skipped: bool
    time: StepTime
    lr: float
    scale: float | None
    data_s: float
    sent_bytes: int


@dataclass(frozen=True, slots=True)
class ReadStep:
    """The same after it was read.

    Attributes:
        losses: The mean loss of every rank that has one, by rank.
        norm: The global norm of the gradient.
        step: The rest of it.
    """

    losses: dict[int, float]
    norm: float | None
    step: UnreadStep


@dataclass(slots=True)
class UnreadSteps:
    """The steps since the last reading.

    Attributes:
        control: The ranks' channel.
        every: Steps between two readings.
        steps: In order.
        peak_bytes: Most bytes of tensors that any rank has held, as of the last reading.
        signal_number: A signal that any rank had got by then; 0 for none.
    """

    control: Control
    every: int
    steps: list[UnreadStep] = field(default_factory=list)
    peak_bytes: int = 0
    signal_number: int = 0
    _read_at: float = field(default_factory=time.perf_counter)
    _count: int = 1  # of steps before the next reading is due by time; the first step is read at once

    def is_due(self, step: int) -> bool:
        """Whether the values have to be read after ``step``. The same answer on every rank."""
        return step % self.every == 0 or len(self.steps) >= self._count

    def read(self, *, own_peak_bytes: int, own_signal: int) -> list[ReadStep]:
        """Exchange and read what the steps have left.

        Args:
            own_peak_bytes: The most bytes of tensors that this rank has held.
            own_signal: The signal that this rank has got; 0 for none.

        Collective:
            One all-gather of 16 bytes per step and rank, and 32 more. All ranks must call after the same step.
            The host waits for the device.
        """
        now = time.perf_counter()
        elapsed_s, self._read_at = now - self._read_at, now
        steps, self.steps = self.steps, []
        has_loss = any(step.loss is not None for step in steps)
        rows = self.control.rows(
            [elapsed_s, float(own_signal), float(own_peak_bytes), float(has_loss)],
            [value for step in steps for value in (step.loss, step.norm)],
        )
        self.signal_number = int(max(row[1] for row in rows))
        self.peak_bytes = max(self.peak_bytes, *(int(row[2]) for row in rows))
        pace_s = rows[0][0] / max(len(steps), 1)  # as rank 0 sees it: all ranks go by the same number
        self._count = max(1, math.floor(LONGEST_UNREAD_S / pace_s)) if pace_s > 0 else self.every
        found = []
        for index, step in enumerate(steps):
            place = 4 + 2 * index
            losses = {rank: row[place] / step.num_losses for rank, row in enumerate(rows) if row[3]}
            norm = None if step.norm is None else rows[self.control.rank][place + 1]
            found.append(ReadStep(losses, norm, step))
        return found


def held_out_samples(part: Part | RandomPart, batch: Batch, num_batches: int) -> int:
    """How many held-out samples an evaluation takes.

    ``num_batches`` global batches, or all there are where that is less, cut to a multiple of what all ranks forward at
    once. So the number does not depend on the world as long as the global batch does not.
    """
    at_once = batch.micro * batch.data_parallel_size
    return min(part.num_samples // at_once * at_once, num_batches * batch.total)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss_of: Loss,
    call: Call,
    part: Part | RandomPart,
    *,
    batch: Batch,
    count: int,
    control: Control,
    rank: int,
) -> float:
    """The mean loss over ``count`` held-out samples, spread evenly over the part; the same value on every rank.

    Collective:
        The model's forwards, then one all-gather of 16 bytes per rank.
    """
    device = engine_of(model, "evaluate").comms.control.device  # parameters may be kept elsewhere
    at_once = batch.micro * batch.data_parallel_size
    stride = part.num_samples // count
    was_training = model.training
    model.eval()
    try:
        parts = [
            to_tensors(part, [index * stride for index in range(start, start + batch.micro)], device)
            for start in range(rank * batch.micro, count, at_once)
        ]
        pipelined = pipelined_of(model)
        if pipelined is None:
            found = [loss_of(model, *tensors) for tensors in parts]
        else:
            found = pipelined.losses(model, parts, call, lambda m, p: loss_of(m, *p))
        losses = torch.stack(list(found)).tolist() if found else []  # read once, when all have been computed
    finally:
        model.train(was_training)
    rows = [row for row in control.rows([sum(losses), float(bool(losses))]) if row[1]]
    return sum(row[0] for row in rows) * batch.micro / count / (len(rows) / batch.data_parallel_size)


#: On CPU, tensors are counted during this many first steps: all that is ever allocated is there by then.
MEASURED_STEPS = 3


class NonFiniteError(ShardwiseError):
    """The loss or the gradient is not a finite number; nothing was saved since."""

    exit_code = 80


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


def train(resolved: RunConfig, *, world: World, run_dir: Path | None, resume: str | None, is_demo: bool = False) -> int:
    """Train on this rank and return the exit code.

    Args:
        resolved: The checked configuration, the same on every rank.
        world: This rank among the others.
        run_dir: The run's folder; chosen from the run's name where it is ``None``.
        resume: ``latest``, ``latest-good`` or a checkpoint's path; ``None`` begins a new run.
        is_demo: Compare with one process after training.

    Raises:
        ShardwiseError: Its ``exit_code`` is what the process should leave with.

    Collective:
        Every rank of the world must call.
    """
    device = join(world)
    with StopRequest() as stop, contextlib.ExitStack() as stack:
        stack.callback(shutdown)
        control = Control(open_comms(device, "control")[0])
        control.check_same([resolved.config.model_dump(mode="json"), torch.__version__], "configuration or torch")
        directory = Path(control.on_first(lambda: str(_open_directory(resolved, run_dir, resume, world))))
        if world.num_nodes > 1:
            _check_shared(control, directory, world)
        if control.is_first:
            lock = RunLock(directory)
            stack.callback(lock.release)
        note = control.on_first(lambda: lock.acquire())  # noqa: PLW0108  the name is bound on rank 0 only
        if note:
            tell_once(note)
        if world.source != "launcher":  # our launcher has read all of the data before it started this process
            control.on_first(lambda: resolved.source.check(resolved.vocab_size))
        if world.restart_count and resume is None:
            resume = "latest" if control.on_first(lambda: _has_checkpoint(directory)) else None
        return _Trainer(resolved, control, directory, device, stop, is_demo=is_demo).run(resume)


def _open_directory(resolved: RunConfig, run_dir: Path | None, resume: str | None, world: World) -> Path:
    is_again = resume is not None or world.restart_count > 0
    if run_dir is not None:
        RunLock(run_dir).check()
    chosen = (
        run_dir
        if run_dir is not None and is_again and resume is None
        else folder.choose(resolved.config.name, run_dir, is_resuming=resume is not None, wanted=resume)
    )
    folder.create(chosen)
    return chosen


def _check_shared(control: Control, directory: Path, world: World) -> None:
    """Refuse a run's folder that is not the same one on all machines: one rank of each looks for a file of rank 0.

    Raises:
        StorageError: On every rank, naming the ranks that do not find it.

    Collective:
        Two all-gathers of small JSON.
    """
    name = control.on_first(lambda: folder.leave_probe(directory))
    try:
        has_found = world.local_rank != 0 or folder.finds(directory, name)
        where = [None if has_found else str(directory.absolute())]
        missing = {rank: path for rank, (path,) in enumerate(control.all_json(where)) if path is not None}
    finally:
        if control.is_first:
            (directory / name).unlink(missing_ok=True)
    if missing:
        rank, path = next(iter(missing.items()))
        ranks = f"rank {rank} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
        raise StorageError(
            f"the run's folder is not one folder for all machines: {ranks} not find in {printable(path)} what rank 0"
            " wrote there. Checkpoints would be spread over the machines' own disks.\n"
            "  Name a folder of a file system that all machines share, with --run-dir."
        )


def _has_checkpoint(directory: Path) -> bool:
    from shardwise.checkpoint import find_latest

    return find_latest(directory).path is not None


def _peak_flops(model: nn.Module, device: torch.device) -> float | None:
    """The device's dense peak for the dtype that the model's matrix products run in."""
    if device.type != "cuda":
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), product_dtype(model), uses_tf32=uses_tf32)


def product_dtype(model: nn.Module) -> str:
    """Short name of the dtype in which most of a parallelized model's weights of two or more dimensions compute."""
    counts: collections.Counter[str] = collections.Counter()
    for group in engine_of(model, "product_dtype").groups:
        numel = sum(spec.numel for spec in group.layout.params if len(spec.shape) >= 2)
        counts[dtype_name(group.compute_dtype)] += numel
    return max(counts, key=counts.__getitem__, default="fp32")


class _Trainer:
    """The loop and what it holds. Made once per process."""

    def __init__(
        self,
        resolved: RunConfig,
        control: Control,
        directory: Path,
        device: torch.device,
        stop: StopRequest,
        *,
        is_demo: bool,
    ) -> None:
        self.resolved, self.config, self.control = resolved, resolved.config, control
        self.directory, self.device, self.stop, self.is_demo = directory, device, stop, is_demo
        self.done = Progressed()
        self.own_peak_bytes = 0  # of this rank
        self.made_steps = 0  # by this process
        self.timed_from = 0  # steps of this process that say nothing about speed
        self.trained_s = 0.0
        self.trained_tokens = 0
        config, batch, mesh = self.config, resolved.batch, resolved.mesh
        self.data = open_data(
            resolved.source,
            seq_len=resolved.seq_len,
            held_out=config.data.held_out,
            vocab_size=resolved.vocab_size,
            seed=config.train.seed,
        )
        self.reader = mesh.data_parallel_rank(control.rank)
        self.sampler = Sampler(
            self.data.train.num_samples,
            config.train.seed,
            batch.micro,
            batch.accumulation,
            self.reader,
            batch.data_parallel_size,
        )
        self.num_held_out = (
            held_out_samples(self.data.held_out, batch, config.train.eval_batches) if config.train.eval_every else 0
        )
        self.loss_of = loss_of(config)
        self.model, self.optimizer = self._build()
        is_scaled = any(control.all_json(needs_scaler(self.model)))  # a stage alone may be in fp16
        self.scaler = sw.GradScaler(device.type, enabled=is_scaled)
        if self.scaler.is_enabled() and config.optimizer.in_backward:
            raise ConfigError(
                "optimizer.in_backward=true, but the model is in fp16: its scaled gradients are looked at before the"
                " update.\n  Set parallel.mp_policy: {param_dtype: bf16, master_dtype: fp32}, or in_backward=false."
            )
        self.peak_flops = _peak_flops(self.model, device)
        decay = config.train.ema_decay
        self.average = None if decay is None else sw.ExponentialMovingAverage(self.model, decay)
        self.predicted_bytes = predict(resolved, self.model, self.average, control, device)
        self.saves = Checkpoints(
            directory, run_id=directory.name, keep=config.checkpoint.keep, control=control, device=device
        )

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        random_state.seed_all(self.config.train.seed)
        model, weights = defer_model(self.resolved, self.device)
        model.train()
        model = sw.parallelize(model, self.resolved.plan, init=weights)
        optimizer = build_optimizer(self.config.optimizer, parameter_groups(self.config.optimizer, model))
        if self.config.optimizer.in_backward:
            sw.optimizer_in_backward(model, optimizer)
        return model, optimizer

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self, resume: str | None) -> int:
        """Train to the end, or to a request to stop."""
        changes = self._begin(resume)
        self.unread = UnreadSteps(self.control, self.config.log.every)
        self.progress = Progress(
            steps=self.config.train.steps,
            start=self.done.step,
            every=self.config.log.every,
            is_shown=self.control.is_first,
        )
        outcome = Outcome(1, "failed")
        try:
            self._introduce(resume, changes)
            outcome = self._loop()
        except ShardwiseError as error:
            outcome = Outcome(error.exit_code, str(error).splitlines()[0])
            raise
        finally:
            self.progress.close()
            if self.control.is_first:
                self._write_summary(outcome)
        self._conclude(outcome)
        return outcome.exit_code

    def _begin(self, resume: str | None) -> list[str]:
        """Take up a checkpoint or start anew; write the run's files. Returns what differs from the run's before."""
        changes: list[str] = []
        path: Path | None = None
        saved_hash = self.fingerprint = self.control.on_first(self.resolved.source.fingerprint)
        if resume is None:
            random_state.seed_all(random_state.rank_seed(self.config.train.seed, self.reader))
        else:
            path = Path(self.control.on_first(lambda: str(find_checkpoint(self.directory, resume))))
            changes = self.control.on_first(lambda: check_config(saved_config(path), self.config, self.resolved.asked))
            state = self.saves.load(path, self.model, self.optimizer, self.average)
            self.sampler.load_state(state["sampler"])
            saved_hash = state["data"]
            self.done = Progressed(**{**state["progress"], "step": state["step"]})
            self._restore_random(state)
            if self.scaler.is_enabled() and state.get("scaler"):  # empty: the run was not in fp16 before
                self.scaler.load_state_dict(state["scaler"])
        if saved_hash != self.fingerprint:
            raise DataError(
                f"{self.config.data.source}: the data is not what the run began with (its hash has changed).\n"
                "  Restore the data, or start a new run."
            )
        if path is not None:
            changes += self.control.on_first(lambda: self.saves.set_aside_later(path, self.done.step))
        if self.config.train.steps - self.done.step > MEASURED_STEPS:
            self.timed_from = MEASURED_STEPS  # counting tensors slows them
        self.control.on_first(self._write_start)
        self.recorder = Recorder(self.directory, self.config, self.done.step) if self.control.is_first else None
        return changes

    def _restore_random(self, state: dict[str, Any]) -> None:
        """The same world: every rank's generators as they were. Another: fresh ones, by seed, rank and step."""
        held = state.get("rank_state", {}).get("random")
        everyones = state.get("random")  # of all ranks, in checkpoints of earlier versions
        if held is None and isinstance(everyones, list) and len(everyones) == self.control.size:
            held = everyones[self.control.rank]
        if held is not None:
            random_state.restore(held, self.device)
        else:
            seed = random_state.rank_seed(self.config.train.seed, self.reader, self.done.step)
            random_state.seed_all(seed)

    def _loop(self) -> Outcome:
        train, saving = self.config.train, self.config.checkpoint
        if self.done.step == 0 and train.eval_every:
            self._evaluate()
        step = self.done.step
        while step < train.steps:
            self._step(step)
            step += 1
            is_last = step == train.steps
            evaluates = train.eval_every is not None and (is_last or step % train.eval_every == 0)
            saves = bool(saving.every and step % saving.every == 0) or (is_last and saving.final)
            if not (is_last or evaluates or saves or self.unread.is_due(step)):
                continue
            self._read(evaluates=evaluates)  # a checkpoint is of steps that were read: their values are finite
            if self.unread.signal_number and not is_last:
                return self._stop(self.unread.signal_number)
            if saves:
                self._save()
        if self.saves.failures and saving.final and self.saves.saved_step != self.done.step:
            raise StorageError(
                f"the last checkpoint was not saved: {self.saves.failures[-1]}\n  Free space and resume."
            )
        return Outcome(0, "finished")

    def _step(self, step: int) -> None:
        """Make the step after ``step`` of them. What it finds stays on the device.

        Collective:
            The model's and its optimizer's.
        """
        clock = StepTime(self.device)
        is_measured = self.device.type == "cuda" or self.made_steps < MEASURED_STEPS
        with contextlib.ExitStack() as stack:
            events = stack.enter_context(sw.record_collectives(self.model))
            memory = stack.enter_context(PeakTensorBytes(self.device)) if is_measured else None
            lr = self.config.optimizer.lr * self.resolved.schedule.ratio(step)
            set_lr(self.optimizer, lr)  # before the backward, which may be what updates
            scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
            loss, data_s = self._forward_backward()
            norm, is_skipped = (None, False) if self.config.optimizer.in_backward else self._update()
            if self.average is not None:
                self.average.update()
        if memory is not None:
            self.own_peak_bytes = max(self.own_peak_bytes, memory.peak_bytes)
        self.made_steps += 1
        clock.stop()
        self.unread.steps.append(
            UnreadStep(
                loss=loss,
                num_losses=self.resolved.batch.accumulation,
                norm=norm,
                is_skipped=is_skipped,
                time=clock,
                lr=lr,
                scale=scale,
                data_s=data_s,
                sent_bytes=sum(event.sent_bytes for event in events),
            )
        )

    def _forward_backward(self) -> tuple[Tensor | None, float]:
        """The sum of this rank's losses, on the device, and the seconds spent on data here.

        Gradients are ready then, or where backward updates, parameters are new.
        """
        if self.resolved.plan.pp > 1:
            return self._pipeline_step()
        accumulation = self.resolved.batch.accumulation
        total = torch.zeros((), device=self.device)
        data_s = 0.0
        for index, samples in enumerate(self.sampler.next_step()):
            started = time.perf_counter()
            inputs_BT, targets_BT = to_tensors(self.data.train, samples, self.device)
            data_s += time.perf_counter() - started
            with sw.gradient_sync(self.model, index == accumulation - 1):
                loss = self.loss_of(self.model, inputs_BT, targets_BT)
                self.scaler.scale(loss / accumulation).backward()
            total += loss.detach()
        return total, data_s

    def _pipeline_step(self) -> tuple[Tensor | None, float]:
        """:meth:`_forward_backward` of a model in stages."""
        started = time.perf_counter()
        parts = [to_tensors(self.data.train, samples, self.device) for samples in self.sampler.next_step()]
        data_s = time.perf_counter() - started
        pipelined = pipelined_of(self.model)
        assert pipelined is not None
        call, loss_of = call_of(self.config), lambda m, part: self.loss_of(m, *part)
        losses = pipelined.losses(self.model, parts, call, loss_of, scale=self.scaler.scale)
        if not losses:
            return None, data_s
        total = torch.zeros((), device=self.device)
        for loss in losses:
            total += loss
        return total, data_s

    def _update(self) -> tuple[Tensor, bool]:
        """Clip and step. Returns the norm before clipping, and whether loss scaling has skipped the step.

        In fp16 the host waits for the gradients here, as with torch's own ``GradScaler``.
        """
        self.scaler.unscale_(self.optimizer)
        norm = sw.clip_grad_norm(self.model, self.config.train.clip_grad_norm or math.inf)
        is_skipped = self.scaler.has_found_inf and self.scaler.get_scale() > 1.0  # at 1 a smaller one would not help
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm, is_skipped

    # --- what the steps have found -----------------------------------------------------------------------------------

    def _read(self, *, evaluates: bool) -> None:
        """Read what the steps since the last reading have found, record it, and take the held-out loss if asked.

        Raises:
            NonFiniteError: A loss or a norm is not finite. The steps before are recorded.

        Collective:
            One all-gather, and those of an evaluation.
        """
        found = self.unread.read(own_peak_bytes=self.own_peak_bytes, own_signal=self.stop.signal_number)
        is_evaluated = False
        for index, values in enumerate(found):
            self._check_finite("loss", values.losses)
            if values.norm is not None and not values.step.is_skipped:
                self._check_finite("gradient norm", {0: values.norm})
            record = self._take(values, made_steps=self.made_steps - len(found) + index + 1)
            self.progress.step(record)
            if evaluates and index == len(found) - 1:
                record = replace(record, eval_loss=self._evaluate())
                is_evaluated = True
            if self.recorder is not None:
                self.recorder.step(record)
        assert is_evaluated == evaluates

    def _check_finite(self, what: str, values: dict[int, float]) -> None:
        bad = [rank for rank, value in values.items() if not math.isfinite(value)]
        if not bad:
            return
        where = f" on rank{'s' if len(bad) > 1 else ''} {', '.join(map(str, bad))}" if len(values) > 1 else ""
        message = (
            f"step {self.done.step + 1}: the {what} is {values[bad[0]]}{where}. Nothing was saved since; safe:"
            f" {self._safe}.\n"
            "  Lower optimizer.lr, lengthen schedule.warmup_steps, or look at the samples of this step. A resume takes"
            " another rate by --set optimizer.lr=..."
        )
        raise NonFiniteError(message)

    @property
    def peak_bytes(self) -> int:
        """The most bytes of tensors that any rank has held, as of the last reading."""
        return self.unread.peak_bytes

    @property
    def _safe(self) -> str:
        return f"checkpoint of step {self.saves.saved_step}" if self.saves.saved_step else "no checkpoint yet"

    def _take(self, values: ReadStep, *, made_steps: int) -> Record:
        """Count a step that was read, the ``made_steps``-th of this process."""
        done, step = self.done, values.step
        tokens = self.resolved.batch.total * self.resolved.seq_len
        loss, step_s = sum(values.losses.values()) / len(values.losses), step.time.seconds()
        done.step += 1
        done.tokens += tokens
        done.first_loss = loss if done.first_loss is None else done.first_loss
        done.final_loss = loss
        if made_steps > self.timed_from:
            self.trained_tokens += tokens
            self.trained_s += step_s
        return Record(
            step=done.step,
            loss=loss,
            grad_norm=values.norm,
            lr=step.lr,
            tokens=done.tokens,
            tokens_per_s=tokens / step_s,
            step_time_s=step_s,
            data_time_s=step.data_s,
            mfu=self._mfu(tokens / step_s),
            peak_memory_bytes=self.peak_bytes,
            collective_bytes=step.sent_bytes,
            loss_scale=step.scale,
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        """The share of the devices' dense peak; ``None`` where the model's FLOPs or the peak are not known."""
        shape = self.resolved.model
        if self.peak_flops is None or shape is None or shape.num_experts:
            return None
        needed = flops_per_token(shape, self.resolved.seq_len)
        return tokens_per_s * needed / (self.peak_flops * self.control.size)

    def _evaluate(self) -> float:
        """The held-out loss, of the averaged weights where there are any."""
        with self.average.swapped_in() if self.average is not None else contextlib.nullcontext():
            loss = evaluate(
                self.model,
                self.loss_of,
                call_of(self.config),
                self.data.held_out,
                batch=self.resolved.batch,
                count=self.num_held_out,
                control=self.control,
                rank=self.reader,
            )
        done = self.done
        done.eval_loss_first = loss if done.eval_loss_first is None else done.eval_loss_first
        done.eval_loss_final = loss
        if self.recorder is not None:
            self.recorder.held_out(done.step, loss)
        self.progress.say(f"step {done.step}  held-out loss {loss:.4f} ({self.num_held_out} samples)")
        return loss

    def _save(self) -> None:
        if self.config.optimizer.in_backward:
            self._check_parameters()
        state = {
            "progress": self.done.state(),
            "sampler": self.sampler.state(),
            "scaler": self.scaler.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "data": self.fingerprint,
            "strategy": str(self.config.parallel.strategy),
            "mesh": self.resolved.mesh.sizes,
        }
        message = self.saves.save(self.model, self.optimizer, self.average, step=self.done.step, state=state)
        if message:
            self.progress.say(message)

    def _check_parameters(self) -> None:
        """What backward updated nobody has looked at: nothing that is not finite may become a checkpoint.

        Raises:
            NonFiniteError: A parameter is not finite.
        """
        held = [p for p in self.model.parameters() if p.is_floating_point()]
        is_bad = not all(bool(p.isfinite().all()) for p in held)
        ranks = [rank for rank, row in enumerate(self.control.rows([float(is_bad)])) if row[0]]
        if ranks:
            raise NonFiniteError(
                f"step {self.done.step}: parameters held by rank {', '.join(map(str, ranks))} are no longer finite. Not"
                f" saved; safe: {self._safe}.\n  Lower optimizer.lr, or clip, with optimizer.in_backward=false."
            )

    def _stop(self, signal_number: int) -> Outcome:
        self._save()
        if self.saves.saved_step != self.done.step:
            raise StorageError(f"stop requested, but the step was not saved: {self.saves.failures[-1]}")
        code = exit_code(signal_number)
        reason = f"stop requested, saved step {self.done.step}, continue with --resume"
        self.progress.say(reason)
        note_exit(code, reason, step=self.done.step, is_shown=True)
        return Outcome(code, reason)

    # --- files and words ---------------------------------------------------------------------------------------------

    def _write_start(self) -> None:
        folder.replace_text(self.directory / folder.CONFIG, self.config.to_yaml())
        plan = self.config.parallel.model_dump(mode="json")
        batch = self.resolved.batch
        folder.replace_text(self.directory / folder.MODEL, f"{sw.summary(self.model)}\n")
        folder.replace_json(
            self.directory / folder.PLAN,
            {
                "world_size": self.control.size,
                "mesh": self.resolved.mesh.sizes,
                "parallel": plan,
                "batch": {"micro": batch.micro, "accumulation": batch.accumulation, "global": batch.total},
                "predicted_bytes_per_rank": self.predicted_bytes,
                "predicted_peak_memory_bytes": self._predicted_peak(),
            },
        )

    def _write_summary(self, outcome: Outcome) -> None:
        if self.recorder is not None:
            self.recorder.close()
        done = self.done
        summary = {
            "steps": done.step,
            "first_loss": done.first_loss,
            "final_loss": done.final_loss,
            "eval_loss_first": done.eval_loss_first,
            "eval_loss_final": done.eval_loss_final,
            "tokens_per_s": self.trained_tokens / self.trained_s if self.trained_s else None,
            "peak_memory_bytes": self.peak_bytes or None,
            "predicted_peak_memory_bytes": self._predicted_peak(),
            "world_size": self.control.size,
            "strategy": self.config.parallel.strategy,
            "exit_code": outcome.exit_code,
            "reason": outcome.reason,
            "failed_saves": self.saves.failures,
        }
        with contextlib.suppress(StorageError):  # the run's own outcome is what matters now
            folder.replace_json(self.directory / folder.SUMMARY, summary)

    def _introduce(self, resume: str | None, changes: list[str]) -> None:
        batch, source, config = self.resolved.batch, self.resolved.source, self.config
        say = self.progress.say
        kind = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        name = config.model.preset or config.model.hf
        mesh = self.resolved.mesh
        axes = f" on {mesh}" if mesh.ep > 1 or mesh.dp_shard != mesh.world_size else ""
        say(
            f"run {printable(self.directory)}: {name} on {self.control.size} x {kind}, {config.parallel.strategy}{axes}"
        )
        tokens = f"{source.num_tokens:,} tokens in {len(source.files)} files" if source.files else "random tokens"
        longer = self.resolved.positions or 0
        more = f" (data.seq_len; the model takes up to {longer:,})" if longer > self.resolved.seq_len else ""
        say(f"model {str(sw.summary(self.model)).splitlines()[0]}; more in {printable(self.directory / folder.MODEL)}")
        say(f"data {printable(source.name)}: {tokens}; samples of {config.data.seq_len:,} tokens{more}")
        say(str(batch))
        if self.resolved.raised_from is not None:
            stored = self.resolved.raised_from
            say(
                f"weights are stored in {stored}: the optimizer updates fp32 masters"
                f" (parallel.mp_policy.master_dtype; {stored} there keeps 16 bit)"
            )
        if resume is not None:
            say(f"resumed at step {self.done.step}" + "".join(f"\n  {line}" for line in changes))

    def _predicted_peak(self) -> int | None:
        return self._predicted_total() if "activations" in self.predicted_bytes else None

    def _predicted_total(self) -> int:
        """What is measured beside it: on CUDA what the device holds."""
        is_measured = {name: name != "host" or self.device.type == "cpu" for name in self.predicted_bytes}
        return sum(held for name, held in self.predicted_bytes.items() if is_measured[name])

    def _memory_table(self) -> list[str]:
        """Predicted beside measured, most bytes held at once by any rank."""
        names = ", ".join(f"{name} {size(held)}" for name, held in self.predicted_bytes.items() if held)
        total = self._predicted_total()
        ratio = f"{self.peak_bytes / total:.2f} of the prediction" if total and self.peak_bytes else "not measured"
        if self._predicted_peak() is None:
            names += "; activations of this model are not known beforehand"
            ratio = "activations included"
        return [
            "peak memory of tensors, per rank",
            f"  predicted  {size(total):>9}  {names}",
            f"  measured   {size(self.peak_bytes):>9}  {ratio}",
        ]

    def _conclude(self, outcome: Outcome) -> None:
        if outcome.exit_code:
            return
        parity = [parity_line(self.resolved, self.data, self.device)] if self.is_demo else []
        done = self.done
        speed = f", {self.trained_tokens / self.trained_s:,.0f} tokens/s" if self.trained_s else ""
        lines = [f"finished {done.step} steps{speed}"]
        if done.eval_loss_first and done.eval_loss_final is not None:
            fall = 100 * (1 - done.eval_loss_final / done.eval_loss_first)
            lines.append(f"held-out loss {done.eval_loss_first:.4f} -> {done.eval_loss_final:.4f} ({fall:.0f}% lower)")
        lines += self._memory_table()
        for line in [*lines, *parity]:
            self.progress.say(line)
        self.progress.say(f"see {printable(self.directory)}")
