"""One rank's training run, from a checked configuration to an exit code: a loop over sw.train_step and sw.save."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.save import drop_save
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.part import plain_of
from shardwise.launch import fault
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.notice import tell_once
from shardwise.launch.stop_request import StopRequest, exit_code
from shardwise.measure.storage import held_bytes
from shardwise.optim.scaler import needs_scaler
from shardwise.spec.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    RankDisagreement,
    ShardwiseError,
    StorageError,
)
from shardwise.spec.run_files import PROFILE, REPORT
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.config.resolve import RunConfig, data_of
from shardwise.train.config.sections import Config
from shardwise.train.control import Control
from shardwise.train.data.packing import PackedRows
from shardwise.train.data.sampler import Sampler
from shardwise.train.data.stream import StreamSampler, stream_of
from shardwise.train.data.token_files import DataError
from shardwise.train.evaluation import Evaluation
from shardwise.train.log.metrics import Record
from shardwise.train.log.owned import owned_units
from shardwise.train.log.progress import Progress
from shardwise.train.log.recorder import Recorder
from shardwise.train.log.report import Outcome, Progressed, Report, Speed
from shardwise.train.microbatches import Microbatches
from shardwise.train.model.build import build_optimizer, defer_model, objective_of, parameter_groups, set_lr
from shardwise.train.model.lora import check_base, fingerprint
from shardwise.train.predicted.memory import PeakTensorBytes, least_checkpoint_bytes, predict
from shardwise.train.predicted.time import predict_step
from shardwise.train.proof import parity_line
from shardwise.train.saves import random_state
from shardwise.train.saves.checkpoints import Checkpoints, check_config, find_checkpoint, resharded, saved_config
from shardwise.train.saves.saved_state import check_state
from shardwise.train.steps.health import Health
from shardwise.train.steps.mfu import mfu_of_token
from shardwise.train.steps.pace import Pace
from shardwise.train.steps.trace import StepTrace
from shardwise.train.steps.unread import ReadStep, StepTime, UnreadStep, UnreadSteps
from shardwise.train.steps.update import Update, with_true_gradient

#: On CPU, tensors are counted during this many first steps: all that is ever allocated is there by then.
MEASURED_STEPS = 3


class Trainer:
    """The loop and what it holds. Made once per process."""

    def __init__(
        self,
        resolved: RunConfig,
        control: Control,
        directory: Path,
        device: torch.device,
        *,
        stop: StopRequest,
        pace: Pace,
        profiled: range = range(0),
    ) -> None:
        self.resolved, self.control, self.device, self.stop, self.pace = resolved, control, device, stop, pace
        self.done, self.speed = Progressed(), Speed()
        self.save_s = 0.0  # of the last save that training waited for
        config, batch = resolved.config, resolved.batch
        self.data = data_of(resolved)
        stream, reader = stream_of(self.data.train), resolved.mesh.data_parallel_rank(control.rank)
        share = config.train.seed, batch.micro, batch.accumulation, reader, batch.data_parallel_size
        self.sampler = Sampler(self.data.train.num_samples, *share) if stream is None else StreamSampler(stream, *share)
        self.model, self.optimizer = self._build()
        self.microbatches = Microbatches(batch, device)
        self.evaluation = Evaluation(
            resolved, self.model, self.data.held_out, reader, self.microbatches, control, self._must_stop
        )
        is_scaled = any(control.all_json(needs_scaler(self.model)))  # a stage alone may be in fp16
        self.scaler = sw.GradScaler(device.type, enabled=is_scaled)
        if self.scaler.is_enabled() and config.optimizer.in_backward:
            raise ConfigError(
                "optimizer.in_backward=true, but the model is in fp16: its scaled gradients are looked at before the"
                " update.\n  Set parallel.mp_policy: {param_dtype: bf16, master_dtype: fp32}, or in_backward=false."
            )
        if config.optimizer.in_backward and config.train.non_finite == "skip":
            raise ConfigError(
                "optimizer.in_backward=true updates before the gradients of all parameters are known, so that"
                " train.non_finite=skip cannot leave an update out.\n  Set one of them to its default."
            )
        stops = config.train.non_finite == "stop"
        self.update = Update(self.model, self.optimizer, max_norm=config.train.clip_grad_norm, stops=stops)
        profiled = range(profiled.start, min(profiled.stop, config.train.steps + 1))
        self.trace = StepTrace(profiled, device, directory / PROFILE / f"rank-{control.rank}.json", control.rank)
        self.health = Health(config, directory, control.rank)
        self.mfu_of_token = mfu_of_token(resolved, self.model, device, control.size)
        decay = config.train.ema_decay
        self.average = None if decay is None else sw.ExponentialMovingAverage(self.model, decay)
        self.report = Report(
            resolved,
            directory,
            control.size,
            device,
            str(sw.summary(self.model)),
            predict(resolved, self.model, self.optimizer, self.average, control=control, device=device),
            owned_units(self.model, resolved.mesh, control),
            predict_step(resolved, self.device, control.size),
        )
        if config.checkpoint.final or config.checkpoint.every is not None:
            num_bytes = least_checkpoint_bytes(config.optimizer, self.model, self.optimizer)
            control.on_first(lambda: folder.check_room(directory, num_bytes))
        run_id = control.on_first(lambda: folder.read_run_id(directory) or f"{directory.name}-{secrets.token_hex(4)}")
        self.saves = Checkpoints(
            self.model, directory, run_id=run_id, section=config.checkpoint, control=control, device=device
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
        groups = parameter_groups(self.config.optimizer, model)
        num_trained = sum(len(group["params"]) for group in groups)
        idle = [rank for rank, count in enumerate(self.control.all_json(num_trained)) if count == 0]
        if idle:
            raise ConfigError(
                f"rank {', '.join(map(str, idle))} would have nothing to train: no adapter lies in its stage.\n"
                "  Lower parallel.pp, or give more layers an adapter (lora.targets)."
            )
        optimizer = build_optimizer(self.config.optimizer, groups)
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
            if isinstance(self.data.train, PackedRows):
                self.progress.say(str(self.data.train))
            if resume is not None:
                self.progress.say(f"resumed at step {self.done.step}" + "".join(f"\n  {line}" for line in changes))
            outcome = self._loop()
        except ShardwiseError as error:
            outcome = Outcome(error.exit_code, str(error).splitlines()[0])
            if isinstance(error, CommError):
                drop_save(self.model)  # it would wait for the rank that is gone
            raise
        finally:
            self.progress.close()
            if self.recorder is not None:
                self.recorder.close()
                self.report.write_summary(
                    self.done, outcome, self.speed, peak_bytes=self.peak_bytes, failed_saves=self.saves.failures
                )
                self.report.write_page()
        if self.saves.saved_step == self.done.step:
            self.saves.close_memory()
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
            path = Path(
                self.control.on_first(lambda: str(find_checkpoint(self.report.directory, resume, say=tell_once)))
            )
            changes = self.control.on_first(lambda: check_config(saved_config(path), self.config, self.resolved.asked))
            self.control.on_first(
                lambda: check_state(path, self.resolved.batch.total, self.optimizer.param_groups, self.resolved.asked)
            )
            with self.pace.long("load"):
                state = self._load(path, is_newest=resume == "latest")
            if self._base is not None:
                self.control.on_first(lambda: check_base(self._base, state.get("base")))
            self.sampler.load_state(state["sampler"])
            changes += resharded(state.get("mesh") or {}, self.resolved.mesh.sizes)
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
        if self.config.checkpoint.memory_every is not None:
            self.saves.open_memory(is_new=path is None)
        if path is not None:
            changes += self.control.on_first(lambda: self.saves.set_aside_later(path, self.done.step))
        if self.config.train.steps - self.done.step > MEASURED_STEPS:
            self.speed.timed_from = MEASURED_STEPS  # counting tensors slows them
        self.control.on_first(self.saves.note_run)
        self.control.on_first(self.report.write_start)
        self.recorder = Recorder(self.report.directory, self.config, self.done.step) if self.control.is_first else None
        return changes

    def _load(self, path: Path, *, is_newest: bool) -> dict[str, Any]:
        """Fill model, optimizer and average; says how to go around the newest checkpoint where that is damaged."""
        try:
            return self.saves.load(path, self.optimizer, self.average)
        except CheckpointError as error:
            if not is_newest:
                raise
            raise CheckpointError(f"{error} --resume latest-good takes the newest one that is whole.") from None

    def _restore_random(self, state: dict[str, Any]) -> None:
        """Restore every rank's generators in a world of the same size; seed them by rank and step in any other."""
        held = state.get("rank_state", {}).get("random")
        if held is not None:
            random_state.restore(held, self.device)
        else:
            random_state.seed_all(random_state.rank_seed(self.config.train.seed, self.reader, self.done.step))

    def _loop(self) -> Outcome:
        train, saving = self.config.train, self.config.checkpoint
        if self.done.step == 0 and train.eval_every:
            self._evaluate()
        step = self.done.step
        while step < train.steps:
            self.pace.step(step + 1, saved_step=self.saves.saved_step)
            self._fault_at("step_begin", step + 1)
            with self.trace.step(step + 1, self.progress.say):
                self._step(step)
            step += 1
            self._fault_at("after_step", step)
            if self.saves.is_under_way and (trouble := self.saves.hear()):
                self.progress.say(trouble)
            is_last = step == train.steps
            evaluates = train.eval_every is not None and (is_last or step % train.eval_every == 0)
            saves = bool(saving.every and step % saving.every == 0) or (is_last and saving.final)
            keeps = bool(saving.memory_every and step % saving.memory_every == 0) and not saves
            if not (is_last or evaluates or saves or keeps or self.unread.is_due(step)):
                continue
            self._read(evaluates=evaluates)  # a checkpoint is of steps that were read: their values are finite
            if self.unread.signal_number and not is_last:
                return self._stop(self.unread.signal_number)
            if saves:
                self._save(waits=is_last or not saving.asynchronous)
            elif keeps:
                self._save(in_memory=True)
        self._finish_save()
        self.pace.end(saved_step=self.saves.saved_step)
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
        clock, waited = StepTime(self.device), self._waited_s()
        is_measured = self.device.type == "cuda" or self.speed.made_steps < MEASURED_STEPS
        with contextlib.ExitStack() as stack:
            events = stack.enter_context(sw.record_collectives(self.model))
            memory = stack.enter_context(PeakTensorBytes(self.device)) if is_measured else None
            ratio = self.resolved.schedule.ratio(step)
            lr = self.config.optimizer.lr * ratio
            set_lr(self.optimizer, self.config.optimizer, ratio)  # before the backward, which may be what updates
            scale = self.scaler.get_scale() if self.scaler.is_enabled() else None
            self._fault_at("before_backward", step + 1)
            generators, everyones = random_state.take(self.device), self.sampler.whole_step()
            samples = self.sampler.next_step()
            loss = self._forward_backward(samples, everyones)
            every = self.config.train.check_replicas_every
            if every is not None and (step + 1) % every == 0:
                self._check_replicas(step + 1, after_backward=True)
            fault.at("before_update", step + 1, self._gradients)
            update = None if self.config.optimizer.in_backward else StepTime(self.device)
            with self.trace.optimizer(step + 1):
                norm, is_skipped = (None, False) if update is None else self.update.make(self.scaler)
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
                data_s=self.microbatches.data_s,
                sent_bytes=sum(event.sent_bytes for event in events),
                samples=samples,
                generators=generators,
                exposed_s=None if waited is None else (self._waited_s() or 0.0) - waited,
            )
        )

    def _fault_at(self, point: str, step: int) -> None:
        fault.at(point, step, lambda: (plain_of(held) for held in self.model.parameters() if held.shape.numel()))

    def _gradients(self) -> Iterator[Tensor]:
        grads = (p.grad for p in self.model.parameters())
        return (plain_of(grad) for grad in grads if grad is not None and grad.shape.numel())

    def _waited_s(self) -> float | None:
        """Seconds that this rank has waited for the model's communication; ``None`` where the host does not wait."""
        if self.device.type != "cpu":
            return None
        comms = engine_of(self.model, "train").comms
        of_model = (comms.gather, comms.reduce, comms.replicate)  # which may be the control's too
        beside = [comm for comm in (comms.control, comms.world) if comm not in of_model]
        return sum(comm.waited_s for comm in comms if comm not in beside)

    def _forward_backward(self, samples: Sequence[Sequence[int]], everyones: Iterable[int]) -> Tensor | None:
        """The sum of this rank's losses, on the device; ``None`` on a rank that has no loss.

        Gradients are ready then, or where backward updates, parameters are new.

        Args:
            samples: Those of each microbatch of this rank.
            everyones: Those of all ranks.
        """
        losses: list[Tensor] = []
        objective = objective_of(self.config)
        self.microbatches.data_s = 0.0
        sw.train_step(
            self.model,
            self.microbatches.read(self.data.train, samples, everyones, self.resolved.batch.total),
            lambda output, batch: with_true_gradient(objective.loss_fn(output, batch)),
            self.resolved.batch.accumulation,
            scaler=self.scaler,
            forward=objective.forward,
            losses=losses,
        )
        return sum(losses, torch.zeros((), device=self.device)) if losses else None

    # --- what the steps have found -----------------------------------------------------------------------------------

    def _read(self, *, evaluates: bool) -> None:
        """Read what the steps since the last reading have found, record it, and take the held-out loss if asked.

        Raises:
            NonFiniteError: A loss or a norm is not finite, and that is not to be skipped. The steps before are
                recorded.

        Collective:
            One all-gather, and those of an evaluation.
        """
        found = self.unread.read(own_peak_bytes=self.speed.own_peak_bytes, own_signal=self.stop.signal_number)
        if self.unread.warning:
            self.progress.say(self.unread.warning)
        is_evaluated = False
        for index, values in enumerate(found):
            for warning in self.health.warnings(self.done.step + 1, values, safe=self._safe):
                self.progress.say(warning)
            record = self._take(values, made_steps=self.speed.made_steps - len(found) + index + 1)
            self.progress.step(record)
            if evaluates and index == len(found) - 1:
                record = replace(record, eval_loss=self._evaluate())
                is_evaluated = True
            if self.recorder is not None:
                self.recorder.step(record)
        assert is_evaluated == evaluates

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
        loss, step_s = values.loss, step.time.seconds()
        done.step += 1
        done.tokens += tokens
        if math.isfinite(loss):
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

    def _evaluate(self) -> float | None:
        """The held-out loss, of the averaged weights where there are any; ``None`` after a request to stop."""
        begin = time.perf_counter()
        swapped = self.average.swapped_in() if self.average is not None else contextlib.nullcontext()
        with self.pace.long("evaluation"), swapped:
            loss = self.evaluation.loss()
        if loss is None:
            self.progress.say(f"step {self.done.step}  the evaluation was left: a stop was requested")
            return None
        done = self.done
        done.eval_loss_first = loss if done.eval_loss_first is None else done.eval_loss_first
        done.eval_loss_final = loss
        if self.recorder is not None:
            self.recorder.held_out(done.step, loss)
        self.progress.say(f"step {done.step}  held-out loss {loss:.4f} ({self.evaluation.num_samples} samples)")
        self.speed.eval_s += time.perf_counter() - begin
        return loss

    def _must_stop(self) -> bool:
        """Whether any rank has been asked to stop meanwhile. One all-gather of eight bytes per rank."""
        self.unread.signal_number = int(max(row[0] for row in self.control.rows([float(self.stop.signal_number)])))
        return self.unread.signal_number > 0

    def _check_replicas(self, step: int, *, after_backward: bool = False) -> None:
        """Compare what several ranks hold a copy of.

        Raises:
            RankDisagreement: Something differs.

        Collective:
            As of ``sw.check_replicas``.
        """
        try:
            sw.check_replicas(self.model, self.optimizer, after_backward=after_backward)
        except RankDisagreement as error:
            raise RankDisagreement(f"step {step}: {error}\n  Nothing was saved since; safe: {self._safe}.") from None

    def _save(self, *, waits: bool = True, in_memory: bool = False) -> None:
        state = {
            "progress": self.done.state(),
            "sampler": self.sampler.state(),
            "scaler": self.scaler.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "data": self.fingerprint,
            "strategy": str(self.config.parallel.strategy),
            "mesh": self.resolved.mesh.sizes,
        }
        if self._base is not None:
            state["base"] = self.control.on_first(lambda: fingerprint(self._base))
        begin = time.perf_counter()
        if self.config.train.check_replicas_every is not None and not in_memory:
            self._check_replicas(self.done.step)
        frozen = self._base is None
        with self.pace.long("save"):
            message = self.saves.save(
                self.optimizer,
                self.average,
                step=self.done.step,
                state=state,
                frozen=frozen,
                waits=waits,
                in_memory=in_memory,
            )
        took_s = time.perf_counter() - begin
        self.speed.checkpoint_s += took_s
        self.save_s = took_s if waits and not in_memory else self.save_s
        if message:
            self.progress.say(message)

    def _finish_save(self) -> None:
        begin = time.perf_counter()
        with self.pace.long("save"):
            message = self.saves.finish()
        self.speed.checkpoint_s += time.perf_counter() - begin
        if message:
            self.progress.say(message)

    @property
    def _base(self) -> Path | None:
        """The folder of the weights below the run's adapters, which checkpoints leave out."""
        folder = self.config.model.hf
        return Path(folder).expanduser() if self.config.lora.is_used and folder is not None else None

    def _stop(self, signal_number: int) -> Outcome:
        code = exit_code(signal_number)
        refusal = self.control.on_first(self._no_time_to_save)
        if refusal is not None:
            self._finish_save()
            self.progress.say(refusal)
            note_exit(code, refusal, step=self.done.step, is_shown=True)
            return Outcome(code, refusal)
        self._save()
        if self.saves.saved_step != self.done.step:
            raise StorageError(f"stop requested, but the step was not saved: {self.saves.failures[-1]}")
        reason = f"stop requested, saved step {self.done.step}, continue with --resume"
        self.progress.say(reason)
        note_exit(code, reason, step=self.done.step, is_shown=True)
        return Outcome(code, reason)

    def _no_time_to_save(self) -> str | None:
        """Why a save would not be finished before the processes are ended; ``None`` where it would, by the last save.

        A run without any checkpoint tries all the same: it has nothing to lose.
        """
        waited_s = time.monotonic() - self.stop.came_at_s if self.stop.signal_number else 0.0
        left_s = self.config.train.grace_s - waited_s
        if self.save_s <= left_s or not self.saves.saved_step:
            return None
        return (
            f"stop requested, but step {self.done.step} is not saved: that needs about {self.save_s:.0f} s, and"
            f" {max(left_s, 0):.0f} of {self.config.train.grace_s:g} s (train.grace_s) are left; safe: {self._safe},"
            " continue with --resume"
        )
