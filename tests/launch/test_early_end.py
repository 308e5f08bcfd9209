"""Without sw.join: one rank's loop ends before the others'. They are told so, instead of waiting for the time limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.spec.errors import CommError, RankDisagreement
from shardwise.testing import report_stalls_after, run_on_ranks
from tests.common.oracle import Chain, plain_loss

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, torch, torch.distributed as dist
import shardwise as sw
from tests.common.oracle import Chain, plain_loss

model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=sys.argv[1]))
rank = dist.get_rank()
try:
    for step in range(1 if rank == 1 else 3):
        plain_loss(model, rank, step).backward()
        if sys.argv[2] == "raise" and rank == 1:
            raise SystemError("the loss is not a number")
except sw.CommError as error:
    print(f"{type(error).__name__} {error.exit_code}: {error}", flush=True)
dist.destroy_process_group()
"""

ADVICE = (
    "Where it has fewer batches, use drop_last=True, or `for batch, weight in sw.join(model, batches):` and the loss"
    " times weight."
)


def launch(tmp_path, *args):
    """Rank 1 leaves the loop and ends its process, as a script does."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *args]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.long), "zero3"])
def test_d4_a_rank_that_ended_with_fewer_batches_is_named(tmp_path, strategy):
    text = launch(tmp_path, strategy, "end")
    assert "RankDisagreement 83: rank 1 has ended, while this rank waits in dp_shard/0/" in text
    assert ADVICE in text


def test_a_rank_that_failed_has_not_ended(tmp_path):
    text = launch(tmp_path, "zero3", "raise")
    assert "SystemError: the loss is not a number" in text
    assert "has ended" not in text


def barrier(strategy):
    """Rank 1 leaves the loop and waits for the others in a barrier of torch's own."""
    report_stalls_after(0.6, idle_interval_s=0.2)
    rank = dist.get_rank()
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
    for step in range(2):
        plain_loss(model, rank, step).backward()
    if rank == 0:
        with pytest.raises(RankDisagreement) as caught:
            plain_loss(model, rank, 2).backward()
        dist.destroy_process_group()  # as the end of its process would
        return str(caught.value)
    with pytest.raises(RuntimeError, match=r"(?i)connection"):
        dist.barrier()
    return ""


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_rank_that_waits_in_a_barrier_after_its_last_batch_is_named(strategy):
    text, _ = run_on_ranks(barrier, 2, strategy)
    assert text.startswith("rank 1 waits in torch.distributed's barrier, while rank 0 waits for it in ")
    assert text.endswith(ADVICE)


def goes_on():
    """Rank 1 leaves the loop and calls something else of ours."""
    report_stalls_after(0.6)
    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    for step in range(2):
        plain_loss(model, rank, step).backward()
    with pytest.raises(CommError) as caught:
        plain_loss(model, rank, 2).backward() if rank == 0 else sw.full_state_dict(model)
    return str(caught.value)


def test_a_rank_that_goes_on_to_something_else_after_its_last_batch_is_told_on_all_ranks():
    for text in run_on_ranks(goes_on, 2):
        first, waiting, other, *_ = text.splitlines()
        assert first == "ranks wait for each other in different collectives:"
        assert waiting.startswith("  rank 0: all_gather of unit 'root'")
        assert other.startswith("  rank 1: message of unit 'control'")
        assert "test_early_end.py:" in other
        assert "Where one has fewer batches, see sw.join." in text
