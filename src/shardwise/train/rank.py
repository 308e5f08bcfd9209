"""What every rank does with a checked configuration: join the world, agree on the run's folder, lock it, train."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from shardwise.comm import stall
from shardwise.comm.axes import open_comms
from shardwise.launch import heartbeat
from shardwise.launch.cause import safe
from shardwise.launch.hang import watch_own_rank
from shardwise.launch.notice import tell_once
from shardwise.launch.program import program
from shardwise.launch.starter import starter
from shardwise.launch.stop_request import StopRequest
from shardwise.launch.world import World, joined
from shardwise.spec.errors import StorageError
from shardwise.spec.run_files import LOGS
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.config.resolve import RunConfig
from shardwise.train.control import Control
from shardwise.train.lock import RunLock
from shardwise.train.loop import Trainer
from shardwise.train.new_world import is_started_again, note_starters
from shardwise.train.saves.checkpoints import NEWEST, is_empty
from shardwise.train.saves.memory_tier import check_one_machine
from shardwise.train.steps.pace import Pace

#: torch's own time limit of a collective comes so much after ours, which says more.
_LATER_S = 60.0

#: A world that goes on with the run of an earlier one waits so long for the lock of a rank that is ending.
_OLD_WORLD_ENDS_S = 60.0


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
        trainer = Trainer(resolved, control, directory, device, stop=stop, pace=pace, profiled=profiled)
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
