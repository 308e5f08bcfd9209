"""One rank's training run, from a checked configuration to an exit code: a loop over sw.train_step and sw.save."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.api.save import drop_save
from shardwise.comm import stall
from shardwise.comm.axes import open_comms
from shardwise.forms.attachment import engine_of
from shardwise.launch import fault, heartbeat
from shardwise.launch.cause import safe
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.hang import watch_own_rank
from shardwise.launch.notice import tell_once
from shardwise.launch.program import program
from shardwise.launch.starter import starter
from shardwise.launch.stop_request import StopRequest, exit_code
from shardwise.launch.world import World, joined
from shardwise.measure.profile import StepProfile, step_range
from shardwise.measure.storage import held_bytes
from shardwise.optim.scaler import needs_scaler
from shardwise.sim.chrome import chrome_trace
from shardwise.spec.errors import (
    CheckpointError,
    CommError,
    ConfigError,
    NonFiniteError,
    RankDisagreement,
    ShardwiseError,
    StorageError,
)
from shardwise.spec.run_files import LOGS, PROFILE, REPORT
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
from shardwise.train.bundle import bundle_folder, write_bundle
from shardwise.train.checkpoints import (
    NEWEST,
    Checkpoints,
    check_config,
    find_checkpoint,
    is_empty,
    saved_config,
)
from shardwise.train.config import Config
from shardwise.train.control import Control
from shardwise.train.data.packing import PackedRows
from shardwise.train.data.rows import Samples
from shardwise.train.data.sampler import Sampler
from shardwise.train.data.stream import StreamSampler, stream_of
from shardwise.train.data.token_files import DataError
from shardwise.train.folder import replace_text
from shardwise.train.lock import RunLock
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
from shardwise.train.lora import check_base, fingerprint
from shardwise.train.memory_tier import check_one_machine
from shardwise.train.new_world import is_started_again, note_starters
from shardwise.train.owned import owned_units
from shardwise.train.pace import Pace
from shardwise.train.predict import PeakTensorBytes, predict
from shardwise.train.proof import parity_line
from shardwise.train.resolve import Batch, RunConfig, data_of
from shardwise.train.saved_state import check_state
from shardwise.train.spikes import LossSpikes
from shardwise.train.step_time import predict_step
from shardwise.train.unread import ReadStep, StepTime, UnreadStep, UnreadSteps, not_finite
from shardwise.train.update import Update, with_true_gradient
from shardwise.train.workload import flops_per_token

#: torch's own time limit of a collective comes so much after ours, which says more.
_LATER_S = 60.0

#: A world that goes on with the run of an earlier one waits so long for the lock of a rank that is ending.
_OLD_WORLD_ENDS_S = 60.0

#: An evaluation asks after so many microbatches whether the run is to stop.
_EVALUATED_AT_ONCE = 16

#: On CPU, tensors are counted during this many first steps: all that is ever allocated is there by then.
MEASURED_STEPS = 3


def train(
    resolved: RunConfig,
    *,
    world: World,
    run_dir: Path | None,
    resume: str | None,
    takes_over: bool = False,
    is_demo: bool = False,
    profiled: range = range(0),
) -> int:
    """Train on this rank and return the exit code.

    Args:
        resolved: The checked configuration, the same on every rank.
        world: This rank among the others.
        run_dir: The run's folder; chosen from the run's name where it is ``None``.
        resume: ``latest``, ``latest-good`` or a checkpoint's path; ``None`` begins a new run.
        takes_over: Take the folder of a run on another machine that gives no sign of life.
        is_demo: Compare with one process after training.
        profiled: Steps of which a trace is written.

    Raises:
        ShardwiseError: Its ``exit_code`` is what the process should leave with.

    Collective:
        Every rank of the world must call.
    """
    pace = Pace(resolved.config.train.step_timeout_s)
    pace.start()
    with (
        StopRequest() as stop,
        joined(world, timeout_s=pace.long_limit_s + _LATER_S) as device,
        contextlib.ExitStack() as stack,
    ):
        control = Control(open_comms(device, "control")[0])
        control.check_same({**resolved.config.model_dump(mode="json"), **program()}, "configuration or program")
        names = control.all_json(starter(world))
        directory, is_again = control.on_first(
            lambda: open_directory(resolved, run_dir, resume, world, names, takes_over=takes_over)
        )
        directory = Path(directory)
        if resolved.config.checkpoint.memory_every is not None:
            check_one_machine(world.num_nodes)
        if world.num_nodes > 1:
            _check_shared(control, directory, world)
        if world.source != "launcher":  # our launcher holds the lock, and has read all of the data
            lock = RunLock(directory, takes_over=takes_over or is_again)
            stack.callback(lock.release)
            note = control.on_first(lambda: lock.acquire(wait_s=_OLD_WORLD_ENDS_S if is_again else 0.0))
            if note:
                tell_once(note)
            control.on_first(lambda: resolved.source.check(resolved.vocab_size))
            control.on_first(lambda: note_starters(directory, names))
        resume = control.on_first(lambda: begins_from(directory, resume, is_restart=is_again))
        stack.callback(_watch(world, directory / LOGS, pace).set)
        trainer = Trainer(resolved, control, directory, device, stop=stop, pace=pace)
        trainer.profiled = profiled
        return trainer.run(resume, is_demo=is_demo)


def _watch(world: World, logs: Path, pace: Pace) -> threading.Event:
    """Write this rank's heartbeat, and watch it where our launcher does not. Returns what ends the watch."""
    ends = threading.Event()
    with contextlib.suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        heart = heartbeat.begin(logs, world.rank)
        heart.ask(stall.where)
        if world.source != "launcher":
            pace.start()
            ends = watch_own_rank(logs, world.rank, world.size, safe=lambda: f"  safe: {safe(heart.beat, logs)}")
    return ends


