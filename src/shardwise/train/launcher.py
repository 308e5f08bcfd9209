"""Starts a training from a verb's arguments: finds the configuration, checks it before any process starts, launches.

The launcher's side checks everything that needs no ranks, chooses the run's folder and starts the workers
(:func:`launch_training`). Each worker reads the same arguments again and trains (:func:`train_worker`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.storage import place_of, storage_of
from shardwise.spec.errors import CheckpointError, ConfigError, MeshError, NonFiniteError, PlanError, ShardwiseError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.run_files import CONFIG, LOGS
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import RawConfig, read_config
from shardwise.train.elastic import begun_run, keep_batch
from shardwise.train.lock import RunLock
from shardwise.train.predicted.budget import check_budget, find_device
from shardwise.train.spec import FILE_VARIABLE, TrainSpec, spec_from_environment

if TYPE_CHECKING:
    from shardwise.launch.world import World

#: The demo takes about a minute on two slow CPU cores; its held-out loss falls from 5.4 to about 2.1 nats per byte.
DEMO: dict[str, Any] = {
    "name": "demo",
    "model": {"preset": "gpt-demo"},
    "data": {"source": "stdlib", "seq_len": 128},
    "parallel": {"strategy": "zero3"},
    "optimizer": {"name": "adamw", "lr": 2e-3},
    "schedule": {"name": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1},
    "train": {
        "steps": 300,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "eval_every": 100,
        "eval_batches": 8,
    },
    "checkpoint": {"every": 100},
    "log": {"every": 10},
}


def named_config(
    config: Path | None,
    overrides: Sequence[str],
    *,
    spec: str | None = None,
    run_dir: Path | None = None,
    resume: str | None = None,
) -> tuple[RawConfig, bool, Path | None]:
    """Return the configuration that the arguments name, whether it is the demo, and the run's folder if they name one.

    A run's folder, as ``config`` or in place of it as ``resume``, brings its ``config.yaml``; the split of the global
    batch into microbatches is computed again, because the number of ranks may have changed. A spec without a file
    starts from the defaults.
    """
    if spec is not None:
        overrides = [*overrides, f"spec={spec}"]
    if config is not None and config.is_dir():
        run_dir = run_dir or config
    elif config is None and resume is not None:
        run_dir = run_dir or folder.run_of(resume)
        directory = folder.choose(DEMO["name"], run_dir, is_resuming=True, resume=resume)
        config = directory if (directory / CONFIG).is_file() else None
    if config is not None and config.is_dir():
        return read_config(config, ["train.gradient_accumulation_steps=null", *overrides]), False, run_dir
    if config is None and spec is not None:
        return read_config(None, overrides, base={"name": _name_of(spec)}, title="the spec's run"), False, run_dir
    if config is None:
        return read_config(None, overrides, base=DEMO, title="the demo"), True, run_dir
    return read_config(config, overrides), False, run_dir


def _name_of(spec: str) -> str:
    """Return the default name of a run: the name of the spec's file or module."""
    found = re.sub(r"[^A-Za-z0-9._-]", "-", Path(spec.partition(":")[0]).name.removesuffix(".py"))
    return found if re.match(r"[A-Za-z0-9]", found) else "run"


