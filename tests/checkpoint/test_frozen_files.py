"""Frozen parameters are written once: checkpoints in one folder share their files, and each is complete by itself."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.store import find_latest, retain
from shardwise.cli import main
from shardwise.spec.errors import CheckpointError, CommError
from shardwise.testing import RankFailure, run_on_ranks
from tests.checkpoint.threads import flip
from tests.weights.state.test_trainable_state import Block, build


def parallel(**plan: Any) -> nn.Module:
    return sw.parallelize(build(), sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class({Block}), **plan))


def save(folder: Path, steps: list[int], plan: dict[str, Any], change: int | None = None) -> None:
    model = parallel(**plan)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for step in steps:
        sw.train_step(
            model, (torch.randn(4, 32, generator=torch.Generator().manual_seed(step)),), lambda out, _: out.sum()
        )
        optimizer.step()
        optimizer.zero_grad()
        if step == change:
            with torch.no_grad():
                for parameter in model.parameters():
                    if not parameter.requires_grad:
                        parameter.add_(1)
        sw.save(folder / f"step-{step:08d}", model, optimizer, state={"step": step}, keep=2)


def load(folder: Path, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = parallel(**plan)
    for parameter in model.parameters():
        parameter.data.zero_()
    sw.load(sw.newest_checkpoint(folder), model)
    return sw.full_state_dict(model)


def frozen_files(path: Path) -> dict[str, os.stat_result]:
    return {file.name: file.stat() for file in path.glob("frozen-*")}


@pytest.mark.parametrize("plan", [{"strategy": "zero3"}, {"strategy": "ddp"}, {"pp": 2}])
def test_later_checkpoints_link_to_what_the_first_has_written(tmp_path: Path, plan: dict[str, Any]) -> None:
    run_on_ranks(save, 2, tmp_path, [1, 2, 3], plan)
    remaining = [tmp_path / f"step-{step:08d}" for step in (2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in remaining]
    before, after = map(frozen_files, remaining)
    assert before.keys() == after.keys()
    assert len(after) == 2
    for name, status in after.items():
        assert (status.st_ino, status.st_nlink) == (before[name].st_ino, 2)  # that of the removed step is gone
    assert sum(status.st_size for status in after.values()) > 4 * 4 * 32 * 32
    shutil.rmtree(remaining[0])
    plain = build().state_dict()
    for world in (1, 3):
        whole = run_on_ranks(load, world, tmp_path, {})[0]
        frozen = [name for name in plain if ".base." in name]
        assert all(torch.equal(whole[name], plain[name]) for name in frozen)
        assert not torch.equal(whole["0.up.weight"], plain["0.up.weight"])
    assert main(["checkpoint", "verify", str(remaining[1])]) == 0
    copied = shutil.copytree(remaining[1], tmp_path / "elsewhere" / remaining[1].name)
    open_checkpoint(copied).verify()


def test_frozen_parameters_that_change_are_written_anew(tmp_path: Path) -> None:
    run_on_ranks(save, 2, tmp_path, [1, 2, 3], {}, 3)
    before, after = (frozen_files(tmp_path / f"step-{step:08d}") for step in (2, 3))
    assert not before.keys() & after.keys()
    plain = build().state_dict()
    whole = run_on_ranks(load, 2, tmp_path, {})[0]
    assert torch.equal(whole["1.base.weight"], plain["1.base.weight"] + 1)


def test_a_damaged_or_lost_file_is_named(tmp_path: Path, capsys) -> None:
    run_on_ranks(save, 2, tmp_path, [1], {})
    path = tmp_path / "step-00000001"
    file = min(path.glob("frozen-*"))
    flip(file)
    open_checkpoint(path).check_files()
    assert main(["checkpoint", "verify", str(path)]) == 65
    assert f"{file.name} (rank " in capsys.readouterr().err
    file.unlink()
    with pytest.raises(CheckpointError, match="the file is missing"):
        open_checkpoint(path).check_files()


def test_a_run_saves_a_file_of_its_own_where_links_are_not_possible(tmp_path: Path, monkeypatch) -> None:
    run_on_ranks(save_without_links, 2, tmp_path)
    first, second = (frozen_files(tmp_path / f"step-{step:08d}") for step in (1, 2))
    assert first.keys() == second.keys()
    assert all(status.st_nlink == 1 for status in (*first.values(), *second.values()))
    open_checkpoint(tmp_path / "step-00000002").verify()


def save_without_links(folder: Path) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("no links here")

    os.link = refuse
    save(folder, [1, 2], {})


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def link_and_die(*arguments: Any, **_: Any) -> bool:
    original(*arguments)
    die()
    return True


original = folders.link


def save_and_die(folder: Path, rank: int, is_linked: bool) -> None:
    if os.environ["RANK"] == str(rank):
        folders.link = link_and_die if is_linked else die
    try:
        save(folder, [1, 2], {})
    except CommError:
        return


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_linked", [True, False])
def test_death_around_a_link_leaves_the_checkpoint_before_whole(tmp_path: Path, rank: int, is_linked: bool) -> None:
    with pytest.raises(RankFailure):
        run_on_ranks(save_and_die, 2, tmp_path, rank, is_linked)
    found = find_latest(tmp_path, verify=True)
    assert (found.step, found.rejected, len(found.unfinished)) == (1, (), 1)
    run_on_ranks(load, 2, tmp_path, {})
    retain(tmp_path, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert all(status.st_nlink == 1 for status in frozen_files(tmp_path / "step-00000001").values())
