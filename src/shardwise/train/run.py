"""``sw.Run``: run folder, metrics, checkpoints and recovery for a user's training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwise as sw
from shardwise.api.dry_run import DryRun
from shardwise.api.model import data_parallel_rank, data_parallel_size
from shardwise.api.save import Optimizers
from shardwise.checkpoint import plain
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch import heartbeat
from shardwise.launch.error_file import with_error_file
from shardwise.launch.exit_codes import run_worker, show_error
from shardwise.launch.process import num_gpus
from shardwise.launch.world import World, read_world
from shardwise.spec.errors import CheckpointError, ConfigError, ShardwiseError, StateError
from shardwise.spec.text import printable
from shardwise.train.callback import Callback, Record
from shardwise.train.checkpoints.checkpoints import mesh_changes, saved_config
from shardwise.train.checkpoints.saved_state import of_reader, pack_state
from shardwise.train.config.resolve import GPU_LOG_EVERY
from shardwise.train.config.sections import Config, read_config
from shardwise.train.control import differences
from shardwise.train.data.workers import workers_exit_with_this_rank
from shardwise.train.log.report import Report
from shardwise.train.loop import Loop, Parts
from shardwise.train.predicted.step import PredictedStep
from shardwise.train.spec import Mean, wrong_callback
from shardwise.train.steps.pending_metrics import TOKENS
from shardwise.train.worker import Session, session

#: Arguments of :meth:`Run.log` with a fixed meaning.
_KNOWN = ("loss", "grad_norm", "tokens")
#: Key of the states of a loader that has a different state on each rank.
_BY_RANK = "of each rank"


class Stateful(Protocol):
    """A sampler, a loader or a schedule that can save its position as JSON."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Continue from a saved position."""


#: Key of the states of several schedules.
_SEVERAL = "of each schedule"


