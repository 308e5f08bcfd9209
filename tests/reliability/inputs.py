"""Section E: configurations, data and worlds that are wrong, and files with random changes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import yaml

from shardwise.train.data.token_files import HEADER_BYTES, write_tokens
from tests.reliability.board import scenario
from tests.reliability.box import Box, Ended, Kind, Seen
from tests.reliability.mutations import KINDS
from tests.reliability.refusals import refuses, untouched
from tests.train.job import command
from tests.train.train_here import sets

#: Enough for the command without torch. What a bomb expands to would not fit.
LIMITED = "ulimit -v 1500000; ulimit -t 30; exec"


def validated(box: Box, config: str) -> Ended:
    """``shardwise validate`` of a configuration: what ``train`` checks before it starts a process."""
    (box.folder / "run.yaml").write_text(config)
    return box.shardwise("validate", "run.yaml", "--nproc", "2")


def limited(box: Box, content: bytes) -> Ended:
    """``shardwise validate`` of any file, with limits on memory and processor time."""
    (box.folder / "bomb.yaml").write_bytes(content)
    words = f"{LIMITED} {sys.executable} -m shardwise validate bomb.yaml --nproc 2"
    return box.start_command(["bash", "-c", words]).wait(120)


@scenario(
    "E1",
    fault="unknown or misspelled key",
    required="error with the line and 'did you mean'; nothing is started",
    code=78,
)
def unknown_key(box: Box) -> Seen:
    box.config = "model: {preset: gpt-nano}\noptimizer: {learning_rate: 1e-3, weight_dcay: 0.1}\ntrian: {steps: 3}\n"
    ended = box.train()
    refuses(box, ended, r"run.yaml:2: optimizer.learning_rate: unknown key", r"Did you mean 'weight_decay'\?")
    box.says(ended, r"run.yaml:3: unknown section 'trian'.*Did you mean 'train'\?", "^  Correct them and try again")
    untouched(box)
    return Seen(ended.line("trian"), ended.code)


@scenario("E2", fault="`lr: 1e-5`, which PyYAML takes for a string", required="parsed as a number", code=0)
def small_rate(box: Box) -> Seen:
    written = {"1e-5": 1e-5, "1E-5": 1e-5, "1.e-05": 1e-5, "2e3": 2000.0, ".00001": 1e-5}
    ended, read = Ended(0, "", 0), {}
    for text in written:
        ended = validated(box, f"data: {{source: random}}\noptimizer: {{lr: {text}}}\n")
        if ended.code:
            break
        read[text] = yaml.safe_load(ended.output)["optimizer"]["lr"]
    read = {text: float(value) for text, value in read.items()}
    box.check(f"each is the number that it says: {read}", read == written, Kind.NUMBER)
    return Seen(f"{', '.join(written)}: numbers, each", ended.code)


@scenario("E3", fault="duplicate key", required="error with both lines; nothing is started", code=78)
def duplicate_key(box: Box) -> Seen:
    box.config = "model: {preset: gpt-nano}\noptimizer:\n  lr: 1e-3\n  weight_decay: 0.1\n  lr: 1e-4\n"
    ended = box.train()
    refuses(box, ended, r"run.yaml:5: duplicate key 'lr', first given at run.yaml:3")
    untouched(box)
    return Seen(ended.line("duplicate"), ended.code)


@scenario(
    "E4",
    fault="`no`, `010` and `1:30`, which YAML 1.1 takes for False, 8 and 90",
    required="an error, or the text itself where text is declared",
    code=78,
)
def words_of_yaml(box: Box) -> Seen:
    named = validated(box, "name: no\ndata: {source: random, column: 010, tokenizer: bytes, learns: all}\n")
    box.check("text where text is declared", named.code == 0, Kind.WORDS)
    box.says(named, "^name: '?no'?$", "column: '?010'?$")
    box.config = (
        "data: {source: random}\ncheckpoint: {asynchronous: no}\nlog: {wandb: on}\n"
        "train: {steps: 010, global_batch_size: 1:30}\n"
    )
    ended = box.train()
    refuses(box, ended, r"checkpoint.asynchronous: .*got 'no'", r"log.wandb: .*got 'on'", r"train.steps: .*got '010'")
    box.says(ended, r"train.global_batch_size: .*got '1:30'")
    untouched(box)
    return Seen(ended.line("1:30"), ended.code)


@scenario(
    "E5",
    fault="wrong types, negative, NaN, absurd sizes, a batch that the ranks do not divide",
    required="all errors at once, before any process is started",
    code=78,
)
def wrong_values(box: Box) -> Seen:
    box.config = """
