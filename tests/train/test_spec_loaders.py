"""Loaders of a spec, one for each reader, and iterables that can say where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

import shardwise as sw
from shardwise.cli import main
from shardwise.spec.errors import ConfigError
from shardwise.train.checkpoints import random_state
from tests.train import towers
from tests.train.test_spec import CUT, Line, train_on
from tests.train.test_spec_data import Noisy
from tests.train.train_here import losses, metrics, sets, summary

HERE = str(Path(__file__))
LENGTH, STEPS = 7, 8  # batches of a loader: it begins again in the middle of a step
CONFIG = """
train: {steps: 8, micro_batch_size: 2, global_batch_size: 8, eval_every: null, seed: 5}
optimizer: {lr: 0.1, weight_decay: 0.0}
schedule: {name: constant}
log: {tensorboard: false}
"""


def batch(reader: int, at: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * reader + at))
    return x, x.sum(1)


class Batches:
    """Batches of a reader; notes in a file how many it has made."""

    def __init__(self, reader: int, readers: int) -> None:
        self.reader, self.readers, self.at = reader, readers, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < LENGTH:
            self.at += 1
            with Path(f"read-{self.reader}-of-{self.readers}").open("a") as file:
                file.write("x")
            yield batch(self.reader, self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Raises(Batches):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield batch(0, 0)
        raise KeyError("image")


class Items(IterableDataset[tuple[Tensor, Tensor]]):
    """An iterable of single items that can say where it is."""

    at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < 20:
            self.at += 1
            with Path("items-read").open("a") as file:
                file.write("x")
            x = torch.tensor([self.at, -self.at, 1.0]) / 20
            yield x, x.sum()
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def shuffled(reader: int, readers: int) -> DataLoader[Any]:
    """Without a state: the order and what items draw come from the generators of the host."""
    return DataLoader(Subset(Noisy(), range(reader, 24, readers)), batch_size=2, shuffle=True)


def of_pairs(reader: int, readers: int) -> DataLoader[Any]:
    return DataLoader(Subset(towers.Pairs(256, 0), range(reader, 256, readers)), batch_size=4)


def uneven(reader: int, readers: int) -> list[tuple[Tensor, Tensor]]:
    return [batch(10 + reader, at) for at in range(5 - reader)]


rows = [{"x": [float(i), 1.0, -float(i)], "y": float(i)} for i in range(20)]
stateful = sw.TrainSpec(model=Line, data=Batches)
stateless = sw.TrainSpec(model=Line, data=shuffled)
pairs = sw.TrainSpec(model=towers.Towers, data=of_pairs, loss=towers.loss)
held_out = sw.TrainSpec(model=Line, data=Batches, eval_data=uneven)
raises = sw.TrainSpec(model=Line, data=Raises)


def items() -> sw.TrainSpec:
    """Of each run a new one: its place is its own."""
    return sw.TrainSpec(model=Line, data=Items())


def streamed() -> sw.TrainSpec:
    data = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=1)
    return sw.TrainSpec(model=Line, data=data.with_format("torch"))


def plain_losses(readers: int) -> list[float]:
    """The same training in one process that reads all loaders."""
    random_state.seed_all(5)
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
    per_step, found = 4 // readers, []
    for step in range(STEPS):
        numbers = range(step * per_step, (step + 1) * per_step)
        loss = sum(model(*batch(reader, at % LENGTH)) for reader in range(readers) for at in numbers) / 4
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_each_reader_has_its_loader_and_a_resume_continues_at_its_state_without_reading(tmp_path: Path) -> None:
    name = f"{HERE}:stateful"
    cut = (name, "--run-dir", "cut")
    results = train_on(
        2, tmp_path, (name, "--run-dir", "whole"), (*cut, *sets("train.steps=5")), (*cut, "--resume"), config=CONFIG
    )
    assert [code for code, _ in results] == [0, 0, 0], results
    assert losses(tmp_path / "whole") == pytest.approx(plain_losses(2), rel=1e-5)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    for reader in range(2):  # two runs of 8 steps with 2 microbatches
        assert len((tmp_path / f"read-{reader}-of-2").read_text()) == 32


def test_another_number_of_readers_is_refused_with_what_to_do(tmp_path: Path) -> None:
    arguments = (f"{HERE}:stateful", "--run-dir", "run", *sets("train.steps=2"))
    assert train_on(2, tmp_path, arguments, config=CONFIG)[0][0] == 0
    ((code, text),) = train_on(1, tmp_path, (f"{HERE}:stateful", "--run-dir", "run", "--resume"), config=CONFIG)
    assert code == 65
    assert "the place of TrainSpec(data=...) was that of each of 2 readers, and this run has 1." in text
    assert "Continue on as many, or give a data set with len and items" in text


def test_a_loader_without_state_draws_and_resumes_at_the_same_batches(tmp_path: Path) -> None:
    name = f"{HERE}:stateless"
    cut = (name, "--run-dir", "cut")
    results = train_on(
        2, tmp_path, (name, "--run-dir", "whole"), (*cut, *sets("train.steps=5")), (*cut, "--resume"), config=CONFIG
    )
    assert [code for code, _ in results] == [0, 0, 0], results
    expected = [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / "whole")]
    assert len(set(expected)) == STEPS
    assert [(line["loss"], line["grad_norm"]) for line in metrics(tmp_path / "cut")] == expected


def test_ranks_of_one_reader_read_the_same_batches(tmp_path: Path) -> None:
    config = CONFIG.replace("micro_batch_size: 2, global_batch_size: 8", "micro_batch_size: 4, global_batch_size: 8")
    tp = (f"{HERE}:pairs", "--run-dir", "tp", *sets("parallel.tp=2", f"parallel.tp_plan={CUT}"))
    assert train_on(2, tmp_path, tp, config=config)[0][0] == 0
    assert train_on(1, tmp_path, (f"{HERE}:pairs", "--run-dir", "alone"), config=config)[0][0] == 0
    assert losses(tmp_path / "tp") == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    found = summary(tmp_path / "alone")  # the loader's own tensors are no part of it
    own = 256 * (towers.LEFT + towers.RIGHT + 1) * 4
    assert found["peak_memory_bytes"] - found["predicted_peak_memory_bytes"] < own / 2


def test_held_out_batches_of_a_loader_are_as_many_on_every_reader_and_the_same_each_time(tmp_path: Path) -> None:
    config = CONFIG.replace("eval_every: null", "eval_every: 1, eval_batches: 3, steps: 1").replace("steps: 8, ", "")
    ((code, text),) = train_on(2, tmp_path, (f"{HERE}:held_out", "--run-dir", "run"), config=config)
    assert code == 0, text
    random_state.seed_all(5)
    model = Line()
    with torch.no_grad():  # 4 batches of each reader: the second has no more, and 6 were asked for
        expected = sum(model(*batch(10 + reader, at)).item() for reader in range(2) for at in range(4)) / 8
    assert f"step 0  held-out loss {expected:.4f} (16 samples)" in text


@pytest.mark.parametrize("name", ["items", "streamed"])
def test_an_iterable_with_a_state_is_resumed_by_it_on_any_number_of_ranks(tmp_path: Path, name: str) -> None:
    name = f"{HERE}:{name}"
    cut = (name, "--run-dir", "cut")
    results = train_on(2, tmp_path, (name, "--run-dir", "whole"), (*cut, *sets("train.steps=3")), config=CONFIG)
    read = len((tmp_path / "items-read").read_text()) if name.endswith("items") else 0
    again = train_on(1, tmp_path, (*cut, "--resume"), config=CONFIG)
    assert [code for code, _ in [*results, *again]] == [0, 0, 0], [*results, *again]
    assert losses(tmp_path / "cut") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    if name.endswith("items"):
        assert len((tmp_path / "items-read").read_text()) - read == 5 * 8  # the steps that were left, in one process


def test_a_loader_that_raises_ends_the_run_with_its_batch(tmp_path: Path) -> None:
    ((code, text),) = train_on(1, tmp_path, (f"{HERE}:raises", "--run-dir", "run"), config=CONFIG)
    assert code != 0
    assert "the loader Raises did not give its batch 2: KeyError: 'image'" in text


def test_the_planner_knows_a_model_by_the_first_batch_of_its_loader(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--gpus", "2", "--gpu", "L4", "--gpus-per-node", "2", "--global-batch", "8", "--strategy", "ddp"]
    assert main(["plan", "--spec", f"{HERE}:pairs", *arguments]) == 0
    assert "Towers" in capsys.readouterr().out


def test_what_does_not_go_with_loaders_is_refused() -> None:
    with pytest.raises(ConfigError, match="collate: the loaders of data make batches themselves"):
        sw.TrainSpec(data=shuffled, collate=torch.utils.data.default_collate)
    with pytest.raises(ConfigError, match=r"a function that makes the loader of a reader: data\(reader, readers\)"):
        sw.TrainSpec(data=shuffled(0, 1))
