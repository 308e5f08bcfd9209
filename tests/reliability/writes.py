"""Section B: saves that are interrupted, refused by the disk, or of what must not be saved."""

from __future__ import annotations

import shutil
from pathlib import Path

from shardwise.checkpoint.reader import open_checkpoint
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError
from tests.reliability.board import scenario
from tests.reliability.box import Box, Ended, Kind, Run, Seen
from tests.train.job import command
from tests.train.train_here import sets

#: Every point of a save, with the ranks that come by.
POINTS = inject.POINTS[inject.POINTS.index("save_begin") : inject.POINTS.index("after_latest") + 1]
OF_ALL_RANKS = ("save_begin", "before_shard_open", "mid_shard_write", "after_shard_fsync")
KILLS = [(point, rank) for point in POINTS for rank in ((0, 1) if point in OF_ALL_RANKS else (0,))]
#: After these the checkpoint is there.
PUBLISHED = ("after_rename", "before_latest", "after_latest")
ASYNCHRONOUS = sets("checkpoint.asynchronous=true")


def is_good(run: Run, step: int) -> bool:
    """Whether all files of a checkpoint are as its manifest says."""
    try:
        open_checkpoint(run.checkpoints / f"step-{step:08d}").verify()
    except CheckpointError:
        return False
    return True


def flip_bit(run: Run, step: int) -> Path:
    """Flip a bit in the content of a checkpoint's first shard."""
    path = min((run.checkpoints / f"step-{step:08d}").glob("shard-*"))
    raw = bytearray(path.read_bytes())
    raw[-10] ^= 1
    path.write_bytes(raw)
    return path


def on_small_disk(box: Box, megabytes: float, *arguments: str, read_only: bool = False, kept: str = "kept") -> Ended:
    """Train with the folder of runs on a file system of this size, which is copied to ``kept`` at the end.

    The mount is seen by the command alone: it is made in a user namespace, which needs no rights.
    """
    place = box.folder / "disk"
    place.mkdir(exist_ok=True)
    words = command(box.folder, "--run-dir", "disk/run", *arguments, config=box.config)
    then = "mount -o remount,ro none disk" if read_only else ":"
    script = (
        f"mount -t tmpfs -o size={round(megabytes * 1024)}k none disk && {then} || exit 99\n"
        f'"$@"; code=$?; cp -r disk/. {kept}; exit $code'
    )
    (box.folder / kept).mkdir()
    return box.start_command(["unshare", "-Urm", "sh", "-c", script, "sh", *words]).wait()


@scenario(
    "B1",
    fault="SIGKILL at each point of a save, on each rank that comes by",
    required="goes on from the checkpoint before or from this one, never from a mix; what is unfinished is removed",
    code=0,
    limit_s=1200,
)
def killed_while_saving(box: Box) -> Seen:
    # One attempt a point: each but the last is killed while it saves, and the next one finds what that has left.
    step, wanted, armed = 10, [], []
    for attempt, (point, rank) in enumerate(KILLS):
        armed.append(f"{point}@rank={rank}@step={step}@attempt={attempt}:kill")
        wanted.append(step if point in PUBLISHED else step - 5)
        step += 5 if point in PUBLISHED else 0
    restarts = str(len(KILLS))
    ended = box.train("--max-restarts", restarts, *sets("train.steps=25"), fault=";".join(armed), limit_s=1200)
    found = [
        int(line.rpartition(" ")[2]) for line in ended.output.splitlines() if line.startswith("shardwise: restart")
    ]
    box.check(f"one restart a kill, each from step N or N-1: {found}, expected {wanted}", found == wanted)
    box.equals(box.oracle("train.steps=25"), step=25)
    return Seen(f"{len(KILLS)} kills, {len(found)} restarts, each from step N or N-1; equal bit for bit", ended.code)


@scenario(
    "B2",
    fault="a save of the step whose first save was killed, its folder still there",
    required="replaced, and all ranks agree; what was published is never touched",
    code=0,
)
def saved_again(box: Box) -> Seen:
    box.train(fault="before_rename@rank=0@step=10:kill")
    left, before = box.run.unfinished, box.run.content(5)
    box.check("the killed save has left its folder", any(name.startswith("step-00000010.tmp-") for name in left))
    ended = box.resumes()
    box.check("step 5 is as it was", bool(before) and box.run.content(5) == before)
    box.check("step 10 is whole", is_good(box.run, 10) and box.run.content(10) == box.oracle().content(10))
    box.check("nothing unfinished is left", box.run.unfinished == [])
    return Seen(f"{len(left)} unfinished folder removed, step 10 saved anew; equal bit for bit", ended.code)


