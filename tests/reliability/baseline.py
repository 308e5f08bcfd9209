"""The same faults for torchrun with FSDP2 and DCP (``baseline_train``), where they can be injected there."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.reliability.board import baseline
from tests.reliability.box import Box, Ended, Hung, Job, Kind, Run, Seen
from tests.train.job import is_running, processes_of, wait_until

STRUCK = "before_backward@rank=1@step=12"
#: A hang is waited for so long; gloo's own limit is 30 minutes.
PATIENCE_S = 60


def start(box: Box, *arguments: str, fault: str = "", restarts: int = 0) -> Job:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts)]
    script = ["-m", "tests.reliability.baseline_train", "run", *arguments]
    return box.start_command([sys.executable, *words, *script], fault=fault)


def train(box: Box, *arguments: str, fault: str = "", restarts: int = 0, limit_s: float = 400) -> Ended:
    return start(box, *arguments, fault=fault, restarts=restarts).wait(limit_s)


def equals(box: Box, ended: Ended) -> bool:
    """A run that ended with 0 has the losses of an uninterrupted one; anything else is silently wrong."""
    if ended.code != 0:
        box.check("it ends well", holds=False)
        return False
    same = box.run.losses == box.oracles.get(("baseline",), train).losses
    box.check("losses equal the uninterrupted run's, bit for bit", same, Kind.NUMBER)
    return same


def says_what_is_safe(box: Box, ended: Ended, *patterns: str) -> None:
    """The block of a failure: the last lines name the checkpoint that is safe, and what happened."""
    box.check("the last lines say what is safe", "step-10" in ended.tail)
    box.says(ended, *patterns)


def last_line(ended: Ended) -> str:
    """The last line that is no frame or rule."""
    lines = [line.strip() for line in ended.output.splitlines() if line.strip(" =-")]
    return lines[-1][:120] if lines else "nothing"


def rank_of(pid: int) -> str:
    held = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((entry[5:].decode() for entry in held if entry.startswith(b"RANK=")), "")


def restarted(fault: str, *patterns: str) -> Callable[[Box], Seen]:
    """A rank is lost in step 12 with three restarts allowed."""

    def run(box: Box) -> Seen:
        ended = train(box, fault=fault, restarts=3)
        is_same = equals(box, ended)
        box.check("at most one interval is lost", ended.code != 0 or "resumed at step 10\n" in ended.output)
        box.says(ended, "at step 12", *patterns)
        how = "goes on from step 10, equal bit for bit" if is_same else last_line(ended)
        return Seen(f"{how}; the message has the signal and the rank, but no step or checkpoint", ended.code)

    return run


baseline("A1")(restarted(f"{STRUCK}:kill", "SIGKILL"))
baseline("A2")(restarted("before_backward@rank=0@step=12:kill", "SIGKILL"))
baseline("A6")(restarted(f"{STRUCK}:segv", "SIGSEGV"))
baseline("A7")(restarted(f"{STRUCK}:kill", "out of memory"))


def ended_by(fault: str, *patterns: str, restarts: int = 0) -> Callable[[Box], Seen]:
    """A rank fails in step 12 and the job ends."""

    def run(box: Box) -> Seen:
        ended = train(box, fault=fault, restarts=restarts)
        says_what_is_safe(box, ended, *patterns)
        box.check("no words of peers", "Connection closed by peer" not in ended.output, Kind.WORDS)
        box.check("a resume finishes", equals(box, train(box)))
        lines, traces = len(ended.output.splitlines()), ended.output.count("Traceback (most")
        return Seen(f"{lines} lines of output, {traces} tracebacks; no step, no checkpoint named", ended.code)

    return run


baseline("A3")(ended_by(f"{STRUCK}@attempt=any:kill", "SIGKILL", restarts=1))
baseline("A4")(ended_by(f"{STRUCK}:raise", "InjectedError: injected at before_backward"))
baseline("A5")(ended_by(f"{STRUCK}:exit=42", "42"))
baseline("B3")(ended_by("mid_shard_write@rank=1@step=10:enospc", "No space left on device", r"needed"))


def hung(action: str) -> Callable[[Box], Seen]:
    """A rank makes no progress in step 13."""

    def run(box: Box) -> Seen:
        job = start(box, fault=f"before_backward@rank=1@step=13:{action}")
        job.until_step(box.run, 12)
        try:
            ended = job.wait(PATIENCE_S)
        except Hung:
            box.check(f"it ends within {PATIENCE_S} s", holds=False)
            return Seen(f"nothing within {PATIENCE_S} s (the limit of Gloo is 30 min)", None)
        box.says(ended, "rank 1")
        return Seen(last_line(ended), ended.code)

    return run


baseline("A8")(hung("stop"))
baseline("A9")(hung("spin"))


@baseline("A10")
def slow(box: Box) -> Seen:
    ended = train(box, fault="before_backward@rank=1:sleep=0.5")
    equals(box, ended)
    box.says(ended, "slower")
    return Seen("nothing is said", ended.code)


def asked(number: int, code: int, *, of_worker: bool = False) -> Callable[[Box], Seen]:
    """A request to stop, after step 7."""

    def run(box: Box) -> Seen:
        job = start(box, fault="step_begin:sleep=0.3")
        job.until_step(box.run, 7)
        if of_worker:
            os.kill(next(pid for pid in processes_of(box.folder) if rank_of(pid) == "1"), number)
        else:
            job.send(number)
        ended = job.wait()
        done = box.run.num_steps
        saved = max((int(path.name[5:]) for path in box.run.path.glob("step-*")), default=0)
        box.check("no finished step is lost", saved == done)
        box.check(f"exit code {code}", ended.code == code, Kind.WORDS)
        return Seen(f"ended at step {done}, step {saved} is the last saved; {last_line(ended)}", ended.code)

    return run


baseline("A11")(asked(signal.SIGTERM, 75))
baseline("A13")(asked(signal.SIGTERM, 75, of_worker=True))
baseline("A15")(asked(signal.SIGINT, 130))


@baseline("A16")
def launcher_killed(box: Box) -> Seen:
    job = start(box, fault="step_begin:sleep=0.5")
    job.until_step(box.run, 5)
    pids = [pid for pid in processes_of(box.folder) if pid != job.process.pid]
    job.send(signal.SIGKILL)
    is_gone = wait_until(lambda: not any(is_running(pid) for pid in pids), 2)
    steps = box.run.num_steps
    time.sleep(2)
    more = box.run.num_steps - steps
    box.check("workers leave within 2 s", is_gone)
    box.check("nothing is written afterwards", more == 0)
    return Seen(f"workers {'gone' if is_gone else 'train on as orphans'}: {more} more steps in 2 s", job.wait().code)


@baseline("A17")
def second_job(box: Box) -> Seen:
    job = start(box, fault="step_begin:sleep=1")
    job.until_step(box.run, 6)
    second = train(box)
    first = job.wait()
    box.check("the second is refused", second.code != 0)
    same = box.run.losses == box.oracles.get(("baseline",), train).losses
    box.check("the first run's record is untouched", same, Kind.NUMBER)
    steps = box.run.num_steps
    return Seen(
        f"both train into one folder and leave with {first.code} and {second.code}; {steps} steps on record",
        second.code,
    )


@baseline("A18")
def port_in_use(box: Box) -> Seen:
    with socket.create_server(("127.0.0.1", 0)) as held:
        os.environ["MASTER_PORT"] = str(held.getsockname()[1])
        try:
            ended = train(box)
        finally:
            del os.environ["MASTER_PORT"]
    equals(box, ended)
    return Seen("--standalone takes a free port", ended.code)


@baseline("B1")
def killed_while_saving(box: Box) -> Seen:
    ended = train(box, "--same-folder", fault="mid_shard_write@rank=1@step=10:kill", restarts=1)
    is_same = equals(box, ended)
    words = "equal" if is_same else "a mix of steps 5 and 10 is loaded without an error"
    return Seen(f"saved into one folder: {words}", ended.code)


@baseline("B2")
def saved_again(box: Box) -> Seen:
    train(box, fault="after_shard_fsync@rank=1@step=10:kill")
    ended = train(box)
    is_same = equals(box, ended)
    return Seen("saved over it, equal bit for bit" if is_same else last_line(ended), ended.code)


@baseline("B4")
def disk_full_behind(box: Box) -> Seen:
    ended = train(box, "--asynchronous", fault="mid_shard_write@rank=1@step=20:enospc")
    has_said = "No space left" in ended.output
    box.check("says so", has_said)
    box.check("the exit code says so", ended.code != 0)
    saved = sorted(int(path.parent.name[5:]) for path in box.run.path.glob("step-*/.metadata"))
    return Seen(f"{'an error' if has_said else 'nothing'} is printed; saved: {saved}", ended.code)


@baseline("B13")
def not_finite(box: Box) -> Seen:
    ended = train(box, fault="after_step@rank=1@step=10:nan")
    equals(box, ended)
    return Seen("NaN is saved, and training goes on with it", ended.code)


def damaged(damage: Callable[[Run], None], *patterns: str) -> Callable[[Box], Seen]:
    """The checkpoint of step 15 is damaged, then resumed."""

    def run(box: Box) -> Seen:
        box.check("a run to step 15", train(box, "--steps", "15").code == 0)
        damage(box.run)
        ended = train(box)
        if ended.code == 0:
            is_same = equals(box, ended)
            return Seen("loads and goes on, equal" if is_same else "loads wrong numbers without an error", 0)
        says_what_is_safe(box, ended, *patterns)
        lines, traces = len(ended.output.splitlines()), ended.output.count("Traceback (most")
        return Seen(f"{lines} lines, {traces} tracebacks", ended.code)

    return run


def flip(run: Run) -> None:
    path = run.path / "step-15" / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(run: Run) -> None:
    path = run.path / "step-15" / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-2000])


baseline("C1")(damaged(flip))
baseline("C2")(damaged(truncate, r"__1_0\.distcp", "expected"))
baseline("C3")(damaged(lambda run: (run.path / "step-15" / "__1_0.distcp").unlink(), r"__1_0\.distcp"))
baseline("C4")(damaged(lambda run: (run.path / "step-15" / ".metadata").unlink(), "never committed"))


@baseline("D6")
def nan_in_gradient(box: Box) -> Seen:
    ended = train(box, fault="before_update@rank=1@step=12:nan")
    equals(box, ended)
    return Seen("training goes on with NaN", ended.code)


@baseline("D10")
def twice(box: Box) -> Seen:
    ended = train(box)
    is_same = equals(box, ended)
    return Seen("equal bit for bit" if is_same else "differs", ended.code)