def open_directory(
    resolved: RunConfig,
    run_dir: Path | None,
    resume: str | None,
    world: World,
    names: Sequence[str | None],
    *,
    takes_over: bool = False,
) -> tuple[str, bool]:
    """Choose and make the run's folder: a new one, or that of the run that is resumed or was started again.

    Args:
        resolved: The configuration.
        run_dir: The folder that was asked for.
        resume: The checkpoint that was asked for.
        world: This world.
        names: Who has started each rank (``launch.starter``).
        takes_over: Whether the folder of a run that gives no sign of life may be taken.

    Returns:
        The folder, and whether the run in it was started again by its launcher and goes on by itself.
    """
    own = run_dir or folder.newest(resolved.config.name)
    is_again = own is not None and is_started_again(own, names, world)
    if run_dir is not None and world.source != "launcher" and not is_again:
        RunLock(run_dir, takes_over=takes_over).check()
    if own is not None and is_again and resume is None:
        chosen = own
    else:
        chosen = folder.choose(resolved.config.name, run_dir, is_resuming=resume is not None, wanted=resume)
    folder.create(chosen)
    return str(chosen), is_again


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


def begins_from(directory: Path, resume: str | None, *, is_restart: bool) -> str | None:
    """What the run goes on from: after a restart what it has saved itself by then, whatever it was started from."""
    if is_restart and not is_empty(directory):
        return "latest"
    if resume in NEWEST and is_empty(directory):
        tell_once(f"{printable(directory)} holds no checkpoint yet: the run starts from the beginning")
        return None
    return resume


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


