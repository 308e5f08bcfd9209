"""A comparison from end to end: real engines, real processes, a model that is as small as can be."""

from __future__ import annotations

import json

import pytest

from shardwise.cli import main

RUN = """
name: small
model: {preset: gpt-nano, num_layers: 3}
data: {source: random, seq_len: 8}
train: {micro_batch_size: 1, steps: 10}
"""


@pytest.mark.slow
def test_engines_take_turns_and_compute_the_same(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    arguments = ["run.yaml", "--strategies", "zero3,ddp", "--peers", "single,torch-ddp,torch-fsdp2", "--nproc", "2"]
    arguments += ["--rounds", "2", "--steps", "2", "--json", "out/result.json", "--markdown", "out/result.md"]
    assert main(["compare", *arguments]) == 0
    values = json.loads((tmp_path / "out" / "result.json").read_text())
    zero3, ddp, single, torch_ddp, torch_fsdp2 = values["rows"]
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
    assert torch_ddp["loss"] == pytest.approx(zero3["loss"], abs=1e-6)
    assert torch_fsdp2["loss"] == pytest.approx(zero3["loss"], abs=1e-6)
    assert {"all_gather", "reduce_scatter"} <= set(zero3["collectives"])
    assert set(ddp["collectives"]) == {"all_reduce"}
    for row in (zero3, ddp):
        assert row["peak_tensor_bytes"] == pytest.approx(row["predicted_peak_tensor_bytes"], rel=0.02)
    shown = capfd.readouterr()
    assert "equal to the last bit" in shown.out
    assert "round 2 of 2" in shown.err
    assert "compare run.yaml" not in (tmp_path / "out" / "result.json").read_text()


@pytest.mark.long
def test_deepspeed_computes_the_same(tmp_path, monkeypatch, capfd):
    pytest.importorskip("deepspeed", reason="needs the peers extra")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    arguments = ["run.yaml", "--strategies", "zero3+flat", "--peers", "single,deepspeed", "--nproc", "2"]
    assert main(["compare", *arguments, "--rounds", "1", "--steps", "2", "--json", "result.json"]) == 0
    values = json.loads((tmp_path / "result.json").read_text())
    assert [row["engine"] for row in values["rows"]][2:] == ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
    assert max(values["losses"]["differences"].values()) <= 1e-6


def test_an_engine_that_fails_ends_all_with_its_code(tmp_path, monkeypatch, capfd):
    """That a policy matches no module is found when the engine is built."""
    monkeypatch.chdir(tmp_path)
    text = RUN + "parallel: {auto_wrap_policy: {by_class: [NoSuchBlock]}}\n"
    (tmp_path / "run.yaml").write_text(text)
    arguments = ["run.yaml", "--peers", "torch-ddp", "--nproc", "2", "--rounds", "1", "--steps", "1"]
    assert main(["compare", *arguments]) == 78
    shown = capfd.readouterr()
    assert "NoSuchBlock" in shown.err
