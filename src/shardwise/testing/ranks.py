"""Run a function on N real processes, and report the result or failure of each.

::

    def body(scale):  # must be at module level, because every process finds it by name
        x = torch.ones(3) * scale
        torch.distributed.all_reduce(x)
        return x


    assert run_on_ranks(body, 2, 10.0)[0].tolist() == [20.0, 20.0, 20.0]

Processes are forked from a server that has already imported torch and shardwise, so a call costs a fork and a
rendezvous instead of an import of torch. The rendezvous is a file in a private directory; Gloo listens on loopback.

Files in the directory of a call (results are written to a temporary name and renamed):

==================  ================================================================================
``out-R``           file descriptors 1 and 2 of rank R
``outcome-R``       pickled :class:`_Outcome`: the result, or the traceback and the time of the error
``stacks-R``        Python stacks of every thread, written by faulthandler on SIGUSR1 (even inside a C call)
``progress-R``      last collective, written by a thread on request
==================  ================================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing import connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.comm import stall
from shardwise.launch.exit_codes import PEER_LOST_TEXTS
from shardwise.launch.file import replace

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import ForkServerProcess

#: Seconds in which the other ranks must notice that one has failed.
_GRACE_S = 5.0
#: Seconds in which a stuck rank must write its stacks.
_DUMP_S = 0.5
#: Texts of errors that a rank raises when it has lost a peer: a consequence, not a cause.
_SECONDARY = (*PEER_LOST_TEXTS, "peer is gone", "failed to connect")
_OUTPUT_TAIL = 4000


#: Environment variable that chooses one of ``testing.transports``.
_TRANSPORT = "SHARDWISE_TRANSPORT"


class RankFailure(AssertionError):  # noqa: N818 - named for what happened; it is a test's failure, not the library's error
    """At least one rank failed. The message shows the rank that failed first, then the others.

    Attributes:
        rank: The rank that failed first, the root cause.
        causes: One line for every rank that failed, by rank.
        tracebacks: The traceback of every rank that raised, by rank.
        timed_out: Whether the time limit ended the run.
    """

    def __init__(
        self, message: str, *, rank: int, causes: dict[int, str], tracebacks: dict[int, str], timed_out: bool
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.causes = causes
        self.tracebacks = tracebacks
        self.timed_out = timed_out


@dataclasses.dataclass
class _Job:
    """The call and settings that a rank receives."""

    rank: int
    world_size: int
    directory: str
    call: bytes
    path: list[str]
    timeout_s: float
    process_group: bool
    device: str
    warning_filters: list[Any]
    environment: dict[str, str]


@dataclasses.dataclass
class _Outcome:
    """The result of a rank, or its failure."""

    result: bytes | None = None
    cause: str | None = None
    trace: str = ""
    raised_at: float = 0.0

    @property
    def is_secondary(self) -> bool:
        return self.cause is not None and any(text in self.cause for text in _SECONDARY)


def run_on_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    process_group: bool = True,
    device: str = "own",
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` processes that form torch.distributed's default group (Gloo).

    Args:
        fn: A module-level function. It can read its rank from ``torch.distributed.get_rank()`` or ``os.environ``
            (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE are set; the other variables are the caller's). The caller's
            warning filters apply.
        world_size: Number of processes.
        *args: Arguments, the same on every rank; pickled.
        timeout_s: Wall-clock limit for the whole call.
        process_group: Initialize the default group before ``fn`` and destroy it afterwards.
        device: ``pretended``: run on a pretended GPU, and fail with a ``StreamError`` if streams are not ordered
            (``shardwise.testing.streams``); ``own``: run on the machine's own devices.

    Returns:
        The results of ``fn`` in rank order. They are pickled, so tensors are copies.

    Raises:
        RankFailure: A rank raised, died, or did not return in time. All processes are ended in any case.
    """
    if device not in {"own", "pretended"}:
        raise ValueError(f"device={device!r}: expected 'own' or 'pretended'.\n  Leave it out for this machine's own.")
    call = pickle.dumps((fn, args))
    directory = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))
    name = getattr(fn, "__qualname__", str(fn))
    run = _Run(name, world_size, directory, timeout_s)
    try:
        run.start(call, process_group=process_group, device=device)
        run.wait()
        run.show_output()
        return run.results()
    finally:
        run.kill()
        shutil.rmtree(directory, ignore_errors=True)


