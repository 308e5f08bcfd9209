"""`shardwise train` as users start it: processes of its own, and what they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

from tests.train.train_here import CONFIG

#: Variables of a surrounding world, which a started run must not see.
OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def command(folder: Path, *arguments: str, config: str = CONFIG) -> list[str]:
    (folder / "run.yaml").write_text(config)
    return [sys.executable, "-m", "shardwise", "train", "run.yaml", *arguments]


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in OUTSIDE} | {"OMP_NUM_THREADS": "1"}


def wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Whether the condition held within the time."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if condition():
            return True
        time.sleep(0.005)
    return condition()


def num_steps(run: Path) -> int:
    """How many steps a run has recorded."""
    with contextlib.suppress(OSError):
        return len((run / "metrics.jsonl").read_text().splitlines())
    return 0


def wait_for_step(run: Path, step: int, process: Popen[bytes], limit_s: float = 150) -> None:
    reached = wait_until(lambda: num_steps(run) >= step or process.poll() is not None, limit_s)
    assert reached, "the step was never reached"
    assert num_steps(run) >= step, "it ended before the step"


def state(pid: int) -> str:
    """The letter that the system has for the state of a process, as ``T`` for one that is stopped; ``X`` for none."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return state(pid) not in "ZX"


def _processes(is_wanted: Callable[[Path], bool]) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if is_wanted(path) and is_running(int(path.name)):
                found.append(int(path.name))
    return found


def workers(launcher: int) -> list[int]:
    """Processes of a launcher that run, zombies left out."""
    mark = f"SHARDWISE_LAUNCHER_PID={launcher}\0".encode()
    return _processes(lambda path: mark in (path / "environ").read_bytes())


def processes_of(folder: Path) -> list[int]:
    """Processes that run in a folder, zombies left out."""
    return _processes(lambda path: path.joinpath("cwd").readlink() == folder)


def content(run: Path, step: int = 20) -> list[str]:
    """Hashes of the tensors of the checkpoint of a step, file by file."""
    found = []
    for path in sorted((run / "checkpoints" / f"step-{step:08d}").glob("shard-*")):
        raw = path.read_bytes()
        found.append(hashlib.sha256(raw[8 + int.from_bytes(raw[:8], "little") :]).hexdigest())
    return found
