"""Section A: processes that are killed, stopped, slow, or asked to end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time

from tests.reliability.board import scenario
from tests.reliability.box import Box, Ended, Kind, Seen
from tests.train.job import is_running, wait_until
from tests.train.train_here import sets

STRUCK = "before_backward@rank=1@step=12"
SAFE = r"^  safe: the checkpoint of step 10, \S+/step-00000010$"
#: Long enough for a step on a busy machine.
STEP_LIMIT_S = 15


def check_restarted(box: Box, ended: Ended, rank: int, signal_name: str = "SIGKILL") -> Seen:
    """A rank was killed in step 12, and the run went on once from step 10 and ended well."""
    box.says(ended, rf"^shardwise: rank {rank} \(pid \d+\) killed by {signal_name} at step 12")
    box.says(ended, "^shardwise: restart 1/3 from step 10$", "^shardwise: finished after 1 restart: rank")
    box.check("one restart is used", ended.output.count("shardwise: restart") == 1)
    box.check("at most one interval is lost", "resumed at step 10\n" in ended.output)
    box.equals(box.oracle())
    return Seen(f"{ended.line('killed by')}; {ended.line('restart 1')}; equal bit for bit", ended.code)


@scenario(
    "A1",
    fault="SIGKILL of a non-zero rank in a step, restarts left",
    required="names rank, pid, signal, step and the restart; at most one interval lost, one restart for one fault",
    code=0,
)
def killed(box: Box) -> Seen:
    return check_restarted(box, box.train("--max-restarts", "3", fault=f"{STRUCK}:kill"), 1)


@scenario("A2", fault="SIGKILL of rank 0, restarts left", required="as A1", code=0)
def killed_first(box: Box) -> Seen:
    return check_restarted(box, box.train("--max-restarts", "3", fault="before_backward@rank=0@step=12:kill"), 0)


@scenario(
    "A3",
    fault="SIGKILL of a rank, restarts used up",
    required="the rank that was killed first, its victims in one line; the last good checkpoint is named and resumes",
    code=81,
)
def restarts_used_up(box: Box) -> Seen:
    ended = box.train("--max-restarts", "1", fault=f"{STRUCK}@attempt=any:kill")
    cause = r"^shardwise: rank 1 \(pid \d+\) killed by SIGKILL at step 12"
    box.says_last(
        ended, cause, r"^  ranks \[0\] ended in consequence$", SAFE, "^  next: continue with `shardwise train"
    )
    box.check("no words of peers", "Connection" not in ended.output, Kind.WORDS)
    box.resumes()
    return Seen(ended.line("killed by"), ended.code)


@scenario(
    "A4",
    fault="a Python exception on one rank",
    required="its text once, its traceback in the rank's log, nothing of what peers saw in consequence",
    code=1,
)
def exception(box: Box) -> Seen:
    ended = box.train(fault=f"{STRUCK}:raise")
    box.says_last(ended, r"rank 1 \(pid \d+\) at step 12: \S*InjectedError: injected at before_backward", SAFE)
    box.check("the exception is named once", ended.output.count("InjectedError") == 1, Kind.WORDS)
    box.check("no words of peers", "Connection" not in ended.output, Kind.WORDS)
    log = (box.run.path / "logs" / "rank-1.log").read_text()
    box.check("the traceback is in the log that is named", log.count("Traceback (most") == 1, Kind.WORDS)
    box.says_last(ended, r"^  log: \S+/rank-1.log$")
    box.resumes()
    return Seen(ended.line("InjectedError"), ended.code)


@scenario(
    "A5",
    fault="sys.exit(42) in user code on one rank",
    required="'rank 1 left with 42 while others were training'; 42 is in the rank's exit note",
    code=1,
)
def left(box: Box) -> Seen:
    ended = box.train(fault=f"{STRUCK}:exit=42")
    box.says_last(ended, r"rank 1 \(pid \d+\) left with exit code 42 at step 12 while others were training", SAFE)
    box.check("the exit note has 42", box.run.notes[1]["code"] == 42, Kind.WORDS)
    box.resumes()
    return Seen(ended.line("left with"), ended.code)


@scenario(
    "A6",
    fault="SIGSEGV in one rank",
    required="signal, rank, and the file with the stack at the crash; a restart goes on",
    code=(0, 81),
)
def crash(box: Box) -> Seen:
    ended = box.train("--max-restarts", "3", fault=f"{STRUCK}:segv")
    seen = check_restarted(box, ended, 1, "SIGSEGV")
    log = box.run.path / "logs" / "rank-1.log"
    box.says(ended, rf"^  log, with the stack at the crash: {re.escape(str(log))}$")
    box.check("the stack is there", "Fatal Python error: Segmentation fault" in log.read_text(), Kind.WORDS)
    return seen


@scenario(
    "A7",
    fault="a rank killed for want of memory (SIGKILL)",
    required="'SIGKILL: often out of memory' and the peak of memory of each rank; a restart goes on",
    code=(0, 81),
)
def out_of_memory(box: Box) -> Seen:
    ended = box.train("--max-restarts", "3", fault=f"{STRUCK}:kill")
    seen = check_restarted(box, ended, 1)
    box.says(ended, r"killed by SIGKILL at step 12 \(often: out of memory")
    memory = r"^  most memory held: rank 0 \d[\d.]* MB, rank 1 \d[\d.]* MB$"
    box.says(ended, memory)
    return Seen(f"{seen.text.split(';')[0]}; {ended.line(memory)}", ended.code)


def check_hung(box: Box, action: str, state: str, stacks: str) -> Seen:
    """Rank 1 makes no progress in step 13; the run ends within the limit of a step, and resumes from step 10."""
    job = box.start(*sets(f"train.step_timeout_s={STEP_LIMIT_S}"), fault=f"before_backward@rank=1@step=13:{action}")
    job.until_step(box.run, 12)
    begin, pids = time.monotonic(), job.workers
    ended = job.wait()
    took_s = time.monotonic() - begin
    last = r"^  rank 1 was last seen .*#\d+ all_gather"
    box.says_last(ended, rf"^shardwise: rank 1 \(pid \d+\) has made no progress .* at step 13.*{state}", last)
    box.says_last(ended, stacks, SAFE)
    box.check("it ends within the limit and 5 s (10 s, as the machine may be busy)", took_s < STEP_LIMIT_S + 10)
    box.check("no process is left", not any(is_running(pid) for pid in pids))
    box.check("the stack of rank 0 is there", (box.run.path / "logs" / "stack-0.txt").stat().st_size > 0)
    box.resumes()
    return Seen(f"{ended.line('no progress')}; after {took_s:.0f} s", ended.code)


@scenario(
    "A8",
    fault="SIGSTOP of one rank (a frozen node)",
    required="within step_timeout: the rank, its step, last collective and state; the frozen process is gone",
    code=82,
)
def frozen(box: Box) -> Seen:
    return check_hung(box, "stop", "stopped: state T", r"^  no stack of rank 1")


@scenario(
    "A9",
    fault="one rank spins in Python",
    required="as A8, and the stacks of all ranks",
    code=82,
)
def spinning(box: Box) -> Seen:
    return check_hung(box, "spin", "computing", r"^  stacks: \S+/stack-0.txt, \S+/stack-1.txt$")


@scenario(
    "A10",
    fault="one rank takes ten times as long",
    required="a warning that names the rank, how many times slower, and the share of data; no end",
    code=0,
)
def slow(box: Box) -> Seen:
    steps = "train.steps=25"  # ranks are compared over 20 steps, without the first
    ended = box.train(*sets(steps), fault="before_backward@rank=1:sleep=1")
    warning = r"WARNING: rank 1 is \d+\.\dx slower than the median of the other ranks \(data \d+%\)"
    box.says(ended, warning)
    box.equals(box.oracle(steps), step=25)
    return Seen(ended.line(warning), ended.code)


def check_stopped(box: Box, ended: Ended, text: str = "stop requested, saved step") -> None:
    """A stopped run has saved every step that it finished, and goes on from there."""
    run = box.run
    box.says(ended, rf"^{text} {run.num_steps}, continue with --resume$")
    box.check("no traceback", "Traceback" not in ended.output, Kind.WORDS)
    box.check("every finished step is saved", run.latest == f"checkpoints/step-{run.num_steps:08d}")


@scenario(
    "A11",
    fault="SIGTERM to the launcher, and the save takes 2 s",
    required="'stop requested, saved step N, resubmit to continue'; no finished step is lost",
    code=75,
)
def asked_to_stop(box: Box) -> Seen:
    job = box.start(*sets("checkpoint.every=null"), fault="after_shard_fsync@rank=1:sleep=2")
    job.until_step(box.run, 3)
    job.send(signal.SIGTERM)
    ended = job.wait()
    check_stopped(box, ended)
    box.resumes(*sets("checkpoint.every=null"))
    return Seen(ended.line("stop requested"), ended.code)


@scenario(
    "A12",
    fault="SIGTERM, and a save takes longer than the grace period",
    required="says before saving that the time will not do, and what is safe; the grace period is a setting",
    code=(75, 81),
)
def too_little_grace(box: Box) -> Seen:
    settings = sets("train.grace_s=10", "checkpoint.every=5")
    job = box.start(
        *settings, fault="after_shard_fsync@rank=1@step=5:sleep=15;after_shard_fsync@rank=1@step=10:sleep=60"
    )
    job.until_step(box.run, 6)
    job.send(signal.SIGTERM)
    ended = job.wait()
    refusal = r"stop requested, but step \d+ is not saved: that needs about \d+ s, and \d+ of 10 s \(train.grace_s\)"
    box.says(ended, refusal, r"safe: checkpoint of step 5, continue with --resume")
    box.check("the checkpoint of step 5 is the last", box.run.saved_steps == [5])
    box.resumes(*settings)
    return Seen(ended.line(refusal), ended.code)


@scenario("A13", fault="SIGTERM to one worker only", required="as A11: all ranks agree", code=75)
def one_asked_to_stop(box: Box) -> Seen:
    job = box.start(*sets("checkpoint.every=null"))
    job.until_step(box.run, 3)
    os.kill(job.rank(1, box.run), signal.SIGTERM)
    ended = job.wait()
    check_stopped(box, ended)
    box.resumes(*sets("checkpoint.every=null"))
    return Seen(ended.line("stop requested"), ended.code)


def phase_of(box: Box) -> str:
    """What rank 0 is doing, by its heartbeat."""
    path = box.run.path / "logs" / "heartbeat-0.json"
    try:
        return str(json.loads(path.read_bytes().rstrip(b"\0 \n"))["phase"])
    except (OSError, ValueError):
        return ""


@scenario(
    "A14",
    fault="SIGTERM while ranks start, before the first step, and during an evaluation",
    required="as A11, each time",
    code=75,
)
def asked_to_stop_early(box: Box) -> Seen:
    settings = sets(
        "checkpoint.every=null", "train.eval_batches=200", "train.grace_s=200"
    )  # a busy machine starts slowly
    job = box.start(*settings)
    job.until(lambda: phase_of(box) != "", "rank 0 starts")
    job.send(signal.SIGTERM)
    starting = job.wait()
    box.check("while starting: 75", starting.code == 75, Kind.WORDS)
    check_stopped(box, starting)
    job = box.start("--resume", *settings)
    job.until(lambda: phase_of(box) == "evaluation", "an evaluation begins")
    job.send(signal.SIGTERM)
    ended = job.wait()
    check_stopped(box, ended)
    box.check("it is stopped at the evaluation of step 10", box.run.num_steps in {10, 11})
    box.resumes(*settings)
    return Seen(f"{starting.line('stop requested')}; {ended.line('stop requested')}", ended.code)


@scenario(
    "A15",
    fault="Ctrl-C once; twice",
    required="once: the step is saved; twice: it ends at once and says what is safe",
    code=130,
)
def interrupted(box: Box) -> Seen:
    settings = sets("checkpoint.every=null", "train.grace_s=120")
    job = box.start(*settings)
    job.until_step(box.run, 3)
    job.send(signal.SIGINT)
    once = job.wait()
    box.check("once: 130", once.code == 130, Kind.WORDS)
    check_stopped(box, once)
    saved = box.run.num_steps
    job = box.start("--resume", *settings, fault="save_begin:sleep=150")
    job.until_step(box.run, saved + 2)
    job.send(signal.SIGINT)
    job.until(lambda: phase_of(box) == "save", "it saves")
    begin = time.monotonic()
    job.send(signal.SIGINT)
    twice = job.wait()
    took_s = time.monotonic() - begin
    box.check(f"twice: it ends at once (20 s, as the machine may be busy): {took_s:.1f} s", took_s < 20)
    box.says_last(twice, rf"^  safe: the checkpoint of step {saved}, ")
    box.resumes(*settings)
    return Seen(f"once: {once.line('stop requested')}; twice: {twice.line('ended by SIGINT')}", twice.code)


@scenario(
    "A16",
    fault="SIGKILL of the launcher",
    required="workers leave within 2 s; nothing is written after that; a resume goes on",
    code=137,
)
def launcher_killed(box: Box) -> Seen:
    job = box.start(fault="before_backward:sleep=0.5")
    job.until_step(box.run, 6)
    pids = job.workers
    job.send(signal.SIGKILL)
    begin = time.monotonic()
    is_gone = wait_until(lambda: not any(is_running(pid) for pid in pids), 20)
    took_s = time.monotonic() - begin
    ended = job.wait()
    box.check("there were workers", len(pids) >= 2)
    box.check("workers leave within 2 s", is_gone and took_s < 2)
    steps = box.run.num_steps
    time.sleep(1.5)
    box.check("nothing is written afterwards", box.run.num_steps == steps)
    box.resumes()
    return Seen(f"no worker after {took_s:.1f} s; resumed", ended.code)


@scenario(
    "A17",
    fault="a second job on the same folder",
    required="refused with the holder's process, host and time, and what to do; the first run is untouched",
    code=84,
)
def second_job(box: Box) -> Seen:
    job = box.start(fault="before_backward@rank=0:sleep=1")
    job.until_step(box.run, 1)
    refused = box.train("--resume", run="run")
    holder = rf"belongs to another run: process \d+ on {re.escape(socket.gethostname())}, since \d{{4}}-\d\d-\d\d "
    box.says(refused, holder, r"Wait for it, stop it, or name another folder with --run-dir or in sw\.Run\.")
    box.check("the first run was still going on", job.process.poll() is None)
    first = job.wait()
    box.check("the first run ends well", first.code == 0)
    box.equals(box.oracle())
    seen = re.sub(r"process \d+ on .*?, since [\d-]+ [\d:]+", "process P on HOST, since TIME", refused.line(holder))
    return Seen(seen, refused.code)


@scenario(
    "A18",
    fault="the port of the environment is in use, and a stale rendezvous file lies about",
    required="another place is taken, or the holder is named",
    code=(0, 74),
)
def port_in_use(box: Box) -> Seen:
    temporary = box.folder / "tmp"
    (temporary / "shardwise-run-stale").mkdir(parents=True)
    (temporary / "shardwise-run-stale" / "rendezvous-0").write_bytes(b"\0" * 64)
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        ended = box.train(env={**address, "TMPDIR": str(temporary)})
    box.equals(box.oracle())
    box.check("nothing of its own is left", [p.name for p in temporary.glob("shardwise-*")] == ["shardwise-run-stale"])
    return Seen("ranks meet through files in a private folder: no port, nothing stale; equal bit for bit", ended.code)