class _Run:
    """The parent's side of one call."""

    def __init__(self, name: str, world_size: int, directory: Path, timeout_s: float) -> None:
        self.name = name
        self.world_size = world_size
        self.directory = directory
        self.timeout_s = timeout_s
        self.processes: list[ForkServerProcess] = []
        self.requests: list[connection.Connection] = []
        self.stuck: list[int] = []
        self.timed_out = False

    def start(self, call: bytes, *, process_group: bool, device: str) -> None:
        context = _fork_server()
        for rank in range(self.world_size):
            mine, theirs = context.Pipe(duplex=False)
            job = _Job(
                rank,
                self.world_size,
                str(self.directory),
                call,
                sys.path,
                self.timeout_s,
                process_group,
                device,
                list(warnings.filters),
                dict(os.environ),
            )
            process = context.Process(target=_rank_main, args=(job, mine), name=f"rank-{rank}", daemon=True)
            process.start()
            mine.close()
            self.processes.append(process)
            self.requests.append(theirs)

    def wait(self) -> None:
        """Wait for all ranks, until the time limit or until some seconds after a rank has failed."""
        deadline = time.monotonic() + self.timeout_s
        pending = dict(enumerate(self.processes))
        failed = False
        while pending:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            connection.wait([process.sentinel for process in pending.values()], timeout=left)
            for rank, process in list(pending.items()):
                if process.exitcode is None:
                    continue
                del pending[rank]
                outcome = self.outcome(rank)
                if not failed and (outcome is None or outcome.result is None):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        self.stuck = sorted(pending)
        self.timed_out = bool(pending) and not failed
        if pending:
            self._ask_stuck_ranks()

    def _ask_stuck_ranks(self) -> None:
        for rank in self.stuck:
            with contextlib.suppress(OSError):
                self.requests[rank].send("progress")
            pid = self.processes[rank].pid
            if pid is not None and (self.directory / f"stacks-{rank}").exists():  # else SIGUSR1 would kill the rank
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(_DUMP_S)

    def kill(self) -> None:
        """Kill every rank and all processes that it started: each rank leads a separate process group."""
        for process in self.processes:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            if process.exitcode is None:
                process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for request in self.requests:
            request.close()
        self.processes, self.requests = [], []

    def outcome(self, rank: int) -> _Outcome | None:
        try:
            return pickle.loads((self.directory / f"outcome-{rank}").read_bytes())
        except FileNotFoundError:
            return None

    def show_output(self) -> None:
        """Write the output of the ranks to this process's stdout, where pytest captures it."""
        for rank in range(self.world_size):
            text = self._text(f"out-{rank}")
            if text.strip():
                sys.stdout.write(f"--- output of rank {rank} of {self.world_size} ({self.name})\n{text.rstrip()}\n")

    def results(self) -> list[Any]:
        outcomes = [self.outcome(rank) for rank in range(self.world_size)]
        results = [outcome.result for outcome in outcomes if outcome is not None and outcome.result is not None]
        if len(results) == self.world_size and not self.stuck:
            return [pickle.loads(result) for result in results]
        raise self._failure(outcomes)

    def _failure(self, outcomes: list[_Outcome | None]) -> RankFailure:
        causes: dict[int, str] = {}
        order: dict[int, tuple[int, float]] = {}  # likely causes first: died, raised, lost a peer, did not return
        for rank, outcome in enumerate(outcomes):
            if rank in self.stuck:
                causes[rank], order[rank] = "did not come back", (3, 0.0)
            elif outcome is None:
                causes[rank], order[rank] = _exit_text(self.processes[rank].exitcode), (0, 0.0)
            elif outcome.cause is not None:
                causes[rank], order[rank] = outcome.cause, (2 if outcome.is_secondary else 1, outcome.raised_at)
        root = min(causes, key=lambda rank: (order[rank], rank))
        victims = [rank for rank in causes if rank != root and order[rank][0] == 2]
        returned = [rank for rank in range(self.world_size) if rank not in causes]

        head = f"{self.name} on {self.world_size} ranks: "
        head += f"no end after {self.timeout_s:g} s." if self.timed_out else f"rank {root} failed first: {causes[root]}"
        parts = [head, self._details(root, outcomes[root])]
        parts += [
            f"rank {rank}: {cause}\n{self._details(rank, outcomes[rank])}"
            for rank, cause in causes.items()
            if rank != root and rank not in victims
        ]
        if victims:
            parts.append(f"ranks {victims} then lost the connection to a peer.")
        if returned:
            parts.append(f"ranks {returned} returned.")
        traces = {rank: outcome.trace for rank, outcome in enumerate(outcomes) if outcome is not None and outcome.trace}
        return RankFailure("\n".join(parts), rank=root, causes=causes, tracebacks=traces, timed_out=self.timed_out)

    def _details(self, rank: int, outcome: _Outcome | None) -> str:
        if outcome is not None and outcome.trace:
            text = outcome.trace
        else:
            progress = self._text(f"progress-{rank}").strip()
            text = f"last collective: {progress or 'unknown'}\n" if rank in self.stuck else ""
            text += _without_harness(self._text(f"stacks-{rank}"))
        output = self._text(f"out-{rank}").rstrip()
        if output:
            text = f"{text.rstrip()}\noutput:\n{output[-_OUTPUT_TAIL:]}"
        return "\n".join(f"  [rank {rank}] {line}" for line in text.rstrip().splitlines())

    def _text(self, name: str) -> str:
        try:
            return (self.directory / name).read_text(errors="replace")
        except FileNotFoundError:
            return ""


