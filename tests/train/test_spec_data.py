"""The samples of a spec: read by worker processes, drawn from at random, from loaders that keep their own place."""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import ConfigError
from shardwise.testing import run_on_ranks
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.sampler import Sampler
from shardwise.train.data.user_data import UserSamples
from tests.train.job import processes_of
from tests.train.test_spec import train
from tests.train.train_here import metrics, sets

HERE = str(Path(__file__))
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CONFIG = """
train: {steps: 8, micro_batch_size: 2, global_batch_size: 8, eval_every: 4, eval_batches: 1, seed: 5}
optimizer: {lr: 0.1}
schedule: {name: constant}
checkpoint: {every: 4, keep: 10}
log: {tensorboard: false}
"""


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Items that every generator of the host has augmented."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(3)  # noqa: NPY002 - as users' code does
        return torch.arange(3.0) + index + noise, torch.tensor(float(index))


class Slow(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.05)
        return super().__getitem__(index)


class Idle(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.2)
        return super().__getitem__(index)


class Broken(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 7:
            raise KeyError("image")
        return super().__getitem__(index)


class Lost(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Line(nn.Module):
    """Computes its loss; drops out, so that the generators of the rank count too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 1), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.layer(self.dropout(x / 24)).squeeze(-1) - y / 24).square().mean()


def masked(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = torch.utils.data.default_collate(items)
    return x * (torch.rand(x.shape) > 0.2), y


noisy = sw.TrainSpec(model=Line, data=Noisy(), eval_data=Noisy(), collate=masked)
slow = sw.TrainSpec(model=Line, data=Slow())
idle = sw.TrainSpec(model=Line, data=Idle())
broken = sw.TrainSpec(model=Line, data=Broken())
lost = sw.TrainSpec(model=Line, data=Lost())
loaded = sw.TrainSpec(model=Line, data=lambda *_: torch.utils.data.DataLoader(Slow(), batch_size=2, num_workers=1))
whole = sw.TrainSpec(
    model=Line,
    data=Noisy(),
    optimizer=lambda groups, lr: torch.optim.SGD(groups, lr=lr),
    schedule=lambda step, steps: 1 - step / steps,
)


def train_with_workers(folder: str, runs: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    multiprocessing.current_process()._config["daemon"] = False  # of a test's ranks, which otherwise have no children
    return train(folder, runs)


def train_on(world: int, folder: Path, *runs: Sequence[str], config: str = CONFIG) -> list[tuple[int, str]]:
    (folder / "run.yaml").write_text(config)
    return run_on_ranks(train_with_workers, world, str(folder), runs, timeout_s=200)[0]


def test_workers_change_no_number_nor_does_a_resume(tmp_path: Path) -> None:
    name = f"{HERE}:noisy"
    cut = (name, "--run-dir", "cut", *sets("data.workers=2"))
    results = train_on(
        2,
        tmp_path,
        (name, "--run-dir", "here"),
        (name, "--run-dir", "workers", *sets("data.workers=2")),
        (*cut, *sets("train.steps=5")),
        (*cut, "--resume", *sets("train.steps=8", "data.workers=1")),
    )
    assert [code for code, _ in results] == [0] * 4, results
    expected = numbers(tmp_path / "here")
    assert len({line["loss"] for line in expected}) == 8
    assert numbers(tmp_path / "workers") == expected
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in numbers(tmp_path / "cut")] == [line[name] for line in expected]


def numbers(run: Path) -> list[dict[str, float]]:
    """Records without memory: several runs share these processes."""
    return [{key: value for key, value in line.items() if key != "peak_memory_bytes"} for line in metrics(run)]


def drawn(readers: int, micro: int, workers: int = 0, position: int = 0) -> Tensor:
    """What all readers of three global batches of eight samples read, in global order."""
    made = []
    for reader in range(readers):
        order = Sampler(24, 5, micro, 8 // micro // readers, reader, readers, position)
        data = UserSamples(Noisy(), torch.utils.data.default_collate, seed=5, workers=workers)
        batches = data.microbatches(order.upcoming(), CPU)
        steps = [torch.cat([next(batches)[0] for _ in range(order.accumulation)]) for _ in range(3)]
        made.append(torch.stack(steps))
    return torch.cat(made, 1).flatten(0, 1)


def test_an_augmentation_depends_on_the_place_alone() -> None:
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    expected = drawn(1, 8)
    assert drawn(2, 4).equal(expected)
    assert drawn(4, 1, workers=2).equal(expected)
    assert drawn(2, 2, position=8)[:16].equal(expected[8:])
    assert not drawn(1, 8, position=24).equal(expected)  # another epoch, and other draws
    assert len(expected.flatten().unique()) == 24 * 3
    assert torch.get_rng_state().equal(state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]  # noqa: NPY002


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("broken", "of Broken could not be read: KeyError: 'image'"),
        ("lost", "a process that reads Lost was lost: DataLoader worker"),
    ],
)
def test_what_a_worker_could_not_read_ends_the_run_with_its_name(tmp_path: Path, spec: str, words: str) -> None:
    arguments = (f"{HERE}:{spec}", "--run-dir", "run", *sets("data.workers=1", "train.steps=30"))
    ((code, text),) = train_on(1, tmp_path, arguments, config=CONFIG.replace("eval_every: 4, ", ""))
    assert code != 0
    assert words in text


@pytest.mark.parametrize(("workers", "advice"), [(0, "; data.workers=4 reads ahead"), (1, "")])
def test_a_run_that_waits_for_data_says_so(tmp_path: Path, workers: int, advice: str) -> None:
    arguments = (f"{HERE}:idle", "--run-dir", "run", *sets("train.steps=6", f"data.workers={workers}"))
    ((code, text),) = train_on(1, tmp_path, arguments, config="log: {tensorboard: false}\n")
    assert code == 0, text
    assert re.search(rf"^  of it \d+% was spent on data{re.escape(advice)}$", text, re.MULTILINE), text


def test_a_run_with_workers_ends(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {steps: 6, micro_batch_size: 2, eval_every: null}\n")
    command = ["-m", "shardwise", "train", "run.yaml", "--spec", f"{HERE}:noisy", "--nproc", "1"]
    words = [sys.executable, *command, *sets("data.workers=3", "schedule.warmup_steps=0")]
    path = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=path, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("spec", "settings"), [("slow", ("data.workers=1",)), ("loaded", ())])
def test_a_stop_that_all_processes_hear_ends_with_a_checkpoint(
    tmp_path: Path, spec: str, settings: tuple[str, ...]
) -> None:
    (tmp_path / "run.yaml").write_text("train: {steps: 10000, micro_batch_size: 2}\nlog: {tensorboard: false}\n")
    command = ["-m", "shardwise", "train", "run.yaml", "--spec", f"{HERE}:{spec}", "--run-dir", "run", "--nproc", "2"]
    run = subprocess.Popen(
        [sys.executable, *command, *sets(*settings)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    records, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (records.exists() and records.read_text()) and run.poll() is None and time.monotonic() < until:
        time.sleep(0.1)
    assert run.poll() is None, run.communicate()[0]
    family = processes_of(tmp_path)
    assert len(family) >= 1 + 2 + 2  # the launcher, two ranks, their workers
    for each in family:
        os.kill(each, signal.SIGTERM)
    text, _ = run.communicate(timeout=120)
    assert run.returncode == 75, text
    assert [*(tmp_path / "run" / "checkpoints").glob("step-*")], text


def test_the_configuration_of_a_run_is_one_of_its_spec_again(tmp_path: Path) -> None:
    first = resolve(read_config(None, [f"spec={HERE}:whole"], base={"data": {"workers": 2}}), 2)
    (tmp_path / "config.yaml").write_text(first.to_yaml())
    assert resolve(read_config(tmp_path / "config.yaml"), 2).config == first.config


def test_workers_are_refused_where_nothing_is_read_by_its_number() -> None:
    config = {"data": {"workers": 2}}
    with pytest.raises(ConfigError, match=r"data\.workers: tokens are read from files as they lie there"):
        resolve(read_config(None, base=config), 1)
    endless = sw.TrainSpec(model=Line, data=Endless())
    with pytest.raises(ConfigError, match=r"data\.workers: the spec's iterable or loader reads itself"):
        resolve(read_config(None, base=config), 1, spec=endless)


class Endless:
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.zeros(3), torch.zeros(()))])
