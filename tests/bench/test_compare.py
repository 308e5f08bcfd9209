"""A comparison from end to end: real engines, real processes, a model that is as small as can be."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from bench.compare.__main__ import main
from bench.compare.request import make_requests
from shardwise.models import gpt
from shardwise.testing import run_on_ranks

RUN = """
name: small
model: {preset: gpt-nano, num_layers: 3}
data: {source: random, seq_len: 8}
train: {micro_batch_size: 1, steps: 10}
"""


@pytest.mark.slow
def test_engines_take_turns_and_compute_the_same_and_replicas_in_one_process_stand_beside_them(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    arguments = ["run.yaml", "--strategies", "zero3,data_parallel,ddp", "--peers", "single", "--nproc", "2"]
    arguments += ["--rounds", "2", "--steps", "2", "--json", "out/result.json", "--markdown", "out/result.md"]
    assert main(arguments) == 0
    values = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {row["engine"] if row["engine"] == "single" else row["strategy"]: row for row in values["rows"]}
    zero3, ddp, replicas, single = (rows[name] for name in ("zero3", "ddp", "data_parallel", "single"))
    assert values["case"] == "small"
    assert values["losses"]["ours_bitwise"]
    assert max(values["losses"]["differences"].values()) <= 1e-6
    for row in values["rows"]:
        assert len(row["step_time_s"]["all"]) == 4
        assert row["peak_rss_bytes"] > row["peak_rss_above_start_bytes"] >= 0
        assert row["peak_tensor_bytes"] > 0
    assert zero3["loss"] == ddp["loss"]
    assert len(zero3["loss"]) == 3 + 4
    assert zero3["loss"][: len(single["loss"])] == single["loss"]
    assert {"all_gather", "reduce_scatter"} <= set(zero3["collectives"])
    assert set(ddp["collectives"]) == {"all_reduce"}
    for row in (zero3, ddp):
        assert row["peak_tensor_bytes"] == pytest.approx(row["predicted_peak_tensor_bytes"], rel=0.02)
    assert (ddp["world_size"], replicas["world_size"]) == (2, 1)
    sent = {exchange: entry["sent_bytes"] for exchange, entry in replicas["collectives"].items()}
    num_bytes = sum(4 * each.numel() for each in gpt("gpt-nano", num_layers=3).parameters())
    assert num_bytes <= ddp["collectives"]["all_reduce"]["sent_bytes"] <= 1.05 * num_bytes  # with its padding
    assert sent == {
        "scatter inputs": 2 * 8 * 8,  # the second replica's tokens and targets, 8 bytes each
        "broadcast parameters": num_bytes,
        "gather outputs": 4,
        "scatter gradients of outputs": 4,
        "reduce gradients": num_bytes,
    }
    shown = capfd.readouterr()
    assert "sent per step by shardwise data_parallel, all by way of its first device: scatter inputs 128 B" in shown.out
    assert "sent per step by shardwise ddp, each rank: all_reduce" in shown.out
    assert "equal to the last bit" in shown.out
    assert "round 2 of 2" in shown.err
    assert "compare run.yaml" not in (tmp_path / "out" / "result.json").read_text()


@pytest.mark.long
def test_torchs_other_engines_compute_the_same(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    peers = ["torch-ddp", "torch-fsdp1", "torch-fsdp2", "torch-fsdp2-noreshard", "torch-zero1"]
    arguments = ["run.yaml", "--strategies", "zero3", "--peers", ",".join(peers), "--nproc", "2"]
    assert main([*arguments, "--rounds", "1", "--steps", "2", "--json", "result.json"]) == 0
    values = json.loads((tmp_path / "result.json").read_text())
    assert [row["engine"] for row in values["rows"]][1:] == peers
    assert max(values["losses"]["differences"].values()) <= 1e-6


@pytest.mark.long
def test_deepspeed_computes_the_same(tmp_path, monkeypatch, capfd):
    pytest.importorskip("deepspeed", reason="needs the peers extra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    arguments = ["run.yaml", "--strategies", "zero3+flat", "--peers", "single,deepspeed", "--nproc", "2"]
    assert main([*arguments, "--rounds", "1", "--steps", "2", "--json", "result.json"]) == 0
    values = json.loads((tmp_path / "result.json").read_text())
    assert [row["engine"] for row in values["rows"]][2:] == ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
    assert max(values["losses"]["differences"].values()) <= 1e-6


def losses_of(path: str) -> tuple[list[float], dict[int, list[list[float]]] | None]:
    """This rank's losses under two groups of two ranks, and on rank 0 those of one process by how it adds gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.distributed.optim, a peer
        from bench.compare.engine import Engine, Workload
    (request,) = make_requests(
        config=Path(path), strategies=["hsdp+dp_replicate=2"], peers=["single"], num_ranks=4, rounds=1
    )
    workload = Workload(request, torch.device("cpu"))
    ours, single = request.entrants
    rank = torch.distributed.get_rank()
    engine = Engine(ours, workload)
    losses = [engine.step(workload.batch(step, rank)).item() for step in range(5)]
    if rank:
        return losses, None
    alone: dict[int, list[list[float]]] = {}
    for size in (2, 4):
        engine = Engine(single, workload)
        for step in range(5):
            batches = [workload.batch(step, each) for each in range(4)]
            alone.setdefault(size, []).append([loss.item() for loss in engine.step_for_all(batches, size)])
    return losses, alone


def test_one_process_adds_gradients_in_the_groups_of_hybrid_sharding(tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    ranks = run_on_ranks(losses_of, 4, str(tmp_path / "run.yaml"))
    ours = [list(step) for step in zip(*(losses for losses, _ in ranks), strict=True)]
    alone = ranks[0][1]
    assert alone[2] == ours
    assert alone[4] != ours
    assert alone[4][0] == ours[0]


def test_an_engine_that_fails_ends_all_with_its_code(tmp_path, monkeypatch, capfd):
    """That a policy matches no module is found when the engine is built."""
    monkeypatch.chdir(tmp_path)
    text = RUN + "parallel: {auto_wrap_policy: {by_class: [NoSuchBlock]}}\n"
    (tmp_path / "run.yaml").write_text(text)
    arguments = ["run.yaml", "--peers", "single", "--nproc", "2", "--rounds", "1", "--steps", "1"]
    assert main(arguments) == 78
    shown = capfd.readouterr()
    assert "NoSuchBlock" in shown.err
