"""A gradient or loss that is not finite: the update is left out on all ranks, and the run ends or goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.launch import inject
from shardwise.train.checkpoints import random_state
from shardwise.train.steps import update
from tests.train.train_here import metrics, sets, train_here


def spoil_gradients() -> None:
    """On rank 1, in steps 7, 12 and 13. A bit of its parameters flips in step 3."""
    faults = [f"before_update@rank=1@step={step}:nan" for step in (7, 12, 13)]
    inject._FAULTS[:] = inject.parse(";".join([*faults, "step_begin@rank=1@step=3:flip"]))


def test_a_run_stops_before_the_update_or_leaves_it_out(tmp_path: Path) -> None:
    resumes = ("--run-dir", "run", "--resume", "latest", *sets("train.non_finite=skip", "train.max_skipped_steps=1"))
    replicas = ("--run-dir", "replicas", *sets("parallel.strategy=ddp"))
    stops = ("--run-dir", "run", *sets("log.every=5"))
    results = train_here(tmp_path, 2, stops, resumes, replicas, before=spoil_gradients)
    assert [code for code, _ in results] == [80, 80, 83]
    stopped, skipped, flipped = (text for _, text in results)
    assert "RankDisagreement: step 5: copies that must be equal on several ranks are not:" in flipped
    assert "(float32): rank 0 and rank 1 differ" in flipped
    assert "safe: no checkpoint yet" in flipped
    assert not (tmp_path / "replicas" / "checkpoints" / "step-00000005").exists()
    assert "step 7: the gradient norm is nan. Parameters are as before that step." in stopped
    assert "safe: checkpoint of step 5" in stopped
    assert "WARNING: step 7 was left out: the gradient norm is nan." in skipped
    assert "step 13: the gradient norm is nan, as in the 1 steps before (train.max_skipped_steps)." in skipped
    run = tmp_path / "run"
    assert [line["step"] for line in metrics(run)] == list(range(1, 13))
    assert [line["step"] for line in metrics(run) if line["grad_norm"] is None] == [7, 12]
    assert all(math.isfinite(line["loss"]) for line in metrics(run))
    bundles = sorted(run.glob("odd-steps/*/*"))
    assert [path.name for path in bundles] == ["rank-00000.json", "rank-00001.json"] * 3
    held = [json.loads(path.read_text()) for path in bundles[:2]]
    assert [content["step"] for content in held] == [7, 7]
    assert len({sample for content in held for part in content["samples"] for sample in part}) == 8
    random_state.restore(held[0]["random"], torch.device("cpu"))


@pytest.mark.parametrize("needs_host", [True, False])
@pytest.mark.parametrize("stops", [True, False])
def test_nothing_changes_where_the_gradient_is_not_finite(needs_host, stops, monkeypatch):
    monkeypatch.setattr(update, "needs_host", lambda optimizer, device: needs_host)  # the CPU has fused kernels too
    model = sw.parallelize(nn.Linear(3, 2), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=0.1, fused=not needs_host)
    made = update.Update(model, optimizer, max_norm=1.0, stops=stops)
    seen = []
    for factor in (1.0, math.inf, 1.0):
        (model(torch.ones(1, 3)).sum() * factor).backward()
        made.make(sw.GradScaler(enabled=False))
        states = [value.clone() for state in optimizer.state.values() for value in state.values()]
        seen.append([*(p.detach().clone() for p in model.parameters()), *states])
    first, second, third = seen
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True)) == stops


def test_an_infinite_loss_has_no_finite_gradient():
    logits = torch.tensor([[0.0, -torch.inf], [0.0, 1.0]], requires_grad=True)
    loss = nn.functional.cross_entropy(logits, torch.tensor([1, 0]))
    loss.backward(retain_graph=True)
    assert loss.isinf()
    assert logits.grad.isfinite().all()
    logits.grad = None
    update.with_true_gradient(loss).backward()
    assert not logits.grad.isfinite().all()
