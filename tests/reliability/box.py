"""What a scenario of the board works with: a folder, jobs in it, the run beside which it is held, and its checks."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.launch import inject as faults
from tests.train.job import command, content, environment, num_steps, processes_of, wait_until, workers
from tests.train.train_here import CONFIG, losses, sets, summary

ROOT = Path(__file__).parents[2]
WITNESS = Path(__file__).parent / "witness"
#: The run of the trainer's tests with fewer layers, and without what takes seconds to import: three processes start for
#: each of a hundred runs.
QUICK = (
    CONFIG.replace("preset: gpt-nano", "preset: gpt-nano, num_layers: 2").replace(
        "micro_batch_size: 2", "micro_batch_size: 4"
    )
    + "log: {tensorboard: false}\n"
)
#: The block of a failure stands among the last lines of the launcher's output.
LAST_LINES = 25
#: The table shows so many characters of a line.
LONGEST = 180
#: How its first line begins, whoever writes it.
HEADLINE = r"(shardwise|\w+Error): "


class Kind(enum.Enum):
    """What a failed check costs; the value is the score that is left."""

    WORDS = 1
    SAFETY = 0
    NUMBER = -5


@dataclass(frozen=True)
class Check:
    name: str
    holds: bool
    kind: Kind


@dataclass(frozen=True)
class Seen:
    """What a scenario has come to: words for the table, and the exit code of the command that the fault struck."""

    text: str
    code: int | None


class Hung(Exception):  # noqa: N818  it is an outcome
    """Something did not happen in time."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended.

    Attributes:
        code: Its exit code; 128 + n where signal n has killed it.
        output: What it has printed, standard error included.
        seconds: From its start to its end.
    """

    code: int
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """The lines in which the block of a failure has to stand."""
        return "\n".join(self.output.splitlines()[-LAST_LINES:])

    @property
    def has_block(self) -> bool:
        """Whether the last lines say what happened, what is safe and what to do next."""
        return all(re.search(rf"^{part}", self.tail, re.MULTILINE) for part in (HEADLINE, "  safe: ", "  next: "))

    def line(self, pattern: str) -> str:
        """The first line that the pattern is found in, without what differs from run to run; empty where none is."""
        found = next((line for line in self.output.splitlines() if re.search(pattern, line)), "")
        found = re.sub(r"\(pid \d+\)", "(pid P)", found.strip().removeprefix("shardwise: "))
        found = re.sub(r"\S*/board-\w+-\w+/", "", found)
        found = re.sub(r"(?<!step)-[0-9a-f]{8,16}(?=\b|-)", "-*", found)
        return found if len(found) <= LONGEST else f"{found[:LONGEST]} ..."


class Run:
    """The folder of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    @property
    def num_steps(self) -> int:
        return num_steps(self.path)

    @property
    def losses(self) -> list[float]:
        return losses(self.path)

    @property
    def summary(self) -> dict[str, Any]:
        return summary(self.path)

    def content(self, step: int = 20) -> list[str]:
        """Hashes of the tensors of a step's checkpoint, file by file."""
        return content(self.path, step)

    @property
    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints that are published."""
        return sorted(int(path.name[5:]) for path in self.checkpoints.glob("step-????????"))

    @property
    def unfinished(self) -> list[str]:
        """Names in the folder of checkpoints that are not those of published ones."""
        return sorted(path.name for path in self.checkpoints.iterdir() if not re.fullmatch(r"step-\d{8}", path.name))

    @property
    def latest(self) -> str:
        return (self.path / "LATEST").read_text().strip()

    @property
    def notes(self) -> dict[int, dict[str, Any]]:
        """Exit notes by rank."""
        found = [json.loads(path.read_text()) for path in (self.path / "logs").glob("exit-*.json")]
        return {note["rank"]: note for note in found}

    @property
    def samples(self) -> dict[int, list[int]]:
        """Which samples all ranks together have read, rank after rank, in each step; a step made again counts once."""
        read: dict[tuple[int, int], list[int]] = {}
        for line in self.path.with_suffix(".samples").read_text().splitlines():
            step, rank, microbatches = json.loads(line)
            read[step, rank] = [sample for microbatch in microbatches for sample in microbatch]
        by_step: dict[int, list[int]] = {}
        for (step, _), held in sorted(read.items()):
            by_step.setdefault(step, []).extend(held)
        return by_step


class Job:
    """A command that runs."""

    def __init__(self, words: list[str], folder: Path, env: Mapping[str, str], box: Box) -> None:
        self._log = folder / f"output-{len(box.jobs)}.txt"
        self._box = box
        self._begin = time.monotonic()
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=folder, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        box.jobs.append(self)

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def workers(self) -> list[int]:
        """Processes that its launcher has started and that run."""
        return workers(self.process.pid)

    def rank(self, rank: int, run: Run) -> int:
        """The process of a rank, by its heartbeat."""
        path = run.path / "logs" / f"heartbeat-{rank}.json"
        self.until(path.exists, f"rank {rank} has a heartbeat")
        return json.loads(path.read_text().rstrip("\0 \n"))["pid"]

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = 240) -> None:
        """Wait.

        Raises:
            Hung: It did not come about in time, or the command ended before.
        """
        if not wait_until(lambda: condition() or self.process.poll() is not None, self._box.left(limit_s)):
            raise Hung(f"not within {limit_s:g} s: {what}")
        if not condition():
            raise Hung(f"ended before: {what}")

    def until_step(self, run: Run, step: int) -> None:
        self.until(lambda: run.num_steps >= step, f"step {step}")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, limit_s: float = 400) -> Ended:
        """Wait for the end.

        Raises:
            Hung: It has not ended in time; it is killed.
        """
        try:
            code = self.process.wait(self._box.left(limit_s))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Hung(f"it has not ended within {limit_s:g} s") from None
        return Ended(code if code >= 0 else 128 - code, self.output, time.monotonic() - self._begin)


class Oracles:
    """Uninterrupted runs, each made once.

    Args:
        folder: Where they are kept for the next board of the same code; ``None``: not beyond this one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._is_kept = folder is not None
        self._root = (folder or Path(tempfile.mkdtemp(prefix="board-oracles-"))).resolve()

    def get(self, key: tuple[str, ...], make: Callable[[Box], Ended], config: str = QUICK) -> Run:
        """The run that ``make`` makes in a box of its own; made where there is none of this key."""
        folder = self._root / hashlib.sha256(repr((*key, config)).encode()).hexdigest()[:16]
        box = Box(folder, self, deadline=time.monotonic() + 600, config=config)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            ended = make(box)
            assert ended.code == 0, ended.output
            (folder / "done").touch()
        return box.run

    def close(self) -> None:
        """Remove what is not to be kept."""
        if not self._is_kept:
            shutil.rmtree(self._root, ignore_errors=True)


