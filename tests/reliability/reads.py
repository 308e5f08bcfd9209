"""Section C: checkpoints that are damaged, missing, of another run, or of another model, and worlds of other sizes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.spec.errors import CheckpointError
from shardwise.train.checkpoints.checkpoints import find_checkpoint
from tests.reliability.board import scenario
from tests.reliability.box import WITNESS, Box, Ended, Kind, Run, Seen
from tests.reliability.refusals import refuses
from tests.train.train_here import CONFIG, sets

NEWEST, OLDER = 15, 10
#: A batch that one, two and three ranks divide; nothing that is drawn depends on how many there are.
ANY_WORLD = CONFIG.replace("global_batch_size: 8", "global_batch_size: 12").replace(", dropout: 0.1", "")


def cut_short(box: Box, step: int = NEWEST) -> Run:
    """A copy of the uninterrupted run of 20 steps as it was after the checkpoint of a step."""
    whole, run = box.oracle(), box.run
    shutil.copytree(whole.path, run.path)
    read = whole.path.with_suffix(".samples").read_text().splitlines(keepends=True)
    run.path.with_suffix(".samples").write_text("".join(line for line in read if json.loads(line)[0] <= step))
    for held in run.checkpoints.glob("step-*"):
        if int(held.name[5:]) > step:
            shutil.rmtree(held)
    return run


def folder_of(run: Run, step: int = NEWEST) -> Path:
    return run.checkpoints / f"step-{step:08d}"


def shards(run: Run, step: int = NEWEST) -> list[Path]:
    return sorted(folder_of(run, step).glob("shard-*"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(content)


def refused(box: Box, *arguments: str, says: tuple[str, ...], begins: bool = False) -> Ended:
    """A resume that is refused with 65, without a step, and without a change of any checkpoint."""
    run = box.run
    before, steps = content_of(run.checkpoints), run.num_steps
    ended = box.train(*arguments)
    refuses(box, ended, *says, begins=begins)
    box.check(f"{' '.join(arguments)}: refused with 65, got {ended.code}", ended.code == 65)
    box.check("no step is made", run.num_steps == steps, Kind.NUMBER)
    box.check("no checkpoint is changed", content_of(run.checkpoints) == before)
    return ended


def content_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def goes_around(box: Box) -> None:
    """``--resume latest-good`` says what it passes over, and ends as the uninterrupted run."""
    ended = box.resumes("latest-good")
    box.says(ended, f"step-{NEWEST:08d} cannot be used and is passed over: ", f"resumed at step {OLDER}$")


def reason_against(box: Box, path: str) -> str:
    """Why the launcher refuses a checkpoint, in this process; empty where it does not."""
    try:
        open_checkpoint(find_checkpoint(box.run.path, path)).verify()
    except CheckpointError as error:
        return str(error)
    return ""


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest as another version, or somebody who knows the format, would have written it."""
    file = path / manifests.MANIFEST_NAME
    content = json.loads(file.read_bytes())
    change(content)
    file.write_bytes(manifests.with_checksum(content))


@scenario(
    "C1",
    fault="one bit flipped in a shard",
    required="names step, shard, hashes and the tensors in the shard; only --resume latest-good goes back, and says so",
    code=65,
)
def flipped_bit(box: Box) -> Seen:
    run = cut_short(box)
    flip(shards(run)[1])
    said = (
        r"\(step 15\) is damaged",
        r"r00001.safetensors \(rank 1 wrote it\): its content has the hash \w+, expected",
    )
    ended = refused(box, "--resume", says=(*said, "it holds blocks.0", "--resume latest-good"), begins=True)
    goes_around(box)
    return Seen(ended.line("has the hash"), ended.code)