FULL = r"WARNING: step 10 was not saved; step 5 is kept\. step 10 was not saved to .*: rank 1: No space left on device "
NUMBERS = r"\([\d.]+ \w+ needed, [\d.]+ \w+ free\): \S+"


@scenario(
    "B3",
    fault="the disk is full on one rank, synchronous save",
    required="rank, bytes needed and free, path, which step is kept; training goes on and the summary counts it",
    code=(0, 74),
)
def disk_full(box: Box) -> Seen:
    ended = box.train(fault="mid_shard_write@rank=1@step=10:enospc")
    box.says(ended, FULL + NUMBERS)
    box.equals(box.oracle())
    box.check("the summary counts it", len(box.run.summary["failed_saves"]) == 1, Kind.WORDS)
    box.check("steps 5, 15 and 20 are there", box.run.saved_steps == [5, 15, 20] and is_good(box.run, 5))
    return Seen(ended.line("WARNING"), ended.code)


@scenario(
    "B4",
    fault="the disk is full, asynchronous save; then again at the last one",
    required="the same message at the next step; failed saves are counted; 74 as the last one failed",
    code=74,
)
def disk_full_behind(box: Box) -> Seen:
    ended = box.train(
        *ASYNCHRONOUS, fault="mid_shard_write@rank=1@step=10:enospc;mid_shard_write@rank=1@step=20:enospc"
    )
    box.says(ended, FULL.partition(r"\. step 10")[0], "rank 1: No space left on device " + NUMBERS)
    lines = ended.output.splitlines()
    told = next((index for index, line in enumerate(lines) if "WARNING: step 10 was not saved" in line), len(lines))
    after = next((index for index, line in enumerate(lines) if line.startswith("step 15/20")), 0)
    box.check("said while training goes on, before step 15", told < after, Kind.WORDS)
    box.says_last(ended, "the last checkpoint was not saved: step 20: .*No space left on device", "step-00000015$")
    box.check("the summary counts both", len(box.run.summary["failed_saves"]) == 2, Kind.WORDS)
    box.check("the earlier ones are kept", box.run.saved_steps == [5, 15] and is_good(box.run, 15))
    box.check("nothing unfinished is left", box.run.unfinished == [])
    box.resumes(*ASYNCHRONOUS)
    return Seen(f"{ended.line('WARNING: step 10')}; {ended.line('last checkpoint was not')}", ended.code)


@scenario(
    "B5",
    fault="too little space before the save, on a small file system",
    required="refused before a byte is written, with the bytes needed and free; the checkpoint before is kept",
    code=(0, 74),
)
def small_disk(box: Box) -> Seen:
    ended = on_small_disk(box, 0.8)  # room for one checkpoint
    box.says(ended, r"WARNING: step 10 was not saved; step 5 is kept\. .*no space left on device: [\d.]+ \w+ needed")
    box.says_last(ended, "the last checkpoint was not saved: step 20: ", "^  safe: the checkpoint of step 5, ")
    kept = Run(box.folder / "kept" / "run")
    box.check("step 5 is kept and whole", kept.saved_steps == [5] and is_good(kept, 5))
    box.check("nothing unfinished is left", kept.unfinished == [])
    box.check("no traceback", "Traceback" not in ended.output, Kind.WORDS)
    return Seen(ended.line("WARNING: step 10"), ended.code)


@scenario(
    "B6",
    fault="a folder that is read-only, or below a file, at the start",
    required="refused at start-up, before step 1",
    code=74,
)
def read_only(box: Box) -> Seen:
    ended = on_small_disk(box, 4, read_only=True)
    box.says(ended, r"\S+ cannot be written: Read-only file system", "with --run-dir")
    (box.folder / "file").write_text("")
    below = box.train(run="file/run")
    box.check("below a file: 74", below.code == 74, Kind.WORDS)
    box.says(below, r"\S+ cannot be written: Not a directory")
    for each in (ended, below):
        box.check("no step was made", "step  1" not in each.output)
    return Seen(ended.line("cannot be written"), ended.code)


@scenario("B7", fault="the folder of checkpoints vanishes while the run goes on", required="as B3", code=(0, 74))
def vanished(box: Box) -> Seen:
    job = box.start(fault="before_backward@rank=0@step=7:sleep=3")
    job.until_step(box.run, 6)
    shutil.rmtree(box.run.checkpoints)
    ended = job.wait()
    removed = r"run/checkpoints has been removed while the run was going on"
    box.says_last(ended, removed, "Nothing is saved any more")
    box.check("nothing else is removed", (box.run.path / "config.yaml").exists() and box.run.num_steps >= 10)
    box.check("no traceback", "Traceback" not in ended.output, Kind.WORDS)
    return Seen(ended.line(removed), ended.code)


