"""Everything around a run's steps, for the trainer and for a user's loop (``sw.Run``).

Resuming, time limits, reading the values that steps leave on the device, health, evaluations, checkpoints, requests to
stop, metrics and the report. The loop's owner makes the steps, and passes their results to :meth:`Loop.store`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.save import abandon_save
from shardwise.checkpoint.storage import Url, place_of
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.part import plain_of
from shardwise.launch import heartbeat, inject
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.log_once import log_once
from shardwise.launch.stop_request import exit_code
from shardwise.measure.storage import held_bytes
from shardwise.spec.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    MemoryBudgetError,
    RankDisagreement,
    ShardwiseError,
    StorageError,
)
from shardwise.spec.run_files import BEST, PROFILE, REPORT
from shardwise.spec.text import first_line, printable, size
from shardwise.train import folder
from shardwise.train.callback import Callback, Record
from shardwise.train.checkpoints import random_state
from shardwise.train.checkpoints.checkpoints import Checkpoints, find_checkpoint
from shardwise.train.checkpoints.saved_state import Progressed
from shardwise.train.config.sections import Config
from shardwise.train.log.progress import Progress
from shardwise.train.log.recorder import Recorder
from shardwise.train.log.report import FINISHED, Outcome, Report, Speed
from shardwise.train.predicted.memory import peak_of_tensors
from shardwise.train.steps.health import Health
from shardwise.train.steps.pending_metrics import TOKENS, PendingMetrics, PendingStep, ReadStep, StepTime
from shardwise.train.steps.trace import StepTrace
from shardwise.train.worker import Session

#: Seconds of ``train.grace_s`` that are reserved for the exit of the processes.
_ENDS_S = 2.0
#: On a CPU, tensors are counted during this number of first steps, after which memory use does not change.
MEASURED_STEPS = 3


class Owner(Protocol):
    """The interface of the code that makes the steps."""

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints in addition to tensors, the same on every rank. May communicate."""

    def check(self, path: Path) -> list[str]:
        """Refuse a checkpoint of another run before anything is changed; return the differences that are allowed.

        May communicate.
        """

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restore :meth:`state` from a checkpoint; return lines to print. May communicate."""

    def evaluate(self) -> dict[str, float] | None:
        """Return the values of an evaluation, including ``eval_loss``; ``None`` after a request to stop."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that a run trains and saves."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: sw.GradScaler  # scaler of fp16 losses; may be disabled
    average: sw.ExponentialMovingAverage | None = None  # average of the model's weights
    reader: int = 0  # this rank among those that read different samples
    seed: int | None = None  # seeds the generators of a new run, by reader; ``None``: they are not changed
    saves_frozen: bool = True  # whether checkpoints contain frozen parameters
    #: Settings of the optimizers' groups that a resume does not restore; ``None``: it restores none
    kept_settings: Collection[str] | None = None


