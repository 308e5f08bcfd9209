"""One rank's training run, from a checked configuration to an exit code: a loop over sw.train_step and sw.save."""

from __future__ import annotations

import collections
import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.forms.attachment import engine_of
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.notice import tell_once
from shardwise.launch.world import World, joined
from shardwise.measure.profile import StepProfile, step_range
from shardwise.measure.storage import held_bytes
from shardwise.optim.scaler import needs_scaler
from shardwise.sim.chrome import chrome_trace
from shardwise.spec.errors import ConfigError, ShardwiseError, StorageError
from shardwise.spec.run_files import PROFILE, REPORT
from shardwise.spec.text import printable
from shardwise.train import folder, random_state
from shardwise.train.build import (
    TokenBatch,
    build_optimizer,
    defer_model,
    objective_of,
    parameter_groups,
    set_lr,
    to_tensors,
)
from shardwise.train.checkpoints import Checkpoints, check_config, find_checkpoint, saved_config
from shardwise.train.config import Config
from shardwise.train.control import Control
from shardwise.train.data import DataError, Part, RandomPart
from shardwise.train.folder import RunLock, replace_text
from shardwise.train.log import (
    Outcome,
    Progress,
    Progressed,
    Record,
    Recorder,
    Report,
    Speed,
    peak_flops,
)
from shardwise.train.owned import owned_units
from shardwise.train.predict import PeakTensorBytes, predict
from shardwise.train.proof import parity_line
from shardwise.train.resolve import Batch, RunConfig, data_of
from shardwise.train.sampler import Sampler
from shardwise.train.step_time import predict_step
from shardwise.train.unread import ReadStep, StepTime, StopRequest, UnreadStep, UnreadSteps, exit_code
from shardwise.train.workload import flops_per_token

#: On CPU, tensors are counted during this many first steps: all that is ever allocated is there by then.
MEASURED_STEPS = 3


class NonFiniteError(ShardwiseError):
    """The loss or the gradient is not a finite number; nothing was saved since."""

    exit_code = 80


def train(
    resolved: RunConfig,
    *,
    world: World,
    run_dir: Path | None,
    resume: str | None,
    is_demo: bool = False,
    profiled: range = range(0),
) -> int:
    """Train on this rank and return the exit code.

    Args:
        resolved: The checked configuration, the same on every rank.
        world: This rank among the others.
        run_dir: The run's folder; chosen from the run's name where it is ``None``.
        resume: ``latest``, ``latest-good`` or a checkpoint's path; ``None`` begins a new run.
        is_demo: Compare with one process after training.
        profiled: Steps of which a trace is written.

    Raises:
        ShardwiseError: Its ``exit_code`` is what the process should leave with.

    Collective:
        Every rank of the world must call.
    """
    with joined(world) as device, StopRequest() as stop, contextlib.ExitStack() as stack:
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
        trainer = Trainer(resolved, control, directory, device, stop)
        trainer.profiled = profiled
        return trainer.run(resume, is_demo=is_demo)


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


def _mfu_of_token(resolved: RunConfig, model: nn.Module, device: torch.device, num_ranks: int) -> float | None:
    """The share of all devices' peaks that one token a second takes."""
    peak, needed = _peak_flops(model, device), flops_per_token(resolved)
    return None if peak is None or needed is None else needed / (peak * num_ranks)


def _peak_flops(model: nn.Module, device: torch.device) -> float | None:
    """The device's dense peak for the dtype that the model's matrix products run in."""
    if device.type != "cuda":
        return None
    uses_tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), product_dtype(model), uses_tf32=uses_tf32)


def product_dtype(model: nn.Module) -> str:
    """Short name of the dtype in which most of a parallelized model's weights of two or more dimensions compute."""
    counts: collections.Counter[str] = collections.Counter()
    for unit in sw.summary(model).units:
        for group in unit.groups:
            shapes = [shape for _, shape, _ in group.parameters]
            counts[group.compute_dtype] += sum(math.prod(shape) for shape in shapes if len(shape) >= 2)
    return max(counts, key=counts.__getitem__, default="fp32")