@scenario(
    "B8",
    fault="a crash between publishing and LATEST; LATEST empty",
    required="the newest whole checkpoint is found without the pointer, and the pointer is repaired",
    code=0,
)
def stale_pointer(box: Box) -> Seen:
    box.train(fault="before_latest@rank=0@step=10:kill")
    box.check("LATEST names the one before", box.run.latest == "checkpoints/step-00000005")
    stale = box.train("--resume", fault="before_backward@rank=1@step=12:kill")
    box.says(stale, "LATEST named checkpoints/step-00000005: it names step-00000010 now$", "resumed at step 10$")
    (box.run.path / "LATEST").write_text("")
    ended = box.resumes()
    box.says(ended, "LATEST was empty: it names step-00000010 now$")
    box.check("step 10 is not lost", "resumed at step 10\n" in ended.output)
    return Seen(f"{stale.line('LATEST named')}; {ended.line('LATEST was')}", ended.code)


@scenario(
    "B9",
    fault="retention while a kept checkpoint is damaged",
    required="a damaged one does not count: older ones go only when enough newer ones are verified",
    code=0,
)
def retention(box: Box) -> Seen:
    box.train(fault="step_begin@rank=0@step=16:kill")
    flip_bit(box.run, 10)
    ended = box.resumes(*sets("checkpoint.keep=3"))
    good = [step for step in box.run.saved_steps if is_good(box.run, step)]
    box.check(f"three good ones are kept: {good}", good == [5, 15, 20])
    return Seen(f"keep=3, step 10 of 5, 10, 15 damaged: good ones after step 20: {good}", ended.code)


@scenario(
    "B10",
    fault="a crash in the middle of a deletion",
    required="what is half deleted is never taken for a checkpoint, and is removed later",
    code=0,
)
def half_deleted(box: Box) -> Seen:
    settings = sets("checkpoint.keep=2")
    box.train(*settings, fault="gc_mid_delete@rank=0@step=5:kill")
    left = box.run.unfinished
    box.check("a half deleted folder is left", any(name.startswith(".trash-") for name in left))
    box.check("it is not a checkpoint", 5 not in box.run.saved_steps)
    box.check("the others are whole", box.run.saved_steps == [10, 15] and all(is_good(box.run, s) for s in (10, 15)))
    ended = box.resumes(*settings)
    box.check("it is gone after the next save", box.run.unfinished == [])
    return Seen(f"half deleted folder renamed before, removed by the next save; left {box.run.saved_steps}", ended.code)


@scenario(
    "B11",
    fault="parameters change while an asynchronous save is in flight",
    required="what is saved is the state of its step, bit for bit",
    code=0,
)
def changing(box: Box) -> Seen:
    job = box.start(*ASYNCHRONOUS, *sets("checkpoint.every=10"), fault="after_shard_fsync@step=10:sleep=12")
    job.until_step(box.run, 12)
    box.check("two steps later it is still being written", box.run.saved_steps == [])
    ended = job.wait()
    box.equals(box.oracle())
    same = bool(box.run.content(10)) and box.run.content(10) == box.oracle().content(10)
    box.check("step 10 equals that of a run that waits for its saves, bit for bit", same, Kind.NUMBER)
    return Seen(
        "written while steps 11 and 12 were made; equal bit for bit to the one of a synchronous save", ended.code
    )


@scenario(
    "B12",
    fault="two asynchronous saves overlap",
    required="one at a time; the second waits and says so; both are whole",
    code=0,
)
def overlapping(box: Box) -> Seen:
    ended = box.train(*ASYNCHRONOUS, fault="after_shard_fsync@rank=1@step=5:sleep=12")
    waited = r"step 10 waited [\d.]+ s for the checkpoint of step 5, which was still being written"
    box.says(ended, waited)
    whole = box.oracle()
    box.equals(whole)
    for step in (5, 10):
        same = is_good(box.run, step) and box.run.content(step) == whole.content(step)
        box.check(f"step {step} is whole and equals the uninterrupted run's", same, Kind.NUMBER)
    return Seen(ended.line(waited), ended.code)


@scenario(
    "B13",
    fault="a parameter is NaN when it is about to be saved",
    required="refused, with rank and name; the good one stays; saved only where asked for",
    code=80,
)
def not_finite(box: Box) -> Seen:
    ended = box.train(*sets("train.eval_every=null"), fault="after_step@rank=1@step=10:nan")
    box.says(
        ended, "there is NaN or infinity in what it would hold", r"^ *- rank 1: \S+", "checkpoint.allow_non_finite"
    )
    box.says(ended, r"safe: (the )?checkpoint of step 5")
    box.check("step 5 is the last and whole", box.run.saved_steps == [5] and is_good(box.run, 5))
    box.resumes(*sets("train.eval_every=10"))
    return Seen(f"{ended.line('NaN or infinity')}: {ended.line('- rank 1')}", ended.code)
