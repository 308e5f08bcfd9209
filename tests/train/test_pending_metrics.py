"""Between two logged steps the trainer neither waits for the device nor exchanges anything of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.train import loop, trainer
from shardwise.train.predicted import step as predicted
from shardwise.train.steps import pending_metrics
from tests.common.ranks import on_ranks
from tests.train.train_here import losses, metrics, sets, summary, train_here, train_well

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 8, micro_batch_size: 2, gradient_accumulation_steps: 2, eval_every: null}
optimizer: {name: sgd, lr: 1e-2}
checkpoint: {final: false}
"""
EVERY_4 = sets("log.every=4")
PLANS = {
    "zero3": (),
    "ddp": sets("parallel.strategy=ddp"),
    "bf16": sets("parallel.mp_policy={param_dtype: bf16}"),
    "pipeline": sets("parallel.pp=2"),
    "inside": sets("optimizer.in_backward=true", "train.clip_grad_norm=null", "train.gradient_accumulation_steps=1"),
}


class HostReads(TorchDispatchMode):
    """Counts values that the host reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() == "aten::_local_scalar_dense"
        return func(*args, **(kwargs or {}))


def count_reads_and_collectives() -> None:
    """Of every step, and of every reading, a line in a file of this rank."""
    pending_metrics.LONGEST_PENDING_S = 1e9  # however slow this machine is
    step, read = trainer.Trainer._step, loop.Loop._read
    path = Path.cwd() / f"rank-{os.environ['RANK']}.jsonl"

    def counted(what: str, call: Any) -> Any:
        def wrapped(self: Any, *args: Any, **options: Any) -> None:
            with HostReads() as reads, self.control.comm.record() as events:
                call(self, *args, **options)
            with path.open("a") as file:
                file.write(json.dumps([what, reads.count, [event.kind for event in events]]) + "\n")

        return wrapped

    trainer.Trainer._step, loop.Loop._read = counted("step", step), counted("read", read)


@pytest.mark.parametrize("name", PLANS)
def test_between_logged_steps_nothing_is_read_and_nothing_exchanged(tmp_path: Path, name: str) -> None:
    arguments = ("--run-dir", "run", *EVERY_4, *PLANS[name])
    ((code, text),) = train_here(tmp_path, 2, arguments, config=CONFIG, before=count_reads_and_collectives)
    assert code == 0, text
    for rank in range(2):
        found = [json.loads(line) for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines()]
        assert [row[0] for row in found] == ["step", "read", *["step"] * 3, "read", *["step"] * 4, "read"]
        steps = [row for row in found if row[0] == "step"]
        # A pipeline draws the seed of a step's dropout from the host's own generator. The norm is read before the
        # update where it is on the CPU, and nobody waits for it; on CUDA the update takes it on the device.
        host_reads = int(name == "pipeline") + int(name != "inside")
        assert steps[1:] == [["step", host_reads, []]] * 7  # the engine records its order in the first
        assert [row[2] for row in found if row[0] == "read"] == [["all_gather"]] * 3
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 9))
    shown = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert shown == ["1/8", "4/8", "8/8"]


@on_ranks(1)
def test_the_dtype_of_products_is_that_which_most_weights_compute_in() -> None:
    def dtype(**options: Any) -> str:
        model = sw.models.gpt("gpt-nano", device="cpu")
        return predicted.product_dtype(sw.parallelize(model, sw.ParallelPlan(**options)))

    head = sw.PrecisionPolicy("bf16", overrides={"blocks.0": sw.PrecisionPolicy("fp32")})
    assert [dtype(), dtype(mp_policy=sw.PrecisionPolicy("bf16")), dtype(mp_policy=head)] == ["fp32", "bf16", "bf16"]


def test_how_often_values_are_read_changes_none_of_them(tmp_path: Path) -> None:
    often, seldom = (("--run-dir", name, *sets(f"log.every={every}")) for name, every in (("a", 1), ("b", 5)))
    train_well(tmp_path, 2, often, seldom, config=CONFIG)
    first, second = (metrics(tmp_path / name) for name in "ab")
    for line in (*first, *second):
        del line["peak_memory_bytes"]  # as of the last reading
    assert first == second


def test_a_loss_that_is_not_finite_is_found_at_the_next_reading_and_never_saved(tmp_path: Path) -> None:
    wild = ("optimizer.lr=1e30", "train.clip_grad_norm=null", "checkpoint.every=4", "log.every=4")
    settings = sets(*wild)
    ((code, text),) = train_here(tmp_path, 2, ("--run-dir", "run", *settings), config=CONFIG)
    assert code == 80, text
    assert "step 2: the loss is" in text or "step 2: the gradient norm is" in text or "step 3: the" in text, text
    assert "Nothing was saved since; safe: no checkpoint yet" in text
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    recorded = len(losses(tmp_path / "run"))
    assert 1 <= recorded < 4
    found = summary(tmp_path / "run")
    assert (found["exit_code"], found["steps"]) == (80, recorded)


def test_held_out_losses_are_in_the_record_of_their_step(tmp_path: Path) -> None:
    arguments = sets("train.eval_every=3", "log.every=5")
    train_well(tmp_path, 2, ("--run-dir", "run", *arguments), config=CONFIG)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6, 8]
    assert lines[-1]["eval_loss"] == summary(tmp_path / "run")["eval_loss_final"]