def _without_harness(stacks: str) -> str:
    """The stacks of faulthandler, without frames of this module and of multiprocessing."""
    lines = [line for line in stacks.splitlines() if __file__ not in line and "/multiprocessing/" not in line]
    return "\n".join(line for line in lines if line != '  File "<string>", line 1 in <module>')


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"left with exit code {code} before it returned"


def _fork_server() -> Any:
    """The context of the fork server, which the first call in a process starts."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["shardwise.testing.preload"])
    previous = dict(os.environ)
    os.environ.update(_SERVER_ENVIRONMENT)  # thread pools read these when they are loaded, in the server
    try:
        from multiprocessing import forkserver

        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(previous)
    return context


_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
#: Environment of the fork server. Modules that look for a GPU during import use NVML, because forks of a process that
#: has initialized CUDA cannot use CUDA.
_SERVER_ENVIRONMENT = {**_ENVIRONMENT, "SHARDWISE_TESTING_PRELOAD": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def _rank_main(job: _Job, requests: connection.Connection) -> None:
    """The main function of a rank's process."""
    os.setsid()
    directory = Path(job.directory)
    out = os.open(directory / f"out-{job.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(_ENVIRONMENT)
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.world_size),
    )
    sys.path[:] = job.path
    stacks = (directory / f"stacks-{job.rank}").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    threading.Thread(target=_answer, args=(requests, directory, job.rank), daemon=True).start()

    outcome = _Outcome()
    try:
        outcome.result = pickle.dumps(_call(job))
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are failures of this rank too
        outcome.raised_at = time.time()
        outcome.cause = "".join(traceback.format_exception_only(error)).strip()
        outcome.trace = "".join(_without_own_frames(error))
    replace(directory / f"outcome-{job.rank}", pickle.dumps(outcome))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome.result is not None else 1)  # no teardown of torch: it takes longer than most tests


def _call(job: _Job) -> Any:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.set_debug_level_from_env()  # torch, imported by the server, has read another environment
    # Warnings that are errors in pytest are errors in ranks too. The declared type is Sequence, but it is a list.
    warnings.filters[:] = job.warning_filters  # pyrefly: ignore[unsupported-operation]
    warnings.simplefilter("default", append=True)  # makes the assignment take effect
    fn, args = pickle.loads(job.call)
    if job.device == "pretended":
        fn = _on_pretended_device(fn)
    elif os.environ.get(_TRANSPORT):
        from shardwise.testing import transports

        transports.install()
    if not job.process_group:
        return fn(*args)
    distributed.init_process_group(
        "gloo",
        store=distributed.FileStore(str(Path(job.directory) / "rendezvous"), job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=dt.timedelta(seconds=job.timeout_s + 30),  # run_on_ranks ends the run first, with a better message
    )
    distributed.barrier()  # so that a rank that exits at once does not look lost to one that still connects
    try:
        return fn(*args)
    finally:
        if distributed.is_initialized() and sys.exc_info()[0] is None:
            distributed.destroy_process_group()


def _on_pretended_device(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function in a pretended GPU, and check the order of streams after it returns."""

    def run(*args: Any) -> Any:
        from shardwise.testing.streams import pretended_cuda

        with pretended_cuda() as seen:
            result = fn(*args)
        seen.check()
        return result

    return run


def _answer(requests: connection.Connection, directory: Path, rank: int) -> None:
    """Write the last collective to a file when the parent asks, and end this rank when the parent is gone.

    Runs in a thread, because the main thread may be waiting for a peer.
    """
    try:
        requests.recv()
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)
    replace(directory / f"progress-{rank}", stall.last_collective())


def _without_own_frames(error: BaseException) -> list[str]:
    """The traceback from the first frame outside this module."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__ and trace.tb_next is not None:
        trace = trace.tb_next
    return traceback.format_exception(type(error), error, trace)