@scenario(
    "C2", fault="truncated shard", required="one block with file, expected and real size; nothing is loaded", code=65
)
def truncated(box: Box) -> Seen:
    run = cut_short(box)
    first, last = shards(run)
    size = last.stat().st_size
    os.truncate(last, size - 1)
    said = rf"{last.name} \(rank 1 wrote it\): the file has {size - 1} bytes, expected {size}"
    ended = refused(box, "--resume", says=(said, "the newest checkpoint of run cannot be used", "latest-good"))
    for file, left in ((last, size // 2), (last, 0), (first, 7)):
        os.truncate(file, left)
        words = f"{file.name} (rank {file.name[-13]} wrote it): the file has {left} bytes, expected"
        for name in ("latest", f"step-{NEWEST:08d}"):
            box.check(f"{left} bytes left, {name}: {words}", words in reason_against(box, name))
    return Seen(ended.line("bytes, expected"), ended.code)


@scenario(
    "C3",
    fault="missing shard: the first, one in the middle, the last",
    required="names the file and which rank wrote it, before anything is copied",
    code=65,
)
def missing(box: Box) -> Seen:
    box.config = ANY_WORLD
    short = sets("train.steps=2", "checkpoint.every=1", "train.eval_every=null")
    box.check("three ranks train", box.train("--nproc", "3", *short).code == 0)
    ended, seen = Ended(0, "", 0), []
    for rank, file in enumerate(shards(box.run, 2)):
        aside = file.rename(box.folder / file.name)
        said = rf"r0000{rank}.safetensors \(rank {rank} wrote it\): the file is missing"
        ended = refused(box, "--nproc", "3", *short, "--resume", says=(said,))
        seen.append(ended.line("is missing"))
        aside.rename(file)
    box.check("with all of them it is whole", not reason_against(box, "latest"))
    return Seen(seen[1], ended.code)


@scenario(
    "C4",
    fault="empty, truncated or missing index",
    required="says that the step was not committed, or that its index is none; latest-good goes back",
    code=65,
)
def no_index(box: Box) -> Seen:
    run = cut_short(box)
    file = folder_of(run) / manifests.MANIFEST_NAME
    raw = file.read_bytes()
    file.unlink()
    ended = refused(box, "--resume", says=(r"step-00000015 was never committed: it has no manifest.json",))
    for left in (0, 1, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:left])
        words = "manifest.json: it is not a manifest"
        box.check(f"{left} bytes of the index: {words}", words in reason_against(box, "latest"))
    goes_around(box)
    return Seen(ended.line("never committed"), ended.code)


@scenario(
    "C5",
    fault="shard of another step, or of another run, under the name of this one's",
    required="run, save and step are in the index and in each shard: told apart",
    code=65,
)
def swapped(box: Box) -> Seen:
    run = cut_short(box)
    own, before = shards(run)[1], shards(run, OLDER)[1]
    shutil.copyfile(before, own)
    said = rf"{own.name} .*: it is a shard of another save: save \w+, step 10, rank 1"
    ended = refused(box, "--resume", says=(said,), begins=True)
    box.config = ANY_WORLD
    other = shards(box.oracle(), NEWEST)[1]
    shutil.copyfile(other, own)
    words = reason_against(box, f"step-{NEWEST:08d}")
    box.check("a shard of another run", "shard of another save" in words or "bytes, expected" in words)
    shutil.copyfile(shards(run)[0], own)
    words = reason_against(box, f"step-{NEWEST:08d}")
    box.check("another rank's shard", "shard of another save" in words or "bytes, expected" in words)
    return Seen(ended.line("another save"), ended.code)


@scenario(
    "C6",
    fault="all checkpoints bad",
    required="lists each with its reason; never starts from the beginning by itself",
    code=65,
)
def all_bad(box: Box) -> Seen:
    run = cut_short(box)
    shards(run, 15)[0].unlink()
    (folder_of(run, 10) / manifests.MANIFEST_NAME).unlink()
    flip(shards(run, 5)[0])
    said = ("step-00000015: .*the file is missing", "step-00000010: .*never committed", "step-00000005: .*has the hash")
    ended = refused(box, "--resume", "latest-good", says=(*said, "A run does not start from the beginning by itself"))
    os.truncate(shards(run, 5)[1], 9)
    refused(box, "--resume", says=(*said[:2], "step-00000005: .*the file has 9 bytes"))
    return Seen(ended.line("can be used"), ended.code)


@scenario("C7", fault="--resume of a path that does not exist", required="stops; suggests near names", code=65)
def no_such_path(box: Box) -> Seen:
    cut_short(box)
    ended = refused(
        box, "--resume", "run/checkpoints/step-00000016", says=("there is no such checkpoint. Near: step-0000001[05]",)
    )
    other = box.train("--resume", run="nowhere")
    refuses(box, other, "nowhere holds no run to resume")
    box.check("a run that does not exist: 65", other.code == 65)
    box.check("nothing is made of it", not (box.folder / "nowhere").exists())
    return Seen(ended.line("no such"), ended.code)


def own_loop(box: Box, act: str, *, ranks: int = 2, limit_s: float = 180) -> Ended:
    """A loop of one's own on ranks, by the launcher."""
    words = [sys.executable, "-m", "tests.reliability.ranks", act, str(ranks), str(box.folder)]
    return box.start_command(words).wait(limit_s)


def load_refused(box: Box, act: str, *says: str) -> Ended:
    ended = own_loop(box, act)
    box.check("no traceback in the last lines", "Traceback" not in ended.tail, Kind.WORDS)
    box.check("one block that says what happened", "shardwise: rank " in ended.tail)
    box.says(ended, *says)
    notes = [json.loads(path.read_text()) for path in (box.folder / "logs").glob("exit-*.json")]
    box.check("all ranks leave with 65", [note["code"] for note in notes] == [65, 65])
    return ended


@scenario(
    "C8",
    fault="the model has other shapes",
    required="sw.load: table of name, saved, expected; shardwise train: table of the changed keys (78)",
    code=65,
)
def other_shapes(box: Box) -> Seen:
    ended = load_refused(box, "other_shape", r"blocks.0.0.weight +\(13, 7\) fp32 +\(13, 8\) fp32")
    cut_short(box)
    config = box.train("--resume", *sets("model.hidden=64"))
    refuses(box, config, r"^  key +the run has +now$", r"model.hidden +.* +64$")
    box.check("shardwise train: 78", config.code == 78, Kind.WORDS)
    return Seen(ended.line("13, 8"), ended.code)


@scenario(
    "C9",
    fault="a key is missing in the checkpoint, or unexpected in it",
    required="both are listed, with shapes; nothing is loaded",
    code=65,
)
def other_keys(box: Box) -> Seen:
    ended = load_refused(box, "other_names", r"more +not there +\(3,\) fp32", "unexpected: checkpoint")
    box.says(ended, r"more +\(3,\) fp32 +not there")
    return Seen(ended.line(r"more +not there"), ended.code)


@scenario("C10", fault="the dtype has changed", required="refused with a table; nothing is ever cast", code=65)
def other_dtype(box: Box) -> Seen:
    ended = load_refused(box, "other_dtype", r"blocks.0.0.weight +\(13, 7\) fp32 +\(13, 7\) bf16")
    return Seen(ended.line("bf16"), ended.code)


@scenario(
    "C11",
    fault="other worlds: 2 to 3 to 2 to 1 to 2 ranks, ZeRO-3 to DDP to tensor parallel to ZeRO-1, every two steps",
    required="goes on each time and says what changes; losses within 1e-6; samples exactly once",
    code=0,
    limit_s=600,
)
def other_worlds(box: Box) -> Seen:
    box.config = ANY_WORLD
    run = cut_short(box, OLDER)
    parts = [
        (12, ("--nproc", "3")),
        (14, ("--nproc", "2", *sets("parallel.strategy=ddp"))),
        (
            16,
            (
                "--nproc",
                "1",
            ),
        ),
        (18, ("--nproc", "2", *sets("parallel.tp=2"))),
        (20, ("--nproc", "2", *sets("parallel.strategy=zero1"))),
    ]
    ended, seen = Ended(0, "", 0), []
    for step, words in parts:
        ended = box.train("--resume", *words, fault="" if step == 20 else f"after_step@step={step}:term")
        box.check(f"to step {step}: exit code {ended.code}", ended.code == (0 if step == 20 else 75))
        box.says(ended, f"resumed at step {step - 2}$", "^  resharded: .* -> ")
        seen.append(ended.line("resharded"))
    whole = box.oracle()
    apart = max((abs(a - b) for a, b in zip(run.losses, whole.losses, strict=True)), default=math.inf)
    box.check(f"losses within 1e-6 of the uninterrupted run's: {apart:.1e}", apart <= 1e-6, Kind.NUMBER)
    tensor_parallel = (17, 18)  # both ranks of tp read the same samples
    meant = {step: sorted(held * (1 + (step in tensor_parallel))) for step, held in whole.samples.items()}
    read = {step: sorted(held) for step, held in run.samples.items()}
    box.check("each step has the samples of the uninterrupted run", read == meant, Kind.NUMBER)
    return Seen(f"{'; '.join(seen)}; losses differ by {apart:.1e}", ended.code)


@scenario(
    "C12",
    fault="uneven and empty shards, a scalar, tied weights, frozen parameters, on three ranks and then on two",
    required="the same world goes on bit for bit, another within 1e-6",
    code=0,
)
def odd_shapes(box: Box) -> Seen:
    box.check("three ranks train and save", own_loop(box, "saves", ranks=3).code == 0)
    same, other = own_loop(box, "goes_on", ranks=3), own_loop(box, "goes_on", ranks=2)
    box.check("three ranks go on", same.code == 0)
    box.check("two ranks go on", other.code == 0)
    whole = json.loads((box.folder / "whole.json").read_text())
    resumed = {size: json.loads((box.folder / f"resumed-{size}.json").read_text()) for size in (2, 3)}
    box.check("three ranks: losses, bit for bit", resumed[3]["losses"] == whole["losses"][3:], Kind.NUMBER)
    box.check("three ranks: parameters, bit for bit", resumed[3]["values"] == whole["values"], Kind.NUMBER)
    apart = max(abs(a - b) for a, b in zip(resumed[2]["losses"], whole["losses"][3:], strict=True))
    box.check(f"two ranks: losses within 1e-6: {apart:.1e}", apart <= 1e-6, Kind.NUMBER)
    return Seen(f"3 ranks to 3: bit for bit; 3 ranks to 2: losses differ by {apart:.1e}", other.code)


@scenario(
    "C13",
    fault="optimizer other than the saved one",
    required="named error; loading without the optimizer starts it anew; shardwise train: the changed key (78)",
    code=65,
)
def other_optimizer(box: Box) -> Seen:
    said = (
        "holds the state of AdamW, the optimizer is Adam",
        "call sw.load.path, model. to start with a fresh optimizer",
    )
    ended = load_refused(box, "other_optimizer", *said, "reset: 0 parameters have state")
    cut_short(box)
    config = box.train("--resume", *sets("optimizer.name=adam"))
    refuses(box, config, "optimizer.name +adamw +adam$")
    box.check("shardwise train: 78", config.code == 78, Kind.WORDS)
    return Seen(ended.line("holds the state"), ended.code)


@scenario(
    "C14",
    fault="older format version, and one that is newer than known",
    required="both versions are named, and the one that is read",
    code=65,
)
def other_version(box: Box) -> Seen:
    run = cut_short(box)
    path = folder_of(run)
    for version in (4, 99):
        rewrite(path, lambda content, version=version: content.update(format_version=version))
        ended = refused(box, "--resume", says=(f"it has format version {version}, expected 5: another version",))
    return Seen(ended.line("format version"), ended.code)


@scenario(
    "C15",
    fault="only rank 1 cannot read the shards (permission)",
    required="all ranks leave within 10 s; the cause is said once",
    code=65,
)
def one_rank_cannot_read(box: Box) -> Seen:
    run = cut_short(box)
    said = (r"shard-\w+-r0000\d.safetensors .*: Permission denied", "Resume from another checkpoint")
    steps = run.num_steps
    path = os.pathsep.join((str(WITNESS.parent / "unreadable"), str(WITNESS.parents[2])))
    path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))
    ended = box.train("--resume", env={"PYTHONPATH": path})
    refuses(box, ended, *said, begins=True)
    box.check("the cause is said once", ended.output.count("Permission denied") in {1, 2})
    notes = list(run.notes.values())
    box.check("both ranks leave with 65", [note["code"] for note in notes] == [65, 65])
    apart = max(note["time_s"] for note in notes) - min(note["time_s"] for note in notes)
    box.check(f"within 10 s of each other: {apart:.1f} s", apart < 10)
    box.check("no step is made", run.num_steps == steps, Kind.NUMBER)
    return Seen(ended.line("Permission denied"), ended.code)


@scenario(
    "C16", fault="resumed twice within one epoch", required="the list of samples is that of the whole run", code=0
)
def resumed_twice(box: Box) -> Seen:
    codes = [box.train(fault="after_step@step=7:term").code]
    codes.append(box.train("--resume", fault="after_step@step=13:term").code)
    box.check(f"stopped twice: {codes}", codes == [75, 75])
    ended = box.resumes()
    whole = sorted(sample for held in box.run.samples.values() for sample in held)
    box.check("no sample twice", len(whole) == len(set(whole)) == 20 * 8, Kind.NUMBER)
    return Seen(f"160 samples in 20 steps over 3 starts, each once; {ended.line('resumed at')}", ended.code)
