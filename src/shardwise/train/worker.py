"""The work of every rank with a checked configuration: join the world, agree on the run's folder, lock it, train."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.comm import stall
from shardwise.comm.axes import open_comms
from shardwise.launch import heartbeat
from shardwise.launch.environment import code_versions
from shardwise.launch.hang import watch_own_rank
from shardwise.launch.log_once import log_once
from shardwise.launch.root_cause import describe_checkpoint
from shardwise.launch.stop_request import StopRequest
from shardwise.launch.world import World, joined_world
from shardwise.spec.errors import StorageError
from shardwise.spec.run_files import LOGS
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.checkpoints.checkpoints import NEWEST, is_empty
from shardwise.train.config.sections import Config
from shardwise.train.control import Control
from shardwise.train.elastic import begun_run, count_run, is_restarted, launcher_identity, save_launchers
from shardwise.train.lock import RunLock
from shardwise.train.steps.timeouts import Timeouts

#: Seconds by which torch's time limit of a collective exceeds ours, whose error says more.
_LATER_S = 60.0

#: Seconds that a restarted world waits for the lock of an old rank that is still exiting.
_OLD_WORLD_ENDS_S = 60.0


@dataclass(frozen=True, slots=True)
class Session:
    """This rank's state in a run, after the ranks have agreed on its folder."""

    control: Control  # communication of the ranks
    directory: Path  # the run's folder
    device: torch.device  # this rank's device
    stop: StopRequest  # signals to stop that this rank received
    timeouts: Timeouts  # time limits that the watchdog checks
    resume: str | None  # the checkpoint to continue from; ``None``: a new run


@contextlib.contextmanager
def session(
    world: World,
    config: Config,
    facts: Mapping[str, Any],
    *,
    run_dir: Path | None,
    resume: str | None,
    check: Callable[[], object] = lambda: None,
    auto_resumes: bool = False,
    takes_over: bool = False,
    is_prepared: bool = False,
) -> Iterator[Session]:
    """Join the world, agree on the run's folder, lock it and start the watchdog, for the duration of the block.

    Args:
        world: This rank and the world.
        config: The run's configuration.
        facts: Further values that must be the same on every rank.
        run_dir: The run's folder; by default named after the run.
        resume: ``latest``, ``latest-good`` or a checkpoint's path; ``None`` starts a new run.
        check: Checks the data; called on rank 0.
        auto_resumes: Whether a run in the folder is continued without ``resume``.
        takes_over: Take over the folder of a run on another machine that shows no sign of life.
        is_prepared: Whether our launcher has locked the folder and checked the data.

    Collective:
        Every rank of the world must call: some all-gathers of small JSON.
    """
    step_timeout_s, upload_to = config.train.step_timeout_s, config.checkpoint.upload_to
    timeouts = Timeouts(step_timeout_s)
    timeouts.start()
    with (
        StopRequest() as stop,
        joined_world(world, timeout_s=timeouts.long_limit_s + _LATER_S) as device,
        contextlib.ExitStack() as stack,
    ):
        control = Control(open_comms(device, "control")[0])
        control.check_same({**config.model_dump(mode="json"), **facts, **code_versions()}, "configuration or program")
        launchers = control.all_json(launcher_identity(world))
        options: dict[str, Any] = {"takes_over": takes_over, "auto_resumes": auto_resumes, "upload_to": upload_to}
        options |= {"is_prepared": is_prepared}
        directory, is_restart, resume = control.on_first(
            lambda: open_directory(config.name, run_dir, resume, world, launchers, **options)
        )
        directory = Path(directory)
        if world.num_nodes > 1:
            _check_shared(control, directory, world)
        if not is_prepared:
            lock = RunLock(directory, takes_over=takes_over or is_restart)
            stack.callback(lock.release)
            note = control.on_first(lambda: lock.acquire(wait_s=_OLD_WORLD_ENDS_S if is_restart else 0.0))
            if note:
                log_once(note)
            control.on_first(check)
            control.on_first(lambda: save_launchers(directory, launchers))
        count_run(directory)
        resume = control.on_first(lambda: begins_from(directory, resume, upload_to, is_restart=is_restart))
        is_interactive = auto_resumes and world.source == "alone" and step_timeout_s is None  # or in a debugger
        if not is_interactive:
            stack.callback(_watch(world, directory / LOGS, timeouts).set)
        yield Session(control, directory, device, stop, timeouts, resume)


def _watch(world: World, logs: Path, timeouts: Timeouts) -> threading.Event:
    """Write this rank's heartbeat, and watch it unless our launcher does. Return an event that ends the watch."""
    ends = threading.Event()
    with contextlib.suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        if world.source != "launcher":
            heartbeat.end()  # from an earlier run of this process
        heart = heartbeat.begin(logs, world.rank)
        heart.set_collective_source(stall.current_wait)
        if world.source != "launcher":
            timeouts.start()
            ends = watch_own_rank(
                logs, world.rank, world.size, describe=lambda: f"  safe: {describe_checkpoint(heart.beat, logs)}"
            )
    return ends


def open_directory(
    name: str,
    run_dir: Path | None,
    resume: str | None,
    world: World,
    launchers: Sequence[str | None],
    *,
    takes_over: bool = False,
    auto_resumes: bool = False,
    upload_to: str | None = None,
    is_prepared: bool = False,
) -> tuple[str, bool, str | None]:
    """Choose and create the run's folder: a new one, or that of the run that is resumed or was started again.

    The arguments are as in :func:`session`; ``launchers`` are those of all ranks (``elastic.launcher_identity``).

    Returns:
        The folder, whether its run was started again by its launcher and continues, and the checkpoint.
    """
    existing = begun_run(name, run_dir)
    is_restart = existing is not None and is_restarted(existing, launchers, world)
    if auto_resumes and resume is None and run_dir is not None:
        resume = "latest" if folder.holds_run(run_dir) or folder.has_lost_run(run_dir, upload_to) else None
    if run_dir is not None and not is_prepared and not is_restart:
        RunLock(run_dir, takes_over=takes_over).check()
    if existing is not None and is_restart and resume is None:
        chosen = existing
    else:
        is_resuming = resume is not None
        chosen = folder.choose(name, run_dir, is_resuming=is_resuming, resume=resume, upload_to=upload_to)
        is_restart = is_restart and chosen == existing
    folder.create(chosen)
    return str(chosen), is_restart, resume


def _check_shared(control: Control, directory: Path, world: World) -> None:
    """Refuse a folder that is not shared by all machines: one rank of each machine looks for a file of rank 0."""
    name = control.on_first(lambda: folder.write_probe(directory))
    try:
        has_found = world.local_rank != 0 or folder.wait_for_file(directory, name)
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
            "  Name a folder of a file system that all machines share, with --run-dir or in sw.Run."
        )


def begins_from(directory: Path, resume: str | None, upload_to: str | None = None, *, is_restart: bool) -> str | None:
    """Return the checkpoint to start from; a restarted run continues from what it has saved, if anything."""
    if is_restart and not is_empty(directory, upload_to):
        return "latest"
    if resume in NEWEST and is_empty(directory, upload_to):
        log_once(f"{printable(directory)} holds no checkpoint yet: the run starts from the beginning")
        return None
    return resume
