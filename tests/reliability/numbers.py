"""Section D: ranks that disagree, values that are not finite, and whether the same run gives the same numbers."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from pathlib import Path

import shardwise
from shardwise.train.config.resolve import data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.sampler import Sampler
from tests.reliability.board import scenario
from tests.reliability.box import ROOT, Box, Ended, Kind, Seen
from tests.reliability.reads import ANY_WORLD, own_loop
from tests.reliability.refusals import refuses
from tests.train.train_here import CONFIG, sets

#: Ranks that disagree are told after a wait of some seconds, far below the 60 s of the process group.
SOON_S = 40.0


def disagrees(box: Box, act: str, *says: str) -> Ended:
    """A loop in which ranks do different things ends soon, on all ranks, with these words."""
    ended = own_loop(box, act)
    box.says(ended, *says)
    box.check("no traceback in the last lines", "Traceback" not in ended.tail, Kind.WORDS)
    box.check("one block that says what happened", "shardwise: rank " in ended.tail)
    for rank in range(2):
        path = box.folder / f"seconds-{rank}"
        took = float(path.read_text()) if path.exists() else float("inf")
        box.check(f"rank {rank} leaves within {SOON_S:g} s: {took:.1f} s", took < SOON_S)
    return ended


@scenario(
    "D1",
    fault="ranks call different collectives: another operation, another path through the model",
    required="both collectives with sequence number, unit and line of the program, in seconds; nothing is mixed up",
    code=83,
)
def other_collectives(box: Box) -> Seen:
    first = disagrees(
        box,
        "other_operation",
        r"ranks issued different collectives at #\d+ of ",
        r"rank 0: all_gather of unit 'weights' \(20 elements\) in fp32, at ranks.py:\d+",
        r"rank 1: all_reduce of unit 'weights' \(20 elements\) in fp32, at ranks.py:\d+",
    )
    box.check(f"another operation: 83, got {first.code}", first.code == 83)
    shutil.rmtree(box.folder / "logs")
    ended = disagrees(
        box,
        "other_collective",
        r"rank 0: all_gather of unit 'blocks\.1' .*, at ranks.py:\d+",
        r"rank 1: all_gather of unit 'blocks\.2' .*, at ranks.py:\d+",
        "The ranks took different paths through the model",
    )
    return Seen(f"{first.line('rank 0: ')} {first.line('rank 1: ')}", ended.code)


@scenario("D2", fault="ranks call one collective with other shapes", required="as D1", code=83)
def other_shapes(box: Box) -> Seen:
    ended = disagrees(
        box,
        "other_sizes",
        r"rank 0: all_reduce of unit 'weights' \(10 elements\) in fp32, at ranks.py:\d+",
        r"rank 1: all_reduce of unit 'weights' \(20 elements\) in fp32, at ranks.py:\d+",
    )
    return Seen(f"{ended.line('rank 0: ')} {ended.line('rank 1: ')}", ended.code)


@scenario("D3", fault="ranks call one collective with other dtypes of one size", required="as D1", code=83)
def other_dtypes(box: Box) -> Seen:
    ended = disagrees(
        box,
        "other_dtypes",
        r"rank 0: all_reduce of unit 'weights' \(10 elements\) in fp32, at ranks.py:\d+",
        r"rank 1: all_reduce of unit 'weights' \(10 elements\) in int32, at ranks.py:\d+",
    )
    box.check("no rank gets a result", not list(box.folder.glob("garbage-*")), Kind.NUMBER)
    return Seen(f"{ended.line('rank 0: ')} {ended.line('rank 1: ')}", ended.code)


@scenario(
    "D4",
    fault="one rank has one batch more",
    required="names the rank that has ended and the one that waits; drop_last or join",
    code=83,
)
def more_batches(box: Box) -> Seen:
    ended = disagrees(
        box,
        "more_batches",
        "rank 1 has ended, while (this rank|rank 0) waits",
        "drop_last=True, or `for batch, weight in sw.join",
    )
    return Seen(ended.line("has ended"), ended.code)


@scenario(
    "D5",
    fault="seed and code of shardwise differ between ranks that were started by hand",
    required="compared before training; all ranks name what differs",
    code=78,
)
def other_program(box: Box) -> Seen:
    other = box.folder / "other"
    shutil.copytree(Path(shardwise.__file__).parent, other / "shardwise", ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "shardwise" / "train" / "loop.py").open("a") as file:
        file.write("# another version\n")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = os.pathsep.join((str(other), str(ROOT)))
    jobs = [
        box.start(env=world | {"RANK": "0", "LOCAL_RANK": "0"}),
        box.start(*sets("train.seed=1"), env=world | {"RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": path}),
    ]
    first, second = [job.wait() for job in jobs]
    refuses(box, first, "train.seed: rank 0 has 0, rank 1 has 1", "code of shardwise: rank 0 has", begins=True)
    box.check("both ranks leave with 78", {first.code, second.code} == {78})
    box.check("no step is made", box.run.num_steps == 0, Kind.NUMBER)
    return Seen(f"{first.line('train.seed')} {first.line('code of')}", first.code)


def stopped_before_update(box: Box, ended: Ended, problem: str, step: int = 12) -> None:
    """The run has ended at a step whose numbers are not finite, before its update."""
    refuses(box, ended, rf"step {step}: {problem}", "Parameters are as before that step", begins=True)
    box.says(ended, "safe: checkpoint of step 10", "--set optimizer.lr=")
    box.check("the last checkpoint is that of step 10", box.run.saved_steps[-1] == 10)
    box.check("the step is not recorded as made", box.run.num_steps == step - 1, Kind.NUMBER)
    bundle = sorted((box.run.path / "odd-steps" / f"step-{step:08d}").glob("rank-*.json"))
    held = [json.loads(path.read_text()) for path in bundle]
    read = [sample for rank in held for microbatch in rank["samples"] for sample in microbatch]
    box.check("samples of all ranks are kept", sorted(read) == sorted(box.run.samples[step]))
    box.check("random states are kept", len(held) == 2 and all(rank["random"] for rank in held))


@scenario(
    "D6",
    fault="NaN in the loss of one rank",
    required="all ranks stop before the update; samples and random states are kept, no checkpoint is made of it",
    code=80,
)
def loss_is_nan(box: Box) -> Seen:
    box.config = CONFIG + "parallel: {strategy: ddp}\n"
    ended = box.train(fault="before_backward@rank=1@step=12:nan")
    stopped_before_update(box, ended, "the loss is nan on rank 1")
    box.check("both ranks leave with 80", [note["code"] for note in box.run.notes.values()] == [80, 80])
    box.resumes()
    return Seen(ended.line("step 12: "), ended.code)


@scenario(
    "D7",
    fault="NaN in a gradient alone",
    required="stops before the update; or leaves the step out, a limited number of times in a row",
    code=80,
)
def gradient_is_nan(box: Box) -> Seen:
    ended = box.train(fault="before_update@rank=1@step=12:nan")
    stopped_before_update(box, ended, "the gradient norm is nan")
    box.resumes()
    skips = sets("train.non_finite=skip", "train.max_skipped_steps=1")
    nan = ";".join(f"before_update@rank=1@step={step}:nan" for step in (7, 12, 13))
    skipped = box.train(*skips, run="skips", fault=nan)
    box.says(skipped, "WARNING: step 7 was left out: the gradient norm is nan", "WARNING: step 12 was left out")
    refuses(box, skipped, r"step 13: .*as in the 1 steps before \(train.max_skipped_steps\)", begins=True)
    box.check("two steps in a row end it", skipped.code == 80)
    return Seen(f"{ended.line('step 12: ')} Skipping: {skipped.line('step 13: ')}", ended.code)


@scenario("D8", fault="loss spike", required="a warning with the samples of the step; the run goes on", code=0)
def loss_spike(box: Box) -> Seen:
    step, count = 110, 4000  # by then the loss has been low for long enough
    text = bytearray(b"abcdefgh" * 2 * count)
    source = box.folder / "text.txt"
    source.write_bytes(text)
    box.config = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: text.txt}
train: {steps: 115, micro_batch_size: 2, global_batch_size: 8, eval_every: null}
optimizer: {lr: 1e-2}
schedule: {name: constant}
checkpoint: {final: false}
"""
    (box.folder / "plan.yaml").write_text(box.config.replace("text.txt", str(source)))
    resolved = resolve(read_config(box.folder / "plan.yaml"), 2)
    sampler = Sampler(data_of(resolved).train.num_samples, resolved.config.train.seed, 8, 1, 0, 1)
    drawn = [sampler.next_step() for _ in range(step)][-1][0]
    draw = random.Random(0)
    for sample in drawn:
        begin = sample * resolved.seq_len
        text[begin : begin + resolved.seq_len] = bytes(draw.randrange(33, 127) for _ in range(resolved.seq_len))
    source.write_bytes(text)
    ended = box.train()
    box.says(ended, rf"WARNING: step {step}: the loss is [\d.]+, \d+ standard deviations above the median")
    box.check("the run goes on", box.run.num_steps == 115)
    bundle = sorted((box.run.path / "odd-steps" / f"step-{step:08d}").glob("rank-*.json"))
    held = [sample for path in bundle for part in json.loads(path.read_text())["samples"] for sample in part]
    box.check("its samples are kept, those that were changed", sorted(held) == sorted(drawn))
    early = [line for line in ended.output.splitlines() if "standard deviations" in line and f"step {step}" not in line]
    box.check(
        f"no step before it is taken for one: {early[:1]}",
        "WARNING: step" not in ended.output.split(f"step {step}:")[0],
        Kind.WORDS,
    )
    return Seen(ended.line("standard deviations"), ended.code)


@scenario(
    "D9",
    fault="a bit of one replica's parameters flips in memory",
    required="found by the comparison of every K steps; the odd rank is named; no checkpoint is made of it",
    code=83,
)
def flipped_replica(box: Box) -> Seen:
    box.config = ANY_WORLD + "parallel: {strategy: ddp}\n"
    ended = box.train("--nproc", "3", *sets("train.check_replicas_every=4"), fault="step_begin@rank=1@step=6:flip")
    refuses(box, ended, "step 8: copies that must be equal on several ranks are not", begins=True)
    box.says(ended, r"\(float32\): rank 1 differs from ranks 0, 2", "safe: checkpoint of step 5")
    box.check("no checkpoint is made of it", box.run.saved_steps == [5])
    return Seen(ended.line("rank 1 differs"), ended.code)


@scenario("D10", fault="the same run twice", required="losses, parameters and samples equal bit for bit", code=0)
def twice(box: Box) -> Seen:
    ended = box.train()
    box.equals(box.oracle())
    return Seen(
        "20 steps on 2 ranks: losses, parameters, optimizer state and samples are equal bit for bit", ended.code
    )
