"""Folders of torch.distributed.checkpoint that one process has saved: names, classes of optimizers, bytes held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardwise.checkpoint.dcp_export import export_dcp
from shardwise.checkpoint.dcp_import import import_dcp
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.measure.storage import StorageCount
from shardwise.spec.errors import CheckpointError
from tests.common.ranks import refusal

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SGD = {"lr": torch.tensor(0.5), "momentum": 0.9, "dampening": 0, "nesterov": False}


def save(folder: Path, **settings: object) -> Path:
    """As the application state of torch's own tutorial, of a compiled model with a recomputed block."""
    name = "_orig_mod.block._checkpoint_wrapped_module.weight"
    state = {"state": {name: {"momentum_buffer": torch.ones(2, 3)}}, "param_groups": [{**settings, "params": [name]}]}
    app = {"model": {name: torch.zeros(2, 3), "count": torch.tensor(4)}, "optim": state}
    dcp.save({"app": app, "steps": {"done": 9, "losses": [0.5, float("nan")]}}, checkpoint_id=folder, no_dist=True)
    return folder


def test_names_are_those_of_the_plain_model_wherever_the_state_dicts_are(tmp_path: Path) -> None:
    found = import_dcp(save(tmp_path / "dcp", **SGD), tmp_path / "in")
    assert (found.num_tensors, found.optimizer, found.left_out) == (2, "SGD", [])
    checkpoint = open_checkpoint(tmp_path / "in")
    assert set(checkpoint.tensors) == {"block.weight", "count", "optimizer/block.weight/momentum_buffer"}
    optimizer = checkpoint.data["optimizer"]
    assert optimizer["groups"] == [{**SGD, "lr": 0.5}]
    assert optimizer["members"] == [["block.weight"]]
    assert str(checkpoint.data["state"]) == "{'steps': {'done': 9, 'losses': [0.5, nan]}}"


def test_a_class_of_optimizer_that_the_state_does_not_tell_is_asked_for(tmp_path: Path) -> None:
    folder = save(tmp_path / "dcp", lr=0.1, ns_steps=5)
    message = refusal(CheckpointError, import_dcp, folder, tmp_path / "in")
    assert "which optimizer has this state (momentum_buffer)" in message
    assert "--optimizer-class" in message
    assert import_dcp(folder, tmp_path / "in", optimizer_class="Muon").optimizer == "Muon"


def test_an_import_holds_a_tensor_at_a_time_and_an_export_a_file(tmp_path: Path) -> None:
    names = [f"layers.{place}.weight" for place in range(20)]
    made = {name: torch.randn(64, 64) for name in names}
    state = {name: {"exp_avg": value, "exp_avg_sq": value.square()} for name, value in made.items()}
    group = {"lr": 0.1, "amsgrad": False, "decoupled_weight_decay": True, "params": names}
    saved = {"model": made, "optimizer": {"state": state, "param_groups": [group]}}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    largest = 64 * 64 * 4
    with StorageCount("cpu") as count:
        import_dcp(tmp_path / "dcp", tmp_path / "in")
    assert count.peak_bytes <= 3 * largest  # it, its shard in the file, a part on the way
    with StorageCount("cpu") as count:
        export_dcp(open_checkpoint(tmp_path / "in"), tmp_path / "out", max_file_bytes=4 * largest)
    assert 4 * largest <= count.peak_bytes <= 6 * largest
