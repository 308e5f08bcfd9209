"""A save that goes on in processes of its own: it holds what was when it began, and says how it ended, on all ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint.background import Background
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.store import step_directory
from shardwise.checkpoint.writer import Saving, begin_write
from shardwise.launch import inject
from shardwise.spec.errors import CheckpointError, ShardwiseError, StorageError
from shardwise.testing import run_on_ranks
from tests.checkpoint.threads import cut, even, run_in_threads, sample, whole


class Rank:
    """One rank with its process, which lasts for several saves."""

    def __init__(self, comm, run: Path) -> None:
        self.comm, self.run, self.background = comm, run, Background()
        self.tensors = sample()
        self.good: list[str] = []

    def begin(self, step: int, **changes) -> Saving:
        pieces = cut(self.tensors, even(self.tensors, self.comm.size), self.comm.rank)
        given = {"step": step, "run_id": "run", "keep": 2, "known_good": self.good, **changes}
        saving = begin_write(
            step_directory(self.run, step), self.comm, pieces, {"step": step}, self.background, **given
        )
        for _, tensor in pieces:  # training goes on, in place
            tensor.zero_()
        self.tensors = sample()
        return saving

    def refused(self, saving: Saving) -> ShardwiseError:
        with pytest.raises((CheckpointError, StorageError)) as raised:
            saving.finish()
        return raised.value


def test_what_is_saved_is_what_was_and_failures_reach_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv(inject.ARMED, "1")
    monkeypatch.setenv(
        inject.FAULT, "mid_shard_write@step=20:enospc;before_manifest@step=30:raise;mid_shard_write@step=40:kill"
    )
    monkeypatch.setenv("RANK", "0")
    checkpoints = tmp_path / "checkpoints"

    def body(comm):
        rank = Rank(comm, tmp_path)
        try:
            rank.good = rank.begin(10).finish()["good"]
            errors = [str(rank.refused(rank.begin(step))) for step in (20, 30, 40)]
            for step in (50, 60):
                rank.good = rank.begin(step).finish()["good"]
            return errors
        finally:
            rank.background.close()

    full, broken, killed = run_in_threads(body, 2)[0]
    assert full.startswith(f"step 20 was not saved to {checkpoints}/step-00000020: rank 1: No space left on device (")
    assert "InjectedError: injected at before_manifest" in broken
    assert "rank 1: the process that writes checkpoints has been killed (often: out of memory)." in killed
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00000050", "step-00000060"]
    assert (tmp_path / "LATEST").read_text() == "checkpoints/step-00000060\n"
    found = open_checkpoint(checkpoints / "step-00000050")
    found.verify()
    assert found.data == {"step": 50}
    targets = {name: torch.empty_like(tensor) for name, tensor in sample().items()}
    found.read_into([(whole(name, tensor), tensor.view(-1)) for name, tensor in targets.items()])
    assert all(torch.equal(targets[name], tensor) for name, tensor in sample().items())


def save_while_training(folder: Path) -> None:
    torch.manual_seed(0)
    model = sw.parallelize(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))), strategy="zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> list[torch.Tensor]:
        states = [state["exp_avg"] for state in optimizer.state.values()]
        return [each.detach().clone() for each in (*model.parameters(), *states)]

    step()
    before = tensors()
    sw.save_async(folder / "step-00000001", model, optimizer, keep=2)
    step()
    sw.save_async(folder / "step-00000002", model, optimizer, keep=2)  # waits for the one before
    assert (folder / "step-00000001").is_dir()
    step()
    assert sw.save_failure(model) is None
    sw.finish_save(model)
    sw.finish_save(model)
    sw.load(folder / "step-00000001", model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(), strict=True))
    with pytest.raises(CheckpointError, match="exists"):
        sw.save_async(folder / "step-00000002", model, optimizer)


def test_a_loop_of_one_s_own_saves_while_it_trains(tmp_path):
    run_on_ranks(save_while_training, 2, tmp_path)


def test_the_writing_process_needs_no_torch_and_ends_with_its_owner(tmp_path):
    background = Background()
    background._start()
    process = background._process
    assert process is not None
    time.sleep(1)
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "xxhash" in maps
    assert "libtorch" not in maps
    background._channel.close()
    background._channel = None
    assert process.wait(timeout=10) == 0
