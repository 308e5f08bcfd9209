"""Start the workers of one machine, through torch elastic, and return the exit code of the rank that is the cause.

torch elastic starts the processes, watches them, passes signals on and ends all when one fails. This module adds: ranks
meet through files in a private directory, and nothing listens beyond loopback; a worker dies with its launcher; every
attempt has a rendezvous of its own; the exit code of the root cause survives; a run that was asked to stop, or whose
configuration is wrong, is not started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.launch.exit_codes import (
    LOG_DIR,
    PEER_LOST,
    STOPPED,
    TIMED_OUT,
    ExitNote,
    clear_exit_notes,
    read_exit_notes,
)
from shardwise.launch.worker import LAUNCHER_PID
from shardwise.launch.world import RENDEZVOUS_DIR, RESTART_COUNT, loopback_interface
from shardwise.spec.errors import ConfigError

#: Exit codes after which a restart can help: an exception without a code, a lost peer, a hang. So can it after signals.
_RESTARTABLE = {1, PEER_LOST, TIMED_OUT}
#: Signals that are sent to a process, or, as SIGABRT, raised by a library when a peer has died.
_OTHERS_KILL_WITH = {signal.SIGTERM, signal.SIGINT, signal.SIGABRT, signal.SIGHUP, signal.SIGQUIT}
_LOG_TAIL_LINES = 12
#: Where there is no GPU, this many processes share the CPU unless --nproc says otherwise.
_CPU_WORKERS = 2
#: More processes than this per core cannot be what was meant.
_MOST_PER_CORE = 8


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why an attempt ended."""

    code: int
    rank: int | None = None
    text: str = ""
    step: int | None = None
    signal_number: int | None = None
    is_shown: bool = False
    victims: tuple[int, ...] = ()


def launch(
    entry: str,
    args: Sequence[str],
    nproc: int,
    *,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: int = 30,
) -> int:
    """Run ``python -m entry args`` on ``nproc`` processes of this machine and wait for them.

    Rank 0 writes to the terminal and to ``log_dir/rank-0.log``, the others to their log files only. Each leaves
    ``log_dir/exit-RANK.json``. The first SIGTERM or SIGINT to this process is passed to every worker, which then has
    ``grace_s`` to end; a second one ends all at once. A worker that sees ``SHARDWISE_RESTART_COUNT`` above 0 has been
    started again and should continue from the newest checkpoint.

    Args:
        entry: A module, found in every worker as it is here.
        args: Its arguments.
        nproc: Number of workers.
        max_restarts: How often to start all workers again after one was killed, lost a peer, hung or raised.
        log_dir: Where logs and exit notes go; by default a private directory that is removed at the end.
        env: Environment variables to add for the workers.
        grace_s: Time that workers have between the request to end and SIGKILL.

    Returns:
        0; or the code of the rank that is the cause; or, where a rank was killed by signal n, 128 + n if no restarts
        were allowed and 81 if they are exhausted; or 128 + n where signal n asked this process to stop and the workers
        did not save (75 if they did).

    Raises:
        ConfigError: ``nproc`` or ``max_restarts`` makes no sense. Nothing has been started.
    """
    if nproc < 1:
        raise ConfigError(f"cannot start {nproc} processes: expected at least 1.\n  Set --nproc to 1 or more.")
    if max_restarts < 0:
        raise ConfigError(f"max_restarts is {max_restarts}: expected 0 or more.\n  Set it to 0 for no restarts.")
    private = Path(tempfile.mkdtemp(prefix="shardwise-run-"))  # mode 0700
    logs = Path(log_dir).resolve() if log_dir is not None else private
    logs.mkdir(parents=True, exist_ok=True)
    try:
        for attempt in range(max_restarts + 1):
            clear_exit_notes(logs)
            variables = _worker_variables(private, logs, attempt, nproc) | dict(env or {})
            with _environment(variables), _quiet_elastic(), _signal_handlers_kept():
                cause = _run_once(
                    entry, args, nproc, rendezvous=private / f"rendezvous-{attempt}", grace_s=grace_s, logs=logs
                )
            if not _can_restart(cause) or attempt == max_restarts:
                break
            _say(f"{_describe(cause, logs)}\nshardwise: restart {attempt + 1}/{max_restarts}")
        if cause.code not in (0, STOPPED) and not cause.is_shown:
            _say(_describe(cause, logs, with_tail=log_dir is None))
        if cause.signal_number is not None and cause.rank is not None and max_restarts > 0:
            return PEER_LOST
        return cause.code
    finally:
        shutil.rmtree(private, ignore_errors=True)


def num_workers(nproc: int | None = None) -> int:
    """How many workers to start on this machine: ``nproc``, by default one for each GPU, else two.

    Raises:
        ConfigError: ``nproc`` makes no sense here; with the arithmetic.
    """
    gpus = _num_gpus()
    if nproc is None:
        return gpus or _CPU_WORKERS
    cores = _num_cores()
    if nproc < 1:
        raise ConfigError(f"--nproc {nproc}: cannot start {nproc} processes, at least 1 is needed.\n  Set --nproc 1.")
    if gpus and nproc > gpus:
        raise ConfigError(
            f"--nproc {nproc}: {nproc} processes need {nproc} GPUs, this machine has {gpus}.\n  Set --nproc {gpus}."
        )
    if not gpus and nproc > _MOST_PER_CORE * cores:
        raise ConfigError(
            f"--nproc {nproc}: {cores} cores take at most {cores} * {_MOST_PER_CORE} = {_MOST_PER_CORE * cores} "
            f"processes.\n  Set --nproc {cores}."
        )
    return nproc


