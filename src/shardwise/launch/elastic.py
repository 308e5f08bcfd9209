"""Starts the workers of one machine through torch elastic, and returns the exit code of the root cause.

torch elastic starts the processes, watches them, forwards signals and ends all when one fails. In addition, here: ranks
rendezvous through files in a private directory, and sockets listen only on loopback; a worker is killed when its
launcher dies; every attempt has a separate rendezvous; the exit code of the root cause is returned; a run that was
asked to stop, or whose configuration is wrong, is not restarted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.launch import heartbeat
from shardwise.launch.exit_codes import ATTEMPT, CODES, LOG_DIR, PEER_LOST, STOPPED, clear_exit_notes, read_exit_notes
from shardwise.launch.process import num_gpus
from shardwise.launch.root_cause import describe, describe_next, find_root_cause, has_begun
from shardwise.launch.supervisor import Supervisor, kill_workers, num_killed_for_memory
from shardwise.launch.worker import LAUNCHER_PID
from shardwise.launch.world import RENDEZVOUS_DIR, RESTART_COUNT, loopback_interface
from shardwise.spec.errors import ConfigError

#: The agent handles no signals, because the supervisor does. An empty list would mean the default set of signals.
_NO_SIGNALS = "NONE"
#: Default number of processes on a machine without GPUs.
_CPU_WORKERS = 2
#: Maximum number of processes per core; more are taken for a mistake.
_MOST_PER_CORE = 8


def launch(
    entry: str,
    args: Sequence[str],
    nproc: int,
    *,
    max_restarts: int = 0,
    log_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 30.0,
    stop_text: str = "the ranks finish their step, save and end",
    advice: str = "",
    advice_by_code: Mapping[int, str] | None = None,
    describe_restart_point: Callable[[], str] | None = None,
) -> int:
    """Run ``python -m entry args`` on ``nproc`` processes of this machine and wait for them.

    Rank 0 writes to the terminal and to ``log_dir/rank-0.log``, the others only to their log files. Each rank writes
    ``log_dir/exit-RANK.json``. The first SIGTERM, SIGINT, SIGHUP, SIGQUIT or SIGUSR1 to this process is forwarded to
    every worker, which then has ``grace_s`` to exit; a second one kills all workers at once. Workers that write
    heartbeats (``launch.heartbeat``) are killed, with exit code 82, when one of them makes no progress. A worker that
    sees ``SHARDWISE_RESTART_COUNT`` above 0 has been restarted and should continue from the newest checkpoint.

    Args:
        entry: A module that workers can import.
        args: Its arguments.
        nproc: Number of workers.
        max_restarts: How many times all workers are restarted after one was killed, lost a peer, hung or raised.
        log_dir: Directory of logs and exit notes; by default a private directory that is removed at the end.
        env: Additional environment variables for the workers.
        grace_s: Seconds between the request to stop and SIGKILL.
        stop_text: What the workers do when they are asked to stop.
        advice: What a user can do after a failure, such as the command that resumes; printed after what is safe.
        advice_by_code: Different ``advice`` by exit code.
        describe_restart_point: Returns what a restart continues from, such as ``step 10``.

    Returns:
        0; or the code of the root cause, or 1 if that is not in ``exit_codes.CODES``; or, if a rank was killed by
        signal n, 128 + n if no restarts were allowed and 81 if they are exhausted; or 128 + n if signal n asked this
        process to stop and the workers did not save (75 if they did).

    Raises:
        ConfigError: ``nproc`` or ``max_restarts`` is invalid. Nothing was started.
    """
    if nproc < 1:
        raise ConfigError(f"cannot start {nproc} processes: expected at least 1.\n  Set --nproc to 1 or more.")
    if max_restarts < 0:
        raise ConfigError(f"max_restarts is {max_restarts}: expected 0 or more.\n  Set it to 0 for no restarts.")
    private = Path(tempfile.mkdtemp(prefix="shardwise-run-"))  # mode 0700
    logs = Path(log_dir).resolve() if log_dir is not None else private
    logs.mkdir(parents=True, exist_ok=True)
    killed_before = num_killed_for_memory()
    restarted_for: list[str] = []
    try:
        for attempt in range(max_restarts + 1):
            clear_exit_notes(logs)
            heartbeat.clear(logs)
            variables = _worker_variables(private, logs, attempt, nproc) | dict(env or {})
            rendezvous = private / f"rendezvous-{attempt}"
            with Supervisor(logs, nproc, grace_s, stop_text) as supervisor, _environment(variables), _quiet_elastic():
                failures = _run_once(entry, args, nproc, supervisor, rendezvous=rendezvous, grace_s=grace_s)
            notes = read_exit_notes(logs, variables[ATTEMPT])
            cause = find_root_cause(notes, failures, supervisor.stopped_by, supervisor.hang)
            killed = num_killed_for_memory() - killed_before
            if not cause.can_restart or attempt == max_restarts or supervisor.stopped_by is not None:
                break
            place = f" from {describe_restart_point()}" if describe_restart_point is not None else ""
            text = describe(cause, logs, out_of_memory=killed)
            restarted_for.append(text.split("\n")[0].removeprefix("shardwise: "))
            _print_error(f"{text}\nshardwise: restart {attempt + 1}/{max_restarts}{place}")
        if cause.code == 0 and restarted_for:
            count = len(restarted_for)
            _print_error(
                f"shardwise: finished after {count} restart{'s' if count > 1 else ''}: {'; '.join(restarted_for[-3:])}"
            )
        advice = (advice_by_code or {}).get(cause.code, advice)
        if cause.code not in (0, STOPPED):
            if not cause.is_shown:
                _print_error(describe(cause, logs, advice=advice, with_tail=log_dir is None, out_of_memory=killed))
            elif advice and has_begun(logs):
                _print_error(describe_next(heartbeat.read(logs, 0), logs, advice))
        if cause.signal_number is not None and cause.rank is not None and max_restarts > 0:
            return PEER_LOST
        return cause.code if cause.code in CODES or cause.signal_number is not None else 1
    finally:
        shutil.rmtree(private, ignore_errors=True)


def num_workers(nproc: int | None = None) -> int:
    """Return the number of workers to start on this machine: ``nproc``, or by default one for each GPU, else two."""
    gpus = num_gpus()
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


def _worker_variables(private: Path, logs: Path, attempt: int, nproc: int) -> dict[str, str]:
    rendezvous = private / "meeting"
    rendezvous.mkdir(mode=0o700, exist_ok=True)
    variables = {
        RENDEZVOUS_DIR: str(rendezvous),
        RESTART_COUNT: str(attempt),
        ATTEMPT: f"{private.name}-{uuid.uuid4().hex}-{attempt}",
        LOG_DIR: str(logs),
        LAUNCHER_PID: str(os.getpid()),
        # Otherwise the agent shares a TCP store that listens on all interfaces, and ranks of a new attempt can read the
        # addresses of the old one: https://github.com/pytorch/pytorch/issues/173909
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


def _run_once(
    entry: str,
    args: Sequence[str],
    nproc: int,
    supervisor: Supervisor,
    *,
    rendezvous: Path,
    grace_s: float,
) -> dict[int, tuple[int, float]]:
    """Run one attempt until no worker is left. Return exit code and time of the workers that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # torch 2.11 waits 30 s for the other workers after one was lost, for any ``grace_s``.
    has_timeout = "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}
    timeout: dict[str, Any] = {"shutdown_timeout": max(1, round(grace_s))} if has_timeout else {}
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
        signals_to_handle=_NO_SIGNALS,
        **timeout,
    )
    failures: dict[int, tuple[int, float]] = {}
    try:
        if supervisor.stopped_by is None:
            elastic_launch(config, sys.executable)("-P", "-u", "-m", "shardwise.launch.worker", entry, *args)
    except ChildFailedError as error:
        failures = {rank: (failure.exitcode, float(failure.timestamp)) for rank, failure in error.failures.items()}
    finally:
        kill_workers()
    return failures


def _print_error(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that the workers inherit from this process, because the agent offers no other way."""
    previous = {name: os.environ.get(name) for name in [*variables, "TORCHELASTIC_SIGNALS_TO_HANDLE"]}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Hide the agent's long log of a failure, unless LOGLEVEL is set; :func:`launch` prints its own description."""
    if "LOGLEVEL" in os.environ:
        yield
        return
    import torch.distributed.elastic.multiprocessing
    import torch.distributed.launcher.api  # noqa: F401 - creates the loggers

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