class Loop:
    """The steps of a run on one rank, and everything around them.

    With ``is_own_loop`` the owner is a user's loop: the update has been made when a loss is read, and steps may have
    values of any name. ``foreign_bytes`` of tensors, such as a data set's, are not counted as the run's.
    """

    def __init__(
        self,
        owner: Owner,
        parts: Parts,
        report: Report,
        config: Config,
        session: Session,
        *,
        profiled: range = range(0),
        callbacks: Sequence[Callback] = (),
        is_own_loop: bool = False,
        foreign_bytes: int = 0,
    ) -> None:
        self.owner, self.parts, self.report, self.config, self.callbacks = owner, parts, report, config, callbacks
        self.stop, self.timeouts, self._resume = session.stop, session.timeouts, session.resume
        self.control = control = session.control
        self._is_own_loop = is_own_loop
        self.model, self.optimizer = parts.model, parts.optimizers[0]
        self.device, self.directory = session.device, session.directory
        self.step, self.done = 0, Progressed.none()  # steps made, and the state of the steps that were read
        self.speed = Speed()
        self.must_end: str | None = None  # a reason to end the run at the next reading; any rank may set it
        self.outcome = Outcome(1, "failed")  # the outcome, once the run has ended
        self.save_s = 0.0  # duration of the last save that training waited for
        self._is_best = False  # whether the newest evaluation is the best
        self._has_ended, self._foreign_bytes = False, foreign_bytes
        self.has_unfinished_step = False
        self._has_updated = True  # whether the newest step has updated parameters
        self._step_values: dict[str, Any] = {}  # results of the current step
        profiled = range(profiled.start, min(profiled.stop, config.train.steps + 1))
        self.trace = StepTrace(
            profiled, self.device, self.directory / PROFILE / f"rank-{control.rank}.json", control.rank
        )
        self.health = Health(config, self.directory, control.rank)
        run_id = control.on_first(
            lambda: folder.read_run_id(self.directory) or f"{self.directory.name}-{secrets.token_hex(4)}"
        )
        self.checkpoints = Checkpoints(
            self.model, self.directory, run_id=run_id, section=config.checkpoint, control=control, device=self.device
        )
        self.pending = PendingMetrics(control, config.log.every, has_values=is_own_loop)
        self.recorder: Recorder | None = None
        self.progress = Progress(steps=config.train.steps, every=config.log.every, is_shown=control.is_first)

    # --- the run -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the loop in this block: load a checkpoint or start anew, and write the run's files at start and end."""
        resume, changes = self._resume, self._begin()
        self.progress.open(self.done.step)
        try:
            for line in self.report.lines:
                self.progress.say(line)
            if resume is not None:
                self.progress.say(f"resumed at step {self.done.step}" + "".join(f"\n  {line}" for line in changes))
            for callback in self.callbacks:
                callback.on_start(self)
            with self._explained_memory():
                yield
            for callback in self.callbacks:
                callback.on_end(self)
        except ShardwiseError as error:
            self.outcome = Outcome(error.exit_code, str(error).splitlines()[0])
            if isinstance(error, CommError):
                abandon_save(self.model)  # a save would wait for the lost rank
            raise
        finally:
            self.progress.close()
            self.checkpoints.uploads.close()
            if self.recorder is not None:
                self.recorder.close(self.outcome.exit_code)
                self.report.write_summary(self.summary)
                self.report.write_page()

    @contextlib.contextmanager
    def _explained_memory(self) -> Iterator[None]:
        """When a GPU runs out of memory in this block, add the prediction and advice to the error."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            predicted = self.report.predicted_peak
            prediction = "" if predicted is None else f" The predicted peak of tensors is {size(predicted)} on a rank."
            advice = (
                "Give each rank fewer samples at a time, the plan activation_checkpointing='full', or more ranks."
                if self._is_own_loop
                else "Lower train.micro_batch_size and keep train.global_batch_size, set"
                " parallel.activation_checkpointing=full, or take more ranks; `shardwise plan` says what fits.\n"
                "  `--profile-steps 1:3` writes what the allocator did."
            )
            raise MemoryBudgetError(
                f"rank {self.control.rank} ran out of memory in step {self.step + 1}: {first_line(error)}{prediction}\n"
                f"  {advice}"
            ) from error

    @property
    def summary(self) -> dict[str, Any]:
        """The current content of summary.json."""
        return self.report.summary(
            self.done,
            self.outcome,
            self.speed,
            peak_bytes=self.pending.peak_bytes,
            failed_saves=self.checkpoints.failures + self.checkpoints.uploads.failures,
        )

    def conclude(self, *lines: str) -> None:
        """Print the results of a finished run."""
        peak, reason = self.pending.peak_bytes, self.outcome.reason
        self.report.conclude(self.progress, self.done, self.speed, peak_bytes=peak, reason=reason)
        for line in (*lines, f"see {printable(self.directory / REPORT)}"):
            self.progress.say(line)

    def _begin(self) -> list[str]:
        """Load a checkpoint or start anew, and write the run's files. Return differences from the earlier run."""
        changes: list[str] = []
        path: Path | None = None
        state: dict[str, Any] = {}
        seed, resume = self.parts.seed, self._resume
        if resume is None and seed is not None:
            random_state.seed_all(random_state.rank_seed(seed, self.parts.reader))
        elif resume is not None:
            to = self.config.checkpoint.upload_to
            found = self.control.on_first(lambda: str(find_checkpoint(self.directory, resume, to, say=log_once)))
            path = place_of(found)
            changes = [f"from {path}"] if isinstance(path, Url) else []
            changes += self.owner.check(path)
            with self.timeouts.long("load"):
                state = self._load(path, is_newest=resume == "latest")
            changes += self.owner.restore(state)
            self.done = Progressed(**{**state["progress"], "step": state["step"]})
            self.step = self.done.step
            self._restore_random(state)
            if self.parts.scaler.is_enabled() and state.get("scaler"):  # empty if the earlier run did not use fp16
                self.parts.scaler.load_state_dict(state["scaler"])
        self.control.on_first(lambda: self.checkpoints.write_run_id(path))
        if path is not None:
            changes += self.control.on_first(lambda: self.checkpoints.set_aside_later(path, self.done.step))
            self._check_best(state["config"].get("checkpoint", {}))
        if self.config.train.steps - self.done.step > MEASURED_STEPS:
            self.speed.timed_from = MEASURED_STEPS  # counting tensors slows these steps down
        self.control.on_first(self.report.write_start)
        self.control.on_first(self._begin_records)
        return changes

    def _check_best(self, before: Mapping[str, Any]) -> None:
        """Forget the best evaluation if another metric is compared now, or if its checkpoint was superseded.

        ``before`` is the section of the checkpoint's configuration.
        """
        section, done = self.config.checkpoint, self.done
        is_same = (before.get("best"), before.get("best_is")) == (section.best, section.best_is)
        if not (self.control.on_first(lambda: self.checkpoints.has_best(done.best_step)) and is_same):
            done.best, done.best_step, done.num_worse = None, 0, 0

    def _begin_records(self) -> None:
        self.recorder = Recorder(self.directory, self.config, self.done.step)

    def _load(self, path: Path, *, is_newest: bool) -> dict[str, Any]:
        """Load model, optimizer and average; if the newest checkpoint is damaged, add advice to the error."""
        parts, kept = self.parts, self.parts.kept_settings
        groups = [group for each in parts.optimizers for group in each.param_groups]
        before = [{key: group[key] for key in kept or () if key in group} for group in groups]
        try:
            state = self.checkpoints.load(path, parts.optimizers, parts.average, keep_settings=kept is None)
        except CheckpointError as error:
            if not is_newest:
                raise
            advice = "--resume latest-good takes the newest one that is whole."
            if self._is_own_loop:
                advice = f"If you move {printable(path)} away, the run continues from the checkpoint before it."
            raise CheckpointError(f"{error} {advice}") from None
        for group, settings in zip(groups, before, strict=True):
            group.update(settings)
        return state

    def _restore_random(self, state: dict[str, Any]) -> None:
        """Restore every rank's generators if the number of ranks is the same; otherwise seed them by rank and step."""
        saved = state.get("rank_state", {}).get("random")
        if saved is not None:
            random_state.restore(saved, self.device)
        else:
            seed = self.parts.seed or 0
            random_state.seed_all(random_state.rank_seed(seed, self.parts.reader, self.done.step))

    # --- steps -------------------------------------------------------------------------------------------------------

    def steps(self) -> Generator[int]:
        """Yield the numbers of the steps to make, from 0. The caller makes each step and calls :meth:`store`.

        Collective:
            Readings, evaluations and saves between the steps. All ranks make the same steps.
        """
        train = self.config.train
        if self.step == 0 and train.eval_every:
            self._evaluate()
        if self.has_unfinished_step:
            self._between_steps()
        while self.step < train.steps and not self._has_ended:
            self.timeouts.step(self.step + 1, saved_step=self.checkpoints.saved_step)
            self.fault_at("step_begin", self.step + 1)
            version, is_left = engine_of(self.model, "train").version, False
            with self.trace.step(self.step + 1, self.progress.say), self._measured():
                try:
                    yield self.step
                except GeneratorExit:  # the caller left the loop; if parameters were updated, its last step counts
                    is_left = True
                    if engine_of(self.model, "train").version == version:
                        raise
            self._has_updated = engine_of(self.model, "train").version != version
            self.step += 1
            if is_left:
                self.has_unfinished_step = True
                return
            self._between_steps()
        if not self._has_ended:
            self._finish(FINISHED)

    def _between_steps(self) -> None:
        """Read, evaluate and save as due after a step, and end the run if it has to end."""
        self.has_unfinished_step = False
        self.fault_at("after_step", self.step)
        if trouble := self.checkpoints.poll():
            self.progress.say(trouble)
        train, saving = self.config.train, self.config.checkpoint
        is_last = self.step == train.steps
        evaluates = train.eval_every is not None and (is_last or self.step % train.eval_every == 0)
        saves = bool(saving.every and self.step % saving.every == 0) or (is_last and saving.final)
        if not (is_last or evaluates or saves or self.pending.is_due(self.step)):
            return
        self._read(evaluates=evaluates)  # before saving, so that saved values are known to be finite
        is_last = self._agree_on_end() or is_last
        if self.pending.signal_number and not is_last:
            self._has_ended = True
            self.outcome = self._stop(self.pending.signal_number)
            return
        if self._is_best:
            self._save(is_best=True)
        if saves or (is_last and saving.final):
            self._save(waits=is_last or not saving.asynchronous)
        if self.must_end is not None:
            self._finish(self.must_end)

    def leave(self) -> None:
        """Read and save the steps of a loop that was left early, on all ranks after the same step."""
        if self._has_ended:
            return
        if self.pending.steps:
            self._read(evaluates=False)
        if self.config.checkpoint.final and self.done.step:
            self._save()
        self._finish(f"left by its loop after step {self.done.step}")

    def _agree_on_end(self) -> bool:
        """Return whether a rank wants to end the run; ``must_end`` is then its reason on all ranks.

        Collective:
            One all-gather of small JSON, if there are callbacks or a user's loop. All ranks must call.
        """
        if self.callbacks or self._is_own_loop:
            self.must_end = next((reason for reason in self.control.all_json(self.must_end) if reason), None)
        return self.must_end is not None

    def _finish(self, reason: str) -> None:
        """Finish pending writes, and end the run."""
        self._has_ended, saving = True, self.config.checkpoint
        problem = self._finish_save()
        self.timeouts.end(saved_step=self.checkpoints.saved_step)
        if self.checkpoints.failures and saving.final and self.checkpoints.saved_step != self.done.step:
            raise StorageError(
                f"the last checkpoint was not saved: {self.checkpoints.failures[-1]}\n  Free space and resume."
            )
        if problem is not None:
            raise StorageError(
                f"the last checkpoint is saved, but not where checkpoint.upload_to says: {problem}\n"
                "  It is uploaded at the start of a resume, once the store can be written."
            )
        self.outcome = Outcome(0, reason)

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure time, memory and traffic of the step in this block. The results of the step stay on the device."""
        self._step_values = {}
        clock, waited = StepTime(self.device), self._waited_s()
        is_measured = self.device.type == "cuda" or self.speed.made_steps < MEASURED_STEPS
        with contextlib.ExitStack() as stack:
            events, engine = stack.enter_context(sw.record_collectives(self.model)), engine_of(self.model, "train")
            memory = stack.enter_context(peak_of_tensors(self.device, engine)) if is_measured else None
            self._generators = random_state.take(self.device)
            yield
        if memory is not None:
            self.speed.own_peak_bytes = max(self.speed.own_peak_bytes, memory.num_bytes - self._foreign_bytes)
            if self.control.is_first and 1 <= self.speed.made_steps < MEASURED_STEPS and memory.history:
                engine_bytes = held_bytes(engine_of(self.model, "train"), self.parts.optimizers)
                self.report.write_memory(self.step + 1, memory.history, engine_bytes, memory.by_unit)
                self.speed.peak_by_unit = memory.by_unit
        self.speed.made_steps += 1
        clock.stop()
        exposed_s = None if waited is None else (self._waited_s() or 0.0) - waited
        pending = PendingStep(
            time=clock,
            generators=self._generators,
            sent_bytes=sum(event.sent_bytes for event in events),
            exposed_s=exposed_s,
            is_guarded=not self._is_own_loop,
        )
        self.pending.steps.append(dataclasses.replace(pending, **self._step_values))

    def store(self, **values: Any) -> None:
        """Store results of the current step, as fields of ``PendingStep``, without reading them from the device."""
        self._step_values |= values

    def fault_at(self, point: str, step: int) -> None:
        """Inject a requested fault, for tests of recovery."""
        inject.at(point, step, lambda: (plain_of(p) for p in self.model.parameters() if p.shape.numel()))

    def gradients(self) -> Iterator[Tensor]:
        """Return this rank's gradients, for an injected fault."""
        grads = (p.grad for p in self.model.parameters())
        return (plain_of(grad) for grad in grads if grad is not None and grad.shape.numel())

    def _waited_s(self) -> float | None:
        """Return the seconds that this rank waited for the model's communication; ``None`` on a GPU."""
        if self.device.type != "cpu":
            return None
        comms = engine_of(self.model, "train").comms
        of_model = (comms.gather, comms.reduce, comms.replicate)  # the control's may be among them
        others = [comm for comm in (comms.control, comms.world) if comm not in of_model]
        return sum(comm.waited_s for comm in comms if comm not in others)

    # --- results of the steps ----------------------------------------------------------------------------------------

    def _read(self, *, evaluates: bool) -> None:
        """Read the results of the steps since the last reading, record them, and evaluate if requested.

        If a step that is not finite ends the run, the steps before it are still recorded.

        Collective:
            One all-gather, and the collectives of an evaluation.
        """
        found = self.pending.read(own_peak_bytes=self.speed.own_peak_bytes, own_signal=self.stop.signal_number)
        if self.pending.warning:
            self.progress.say(self.pending.warning)
        for index, values in enumerate(found):
            for warning in self.health.warnings(self.done.step + 1, values, safe=self.safe):
                self.progress.say(warning)
            record = self._update_progress(values, made_steps=self.speed.made_steps - len(found) + index + 1)
            self.progress.step(record)
            if evaluates and index == len(found) - 1:
                evaluated = self._evaluate() or {}
                record = replace(record, eval_loss=evaluated.pop("eval_loss", None), values=record.values | evaluated)
            if self.recorder is not None:
                self.recorder.step(record)
            for callback in self.callbacks:
                callback.on_step(self, record)

    @property
    def safe(self) -> str:
        """The last saved checkpoint, in words."""
        step = self.checkpoints.saved_step
        return f"checkpoint of step {step}" if step else "no checkpoint yet"

    def _update_progress(self, values: ReadStep, *, made_steps: int) -> Record:
        """Update the run's progress by one read step, the ``made_steps``-th of this process; return its record."""
        done, step = self.done, values.step
        loss, step_s, tokens = values.loss, step.time.seconds(), values.tokens
        held_out = values.values.pop("eval_loss", None)
        values.values.pop(TOKENS, None)
        done.step += 1
        done.tokens += tokens
        if loss is not None and math.isfinite(loss):
            done.first_loss = loss if done.first_loss is None else done.first_loss
            done.final_loss = loss
        if held_out is not None:
            self._count_held_out(held_out)
        self.speed.steps_s += step_s
        if made_steps > self.speed.timed_from:
            self.speed.tokens += tokens
            self.speed.seconds += step_s
            self.speed.data_s += step.data_s
            self.speed.timed_steps += 1
        of_step = self.report.mfu_of_step
        return Record(
            step=done.step,
            loss=loss,
            grad_norm=values.norm,
            lr=step.lr,
            tokens=done.tokens,
            tokens_per_s=tokens / step_s,
            step_time_s=step_s,
            data_time_s=step.data_s,
            mfu=None if of_step is None else of_step / step_s,
            peak_memory_bytes=self.pending.peak_bytes,
            collective_bytes=step.sent_bytes,
            loss_scale=step.scale,
            optimizer_time_s=None if step.update is None else step.update.seconds(),
            exposed_time_s=step.exposed_s,
            eval_loss=held_out,
            values=values.values,
        )

    def _count_held_out(self, loss: float) -> None:
        done = self.done
        done.eval_loss_first = loss if done.eval_loss_first is None else done.eval_loss_first
        done.eval_loss_final = loss

    def _evaluate(self) -> dict[str, float] | None:
        """Evaluate, with averaged weights if there are any; return the values, or ``None`` after a request to stop."""
        begin, average = time.perf_counter(), self.parts.average
        swapped = average.swapped_in() if average is not None else contextlib.nullcontext()
        with self.timeouts.long("evaluation"), swapped:
            found = self.owner.evaluate()
        if found is None:
            self.progress.say(f"step {self.done.step}  the evaluation was left: a stop was requested")
            return None
        self._count_held_out(found["eval_loss"])
        self._compare_with_best(found)
        if self.recorder is not None and not self.step:  # later values are part of their step's record
            self.recorder.send(0, found)
        self.speed.eval_s += time.perf_counter() - begin
        for callback in self.callbacks:
            callback.on_evaluation(self, found)
        return dict(found)

    def _compare_with_best(self, found: Mapping[str, float]) -> None:
        """Compare an evaluation with the best one so far, for ``checkpoint.best`` and ``train.patience``."""
        saving, patience, done = self.config.checkpoint, self.config.train.patience, self.done
        name = saving.best or "eval_loss"
        if name not in found:
            raise ConfigError(
                f"checkpoint.best={name}: an evaluation gives {', '.join(sorted(found))}.\n  Name one of these."
            )
        value, sign = found[name], 1 if saving.best_is == "least" else -1
        if not math.isnan(value) and (done.best is None or sign * value < sign * done.best):
            done.best, done.best_step, done.num_worse = value, done.step, 0
            self._is_best = saving.best is not None and done.step > 0
            return
        done.num_worse += 1
        if patience is not None and done.num_worse >= patience:
            best = "NaN" if done.best is None else f"{done.best:.4f}"
            self.must_end = f"no better {name} in {patience} evaluations: the best is {best}, of step {done.best_step}"

    def must_stop(self) -> bool:
        """Return whether any rank was asked to stop. One all-gather of eight bytes per rank."""
        self.pending.signal_number = int(max(row[0] for row in self.control.rows([float(self.stop.signal_number)])))
        return self.pending.signal_number > 0

    def check_replicas(self, step: int, *, after_backward: bool = False) -> None:
        """Compare replicated values over the ranks with ``sw.check_replicas``. All ranks must call."""
        try:
            sw.check_replicas(self.model, self.parts.optimizers, after_backward=after_backward)
        except RankDisagreement as error:
            raise RankDisagreement(f"step {step}: {error}\n  Nothing was saved since; safe: {self.safe}.") from None

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, *, waits: bool = True, is_best: bool = False) -> None:
        state, begin, self._is_best = self._state(), time.perf_counter(), False
        if self._is_own_loop and not self._has_updated and any(p.grad is not None for p in self.model.parameters()):
            self.progress.say(
                f"WARNING: step {self.done.step} made no update, and its gradients are not saved: a resumed run adds up"
                " others. Let each step of run.steps() end with optimizer.step() and zero_grad()."
            )
        if self.config.train.check_replicas_every is not None:
            self.check_replicas(self.done.step)
        with self.timeouts.long("save"):
            message = self.checkpoints.save(
                self.parts.optimizers,
                self.parts.average,
                step=self.done.step,
                state=state,
                frozen=self.parts.saves_frozen,
                waits=waits,
                is_best=is_best,
            )
        took_s = time.perf_counter() - begin
        self.speed.checkpoint_s += took_s
        self.save_s = took_s if waits else self.save_s
        if is_best and not message:
            best = f"the best {self.config.checkpoint.best} so far"
            message = f"step {self.done.step}  {best}, kept in {printable(self.directory / BEST)}"
        if message:
            self.progress.say(message)
        heartbeat.enter("step", saved_step=self.checkpoints.saved_step)  # in case a callback raises
        for callback in () if is_best else self.callbacks:
            callback.on_save(self)

    def _state(self) -> dict[str, Any]:
        return {"progress": self.done.model_dump(), "scaler": self.parts.scaler.state_dict(), **self.owner.state()}

    def _finish_save(self, limit_s: float = math.inf) -> str | None:
        """Wait for a running save, and up to ``limit_s`` for uploads; return why the newest checkpoint is not uploaded.

        Collective:
            That of ``sw.finish_save``, and a small all-gather every few seconds, so that no rank seems to hang.
        """
        begin, uploads, is_over, problem = time.perf_counter(), self.checkpoints.uploads, False, None
        with self.timeouts.long("save"):
            message = self.checkpoints.finish()
        self.speed.checkpoint_s += time.perf_counter() - begin
        while True:
            if message:
                self.progress.say(message)
            if is_over or uploads.place is None:
                return problem
            left_s = begin + limit_s - time.perf_counter()
            with self.timeouts.long("save"):
                message, is_over, problem = self.control.on_first(lambda left_s=left_s: uploads.wait(left_s))

    @property
    def _how_to_continue(self) -> str:
        return "start the same command again to continue" if self._is_own_loop else "continue with --resume"

    def _stop(self, signal_number: int) -> Outcome:
        code = exit_code(signal_number)
        refusal = self.control.on_first(self._no_time_to_save)
        if refusal is not None:
            self._finish_save(0.0)
            self.progress.say(refusal)
            note_exit(code, refusal, step=self.done.step, is_shown=True)
            return Outcome(code, refusal)
        is_best = self._is_best
        self._save()
        if self.checkpoints.saved_step != self.done.step:
            raise StorageError(f"stop requested, but the step was not saved: {self.checkpoints.failures[-1]}")
        if is_best and self.control.on_first(self._no_time_to_save) is None:
            self._save(is_best=True)
        waited_s = time.monotonic() - self.stop.received_at_s if self.stop.signal_number else 0.0
        problem = self._finish_save(self.config.train.grace_s - waited_s - _ENDS_S)
        reason = f"stop requested, saved step {self.done.step}, {self._how_to_continue}"
        if problem is not None:
            reason += f" on this machine: {problem.splitlines()[0]}"
        self.progress.say(reason)
        note_exit(code, reason, step=self.done.step, is_shown=True)
        return Outcome(code, reason)

    def _no_time_to_save(self) -> str | None:
        """Return why a save would not finish within ``train.grace_s``, from the time of the last save; else ``None``.

        A run without any checkpoint saves anyway, because it has nothing to lose.
        """
        waited_s = time.monotonic() - self.stop.received_at_s if self.stop.signal_number else 0.0
        left_s = self.config.train.grace_s - waited_s
        if self.save_s <= left_s or not self.checkpoints.saved_step:
            return None
        return (
            f"stop requested, but step {self.done.step} is not saved: that needs about {self.save_s:.0f} s, and"
            f" {max(left_s, 0):.0f} of {self.config.train.grace_s:g} s (train.grace_s) are left; safe: {self.safe},"
            f" {self._how_to_continue}"
        )
