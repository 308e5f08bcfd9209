"""The program of a worker: ``python -m shardwise.launch.worker MODULE ARGS...`` runs ``MODULE`` as ``python -m`` does.

In addition the worker is killed when its launcher dies, writes to its rank's log file (rank 0 also to the terminal),
and writes an exit note. Nothing here imports torch, so that a worker is bound to its launcher as early as possible.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import os
import re
import runpy
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

from shardwise.launch import heartbeat
from shardwise.launch.exit_codes import LOG_DIR, note_exit, reserve_exit_note
from shardwise.launch.stop_request import CATCHES_STOPS, catch_early

#: Process number of the launcher, which a worker must not outlive.
LAUNCHER_PID = "SHARDWISE_LAUNCHER_PID"

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|\x07")


def die_with_parent(parent_pid: int | None = None) -> None:
    """Make the kernel kill this process when its parent dies.

    Call it first in a worker. A training worker that outlives its launcher occupies a device, and writes checkpoints
    into the folder of the run that replaces it. With ``parent_pid`` this works even after the parent's death.
    """
    parent = parent_pid if parent_pid is not None else os.getppid()
    if not _set_parent_death_signal():
        threading.Thread(target=_poll_parent, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # the parent ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def _set_parent_death_signal() -> bool:
    if sys.platform != "linux":
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    except (OSError, AttributeError):
        return False


def _poll_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


class _Tee:
    """Writes text to the terminal unchanged, and to a log without colours, cursor movements and overwritten lines."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        written = self._terminal.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._log.write(_without_control(line) + "\n")
        self._line = self._line[self._line.rfind("\r") + 1 :]
        return written

    def write_to_log(self, text: str) -> None:
        """Write only to the log."""
        self._log.write(text)

    def flush(self) -> None:
        self._terminal.flush()
        self._log.flush()

    def finish(self) -> None:
        """Write the last line if it is incomplete."""
        if _without_control(self._line):
            self._log.write(_without_control(self._line) + "\n")
        self._line = ""
        self.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._terminal, name)


def _without_control(line: str) -> str:
    text = line.rstrip("\r")
    return _CONTROL.sub("", text[text.rfind("\r") + 1 :])


def _open_log(rank: int) -> TextIO:
    """Open the rank's log file. All output of ranks other than 0 goes only there, including that of C++."""
    directory = os.environ.get(LOG_DIR)
    log = _lossy(os.devnull)
    if directory:
        with contextlib.suppress(OSError):
            log = _lossy(f"{directory}/rank-{rank}.log")
    if rank == 0:
        sys.stdout = _Tee(sys.stdout, log)
        sys.stderr = _Tee(sys.stderr, log)
    else:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        sys.stdout, sys.stderr = _lossy(1), _lossy(2)
    return log


class _Lossy(io.FileIO):
    """A file that ignores write errors, because a run must not end when a log cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _lossy(file: str | int) -> TextIO:
    raw = _Lossy(file, "ab", closefd=isinstance(file, str))
    return io.TextIOWrapper(io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)


def main(arguments: list[str]) -> int:
    """Run ``arguments[0]`` as ``python -m`` would. Return the exit code."""
    die_with_parent(int(os.environ.get(LAUNCHER_PID) or os.getppid()))
    rank = int(os.environ.get("RANK", "0"))
    log = _open_log(rank)
    faulthandler.enable(log)
    if os.environ.get(LOG_DIR):
        if os.environ.get(CATCHES_STOPS):
            catch_early()
        with contextlib.suppress(OSError):
            heartbeat.begin(Path(os.environ[LOG_DIR]), rank)
            reserve_exit_note(Path(os.environ[LOG_DIR]), rank)
    module, *rest = arguments
    if module != "shardwise":  # a user's module may be in the current folder, which -P hides
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    sys.argv = [module, *rest]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code, reason, is_shown = 0, "finished", True
    except SystemExit as end:
        code, reason = _code_of(end)
        is_shown = rank == 0
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    except KeyboardInterrupt:
        code, reason, is_shown = 130, "interrupted", False
    except BaseException as error:  # noqa: BLE001 - the launcher must be notified of any error
        code, is_shown = getattr(error, "exit_code", 1), False
        reason = "".join(traceback.format_exception_only(error)).strip()
        log.write("".join(_traceback(error)))
    note_exit(code, reason, is_shown=is_shown)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Tee):
            stream.finish()
        else:
            stream.flush()
    log.flush()
    return code


def _code_of(end: SystemExit) -> tuple[int, str]:
    if end.code is None or end.code == 0:
        return 0, "finished"
    if isinstance(end.code, int):
        return end.code, f"left with exit code {end.code}"
    return 1, str(end.code)


def _traceback(error: BaseException) -> list[str]:
    """Return the traceback without the frames of this module and of runpy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            break
        trace = trace.tb_next
    return traceback.format_exception(type(error), error, trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