def held_out_samples(part: Part | RandomPart, batch: Batch, num_batches: int) -> int:
    """How many held-out samples an evaluation takes.

    ``num_batches`` global batches, or all there are where that is less, cut to a multiple of what all ranks forward at
    once. So the number does not depend on the world as long as the global batch does not.
    """
    at_once = batch.micro * batch.data_parallel_size
    return min(part.num_samples // at_once * at_once, num_batches * batch.total)


class Trainer:
    """The loop and what it holds. Made once per process."""

    def __init__(
        self, resolved: RunConfig, control: Control, directory: Path, device: torch.device, stop: StopRequest
    ) -> None:
        self.resolved, self.control, self.device, self.stop = resolved, control, device, stop
        self.done, self.speed = Progressed(), Speed()
        self.profiled, self.traced = range(0), cast("StepProfile | None", None)
        config, batch = resolved.config, resolved.batch
        self.data = data_of(resolved)
        self.sampler = Sampler(
            self.data.train.num_samples,
            config.train.seed,
            batch.micro,
            batch.accumulation,
            resolved.mesh.data_parallel_rank(control.rank),
            batch.data_parallel_size,
        )
        self.model, self.optimizer = self._build()
        is_scaled = any(control.all_json(needs_scaler(self.model)))  # a stage alone may be in fp16
        self.scaler = sw.GradScaler(device.type, enabled=is_scaled)
        if self.scaler.is_enabled() and config.optimizer.in_backward:
            raise ConfigError(
                "optimizer.in_backward=true, but the model is in fp16: its scaled gradients are looked at before the"
                " update.\n  Set parallel.mp_policy: {param_dtype: bf16, master_dtype: fp32}, or in_backward=false."
            )
        self.mfu_of_token = _mfu_of_token(resolved, self.model, device, control.size)
        decay = config.train.ema_decay
        self.average = None if decay is None else sw.ExponentialMovingAverage(self.model, decay)
        self.report = Report(
            resolved,
            directory,
            control.size,
            device,
            str(sw.summary(self.model)),
            predict(resolved, self.model, self.average, control, device),
            owned_units(self.model, resolved.mesh, control),
            predict_step(resolved, self.device, control.size),
        )
        self.saves = Checkpoints(
            directory, run_id=directory.name, keep=config.checkpoint.keep, control=control, device=device
        )

    @property
    def config(self) -> Config:
        """The run's configuration, every value filled in."""
        return self.resolved.config

    @property
    def reader(self) -> int:
        """This rank among those that read different samples."""
        return self.sampler.data_parallel_rank

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

    def run(self, resume: str | None, *, is_demo: bool) -> int:
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
            self.report.introduce(self.progress)
            if resume is not None:
                self.progress.say(f"resumed at step {self.done.step}" + "".join(f"\n  {line}" for line in changes))
            outcome = self._loop()
        except ShardwiseError as error:
            outcome = Outcome(error.exit_code, str(error).splitlines()[0])
            raise
        finally:
            self.progress.close()
            if self.recorder is not None:
                self.recorder.close()
                self.report.write_summary(
                    self.done, outcome, self.speed, peak_bytes=self.peak_bytes, failed_saves=self.saves.failures
                )
                self.report.write_page()
        if outcome.exit_code == 0:
            parity = parity_line(self.resolved, self.data, self.device) if is_demo else None
            self.report.conclude(self.progress, self.done, self.speed, peak_bytes=self.peak_bytes)
            if parity is not None:
                self.progress.say(parity)
            self.progress.say(f"see {printable(self.report.directory / REPORT)}")
        return outcome.exit_code

    def _begin(self, resume: str | None) -> list[str]:
        """Take up a checkpoint or start anew; write the run's files. Returns what differs from the run's before."""
        changes: list[str] = []
        path: Path | None = None
        saved_hash = self.fingerprint = self.control.on_first(self.resolved.source.fingerprint)
        if resume is None:
            random_state.seed_all(random_state.rank_seed(self.config.train.seed, self.reader))
        else:
            path = Path(self.control.on_first(lambda: str(find_checkpoint(self.report.directory, resume))))
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
            self.speed.timed_from = MEASURED_STEPS  # counting tensors slows them
        self.control.on_first(self.report.write_start)
        self.recorder = Recorder(self.report.directory, self.config, self.done.step) if self.control.is_first else None
        return changes

    def _restore_random(self, state: dict[str, Any]) -> None:
        """Restore every rank's generators in a world of the same size; seed them by rank and step in any other."""
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
            if step + 1 in self.profiled:
                self._profile(step + 1)
            else:
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

    def _profile(self, number: int) -> None:
        """Make step ``number`` and time what it does; after the last of them write this rank's trace."""
        if self.traced is None:
            self.traced = StepProfile(self.device)
            self.traced.__enter__()
        with step_range(number):
            self._step(number - 1)
        if number in (self.profiled[-1], self.config.train.steps):
            self.traced.__exit__(None, None, None)
            path = self.report.directory / PROFILE / f"rank-{self.control.rank}.json"
            path.parent.mkdir(exist_ok=True)
            replace_text(path, chrome_trace({f"rank {self.control.rank}, measured": self.traced.slices}))
            self.traced = None
            self.progress.say(f"trace of steps {self.profiled[0]} to {number}: {printable(path)}, for ui.perfetto.dev")

    def _step(self, step: int) -> None:
        """Make the step after ``step`` of them. What it finds stays on the device.

        Collective:
            The model's and its optimizer's.
        """
        clock, waited = StepTime(self.device), self._waited_s()
        is_measured = self.device.type == "cuda" or self.speed.made_steps < MEASURED_STEPS
        with contextlib.ExitStack() as stack:
            events = stack.enter_context(sw.record_collectives(self.model))
            memory = stack.enter_context(PeakTensorBytes(self.device)) if is_measured else None
            lr = self.config.optimizer.lr * self.resolved.schedule.ratio(step)
            set_lr(self.optimizer, lr)  # before the backward, which may be what updates
            scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
            loss = self._forward_backward()
            update = None if self.config.optimizer.in_backward else StepTime(self.device)
            with step_range(step + 1, "optimizer") if self.traced is not None else contextlib.nullcontext():
                norm, is_skipped = (None, False) if update is None else self._update()
            if update is not None:
                update.stop()
            if self.average is not None:
                self.average.update()
        if memory is not None:
            self.speed.own_peak_bytes = max(self.speed.own_peak_bytes, memory.peak_bytes)
            if self.control.is_first and 1 <= self.speed.made_steps < MEASURED_STEPS and memory.history:
                held = held_bytes(engine_of(self.model, "train"), [self.optimizer])
                self.report.write_memory(step + 1, memory.history, held)
        self.speed.made_steps += 1
        clock.stop()
        self.unread.steps.append(
            UnreadStep(
                loss=loss,
                num_losses=self.resolved.batch.accumulation,
                norm=norm,
                is_skipped=is_skipped,
                time=clock,
                update=update,
                lr=lr,
                scale=scale,
                data_s=self.speed.data_s,
                sent_bytes=sum(event.sent_bytes for event in events),
                exposed_s=None if waited is None else (self._waited_s() or 0.0) - waited,
            )
        )

    def _waited_s(self) -> float | None:
        """Seconds that this rank has waited for the model's communication; ``None`` where the host does not wait."""
        if self.device.type != "cpu":
            return None
        comms = engine_of(self.model, "train").comms
        return sum(comm.waited_s for comm in comms if comm not in (comms.control, comms.world))

    def _forward_backward(self) -> Tensor | None:
        """The sum of this rank's losses, on the device; ``None`` on a rank that has no loss.

        Gradients are ready then, or where backward updates, parameters are new.
        """
        losses: list[Tensor] = []
        objective = objective_of(self.config)
        self.speed.data_s = 0.0
        sw.train_step(
            self.model,
            self._microbatches(self.data.train, self.sampler.next_step()),
            objective.loss_fn,
            self.resolved.batch.accumulation,
            scaler=self.scaler,
            forward=objective.forward,
            losses=losses,
        )
        return sum(losses, torch.zeros((), device=self.device)) if losses else None

    def _microbatches(self, part: Part | RandomPart, samples: Iterable[Sequence[int]]) -> Iterator[TokenBatch]:
        for each in samples:
            started = time.perf_counter()
            batch = to_tensors(part, each, self.device)
            self.speed.data_s += time.perf_counter() - started
            yield batch

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
        found = self.unread.read(own_peak_bytes=self.speed.own_peak_bytes, own_signal=self.stop.signal_number)
        is_evaluated = False
        for index, values in enumerate(found):
            self._check_finite("loss", values.losses)
            if values.norm is not None and not values.step.is_skipped:
                self._check_finite("gradient norm", {0: values.norm})
            record = self._take(values, made_steps=self.speed.made_steps - len(found) + index + 1)
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
        self.speed.steps_s += step_s
        if made_steps > self.speed.timed_from:
            self.speed.tokens += tokens
            self.speed.seconds += step_s
            self.speed.timed_steps += 1
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
            optimizer_time_s=None if step.update is None else step.update.seconds(),
            exposed_time_s=step.exposed_s,
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        """The share of the devices' dense peak; ``None`` where the model's FLOPs or the peak are not known."""
        return None if self.mfu_of_token is None else tokens_per_s * self.mfu_of_token

    def _evaluate(self) -> float:
        """The held-out loss, of the averaged weights where there are any."""
        begin = time.perf_counter()
        count = held_out_samples(self.data.held_out, self.resolved.batch, self.config.train.eval_batches)
        with self.average.swapped_in() if self.average is not None else contextlib.nullcontext():
            loss = self._held_out_loss(count)
        done = self.done
        done.eval_loss_first = loss if done.eval_loss_first is None else done.eval_loss_first
        done.eval_loss_final = loss
        if self.recorder is not None:
            self.recorder.held_out(done.step, loss)
        self.progress.say(f"step {done.step}  held-out loss {loss:.4f} ({count} samples)")
        self.speed.eval_s += time.perf_counter() - begin
        return loss

    def _held_out_loss(self, count: int) -> float:
        """The mean loss over ``count`` held-out samples, spread evenly over their part; the same value on every rank.

        Collective:
            The model's forwards, then one all-gather of 16 bytes per rank.
        """
        batch, part, objective = self.resolved.batch, self.data.held_out, objective_of(self.config)
        at_once, stride = batch.micro * batch.data_parallel_size, part.num_samples // count
        starts = range(self.reader * batch.micro, count, at_once)
        samples = [[index * stride for index in range(start, start + batch.micro)] for start in starts]
        losses: list[Tensor] = []
        self.model.eval()
        try:
            sw.eval_step(
                self.model,
                self._microbatches(part, samples),
                objective.loss_fn,
                len(samples),
                forward=objective.forward,
                losses=losses,
            )
            found = torch.stack(losses).tolist() if losses else []  # read once, when all have been computed
        finally:
            self.model.train()
        rows = [row for row in self.control.rows([sum(found), float(bool(found))]) if row[1]]
        return sum(row[0] for row in rows) * batch.micro / count / (len(rows) / batch.data_parallel_size)

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
        begin = time.perf_counter()
        message = self.saves.save(self.model, self.optimizer, self.average, step=self.done.step, state=state)
        self.speed.checkpoint_s += time.perf_counter() - begin
        if message:
            self.progress.say(message)

    def _check_parameters(self) -> None:
        """Check parameters before a save where backward updates them, as no gradient norm has been checked there.

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