class _StatefulList:
    """Several schedules that are saved and restored together."""

    def __init__(self, parts: Sequence[Stateful]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each schedule."""
        return {_SEVERAL: [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore each schedule."""
        for part, state in zip(self._parts, state_dict[_SEVERAL], strict=True):
            part.load_state_dict(state)


class Run:
    """Add a run folder, metrics, checkpoints and everything else of ``shardwise train`` to a user's training loop.

    ::

        model = sw.parallelize(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with sw.Run("runs/mine", model=model, optimizer=optimizer, steps=1000, checkpoint={"every": 100}) as run:
            for step in run.steps():
                loss = sw.train_step(model, next(batches), loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)

    If the same program is started again, alone, under ``torchrun`` or by a scheduler, it continues from its newest
    checkpoint, on any number of ranks. SIGTERM and SIGINT end it after the current step, with a checkpoint and exit
    code 75 or 130; other errors have the exit codes of ``shardwise train``. The folder has the same files as a
    trainer's: ``metrics.jsonl``, ``report.html``, ``summary.json``, ``checkpoints/``.

    Args:
        directory: The run's folder, on a disk that all machines share.
        model: A parallelized model; on one process also a plain model, for which nothing is communicated.
        optimizer: An optimizer of the model's parameters; or several, such as those of a generator and its critic. The
            record has the first one's learning rate.
        steps: Number of steps of the whole run.
        checkpoint: Fields of ``checkpoint:`` in a run.yaml, such as ``{"every": 100, "keep": 3}``. By default one
            checkpoint, at the end.
        log: Fields of ``log:``, such as ``{"every": 10, "wandb": True}``.
        train: Fields of ``train:``: ``step_timeout_s``, ``grace_s``, ``non_finite`` and ``check_replicas_every``.
        sampler: The source of samples, saved and restored: an ``sw.DistributedSampler``, or a loader with state.
        scheduler: The learning rate schedule, saved and restored; for several optimizers a list.
        scaler: Scaler of fp16 losses.
        average: Average of the model's weights.
        config: The user's settings, for config.yaml and W&B. Changes are printed when a run continues.
        predicted: The result of ``sw.dry_run``, shown next to the measurements.
        callbacks: Objects whose methods are called during the run (``sw.Callback``).

    Raises:
        ConfigError: A field is unknown or has a wrong type, or the model of several ranks is not parallelized.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        model: nn.Module,
        optimizer: Optimizers,
        steps: int,
        checkpoint: Mapping[str, Any] | None = None,
        log: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        sampler: Stateful | None = None,
        scheduler: Stateful | Sequence[Stateful] | None = None,
        scaler: sw.GradScaler | None = None,
        average: sw.ExponentialMovingAverage | None = None,
        config: Mapping[str, Any] | None = None,
        predicted: DryRun | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._directory, self._own_config, self._predicted = Path(directory), dict(config or {}), predicted
        self._config = _check_config(steps, checkpoint, log, train)
        samplers: list[tuple[str, object]] = [] if sampler is None else [("sampler", sampler)]
        schedules = scheduler if isinstance(scheduler, Sequence) else () if scheduler is None else (scheduler,)
        for name, value in [*samplers, *(("scheduler", each) for each in schedules)]:
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(
                    f"sw.Run({name}=...): {type(value).__name__} has no state_dict and load_state_dict, so that a"
                    " resume would begin its data anew.\n  Pass one that has, or leave it out."
                )
        self._stateful = {
            "sampler": sampler,
            "scheduler": _StatefulList(scheduler) if isinstance(scheduler, Sequence) else scheduler,
        }
        optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            kinds = ", ".join(type(each).__name__ for each in optimizers) or "none"
            raise ConfigError(
                f"sw.Run(optimizer=...): expected a torch optimizer, or several, got {kinds}.\n"
                "  Pass the optimizers that sw.save would get."
            )
        saving = self._config.checkpoint
        if (saving.final or saving.every) and any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            raise ConfigError(
                "sw.Run(optimizer=...): LBFGS keeps lists of directions, which a checkpoint cannot hold.\n"
                '  Run without checkpoints, checkpoint={"final": False}, and save the weights: sw.save(folder, model).'
            )
        try:
            engine_of(model, "sw.Run")
        except StateError as error:
            if (dist.get_world_size() if dist.is_initialized() else read_world().size) > 1:
                raise ConfigError(str(error)) from None
            sw.parallelize(model, "ddp")  # on one rank: no value changes, and the Parameter objects stay
        scaler = scaler or sw.GradScaler("cpu", enabled=False)
        self._parts = Parts(model, optimizers, scaler, average, data_parallel_rank(model), kept_settings=())
        if wrong := [why for each in callbacks for why in wrong_callback(each)]:
            raise ConfigError("sw.Run(callbacks=...):" + "".join(f"\n  - {each}" for each in wrong))
        self._callbacks = callbacks
        self._world: World = read_world()
        self._stack = contextlib.ExitStack()
        self._loop: Loop | None = None
        self._steps: Generator[int] | None = None
        self._logged: dict[str, Any] = {}
        self._lr: float | None = None  # the rate of the step's update: a schedule may step before the loop's next step

    # --- around the loop ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Lock the folder, load its newest checkpoint if there is one, and start the watchdog.

        Collective:
            All ranks must enter: some all-gathers of small JSON, and ``sw.load``.
        """
        with self._exit_codes(), contextlib.ExitStack() as stack:
            facts = {"config": self._own_config}
            run_session = stack.enter_context(
                session(self._world, self._config, facts, run_dir=self._directory, resume=None, auto_resumes=True)
            )
            self._loop = loop = Loop(
                self,
                self._parts,
                self._report(run_session),
                self._config,
                run_session,
                callbacks=self._callbacks,
                is_own_loop=True,
            )
            run_session.control.check_same(self._shared(), "state of sampler and scheduler")
            stack.enter_context(loop.running())
            stack.enter_context(workers_exit_with_this_rank())
            stack.callback(register_optimizer_step_pre_hook(self._read_lr).remove)  # also if Accelerate wraps it
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the summary and the report; if the run was stopped, exit with its exit code.

        Raises:
            SystemExit: A stop was requested, or an error of ours was raised on one of several ranks.
        """
        loop = self._started_loop
        with self._exit_codes():
            try:
                if kind is None:
                    if self._steps is not None:
                        self._steps.close()
                    loop.leave()
            except BaseException:
                self._stack.__exit__(*sys.exc_info())
                raise
            self._stack.__exit__(kind, error, trace)
        if isinstance(error, ShardwiseError) and self._world.source != "alone":
            raise SystemExit(_report_exit(error, self._world)) from error
        if kind is None and loop.outcome.exit_code:
            raise SystemExit(loop.outcome.exit_code)
        if kind is None and (loop.step == self._config.train.steps or loop.must_end):
            loop.conclude()

    @contextlib.contextmanager
    def _exit_codes(self) -> Iterator[None]:
        """Turn an error into a note and an exit code for the launcher of this rank, if there is one."""
        try:
            yield
        except ShardwiseError as error:
            if self._world.source == "alone":
                raise
            raise SystemExit(_report_exit(error, self._world)) from error

    # --- the loop ----------------------------------------------------------------------------------------------------

    @property
    def _started_loop(self) -> Loop:
        if self._loop is None:
            raise StateError("the run has not begun.\n  Use it in a with statement: with sw.Run(...) as run:")
        return self._loop

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps, from 0. Between steps, metrics are read and checkpoints written.

        Collective:
            Every ``log.every`` steps two all-gathers, and those of saves: all ranks make the same steps.
        """
        self._steps = self._make_steps(self._started_loop)
        return self._steps

    def _make_steps(self, loop: Loop) -> Generator[int]:
        every = self._config.train.check_replicas_every
        if loop.has_unfinished_step and every is not None and loop.step % every == 0:
            loop.check_replicas(loop.step)
        with contextlib.closing(loop.steps()) as steps:
            for step in steps:
                self._logged, self._lr = {}, None
                try:
                    yield step
                finally:  # also if the loop is left here
                    self._record_values(loop)
                if every is not None and (step + 1) % every == 0:
                    loop.check_replicas(step + 1)

    def log(
        self,
        *,
        loss: Tensor | float | None = None,
        grad_norm: Tensor | float | None = None,
        tokens: int | None = None,
        **values: Tensor | float | Mean,
    ) -> None:
        """Record results of the current step; may be called several times per step. Does not wait for the device.

        Args:
            loss: This rank's mean loss; the record has the mean over the ranks that log one. A value that is not finite
                ends the run (``train.non_finite``).
            grad_norm: The global norm of the gradient.
            tokens: Tokens of this rank's batch; the record has the sum over all ranks.
            **values: Other values, by their names in the record: an ``sw.Mean``, or a number or tensor without
                dimensions, which is averaged over the ranks. ``eval_loss`` is a held-out loss.
        """
        heartbeat.record_progress()
        reserved = {each.name for each in dataclasses.fields(Record) if each.name != "eval_loss"} & set(values)
        if reserved:
            raise ConfigError(
                f"run.log({', '.join(sorted(reserved))}=...): the record has this already; name it otherwise."
            )
        fields = {"loss": loss, "grad_norm": grad_norm, "tokens": tokens, **values}
        self._logged |= {name: _detach(name, value) for name, value in fields.items() if value is not None}

    def _read_lr(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer.param_groups is (groups := self._parts.optimizers[0].param_groups):
            self._lr = float(groups[0]["lr"])

    def _record_values(self, loop: Loop) -> None:
        model, found = self._parts.model, dict(self._logged)
        loss, norm, tokens = (found.pop(name, None) for name in _KNOWN)
        pairs = {
            name: (each.total, each.count) if isinstance(each, Mean) else (each, 1.0) for name, each in found.items()
        }
        if tokens is not None:
            pairs[TOKENS] = float(tokens) * data_parallel_size(model), 1.0
        if self._lr is None:  # no update was made here, as with an optimizer in backward
            self._read_lr(self._parts.optimizers[0])
        loop.store(loss=loss, norm=norm, lr=self._lr, values=pairs)

    @contextlib.contextmanager
    def long(self, phase: str = "evaluation") -> Iterator[None]:
        """Extend the time limit in this block, for work that takes longer than a step, such as an evaluation."""
        with self._started_loop.timeouts.long(phase):
            yield

    def say(self, text: str) -> None:
        """Print a line above the progress bar, on rank 0."""
        self._started_loop.progress.say(text)

    def stop(self, reason: str) -> None:
        """End the run with a final checkpoint when metrics are next read; may be called on any rank."""
        self._started_loop.must_end = reason

    @property
    def step(self) -> int:
        """Number of steps that the run has made so far."""
        return self._started_loop.step

    @property
    def directory(self) -> Path:
        """The run's folder."""
        return self._directory

    @property
    def summary(self) -> dict[str, Any]:
        """The current content of ``summary.json``: steps, losses, predicted and measured memory and time."""
        return self._started_loop.summary

    # --- methods that the loop calls on its owner --------------------------------------------------------------------

    def _shared(self) -> dict[str, Any]:
        """Return the state that must be the same on every rank; a loader's state may differ."""
        states = {
            name: pack_state(part.state_dict(), f"sw.Run({name}=...)")
            for name, part in self._stateful.items()
            if name == "scheduler" or isinstance(part, sw.DistributedSampler)
            if part is not None
        }
        settings = {"loop": "sw.Run", **self._config.model_dump(mode="json"), "own": self._own_config}
        return {"kept": states, "config": settings, "mesh": sw.summary(self._parts.model).mesh}

    def state(self) -> dict[str, Any]:
        """Return the state for checkpoints besides tensors. A loader has one state, or one per rank in rank order.

        Collective:
            One all-gather of small JSON, and another one if ``sampler`` is not an ``sw.DistributedSampler``.
        """
        state, sampler = self._shared(), self._stateful["sampler"]
        advice = "Nothing was saved. Read as many samples on every rank: sw.DistributedSampler(..., drop_last=True)."
        self._started_loop.control.check_same(state["kept"], "state of sampler and scheduler", advice)
        if sampler is not None and "sampler" not in state["kept"]:
            by_rank = self._started_loop.control.all_json(pack_state(sampler.state_dict(), "sw.Run(sampler=...)"))
            is_one = all(each == by_rank[0] for each in by_rank)
            state["kept"]["sampler"] = by_rank[0] if is_one else {_BY_RANK: by_rank}
        return state | {"kept": plain.unpack(state["kept"])}

    def check(self, path: Path) -> list[str]:
        """Refuse a checkpoint of a trainer's run; return differences of the user's settings. Exchanges small JSON."""

        def compare() -> list[str]:
            saved = saved_config(path)
            if saved.get("loop") != "sw.Run":
                raise CheckpointError(
                    f"{printable(path)} is of a run of `shardwise train`.\n  Continue it with shardwise train --resume,"
                    " or name another folder."
                )
            found = differences(saved.get("own", {}), self._own_config)
            return [f"config.{key}: {printable(old)} -> {printable(new)}" for key, old, new in found]

        return self._started_loop.control.on_first(compare)

    def restore(self, state: Mapping[str, Any]) -> list[str]:
        """Restore sampler and scheduler."""
        saved = state.get("kept", {})
        for name, part in self._stateful.items():
            if part is not None and name not in saved:
                raise CheckpointError(
                    f"the checkpoint has no state of the {name}, which sw.Run({name}=...) is to restore.\n"
                    "  Leave it out to begin it anew, or begin a new run in another folder."
                )
            if name == "scheduler" and part is not None and _num_schedules(saved[name]) != _num_schedules(part):
                raise CheckpointError(
                    f"the checkpoint has the state of {_num_schedules(saved[name])}, and sw.Run(scheduler=...) has"
                    f" {_num_schedules(part)}.\n  Pass as many as before, in the same order, or begin a new run in"
                    " another folder."
                )
            if part is not None:
                value, control = saved[name], self._started_loop.control
                if isinstance(value, dict) and value.keys() == {_BY_RANK}:
                    what = "sw.Run(sampler=...) was that of each of {} ranks"
                    instead = "read by an sw.DistributedSampler"
                    value = of_reader(value[_BY_RANK], control.rank, control.size, what, instead)
                part.load_state_dict(value)
        lines = mesh_changes(state.get("mesh") or {}, sw.summary(self._parts.model).mesh)
        loader = self._stateful["sampler"]
        if lines and loader is not None and not isinstance(loader, sw.DistributedSampler):
            lines.append(
                f"sampler: the place of {type(loader).__name__} is that of the ranks before; samples are left out or"
                " read twice unless it counts those of all ranks"
            )
        return lines

    def evaluate(self) -> dict[str, float] | None:
        """Return ``None``, because evaluations are made by the user's loop."""
        return None

    def _report(self, run_session: Session) -> Report:
        found, config = sw.summary(self._parts.model), self._config
        written = {"name": self._directory.name} | {
            name: getattr(config, name).model_dump(mode="json") for name in ("checkpoint", "log")
        }
        written |= {"train": {"steps": config.train.steps}, "config": self._own_config}
        size, model, strategy = run_session.control.size, str(found), found.placements
        name = type(self._parts.model).__name__
        lines = [
            f"run {printable(run_session.directory)}: {name} on {size} x {run_session.device.type}, {strategy}",
            f"model {model.splitlines()[0]}",
        ]
        return Report(
            run_session.directory,
            run_session.device,
            config=yaml.safe_dump(written, sort_keys=False),
            plan={"world_size": size, "mesh": found.mesh, "parallel": {"strategy": strategy}, "batch": {}},
            model=model,
            lines=lines,
            predicted={},
            predicted_bytes={} if self._predicted is None else dict(self._predicted.bytes_by_category),
            units=[],
            predicted_step=PredictedStep(None, "of a loop of one's own no time is predicted"),
        )


def _check_config(
    steps: int, checkpoint: Mapping[str, Any] | None, log: Mapping[str, Any] | None, train: Mapping[str, Any] | None
) -> Config:
    """Return the configuration of all sections; raise with every mistake at once."""
    ignored = {"best", "best_is", "allow_other_code"} & set(checkpoint or {})
    if ignored:
        raise ConfigError(
            f"sw.Run(checkpoint={{{min(ignored)!r}: ...}}): evaluations and code are the loop's own."
            "\n  Save the best step in the loop: sw.save(folder, model, optimizer)."
        )
    unknown = set(train or {}) - {"step_timeout_s", "grace_s", "non_finite", "check_replicas_every"}
    if unknown:
        raise ConfigError(
            f"sw.Run(train={{{min(unknown)!r}: ...}}): what a step does is the loop's own.\n"
            "  Known are step_timeout_s, grace_s, non_finite and check_replicas_every."
        )
    base = {
        "checkpoint": dict(checkpoint or {}),
        "log": {**({"every": GPU_LOG_EVERY} if num_gpus() else {}), **(log or {})},
        "train": {**(train or {}), "steps": steps, "eval_every": None},
    }
    raw = read_config(None, base=base, title="sw.Run")
    raw.raise_if_any()
    return raw.config


def _num_schedules(schedulers: Any) -> str:
    """Return the number of schedules in ``schedulers``, which is a schedule or its state, in words."""
    states = schedulers.state_dict() if hasattr(schedulers, "state_dict") else schedulers
    if isinstance(states, Mapping) and states.keys() == {_SEVERAL}:
        return f"a list of {len(states[_SEVERAL])} schedules"
    return "one schedule"


def _detach(name: str, value: Any) -> Any:
    """Return a copy of a value without its graph, because it is read some steps later."""
    if isinstance(value, Mean) and name not in _KNOWN:
        return Mean(_detach(name, value.total), _detach(name, value.count))
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    if isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, Tensor)):
        return float(value)
    what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    raise ConfigError(
        f"run.log({name}=...): expected a number or a tensor of one element, got {what}.\n"
        "  Give its mean, or an sw.Mean of a sum and a count under a name of your own."
    )


def _report_exit(error: ShardwiseError, world: World) -> int:
    """Report to the launcher why this rank exits, and return the exit code."""

    def fail() -> int:
        raise error

    return run_worker(with_error_file(fail, world, "start the same command again"), world, show_error)