model: {preset: gpt-nano, num_heads: 5}
data: {source: random, seq_len: 1000000000, held_out: 1.5}
optimizer: {lr: .nan, weight_decay: -1, betas: [0.9]}
schedule: {warmup_steps: many}
train: {steps: 1000000000000000, seed: -1, clip_grad_norm: .inf, micro_batch_size: 2.5}
checkpoint: {keep: 1}
"""
    ended = box.train()
    fields = ("data.seq_len", "data.held_out", "optimizer.lr", "optimizer.weight_decay", "optimizer.betas")
    fields += ("schedule.warmup_steps", "train.steps", "train.seed", "train.clip_grad_norm", "train.micro_batch_size")
    refuses(box, ended, *(rf"run.yaml:\d: {field}: " for field in (*fields, "checkpoint.keep")))
    untouched(box)
    box.config = (
        "model: {preset: gpt-nano}\ndata: {source: random}\ntrain: {micro_batch_size: 2, global_batch_size: 7}\n"
    )
    batch = box.train()
    refuses(box, batch, r"7 samples are not a multiple of micro_batch_size=2 \* 2 ranks = 4; use 4 or 8")
    box.check("a batch that the ranks do not divide: 78", batch.code == 78, Kind.WORDS)
    box.config = "model: {preset: gpt-nano, hidden: 1000000, num_layers: 1000}\ndata: {source: random}\n"
    large = box.train()
    refuses(box, large)
    box.check("a model that no memory holds: 78", large.code == 78, Kind.WORDS)
    untouched(box)
    return Seen(f"{ended.line('mistakes in')} ... {batch.line('7 samples')}", ended.code)


@scenario(
    "E6",
    fault="deep nesting, alias bombs, endless text",
    required="limits of size, depth and aliases; little memory and time",
    code=78,
)
def bombs(box: Box) -> Seen:
    aliases = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{right}: &{right} [{', '.join([f'*{left}'] * 10)}]\n"
        for left, right in zip("abcdefgh", "bcdefghi", strict=True)
    )
    files = {
        "nested": b"[" * 100_000,
        "mappings": b"{a: " * 50_000,
        "aliases": aliases.encode(),
        "cycle": b"a: &x [*x]",
        "long": b"name: " + b"x" * 20_000_000,
        "wide": b"- 1\n" * 2_000_000,
    }
    seen = []
    for name, content in files.items():
        ended = limited(box, content)
        refuses(box, ended)
        box.check(f"{name}: refused with 78 within 1.5 GB of addresses, got {ended.code}", ended.code == 78)
        seen.append(f"{name}: {ended.line('Error: ').partition('Error: ')[2][:70]}")
    return Seen("; ".join(seen), ended.code)


def refused_data(box: Box, source: str, *patterns: str) -> Ended:
    """Training on data that cannot be used."""
    (box.folder / "run.yaml").write_text(f"model: {{preset: gpt-nano, vocab_size: 256}}\ndata: {{source: {source}}}\n")
    words = [*command(box.folder, "--run-dir", "run", config=(box.folder / "run.yaml").read_text())]
    ended = box.start_command(words).wait()
    refuses(box, ended, *patterns)
    box.check(f"{source}: refused with 65, got {ended.code}", ended.code == 65)
    untouched(box)
    return ended


def _write_data(folder: Path) -> dict[str, tuple[str, ...]]:
    """Files of data that cannot be used, with what has to be said of each."""
    contents: dict[str, bytes] = {
        "empty.txt": b"",
        "one.txt": b"x" * 20,
        "few.txt": b"x" * 50,
        "binary.txt": bytes(range(256)) * 50,
        "invalid.txt": b"one\ntwo\nthr\xffee\n" * 2000,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    write_tokens(folder / "cut.bin", [np.arange(20_000) % 256], vocab_size=256)
    (folder / "cut.bin").write_bytes((folder / "cut.bin").read_bytes()[:-300])
    return {
        "empty.txt": ("empty.txt: the text is empty",),
        "one.txt": (r"one.txt: 20 tokens leave \d+ samples",),
        "few.txt": (r"few.txt: 50 tokens leave \d+ samples .* are needed",),
        "binary.txt": (r"binary.txt:2: byte 0x80 is not UTF-8",),
        "invalid.txt": (r"invalid.txt:3: byte 0xff is not UTF-8",),
        "cut.bin": (r"cut.bin: .*bytes",),
        "none.txt": ("none.txt: no such file",),
    }


@scenario(
    "E7",
    fault="data: empty, one sample, too few, binary, invalid UTF-8, a line of 100 MB, cut off, changed between runs",
    required="typed error that names file and line; changed data stops a resume",
    code=65,
    limit_s=600,
)
def odd_data(box: Box) -> Seen:
    seen = [refused_data(box, name, *words).line(words[0]) for name, words in _write_data(box.folder).items()]
    (box.folder / "line.txt").write_bytes(b"one line without an end " * 4_400_000)
    short = sets("train.steps=2", "train.eval_every=null", "train.micro_batch_size=2", "checkpoint.every=1")
    box.config = "model: {preset: gpt-nano, vocab_size: 256}\ndata: {source: line.txt}\n"
    box.check("a line of 100 MB is text as any other", box.train(*short, "--nproc", "1", run="line").code == 0)
    text = bytearray(b"text that will be changed in its middle " * 2500)
    (box.folder / "text.txt").write_bytes(text)
    box.config = "model: {preset: gpt-nano, vocab_size: 256}\ndata: {source: text.txt}\n"
    box.check("it trains before the change", box.train(*short, "--nproc", "1").code == 0)
    text[50_000] ^= 1
    (box.folder / "text.txt").write_bytes(text)
    before = box.run.num_steps
    ended = box.train(*short, "--nproc", "1", "--resume", *sets("train.steps=4"))
    refuses(box, ended, r"text.txt: the data is not what the run began with", begins=True)
    box.check("no step is made with other data", box.run.num_steps == before, Kind.NUMBER)
    return Seen(f"{seen[4]}; {ended.line('began with')}", ended.code)


@scenario("E8", fault="a token id beyond the vocabulary", required="found before training; the token is named", code=65)
def large_token(box: Box) -> Seen:
    path = box.folder / "tokens.bin"
    write_tokens(path, [np.arange(20_000) % 256], vocab_size=256)
    content, place = bytearray(path.read_bytes()), HEADER_BYTES + 2 * 1234
    content[place : place + 2] = (300).to_bytes(2, "little")
    path.write_bytes(content)
    ended = refused_data(box, "tokens.bin", "tokens.bin: token 1,?234 is 300, but the vocabulary has 256 ids")
    return Seen(ended.line("is 300"), ended.code)


@scenario(
    "E9",
    fault="0, negative or too many processes; a mesh that is not the world",
    required="message with the arithmetic; nothing is started",
    code=78,
)
def wrong_world(box: Box) -> Seen:
    wrong: dict[tuple[str, ...], str] = {
        ("--nproc", "0"): "--nproc 0: cannot start 0 processes, at least 1 is needed",
        ("--nproc", "-1"): "--nproc -1: cannot start -1 processes",
        ("--nproc", "5000"): r"--nproc 5000: \d+ cores take at most \d+ \* 8 = \d+ processes",
        sets("parallel.tp=3"): r"tp=3",
        sets("parallel.dp_shard=2", "parallel.tp=2"): r"dp_shard=2 \* tp=2 .*make 4 ranks, but the world has 2",
    }
    seen = []
    for words, said in wrong.items():
        ended = box.train(*words)
        refuses(box, ended, said)
        box.check(f"{' '.join(words)}: 78, got {ended.code}", ended.code == 78, Kind.WORDS)
        seen.append(ended.line(said))
    untouched(box)
    return Seen("; ".join(seen[2:]), ended.code)


@scenario(
    "E10",
    fault="random changes of a configuration, an index and a shard's header, from a fixed seed",
    required="typed errors only, no hang over 1 s, less than 500 MB; 10,000 each in `make soak`",
    code=0,
)
def random_changes(box: Box) -> Seen:
    words = [sys.executable, "-m", "tests.reliability.soak", "mutations", "--seed", "14", "--mutations", "1500"]
    ended = box.start_command(words).wait(280)
    box.check("only typed errors, each within a second", ended.code == 0)
    counts = re.findall(r"^(\w+): (\d+) of (\d+) changed files refused", ended.output, re.MULTILINE)
    box.check("all kinds of files", [kind for kind, _, _ in counts] == list(KINDS))
    peak = re.search(r"peak memory (\d+) MiB", ended.output)
    box.check(f"memory: {peak and peak[1]} MiB", peak is not None and int(peak[1]) < 500)
    return Seen(
        f"{', '.join(f'{kind} {refused} of {count} refused' for kind, refused, count in counts)}; {peak and peak[0]}",
        ended.code,
    )