def held_out_samples(part: Samples, batch: Batch, num_batches: int) -> int:
    """How many held-out samples an evaluation takes.

    ``num_batches`` global batches, or all there are where that is less, cut to a multiple of what all ranks forward at
    once. So the number does not depend on the world as long as the global batch does not.
    """
    at_once = batch.micro * batch.data_parallel_size
    return min(part.num_samples // at_once * at_once, num_batches * batch.total)


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
    ) -> None:
        self.resolved, self.control, self.device, self.stop, self.pace = resolved, control, device, stop, pace
        self.done, self.speed = Progressed(), Speed()
        self.save_s = 0.0  # of the last save that training waited for
        self.profiled, self.traced = range(0), cast("StepProfile | None", None)
        config, batch = resolved.config, resolved.batch
        self.data = data_of(resolved)
        stream, reader = stream_of(self.data.train), resolved.mesh.data_parallel_rank(control.rank)
        share = config.train.seed, batch.micro, batch.accumulation, reader, batch.data_parallel_size
        self.sampler = Sampler(self.data.train.num_samples, *share) if stream is None else StreamSampler(stream, *share)
        self.model, self.optimizer = self._build()
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
        self.skipped_in_a_row = 0
        self.spikes = None if config.log.loss_spikes is None else LossSpikes(config.log.loss_spikes)
        self.mfu_of_token = _mfu_of_token(resolved, self.model, device, control.size)
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
            changes += self._resharded(state.get("mesh") or {})
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

    def _resharded(self, before: dict[str, int]) -> list[str]:
        """What is said of a checkpoint of another mesh."""
        now = self.resolved.mesh.sizes
        if not before or before == now:
            return []
        cuts = [" * ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) for sizes in (before, now)]
        return [f"resharded: {' -> '.join(cut or 'one rank' for cut in cuts)}"]

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
            self.pace.step(step + 1, saved_step=self.saves.saved_step)
            self._fault_at("step_begin", step + 1)
            if step + 1 in self.profiled:
                self._profile(step + 1)
            else:
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
            with step_range(step + 1, "optimizer") if self.traced is not None else contextlib.nullcontext():
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
                data_s=self.speed.data_s,
                sent_bytes=sum(event.sent_bytes for event in events),
                samples=samples,
                generators=generators,
                exposed_s=None if waited is None else (self._waited_s() or 0.0) - waited,
            )
        )

    def _fault_at(self, point: str, step: int) -> None:
        fault.at(point, step, lambda: (held.data for held in self.model.parameters() if held.numel()))

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for p in self.model.parameters() if p.grad is not None and p.grad.numel())

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
        self.speed.data_s = 0.0
        count = self.resolved.batch.total
        sw.train_step(
            self.model,
            self._microbatches(self.data.train, samples, everyones, count),
            lambda output, batch: with_true_gradient(objective.loss_fn(output, batch)),
            self.resolved.batch.accumulation,
            scaler=self.scaler,
            forward=objective.forward,
            losses=losses,
        )
        return sum(losses, torch.zeros((), device=self.device)) if losses else None

    def _microbatches(
        self, part: Samples, samples: Iterable[Sequence[int]], everyones: Iterable[int], count: int
    ) -> Iterator[TokenBatch]:
        """This rank's microbatches, of a step (or an evaluation) over ``count`` samples, ``everyones``."""
        learned = part.num_targets(everyones)
        share = None if learned is None else learned * self.resolved.batch.micro / count
        for each in samples:
            heartbeat.move()
            started = time.perf_counter()
            batch = to_tensors(part, each, self.device, share)
            self.speed.data_s += time.perf_counter() - started
            yield batch

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
            self._check_finite(values)
            self._report_spike(values)
            record = self._take(values, made_steps=self.speed.made_steps - len(found) + index + 1)
            self.progress.step(record)
            if evaluates and index == len(found) - 1:
                record = replace(record, eval_loss=self._evaluate())
                is_evaluated = True
            if self.recorder is not None:
                self.recorder.step(record)
        assert is_evaluated == evaluates

    def _check_finite(self, values: ReadStep) -> None:
        """Look at the loss and the norm of the step after those that are done.

        Raises:
            NonFiniteError: One is not finite, and such steps are not skipped, or too many of them were.
        """
        problem = not_finite(values)
        if problem is None:
            self.skipped_in_a_row = 0
            return
        step, train, directory = self.done.step + 1, self.config.train, self.report.directory
        self.skipped_in_a_row += 1
        write_bundle(directory, self.control.rank, step, problem, values)
        about = f"Its samples, losses and random states are in {printable(bundle_folder(directory, step))}."
        if train.non_finite == "skip" and self.skipped_in_a_row <= train.max_skipped_steps:
            self.progress.say(f"WARNING: step {step} was left out: {problem}. {about}")
            return
        if train.non_finite == "skip":
            problem += f", as in the {train.max_skipped_steps} steps before (train.max_skipped_steps)"
        update = " Parameters are as before that step." if values.norm is not None else ""
        raise NonFiniteError(
            f"step {step}: {problem}.{update} Nothing was saved since; safe: {self._safe}.\n"
            f"  {about} Lower optimizer.lr, lengthen schedule.warmup_steps, or set train.non_finite=skip. A resume"
            " takes another rate by --set optimizer.lr=..."
        )

    def _report_spike(self, values: ReadStep) -> None:
        """Warn of a loss that stands out, and keep its samples, losses and random states."""
        loss = sum(values.losses.values()) / len(values.losses)
        found = None if self.spikes is None else self.spikes.look(loss)
        if found is None:
            return
        step, directory = self.done.step + 1, self.report.directory
        write_bundle(directory, self.control.rank, step, found, values)
        rank = max(values.losses, key=values.losses.__getitem__)
        self.progress.say(
            f"WARNING: step {step}: {found}; the highest is {values.losses[rank]:.4f}, of rank {rank}. Its samples are"
            f" in {printable(bundle_folder(directory, step))}."
        )

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
        count = held_out_samples(self.data.held_out, self.resolved.batch, self.config.train.eval_batches)
        swapped = self.average.swapped_in() if self.average is not None else contextlib.nullcontext()
        with self.pace.long("evaluation"), swapped:
            loss = self._held_out_loss(count)
        if loss is None:
            self.progress.say(f"step {self.done.step}  the evaluation was left: a stop was requested")
            return None
        done = self.done
        done.eval_loss_first = loss if done.eval_loss_first is None else done.eval_loss_first
        done.eval_loss_final = loss
        if self.recorder is not None:
            self.recorder.held_out(done.step, loss)
        self.progress.say(f"step {done.step}  held-out loss {loss:.4f} ({count} samples)")
        self.speed.eval_s += time.perf_counter() - begin
        return loss

    def _must_stop(self) -> bool:
        """Whether any rank has been asked to stop meanwhile. One all-gather of eight bytes per rank."""
        self.unread.signal_number = int(max(row[0] for row in self.control.rows([float(self.stop.signal_number)])))
        return self.unread.signal_number > 0

    def _held_out_loss(self, count: int) -> float | None:
        """The mean loss over ``count`` held-out samples, spread evenly over their part; the same value on every rank.

        ``None`` where a request to stop has come before its end. A pipeline evaluates to the end.

        Collective:
            The model's forwards, then one all-gather of 16 bytes per rank; and one of eight bytes every
            ``_EVALUATED_AT_ONCE`` microbatches.
        """
        batch, part, objective = self.resolved.batch, self.data.held_out, objective_of(self.config)
        at_once, stride = batch.micro * batch.data_parallel_size, part.num_samples // count
        starts = range(self.reader * batch.micro, count, at_once)
        samples = [[index * stride for index in range(start, start + batch.micro)] for start in starts]
        losses: list[Tensor] = []
        microbatches = self._microbatches(part, samples, range(0, count * stride, stride), count)
        at_once = len(samples) if self.resolved.plan.pp > 1 else _EVALUATED_AT_ONCE
        self.model.eval()
        try:
            for first in range(0, len(samples), at_once):
                if first and self._must_stop():
                    return None
                number = min(at_once, len(samples) - first)
                sw.eval_step(
                    self.model,
                    itertools.islice(microbatches, number),
                    objective.loss_fn,
                    number,
                    forward=objective.forward,
                    losses=losses,
                )
            found = torch.stack(losses).tolist() if losses else []  # read once, when all have been computed
        finally:
            self.model.train()
        rows = [row for row in self.control.rows([sum(found), float(bool(found))]) if row[1]]
        return sum(row[0] for row in rows) * batch.micro / count / (len(rows) / batch.data_parallel_size)

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