def launch_training(
    raw: RawConfig,
    num_ranks: int,
    arguments: Sequence[str],
    *,
    run_dir: Path | None,
    resume: str | None,
    takes_over: bool = False,
    max_restarts: int,
    say: Callable[[str], None],
    spec: TrainSpec | None = None,
    spec_file: Path | None = None,
) -> int:
    """Check everything that needs no ranks, choose the run's folder, start the workers and return their exit code.

    Every worker reads the command line ``arguments`` again, and ``spec`` from ``spec_file``.
    """
    from shardwise.launch.elastic import launch
    from shardwise.launch.stop_request import CATCHES_STOPS
    from shardwise.train.log.recorder import check_extras

    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: expected 0 or more.\n  Set --max-restarts 0.")
    check_extras(raw.config)  # before data is tokenized
    resolved = resolve(raw, num_ranks, say=say, spec=spec)
    if run_dir is not None:
        RunLock(run_dir, takes_over=takes_over).check()
    to = resolved.config.checkpoint.upload_to
    is_resuming = {"is_resuming": resume is not None, "resume": resume, "upload_to": to}
    directory = folder.choose(resolved.config.name, run_dir, **is_resuming)
    RunLock(directory, takes_over=takes_over).check()
    if to is not None:
        storage_of(place_of(to))
    if resume is not None:
        from shardwise.train.checkpoints.checkpoints import check_config, find_checkpoint, is_empty, saved_config

        if resume not in folder.NEWEST or not is_empty(directory, to):
            check_config(saved_config(find_checkpoint(directory, resume, to)), resolved.config, resolved.overridden)
    resolved.source.check(resolved.vocab_size)
    rehearse(resolved, num_ranks)
    check_budget(resolved, find_device(num_ranks))
    folder.create(directory)
    lock = RunLock(directory, takes_over=takes_over)
    note = lock.acquire()  # also for the workers, so that no other start can intervene
    try:
        if note:
            say(note)
        folder.choose(resolved.config.name, directory, **is_resuming)  # check again under the lock
        verb, *others = arguments
        words, lower_lr = [verb, f"--run-dir={directory}", *others], resolved.config.optimizer.lr / 10
        again = f"continue with `{_resume_command(words)}`"
        lower = f"lower the rate, as by `{_resume_command(words, lower_lr)}`"
        if spec_file is not None:
            call = f"sw.train(config, spec, run_dir={str(directory)!r}, resume=True)"
            again, lower = f"continue with `{call}`", f"continue with a lower rate, by `{call}`"
        refused = dict.fromkeys((ShardwiseError.exit_code, ConfigError.exit_code), f"correct the cause, then {again}")
        return launch(
            "shardwise",
            words,
            num_ranks,
            max_restarts=max_restarts,
            log_dir=directory / LOGS,
            env={CATCHES_STOPS: "1"} | ({} if spec_file is None else {FILE_VARIABLE: str(spec_file)}),
            grace_s=resolved.config.train.grace_s,
            describe_restart_point=lambda: _restart_point(directory, resume, to),
            advice=again,
            advice_by_code={NonFiniteError.exit_code: lower, **refused},
        )
    finally:
        lock.release()


def _restart_point(directory: Path, resume: str | None, upload_to: str | None) -> str:
    """Return the step from which a restart continues, or the checkpoint that the run was started from, in words."""
    from shardwise.checkpoint.store import find_latest

    step = find_latest(directory).step
    if step:
        return f"step {step}"
    is_beginning = resume is None or (resume in folder.NEWEST and upload_to is None)
    return "the beginning" if is_beginning else printable(resume)


def _resume_command(words: Sequence[str], lr: float | None = None) -> str:
    """Return the command that continues a run started with these arguments, with learning rate ``lr`` if given."""
    text = "\0".join(words)
    if lr is not None:
        text = re.sub(r"\0--set[=\0]optimizer\.lr=[^\0]*", "", text) + f"\0--set\0optimizer.lr={lr:g}"
    words = text.split("\0")
    remaining, is_value = list(words[:2]), False
    for word in words[2:]:  # the folder is one of the first two
        name, _, value = word.partition("=")
        if not is_value and name not in {"--resume", "--run-dir"}:
            remaining.append(word)
        is_value = name in {"--resume", "--run-dir"} and not value
    return shlex.join(["shardwise", *remaining, "--resume"])


def launch_parity(raw: RawConfig, num_ranks: int, arguments: Sequence[str], *, strategies: Sequence[str]) -> int:
    """Check everything that needs no ranks, start the workers that compare, and return their exit code."""
    from shardwise.launch.elastic import launch
    from shardwise.spec.tolerances import check_exact
    from shardwise.train.parity import under_strategies

    for name in strategies:
        ParallelPlan(strategy=name)
    resolved = resolve(raw, num_ranks, raises_masters=False)
    for name, plan in under_strategies(resolved.plan, strategies).items():
        check_exact(plan, name)
        plan.mesh(num_ranks, num_ranks)
    resolved.source.check(resolved.vocab_size)
    return launch("shardwise", arguments, num_ranks)


