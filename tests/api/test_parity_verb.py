"""``sw.parity`` of plans with tensor parallelism and pipelines: what must be equal, what near, and what is neither."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks, refusal

PLANS = {
    "dp": sw.ParallelPlan(),
    "pp": sw.ParallelPlan(pp=2, pipeline="gpipe"),
    "pp 4": sw.ParallelPlan(pp=4, pipeline=sw.PipelinePolicy(num_microbatches=2), strategy="zero1"),
    "tp": sw.ParallelPlan(tp=2, strategy="ddp"),
    "pp x tp": sw.ParallelPlan(pp=2, tp=2, pipeline="zb-h1"),
}


def build(dtype: torch.dtype = torch.float32, *, tied: bool = False, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(3)
    return sw.models.gpt(
        "gpt-tiny", num_layers=4, hidden=16, num_heads=2, vocab_size=31, seq_len=6, tied=tied, dropout=dropout
    ).to(dtype)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    tokens = [torch.randint(0, 31, (8, 7), generator=generator) for _ in range(3)]
    return [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in tokens]


def prove() -> dict[str, Any]:
    built = itertools.count()

    def other() -> nn.Module:
        model = build()
        if next(built) == 2:  # the first is looked at, the second trains as one process, the third as the plan says
            with torch.no_grad():
                model.blocks[2].mlp.up.bias[3] += 2e-3
        return model

    found: dict[str, Any] = {
        "fp32": sw.parity(build, batches(), None, PLANS),
        "fp64": sw.parity(lambda: build(torch.float64), batches(), None, {"tp": PLANS["tp"]}),
        "tied": sw.parity(lambda: build(tied=True), batches(), None, {"pp": PLANS["pp"]}),
        "wrong": sw.parity(other, batches(), None, {"pp x tp": PLANS["pp x tp"]}),
        "dropout": sw.parity(lambda: build(dropout=0.1), batches(), None, {"dp": PLANS["dp"]}),
    }
    return found | {
        "16 bit": refusal(PlanError, sw.parity, lambda: build(torch.bfloat16), batches(), None, {"tp": PLANS["tp"]})
    }


def test_plans_that_split_sums_are_near_and_all_others_equal():
    ranks = run_on_ranks(prove, 4, timeout_s=150)
    for found in ranks:
        rows = {row.plan: row for row in found["fp32"].rows}
        assert [name for name, row in rows.items() if row.is_bitwise] == ["dp", "pp", "pp 4"]
        assert [row.allowed for row in rows.values()] == [None, None, None, (1e-5, 5e-4), (1e-5, 5e-4)]
        assert found["fp32"].holds
        assert not found["fp32"].is_bitwise
        assert re.search(r"\npp 4 +4 +3 +equal +equal +equal +0 \(bitwise\)\n", str(found["fp32"]))
        assert "losses and norms" in str(found["fp32"])
        (row,) = found["fp64"].rows
        assert row.holds
        assert row.allowed == pytest.approx((1e-9, 1e-8))
        (row,) = found["tied"].rows
        assert row.holds
        assert row.allowed == (1e-5, 5e-4)
        (row,) = found["wrong"].rows
        assert not row.holds
        assert row.absolute > 1e-3
        assert "DIFFER" in str(found["wrong"])
        assert "random numbers" not in str(found["wrong"])
        (row,) = found["dropout"].rows
        assert (row.holds, row.location) == (False, None)
        assert "draws random numbers (dropout, noise), and every rank draws different ones" in str(found["dropout"])
        assert "the model is in bf16" in found["16 bit"]
    assert len({str(found["fp32"]) for found in ranks}) == 1


class Twice(sw.GradScaler):
    """Divides gradients by the scale and by two."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale / 2, found_inf, allow_fp16)


@on_ranks(2, timeout_s=100)
def test_accumulation_and_a_scaler_are_compared():
    plans = {"each": sw.ParallelPlan(), "whole": sw.ParallelPlan(accumulation="unsharded")}
    given: dict[str, Any] = {"microbatches": 2, "locate": False}
    found = {
        "plain": sw.parity(build, batches(), None, plans, **given),
        "scaled": sw.parity(build, batches(), None, plans, scaler=lambda: sw.GradScaler("cpu"), **given),
        "wrong": sw.parity(build, batches(), None, plans, scaler=lambda: Twice("cpu"), **given),
        "none": refusal(StateError, sw.parity, build, batches(), None, plans, microbatches=0),
    }
    for name in ("plain", "scaled"):
        each, whole = found[name].rows
        assert each.holds, each
        assert each.allowed == (1e-5, 5e-4)  # each microbatch is reduced by itself: sums are split
        assert whole.is_bitwise, whole
    assert [row.holds for row in found["wrong"].rows] == [False, False]
    assert "microbatches=0" in found["none"]


class Spectral(nn.Module):
    """A layer with complex weights."""

    def __init__(self, turned: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) + 1j * turned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs().square().mean()


@on_ranks(2)
def test_complex_weights_are_compared_with_their_imaginary_parts():
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(4, 4, generator=generator) for _ in range(3)]
    built = itertools.count()
    given: dict[str, Any] = {"max_norm": 0.1, "locate": False}
    plans = {name: sw.ParallelPlan(strategy=name) for name in ("ddp", "zero3")}
    equal = sw.parity(lambda: Spectral(0.0), data, None, plans, **given)
    assert equal.is_bitwise, equal
    # The first model is looked at, the second trains as one process, the third as the plan says.
    turned = sw.parity(lambda: Spectral(0.5 * (next(built) == 2)), data, None, {"ddp": plans["ddp"]}, **given)
    assert turned.rows[0].absolute == pytest.approx(0.5, rel=0.2)
