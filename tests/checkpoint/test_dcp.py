"""Folders of torch.distributed.checkpoint that FSDP2 writes on two ranks: in, and out again."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import shardwise as sw
from shardwise.checkpoint.dcp_export import export_dcp
from shardwise.checkpoint.dcp_import import import_dcp
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.cli.app import run
from shardwise.comm.dtype import memory_order
from shardwise.spec.errors import CheckpointError
from shardwise.testing import run_on_ranks
from shardwise.weights.state.extents import empty
from tests.common.ranks import refusal

VOCAB, DIM = 12, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inner = nn.Linear(DIM, 7)
        self.outer = nn.Linear(7, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Tied(nn.Module):
    """A tied head, a buffer, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """First those without weight decay: the order in which ours are asked for is another."""
    parameters = dict(model.named_parameters())
    is_decayed = {name: "weight" in name and "norm" not in name for name in parameters}
    return [
        {"params": [p for name, p in parameters.items() if not is_decayed[name]], "weight_decay": 0.0, "lr": 2e-2},
        {"params": [p for name, p in parameters.items() if is_decayed[name]], "weight_decay": 0.3},
    ]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> list[float]:
    """The losses of these steps on this rank."""
    found = []
    for step in which:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(VOCAB, (3, 5), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


def fsdp2() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(groups(model), lr=1e-2)


def save_fsdp1(folder: Path) -> None:
    """The same two steps by FSDP1, saved by its own sharded state dicts."""
    model = FullyShardedDataParallel(
        Tied(), auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    steps(model, optimizer, range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells users of FSDP1 to go on to other calls
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def ours(strategy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sw.parallelize(Tied(), sw.ParallelPlan(strategy=strategy))
    flat = sw.flat_parameters(model, decay=lambda name, _: "weight" in name and "norm" not in name)
    return model, torch.optim.AdamW(flat, lr=1e-2)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options)),
    }


@contextlib.contextmanager
def first_rank_does() -> Iterator[bool]:
    try:
        yield dist.get_rank() == 0
    finally:
        dist.barrier()


def there_and_back(folder: Path) -> dict[str, list[float]]:
    """FSDP2 trains and saves; zero3 and ddp go on; what zero3 saves FSDP2 goes on with. Losses of steps 2 and 3, 4."""
    model, optimizer = fsdp2()
    steps(model, optimizer, range(2))
    dcp.save({**state_of(model, optimizer), "epoch": 7, "rows": [1, 2]}, checkpoint_id=folder / "fsdp2")
    flat = state_of(model, optimizer, flatten_optimizer_state_dict=True)
    dcp.save({**flat["model"], "optimizer": flat["optimizer"], "at": io.BytesIO(b"7")}, checkpoint_id=folder / "titan")
    dcp.save({"model": flat["model"], "optim": optimizer.state_dict()}, checkpoint_id=folder / "numbers")
    losses = {"fsdp2": steps(model, optimizer, range(2, 5))}
    save_fsdp1(folder / "fsdp1")
    with first_rank_does() as is_first:
        if is_first:
            import_dcp(folder / "fsdp2", folder / "imported")
    for strategy in ("ddp", "zero3"):
        model, optimizer = ours(strategy)
        state = sw.load(folder / "imported", model, optimizer)
        assert state == {"epoch": 7, "rows": [1, 2]}
        losses[strategy] = steps(model, optimizer, range(2, 4))
    halves = list(model.parameters())
    other = torch.optim.AdamW([{"params": halves[:6]}, {"params": halves[6:]}])
    message = refusal(CheckpointError, sw.load, folder / "imported", model, other)
    assert "are in one parameter group of the optimizer, and were in different ones" in message
    sw.save(folder / "ours", model, optimizer)
    losses["zero3"] += steps(model, optimizer, range(4, 5))
    with first_rank_does() as is_first:
        if is_first:
            checkpoint = open_checkpoint(folder / "ours")
            assert export_dcp(checkpoint, folder / "exported", max_file_bytes=600) == []
            export_dcp(checkpoint, folder / "flat", model_key="", is_flat=True)
    for name, options in (("exported", {}), ("flat", {"flatten_optimizer_state_dict": True})):
        model, optimizer = fsdp2()
        state = state_of(model, optimizer, **options)
        wanted = state if name == "exported" else {**state["model"], "optimizer": state["optimizer"]}
        dcp.load(wanted, checkpoint_id=folder / name)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, wanted["optimizer"], options=StateDictOptions(**options))
        losses[name] = steps(model, optimizer, range(4, 5))
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, list[float]]]]:
    folder = tmp_path_factory.mktemp("dcp")
    return folder, run_on_ranks(there_and_back, 2, folder)