def _num_gpus() -> int:
    """Visible CUDA devices; torch is loaded only where the machine has any."""
    if not Path("/dev/nvidia0").exists() and not Path("/dev/nvidiactl").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def _worker_variables(private: Path, logs: Path, attempt: int, nproc: int) -> dict[str, str]:
    meeting = private / "meeting"
    meeting.mkdir(mode=0o700, exist_ok=True)
    variables = {
        RENDEZVOUS_DIR: str(meeting),
        RESTART_COUNT: str(attempt),
        LOG_DIR: str(logs),
        LAUNCHER_PID: str(os.getpid()),
        # Without this the agent shares a TCP store that listens on all interfaces, and ranks of a new attempt can read
        # the addresses of the dead one: https://github.com/pytorch/pytorch/issues/173909
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name not in os.environ:
            variables[name] = loopback_interface()
    if "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, _num_cores() // nproc))
    return variables


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_once(entry: str, args: Sequence[str], nproc: int, *, rendezvous: Path, grace_s: int, logs: Path) -> _Cause:
    """One attempt, from the start of the workers until none is left."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=str(rendezvous),
        rdzv_configs={"store_type": "file"},
        local_addr="127.0.0.1",
        max_restarts=0,  # each restart is a new agent, see launch
        logs_specs=DefaultLogsSpecs(),
        shutdown_timeout=grace_s,
    )
    stopped_by: int | None = None
    failures: dict[int, tuple[int, float]] = {}
    try:
        elastic_launch(config, sys.executable)("-u", "-m", "shardwise.launch.worker", entry, *args)
    except ChildFailedError as error:
        failures = {rank: (failure.exitcode, float(failure.timestamp)) for rank, failure in error.failures.items()}
    except SignalException as error:
        stopped_by = int(error.sigval)
    except KeyboardInterrupt:
        stopped_by = int(signal.SIGINT)
    finally:
        _kill_what_is_left()
    notes = read_exit_notes(logs)
    return _find_cause(notes, failures, stopped_by)


def _kill_what_is_left() -> None:
    """Kill workers that a second signal has left behind. Each leads a session of its own."""
    own = str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{LAUNCHER_PID}={own}\0".encode() in path.read_bytes() and path.parent.name != own:
                os.kill(int(path.parent.name), signal.SIGKILL)


def _find_cause(
    notes: Mapping[int, ExitNote], failures: Mapping[int, tuple[int, float]], stopped_by: int | None
) -> _Cause:
    """Find the rank that failed first; the others are its victims.

    Args:
        notes: Exit notes of the workers.
        failures: Exit code (negative: signal) and time of the workers that the agent saw fail.
        stopped_by: The signal that asked this process to stop.
    """
    ends: list[tuple[int, float, int, _Cause]] = []
    for rank in sorted({*notes, *failures}):
        note = notes.get(rank)
        status, time_s = failures.get(rank, (note.code if note is not None else 0, 0.0))
        if note is not None and note.code != 0:
            order = 2 if note.is_consequence else 1
            ends.append(
                (order, note.time_s, rank, _Cause(note.code, rank, note.reason, note.step, None, note.is_shown))
            )
        elif status < 0:
            number = -status
            order = 3 if number == signal.SIGTERM else 1 if number in _OTHERS_KILL_WITH else 0
            text = f"killed by {signal.Signals(number).name}"
            if number == signal.SIGKILL:
                text += " (often: out of memory)"
            ends.append((order, time_s, rank, _Cause(128 + number, rank, text, None, number)))
        elif status > 0:
            ends.append((1, time_s, rank, _Cause(status, rank, f"left with exit code {status} without a word")))
    if stopped_by is not None:
        own = [end for end in ends if end[3].code < 128 and end[0] < 2]
        if not own:
            all_finished = bool(notes) and all(note.code == 0 for note in notes.values()) and not failures
            return _Cause(0) if all_finished else _Cause(128 + stopped_by, signal_number=stopped_by, is_shown=True)
        ends = [end for end in own if end[3].code != STOPPED] or own
    if not ends:
        return _Cause(1, text="the workers failed, and none of them said why") if failures else _Cause(0)
    _, _, rank, cause = min(ends, key=lambda end: end[:3])
    is_shown = any(end[3].is_shown and end[3].code == cause.code for end in ends)  # rank 0 says it for all
    return replace(cause, is_shown=is_shown, victims=tuple(end[2] for end in ends if end[2] != rank and end[0] > 1))


def _can_restart(cause: _Cause) -> bool:
    if cause.rank is None:
        return False
    return cause.signal_number is not None or cause.code in _RESTARTABLE


def _describe(cause: _Cause, logs: Path, *, with_tail: bool = False) -> str:
    if cause.rank is None:
        return f"shardwise: {cause.text}"
    at = f" at step {cause.step}" if cause.step is not None else ""
    lines = [f"shardwise: rank {cause.rank}{at}: {cause.text}"]
    if cause.victims:
        lines.append(f"  ranks {list(cause.victims)} ended in consequence")
    log = logs / f"rank-{cause.rank}.log"
    if with_tail:
        with contextlib.suppress(OSError):
            lines += [f"  | {line}" for line in log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]]
    elif log.exists():
        lines.append(f"  log: {log}")
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the workers, which inherit this process's environment; the agent has no other way."""
    kept = {name: os.environ.get(name) for name in [*variables, "TORCHELASTIC_SIGNALS_TO_HANDLE"]}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Hide the forty lines that the agent logs on a failure, unless LOGLEVEL is set; :func:`launch` prints its own."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    import torch.distributed.elastic.multiprocessing
    import torch.distributed.launcher.api  # noqa: F401 - makes the loggers

    prefixes = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(prefixes)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Restore this process's signal handlers, which the agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    kept: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
