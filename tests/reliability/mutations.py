"""Configurations, manifests and shard headers with random changes: a typed error, or what was meant.

Half of the changes are of bytes. The other half puts odd values in places of the structure, with checksums made again,
as someone would who wants to be read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

import shardwise as sw
from shardwise.checkpoint import manifest as manifests
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.writer import write
from shardwise.spec.errors import ShardwiseError
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from shardwise.train.load import find_model
from tests.checkpoint.threads import cut, even, run_in_threads, sample, whole

KINDS = ("config", "manifest", "header", "optimizer", "run")
#: Seconds of the processor that reading one file may take.
MOST_S = 1.0

_CONFIG = """\
model: {preset: gpt-tiny, num_layers: 2}
data: {source: random}
parallel: {strategy: zero2}
train: {steps: 10, global_batch_size: 8}
optimizer: {lr: 1e-4, betas: [0.9, 0.95]}
"""
_ODD = (
    *(None, True, -1, 0, 1, 2, 2**31, 2**63, 2**70, 10**400, -(2**63), 0.5, 1e308, "", "0", "x" * 5000, "../../x"),
    *(
        "/etc/passwd",
        "a\0b",
        "\x1b[31m",
        "\u202e",
        "fp32",
        "zero3",
        [],
        {},
        [[]],
        [0] * 100,
        {"": None},
        {"a": {"b": []}},
    ),
)
_MARKS = b"{}[]:,&*!|>'\"%@`\n\t -#0a"


def run(kind: str, count: int, seed: int, folder: Path) -> Counter[str]:
    """Read ``count`` changed files, one after the other.

    Args:
        kind: One of ``KINDS``.
        count: Changes.
        seed: Of the changes; the same seed makes the same ones.
        folder: An empty folder to write to.

    Returns:
        How many were ``refused`` and how many ``taken``.

    Raises:
        AssertionError: Reading raised something else than a typed error, took more than ``MOST_S``, or gave other
            numbers; the message lists the first such changes by their numbers.
    """
    draw, found = random.Random(f"{kind} {seed}"), Counter[str]()
    makers = {"config": _config, "manifest": _manifest, "header": _header, "optimizer": _optimizer, "run": _run}
    read = makers[kind](folder)
    wrong: list[str] = []
    for number in range(count):
        begin = time.process_time()
        try:
            read(draw)
            found["taken"] += 1
        except ShardwiseError as error:
            found["refused"] += 1
            if error.exit_code not in {65, 78}:  # checkpoint or data, configuration
                wrong.append(f"{number}: exit code {error.exit_code}: {error}")
        except Exception as error:  # noqa: BLE001  all of them are listed
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{number}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
        took = time.process_time() - begin
        if took > MOST_S:
            wrong.append(f"{number} took {took:.1f} s of the processor")
    assert not wrong, f"{kind}, seed {seed}: {len(wrong)} of {count}\n" + "\n".join(wrong[:20])
    return found


def peak_memory() -> int:
    """The most resident memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def changed_bytes(draw: random.Random, source: bytes) -> bytes:
    """One to four bytes replaced, flipped in one bit, taken out, put in, or everything after them cut off."""
    data = bytearray(source)
    for _ in range(draw.randint(1, 4)):
        place, action = draw.randrange(len(data)), draw.randrange(20)
        if action < 5:
            data[place] = draw.randrange(256)
        elif action < 10:
            data[place] ^= 1 << draw.randrange(8)
        elif action < 14:
            del data[place]
        elif action < 19:
            data.insert(place, draw.choice(_MARKS))
        else:
            del data[place + 1 :]
    return bytes(data) if data != source else bytes(data) + b"\0"


def changed_value(draw: random.Random, source: Any) -> Any:
    """A deep copy in which one to three places hold an odd value, are missing, occur twice or have another name."""
    value = copy.deepcopy(source)
    for _ in range(draw.randint(1, 3)):
        held, key = _place(draw, value)
        if held is None:
            return draw.choice(_ODD)
        action = draw.randrange(6)
        if action == 0:
            del held[key]
        elif action == 1 and isinstance(held, list):
            held.insert(key, copy.deepcopy(held[key]))
        elif action == 1:
            held[f"{key}x"] = held.pop(key)
        elif action == 2 and isinstance(held[key], int | float) and abs(held[key]) < 2**63:
            held[key] = held[key] + draw.choice((-1, 1))
        else:
            held[key] = copy.deepcopy(draw.choice(_ODD))
    return value


def _place(draw: random.Random, value: Any) -> tuple[Any, Any]:
    """A container inside of ``value`` and a key of it."""
    held, key = None, None
    while isinstance(value, dict | list) and value and (held is None or draw.random() < 0.8):
        held, key = value, draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        value = held[key]
    return held, key


def _config(folder: Path) -> Callable[[random.Random], None]:
    path, meant = folder / "run.yaml", yaml.safe_load(_CONFIG)

    def read(draw: random.Random) -> None:
        if draw.random() < 0.5:
            path.write_bytes(changed_bytes(draw, _CONFIG.encode()))
        else:
            path.write_text(yaml.safe_dump(changed_value(draw, meant)))
        resolve(read_config(path), 2)

    return read