def test_training_goes_on_from_fsdp2_and_back(trained) -> None:
    for losses in trained[1]:
        expected = losses["fsdp2"]
        assert losses["zero3"] == pytest.approx(expected, rel=1e-5)
        assert losses["ddp"] == pytest.approx(expected[:2], rel=1e-5)
        assert losses["exported"] == losses["flat"] == pytest.approx(expected[2:], rel=1e-5)


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    checkpoint = open_checkpoint(path)
    found = {name: empty(extent) for name, extent in checkpoint.tensors.items()}
    checkpoint.read_into([(checkpoint.tensors[name], memory_order(value)) for name, value in found.items()])
    return found, checkpoint.data


def test_every_form_of_the_folder_gives_the_same_checkpoint(trained, tmp_path: Path) -> None:
    folder, _ = trained
    result = import_dcp(folder / "titan", tmp_path / "titan", max_file_bytes=500)
    assert (result.optimizer, result.step, result.left_out) == ("AdamW", 2, ["at"])
    (first, data), (second, titan) = content(folder / "imported"), content(tmp_path / "titan")
    assert open_checkpoint(tmp_path / "titan").world_size > 2
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    import_dcp(folder / "fsdp1", tmp_path / "fsdp1")
    third, fsdp1 = content(tmp_path / "fsdp1")
    assert third.keys() == first.keys()
    assert all(torch.allclose(value, third[name], rtol=1e-5, atol=1e-7) for name, value in first.items())
    three = [
        {frozenset(names): group for names, group in zip(state["members"], state["groups"], strict=True)}
        for state in (data["optimizer"], titan["optimizer"], fsdp1["optimizer"])
    ]
    assert three[0] == three[1] == three[2]


def test_what_the_folder_does_not_say_is_asked_for(trained, tmp_path: Path) -> None:
    folder, _ = trained
    by_number = refusal(CheckpointError, import_dcp, folder / "numbers", tmp_path / "a")
    assert "get_optimizer_state_dict() gives it" in by_number
    assert "--no-optimizer" in by_number
    alone = import_dcp(folder / "numbers", tmp_path / "b", has_optimizer=False)
    assert (alone.optimizer, alone.left_out) == (None, ["optimizer state"])
    for wrong in ({"model_key": "weights"}, {"optimizer_key": "adam"}):
        assert "At the top it has model, optimizer" in refusal(
            CheckpointError, import_dcp, folder / "fsdp2", tmp_path / "a", **wrong
        )
    damaged = tmp_path / "damaged"
    shutil.copytree(folder / "fsdp2", damaged)
    largest = max(damaged.glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    assert "cannot be read" in refusal(CheckpointError, import_dcp, damaged, tmp_path / "a")
    assert ".metadata is missing" in refusal(CheckpointError, import_dcp, tmp_path, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "damaged"]


def test_the_verbs(trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = trained
    assert run(["checkpoint", "import", str(folder / "fsdp2"), str(tmp_path / "in")]) == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert "executes code: its .metadata is a pickle" in message
    assert run(["checkpoint", "import", str(folder / "fsdp2"), str(tmp_path / "in"), "--trust"]) == 0
    assert run(["checkpoint", "verify", str(tmp_path / "in")]) == 0
    assert run(["checkpoint", "export", str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert "AdamW state of step 2" in capsys.readouterr().out
    result = import_dcp(tmp_path / "out", tmp_path / "again", dtype="fp64")
    assert result.left_out == []
    first, again = content(tmp_path / "in")[0], content(tmp_path / "again")[0]
    assert first.keys() == again.keys()
    assert all(torch.equal(value, again[name].float()) for name, value in first.items())
    assert {name.partition("/")[0] == "optimizer" for name in again if again[name].dtype is torch.float32} == {True}
