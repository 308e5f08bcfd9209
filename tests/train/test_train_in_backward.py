"""`shardwise train` with the update inside backward, what its records say, and replicas in one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from shardwise.cli import main
from tests.train.train_here import CONFIG, losses, metrics, sets, summary, train_here, train_well

FREE = sets(
    *("train.clip_grad_norm=null", "train.steps=6", "checkpoint.every=4"),
    *("train.micro_batch_size=4", "train.eval_every=8"),
)
INSIDE = (*FREE, *sets("optimizer.in_backward=true"))
#: Gradients take more than activations.
DEEP = sets("train.micro_batch_size=1", "train.global_batch_size=2", "model.seq_len=4", "model.num_layers=12")


def test_updates_in_backward_are_those_after_it_also_when_resumed(tmp_path: Path) -> None:
    outside, inside, again = tmp_path / "outside", tmp_path / "inside", tmp_path / "again"
    on_host = sets("parallel.offload_policy=cpu")
    train_well(
        tmp_path,
        2,
        ("--run-dir", "outside", *FREE, *DEEP),
        ("--run-dir", "inside", *INSIDE, *DEEP),
        ("--run-dir", "host_outside", *FREE, *DEEP, *on_host),
        ("--run-dir", "host_inside", *INSIDE, *DEEP, *on_host),
    )
    assert losses(inside) == losses(outside)
    # On the host torch's fused kernel updates, which may round in another way than the default: each beside its own.
    assert losses(tmp_path / "host_inside") == losses(tmp_path / "host_outside")
    assert summary(inside)["eval_loss_final"] == summary(outside)["eval_loss_final"]
    assert [line["grad_norm"] for line in metrics(inside)] == [None] * 6
    assert all(line["grad_norm"] > 0 for line in metrics(outside))
    assert summary(inside)["peak_memory_bytes"] < 0.95 * summary(outside)["peak_memory_bytes"]
    for run in (inside, outside):
        assert summary(run)["peak_memory_bytes"] == pytest.approx(summary(run)["predicted_peak_memory_bytes"], rel=0.01)
    shutil.copytree(inside, again)
    by_name = sets("optimizer.flat=false")
    texts = train_well(
        tmp_path,
        2,
        ("--run-dir", "inside", "--resume", "step-00000004", *INSIDE, *DEEP, *by_name),
        ("--run-dir", "again", "--resume", "step-00000004", *FREE, *DEEP),
        ("--run-dir", "outside", "--resume", "step-00000004", *INSIDE, *DEEP),
    )
    assert all("resumed at step 4" in text for text in texts)
    assert losses(inside) == losses(again) == losses(outside)
    assert summary(again)["eval_loss_final"] == summary(inside)["eval_loss_final"]


def test_what_became_infinite_inside_backward_is_not_saved(tmp_path: Path) -> None:
    wild = sets("optimizer.name=sgd", "optimizer.lr=1e37", "train.eval_every=null")
    ((code, text),) = train_here(
        tmp_path, 2, ("--run-dir", "run", *INSIDE, *wild, *sets("checkpoint.every=1", "train.steps=3"))
    )
    assert code == 80
    assert "there is NaN or infinity in what it would hold" in text or "Nothing was saved since; safe: " in text
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/*.safetensors"):
        from safetensors.torch import load_file

        assert all(bool(value.isfinite().all()) for value in load_file(path).values()), path


def ten_million_bytes_on_rank_1() -> torch.Tensor | None:
    return torch.ones(2_500_000) if torch.distributed.get_rank() == 1 else None


def test_a_record_has_the_peak_of_all_ranks_and_a_short_resume_its_speed(tmp_path: Path) -> None:
    one, more = sets("train.steps=1"), sets("train.steps=3")
    quiet = sets("train.eval_every=null")
    again = "--run-dir", "run", "--resume", *more, *quiet
    results = train_here(
        tmp_path, 2, ("--run-dir", "run", *one, *quiet), again, before=ten_million_bytes_on_rank_1
    )  # fmt: skip
    first = summary(tmp_path / "run")
    results += train_here(tmp_path, 2, again)
    assert [code for code, _ in results] == [0, 0, 0]
    assert first["timed_steps"] > 0
    assert first["peak_memory_bytes"] > 0
    assert summary(tmp_path / "run") == first
    assert train_here(tmp_path, 1, again)[0][0] == 0
    alone = summary(tmp_path / "run")  # what two ranks measured is not one rank's
    assert (alone["world_size"], alone["step_time_s"], alone["peak_memory_bytes"]) == (1, None, None)
    lines = metrics(tmp_path / "run")
    assert lines[0]["peak_memory_bytes"] > 10_000_000
    assert "finished 3 steps, " in results[1][1]
    assert "tokens/s" in results[1][1]
    assert " 0 tokens/s" not in results[1][1]
    assert "finished 3 steps\n" in results[2][1]  # nothing was left to do
    assert "  measured         n/a\n" in results[2][1]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ((), "clipping needs the norm of all gradients before the first update"),
        ((*FREE, *sets("train.micro_batch_size=2")), "gradients of 2 microbatches are to be added up"),
        ((*FREE, *sets("parallel.mp_policy={param_dtype: fp16}")), "fp16's scaled gradients"),
        (
            (*FREE, *sets("train.micro_batch_size=2", "parallel.offload_policy={ratio: 0.5}")),
            "or parallel.offload_policy=cpu, which adds them up on the host",
        ),
    ],
)
def test_what_needs_all_gradients_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], settings: tuple[str, ...],
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    assert main(["train", "run.yaml", *settings, *sets("optimizer.in_backward=true")]) == 78
    shown = capfd.readouterr().err
    assert "optimizer.in_backward" in shown
    assert reason in shown


REPLICAS = sets(
    *("parallel.strategy=data_parallel", "model.dropout=0.0", "train.micro_batch_size=3"),
    *("train.global_batch_size=6", "train.steps=12"),
)


def test_replicas_in_one_process_train_resume_and_report(tmp_path: Path) -> None:
    replicas, alone = tmp_path / "replicas", tmp_path / "alone"
    train_well(
        tmp_path,
        1,
        ("--run-dir", "replicas", *REPLICAS),
        ("--run-dir", "alone", *REPLICAS, *sets("parallel.strategy=ddp")),
    )
    assert max(abs(x - y) for x, y in zip(losses(replicas), losses(alone), strict=True)) < 1e-5
    found, expected = summary(replicas), summary(alone)
    assert (found["strategy"], found["world_size"], found["steps"]) == ("data_parallel", 1, 12)
    assert found["eval_loss_final"] == pytest.approx(expected["eval_loss_final"], abs=1e-5)

    assert found["predicted_peak_memory_bytes"] is None  # no dry run knows the replicas
    assert found["peak_memory_bytes"] > expected["peak_memory_bytes"]
    before = losses(replicas)
    train_well(tmp_path, 1, ("--run-dir", "replicas", "--resume", "step-00000010", *REPLICAS))
    assert losses(replicas) == before
    assert summary(replicas)["eval_loss_final"] == found["eval_loss_final"]


def test_replicas_with_several_processes_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *sets("parallel.strategy=data_parallel"), "--nproc", "2"]) == 78
    shown = capfd.readouterr().err
    assert "--set parallel.strategy: strategy='data_parallel' runs replicas in one process" in shown
    assert "--nproc 1" in shown
    assert "dp_shard" not in shown
