"""`shardwise train` with `optimizer.name: muon`: settings, memory, and resuming under other strategies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from shardwise.spec.errors import ConfigError
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.model.build import build_model, build_optimizer, parameter_groups, set_lr
from tests.train.train_here import losses, metrics, sets, summary, train_well

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, dropout: 0.0}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 6, micro_batch_size: 4, gradient_accumulation_steps: 1, eval_every: null}
optimizer: {name: muon, lr: 2e-3, adamw_lr: 1e-3}
checkpoint: {every: 3}
"""


def run(folder: Path, *settings: str) -> RunConfig:
    (folder / "run.yaml").write_text(CONFIG)
    raw = read_config(folder / "run.yaml", list(settings))
    raw.raise_if_any()
    return resolve(raw, 2, checks_data=False)


def test_a_run_goes_on_under_other_strategies(tmp_path: Path) -> None:
    first, ddp, pipeline = (tmp_path / name for name in ("first", "ddp", "pipeline"))
    train_well(tmp_path, 2, ("--run-dir", "first"), config=CONFIG)
    whole = losses(first)
    found = summary(first)
    assert 0.95 < found["peak_memory_bytes"] / found["predicted_peak_memory_bytes"] <= 1.02
    assert metrics(first)[0]["lr"] == 2e-3
    for copy in (ddp, pipeline):
        shutil.copytree(first, copy)
    resume = ("--resume", "step-00000003")
    texts = train_well(
        tmp_path,
        2,
        ("--run-dir", "ddp", *resume, *sets("parallel.strategy=ddp")),
        ("--run-dir", "pipeline", *resume, *sets("parallel.pp=2", "train.micro_batch_size=8")),
        config=CONFIG,
    )
    assert all("resumed at step 3" in text for text in texts)
    assert losses(ddp) == whole
    predicted = json.loads((ddp / "plan.json").read_text())["predicted_bytes_per_rank"]["optimizer"]
    assert json.loads((ddp / "memory.json").read_text())["held_bytes"]["optimizer"] == predicted
    assert losses(pipeline) == pytest.approx(whole, abs=1e-3)
    again = train_well(tmp_path, 2, ("--run-dir", "pipeline", *resume, *sets("optimizer.adamw_lr=1e-2")), config=CONFIG)
    assert "optimizer.adamw_lr: 0.001 -> 0.01" in again[0]
    assert losses(pipeline)[:4] == pytest.approx(whole[:4], abs=1e-3)
    assert losses(pipeline)[4:] != pytest.approx(whole[4:], abs=1e-3)


def test_each_group_has_its_own_peak_rate_and_settings(tmp_path: Path) -> None:
    resolved = run(tmp_path, "optimizer.ns_steps=3", "optimizer.adamw_weights=[blocks.0.*]")
    section = resolved.config.optimizer
    assert (section.momentum, section.betas, section.adjust_lr, section.flat) == (
        0.95, (0.9, 0.95), "match_rms_adamw", False,
    )  # fmt: skip
    model = build_model(resolved, torch.device("cpu"))
    optimizer = build_optimizer(section, parameter_groups(section, model))
    kinds = {group["kind"]: group for group in optimizer.param_groups}
    assert {kind: group["lr"] for kind, group in kinds.items()} == {"muon": 2e-3, "adamw": 1e-3}
    assert (kinds["muon"]["ns_steps"], kinds["muon"]["adjust_lr_fn"]) == (3, "match_rms_adamw")
    set_lr(optimizer, section, 0.5)
    assert {kind: group["lr"] for kind, group in kinds.items()} == {"muon": 1e-3, "adamw": 5e-4}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    trained = [names[id(p)] for g in optimizer.param_groups if g["kind"] == "muon" for p in g["params"]]
    assert trained
    assert not any(name.startswith("blocks.0.") for name in trained)


def test_adamws_rate_is_that_of_matrices_where_none_is_given(tmp_path: Path) -> None:
    resolved = run(tmp_path, "optimizer.adamw_lr=null")
    model = build_model(resolved, torch.device("cpu"))
    section = resolved.config.optimizer
    assert {group["lr"] for group in parameter_groups(section, model)} == {2e-3}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("optimizer.flat=true",), "optimizer.flat: muon orthogonalizes each matrix by itself"),
        (("optimizer.in_backward=true",), "muon exchanges the matrices of all units after backward"),
        (("optimizer.name=adamw",), "optimizer.adamw_lr: adamw has no adamw_lr; take it out"),
        (("optimizer.name=sgd", "optimizer.ns_steps=3"), "optimizer.ns_steps: sgd has no ns_steps; take it out"),
        (("optimizer.adjust_lr=rms",), "expected 'match_rms_adamw' or 'original'"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_a_process_starts(
    tmp_path: Path, setting: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, *setting)
    assert message in str(caught.value)
