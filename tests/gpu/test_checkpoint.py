"""Checkpoints of tensors on a GPU."""

from __future__ import annotations

import os

import torch

from shardwise.checkpoint import background
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.shard import CHUNK_BYTES, Piece, layout, write_shard
from shardwise.checkpoint.writer import write
from shardwise.comm.dtype import dtype_name
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


def test_an_image_holds_what_the_file_would_hold_also_where_its_memory_cannot_be_locked(tmp_path, monkeypatch):
    tensors = {
        "wide": torch.randn(33, device="cuda", dtype=torch.complex128),
        "odd": torch.arange(7, device="cuda") > 3,
    }
    content = {Piece(name, dtype_name(tensor.dtype), 0, tensor.numel()): tensor for name, tensor in tensors.items()}
    plan = layout(save_id="0" * 16, run_id="r", step=1, rank=0, pieces=content)
    folder = os.open(tmp_path, os.O_RDONLY)
    write_shard(folder, "file", plan, content)
    os.close(folder)
    for can_lock in (True, False):
        held = background.Image(plan.file_bytes)
        if not can_lock:
            monkeypatch.setattr(held, "capacity", 1 << 60)
        held.fill(plan, content)
        held.wait()
        assert held._is_pinned == can_lock
        assert os.pread(held.file, plan.file_bytes, 0) == (tmp_path / "file").read_bytes()
        torch.zeros(1, device="cuda")  # no error of an earlier call comes up
        held.close()


def test_memory_that_a_device_is_still_to_write_to_outlives_its_image():
    tensor = torch.ones(1 << 20, device="cuda")
    content = {Piece("t", "fp32", 0, tensor.numel()): tensor}
    plan = layout(save_id="0" * 16, run_id="r", step=1, rank=0, pieces=content)
    held = background.Image(plan.file_bytes)
    torch.cuda._sleep(1 << 30)
    held.fill(plan, content)
    held.close()
    assert len(background._abandoned) == 1
    torch.cuda.synchronize()