@dataclass
class Box:
    """A folder in which a scenario is played out.

    Attributes:
        folder: Empty at the start.
        oracles: Uninterrupted runs.
        deadline: On ``time.monotonic``: later no wait goes on.
        config: What ``run.yaml`` holds.
        checks: What has been checked.
        jobs: What has been started.
    """

    folder: Path
    oracles: Oracles
    deadline: float
    config: str = QUICK
    checks: list[Check] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @property
    def run(self) -> Run:
        """The run that jobs train unless they name another."""
        return Run(self.folder / "run")

    def left(self, limit_s: float) -> float:
        """What is left of a limit before the scenario's own."""
        return max(0.1, min(limit_s, self.deadline - time.monotonic()))

    # --- jobs --------------------------------------------------------------------------------------------------------

    def start(self, *arguments: str, fault: str = "", env: Mapping[str, str] | None = None, run: str = "run") -> Job:
        """Start ``shardwise train run.yaml --run-dir RUN ARGUMENTS``, with faults armed where any are given."""
        words = command(self.folder, "--run-dir", run, *arguments, config=self.config)
        return self.start_command(
            words, fault=fault, env={"BOARD_SAMPLES": str(self.folder / f"{run}.samples")} | dict(env or {})
        )

    def start_command(self, words: list[str], *, fault: str = "", env: Mapping[str, str] | None = None) -> Job:
        """Start any command in the folder."""
        held = environment()
        held["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WITNESS), held.get("PYTHONPATH"), str(ROOT))))
        armed = {faults.ARMED: "1", faults.FAULT: fault} if fault else {}
        return Job(words, self.folder, held | armed | dict(env or {}), self)

    def train(
        self,
        *arguments: str,
        fault: str = "",
        env: Mapping[str, str] | None = None,
        run: str = "run",
        limit_s: float = 400,
    ) -> Ended:
        """Start a training run and wait for its end."""
        return self.start(*arguments, fault=fault, env=env, run=run).wait(limit_s)

    def shardwise(self, *arguments: str, limit_s: float = 240) -> Ended:
        """Another verb of the command."""
        return self.start_command([sys.executable, "-m", "shardwise", *arguments]).wait(limit_s)

    def oracle(self, *settings: str, nproc: int = 2) -> Run:
        """An uninterrupted run of this configuration, made once a board."""
        words = ("--nproc", str(nproc), *sets(*settings))
        return self.oracles.get((self.config, *words), lambda box: box.train(*words), self.config)

    def end_all(self) -> list[int]:
        """Kill what runs in the folder. Returns the processes that there were, after some time for ends to end."""
        wait_until(lambda: not processes_of(self.folder), 3)
        left = processes_of(self.folder)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for job in self.jobs:
            job.process.kill()
            job.process.wait()
        return left

    # --- checks ------------------------------------------------------------------------------------------------------

    def check(self, name: str, holds: bool, kind: Kind = Kind.SAFETY) -> None:
        """Note whether something holds, and what it costs where it does not."""
        self.checks.append(Check(name, bool(holds), kind))

    def says(self, ended: Ended, *patterns: str) -> None:
        """The output has these words (regular expressions)."""
        for pattern in patterns:
            self.check(f"says {pattern!r}", re.search(pattern, ended.output, re.MULTILINE) is not None, Kind.WORDS)

    def says_last(self, ended: Ended, *patterns: str) -> None:
        """The last lines are one block that says what happened, what is safe and what to do next, with these words."""
        self.check("the last lines have the block: what happened, what is safe, what to do next", ended.has_block)
        self.check("no traceback in the last lines", "Traceback (most recent" not in ended.tail, Kind.WORDS)
        for pattern in patterns:
            self.check(
                f"says at last {pattern!r}", re.search(pattern, ended.tail, re.MULTILINE) is not None, Kind.WORDS
            )

    def equals(self, whole: Run, run: Run | None = None, step: int = 20) -> None:
        """A run that was struck and went on equals an uninterrupted one, to the last bit, and has left nothing."""
        run = run or self.run
        self.check("losses equal the uninterrupted run's, bit for bit", run.losses == whole.losses, Kind.NUMBER)
        same = bool(whole.content(step)) and run.content(step) == whole.content(step)
        self.check("the last checkpoint equals the uninterrupted run's, bit for bit", same, Kind.NUMBER)
        self.check(
            "samples equal the uninterrupted run's, none twice, none missing", run.samples == whole.samples, Kind.NUMBER
        )
        self.check("no unfinished folder is left", not [name for name in run.unfinished if "tmp" in name])

    def resumes(self, *arguments: str) -> Ended:
        """Resume the run without the fault; it must end well and equal the uninterrupted one."""
        ended = self.train("--resume", *arguments)
        self.check("a resume finishes the run", ended.code == 0)
        if ended.code == 0:
            self.equals(self.oracle())
        return ended
