"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

import torch

from shardwise.checkpoint import open_checkpoint, write
from shardwise.checkpoint.shard import CHUNK_BYTES
from tests.checkpoint.threads import alone, whole


def test_tensors_on_a_gpu_go_out_and_come_back_in_chunks(tmp_path):
    tensors = {
        "large": torch.randn(CHUNK_BYTES // 2 + 3, device="cuda"),  # two chunks and a little
        "half": torch.randn(1001, device="cuda").bfloat16(),
        "empty": torch.zeros(0, device="cuda"),
    }
    pieces = [(whole(name, tensor), tensor) for name, tensor in tensors.items()]
    write(tmp_path / "s", alone(), pieces, {}, step=0, run_id="r")
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    open_checkpoint(tmp_path / "s").read_into([(whole(name, target), target) for name, target in targets.items()])
    for name, target in targets.items():
        assert torch.equal(target, tensors[name]), name