def train_worker(
    raw: RawConfig,
    world: World,
    *,
    run_dir: Path | None,
    resume: str | None,
    takes_over: bool = False,
    is_demo: bool,
    profiled: range = range(0),
    spec: TrainSpec | None = None,
    found: dict[str, Any] | None = None,
) -> int:
    """Train as one of the workers. Return the exit code; ``found`` receives the run's summary and folder."""
    from shardwise.launch.error_file import with_error_file
    from shardwise.launch.exit_codes import run_worker, show_error

    def train_here() -> int:
        from shardwise.train.log.recorder import check_extras
        from shardwise.train.trainer import Trainer
        from shardwise.train.worker import session

        adapted = keep_batch(raw, begun_run(raw.config.name, run_dir), world)
        check_extras(adapted.config)
        resolved = resolve(adapted, world.size, world.ranks_per_machine, spec=spec or spec_from_environment())
        config = resolved.config
        is_prepared = world.source == "launcher" and found is None  # by launch_training, not by sw.launch
        if not is_prepared:
            check_budget(resolved, find_device(world.ranks_per_machine or 1))
        with session(
            world,
            config,
            {"code of the spec": resolved.spec.code},
            run_dir=run_dir,
            resume=resume,
            check=lambda: resolved.source.check(resolved.vocab_size),
            takes_over=takes_over,
            is_prepared=is_prepared,
        ) as run_session:
            trainer = Trainer(resolved, run_session, profiled=profiled)
            code = trainer.run(is_demo=is_demo)
            if found is not None:
                found.update(trainer.loop.summary, directory=str(run_session.directory))
            return code

    again = "start the same command again, with --resume"
    return run_worker(with_error_file(train_here, world, again), world, show_error)


def step_range_of(text: str | None) -> range:
    """Parse ``--profile-steps``; steps are numbered as in ``metrics.jsonl``: ``10:12`` are 10, 11 and 12."""
    if text is None:
        return range(0)
    first, mark, last = text.partition(":")
    if not (first.isdecimal() and (last.isdecimal() or not mark)) or not 1 <= int(first) <= int(last or first):
        raise ConfigError(
            f"--profile-steps {printable(text)}: expected FIRST:LAST, both at least 1.\n  Use --profile-steps 10:12."
        )
    return range(int(first), int(last or first) + 1)


def rehearse(resolved: RunConfig, world_size: int, local_size: int | None = None) -> None:
    """Apply the plan to the model on meta if the plan or the adapters depend on parts of the model.

    This finds everything that would be refused in the workers: degrees that do not divide heads, layers or experts,
    names of missing modules, an adapter of another model. Imports torch for such configurations only.
    """
    lora = resolved.config.lora
    names_layers = lora.is_used and (lora.adapter is not None or lora.targets != "all-linear")
    if not (names_layers or _depends_on_model(resolved.plan)):
        return
    import torch

    from shardwise.api.dry_run import rehearse as apply
    from shardwise.train.model.build import build_model

    try:
        apply(
            lambda: build_model(resolved, torch.device("meta")),
            resolved.plan,
            world_size=world_size,
            ranks_per_machine=local_size,
        )
    except (PlanError, MeshError, ConfigError, CheckpointError):
        raise
    except Exception:  # noqa: BLE001, S110  a model that fails on meta may still build in the workers
        pass


def _depends_on_model(plan: ParallelPlan) -> bool:
    if plan.placements.is_threaded:
        return False  # replicas of the full model
    by_name = (plan.ignored, plan.row_sharded, plan.tp_plan, plan.precision.parts, plan.recompute)
    divides = max(plan.tp, plan.pp, plan.cp, plan.ep) > 1 or plan.routes_tokens
    return divides or any(by_name) or plan.auto_wrap_policy not in {"auto", "none"} or plan.quantize_frozen != "none"