def _saved(folder: Path) -> Path:
    """A checkpoint of two ranks."""
    tensors, path = sample(0), folder / "step-00000020"
    run_in_threads(
        lambda comm: write(
            path, comm, cut(tensors, even(tensors, 2), comm.rank), {"lr": 0.1, "position": 7}, step=20, run_id="run"
        ),
        2,
    )
    return path


def _load(path: Path) -> None:
    """Load it; what arrives must be what was saved."""
    meant = sample(0)
    pairs = [(whole(name, tensor), torch.zeros(tensor.numel(), dtype=tensor.dtype)) for name, tensor in meant.items()]
    open_checkpoint(path).read_into(pairs)
    for (_, got), (name, tensor) in zip(pairs, meant.items(), strict=True):
        assert torch.equal(got.view(tensor.shape), tensor), f"{name} has other numbers than were saved"


def _manifest(folder: Path) -> Callable[[random.Random], None]:
    path = _saved(folder)
    file = path / manifests.MANIFEST_NAME
    raw = file.read_bytes()
    meant = json.loads(raw)

    def read(draw: random.Random) -> None:
        if draw.random() < 0.5:
            file.write_bytes(changed_bytes(draw, raw))
        else:
            content = changed_value(draw, meant)
            file.write_bytes(
                manifests.with_checksum(content) if isinstance(content, dict) else json.dumps(content).encode()
            )
        _load(path)

    return read


def _header(folder: Path) -> Callable[[random.Random], None]:
    path = _saved(folder)
    file = min(path.glob("*.safetensors"))
    raw = file.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    meant = json.loads(raw[8:end])

    def read(draw: random.Random) -> None:
        if draw.random() < 0.5:
            file.write_bytes(changed_bytes(draw, raw[:end]) + raw[end:])
        else:
            header = json.dumps(changed_value(draw, meant)).encode()
            length = len(header) if draw.random() < 0.9 else draw.choice((0, 2**63, 2**64 - 1, len(header) - 1))
            file.write_bytes(length.to_bytes(8, "little") + header + raw[end:])
        _load(path)

    return read


def _optimizer(folder: Path) -> Callable[[random.Random], None]:
    """What ``sw.save`` wrote of optimizers and of an average; it is loaded, and training continues."""
    saved = []
    for number, make in enumerate(_OPTIMIZERS):
        path = folder / str(number)
        model, optimizer, average = _training(make)
        _steps(model, optimizer)
        sw.save(path, model, optimizer, average=average)
        saved.append((make, path, json.loads((path / manifests.MANIFEST_NAME).read_bytes())))

    def read(draw: random.Random) -> None:
        make, path, meant = draw.choice(saved)
        content = copy.deepcopy(meant)
        part = draw.choice(("optimizer", "average", None))
        if part is None:
            content["data"] = changed_value(draw, content["data"])
        else:
            key = draw.choice(("scalars", "groups")) if part == "optimizer" else part
            held = content["data"][part] if part == "optimizer" else content["data"]
            held[key] = changed_value(draw, held[key])
        (path / manifests.MANIFEST_NAME).write_bytes(manifests.with_checksum(content))
        model, optimizer, average = _training(make)
        with contextlib.redirect_stderr(io.StringIO()):
            sw.load(path, model, optimizer, average=average)
        _steps(model, optimizer)
        average.update()

    return read


#: One with a count, one with more numbers, one with neither.
_OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    lambda parameters: torch.optim.ASGD(parameters, lr=1e-3),
    lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
)


def _training(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, torch.optim.Optimizer, Any]:
    model = sw.parallelize(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2)), "zero3")
    return model, make(model.parameters()), sw.ExponentialMovingAverage(model)


def _steps(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _run(folder: Path) -> Callable[[random.Random], None]:
    """A run's configuration in a checkpoint, as ``generate``, ``serve`` and ``export`` read it."""
    (folder / "run.yaml").write_text(_CONFIG)
    config = resolve(read_config(folder / "run.yaml"), 2).config
    path, tensors = folder / "step-00000020", sample(0)
    state = {"step": 20, "config": config.model_dump(mode="json")}
    run_in_threads(
        lambda comm: write(path, comm, cut(tensors, even(tensors, 1), 0), {"state": state}, step=20, run_id="run"), 1
    )
    meant = json.loads((path / manifests.MANIFEST_NAME).read_bytes())

    def read(draw: random.Random) -> None:
        content = copy.deepcopy(meant)
        held, key = draw.choice(((content, "data"), (content["data"]["state"], "config")))
        held[key] = changed_value(draw, held[key])
        (path / manifests.MANIFEST_NAME).write_bytes(manifests.with_checksum(content))
        trained = find_model(path)
        trained.read_template()
        trained.tokenizer()
        trained.resolve([], 1)

    return read
