"""A model on meta under tensor and pipeline parallelism: a rank fills its part, and never holds the whole."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from shardwise.train.compare.count import TensorCount

PLANS = ({"tp": 2}, {"pp": 2}, {"tp": 2, "strategy": "ddp"}, {"pp": 2, "strategy": "zero1"})


def build(*, tied: bool = False) -> nn.Module:
    return sw.models.gpt("gpt-tiny", num_layers=8, hidden=64, num_heads=4, vocab_size=96, seq_len=8, tied=tied)


def whole_bytes() -> int:
    return sum(parameter.nbytes for parameter in build().parameters())


def fill(plans: tuple[dict[str, object], ...], expected: dict[bool, dict[str, Tensor]]) -> list[int]:
    """The most bytes that each plan holds while it fills the model; the values are those of a plain construction."""
    peaks = []
    for plan in plans:
        for tied in (False, True):
            torch.manual_seed(3)
            model = sw.deferred_init(lambda tied=tied: build(tied=tied))
            gc.collect()
            with TensorCount("cpu") as count:
                model = sw.parallelize(model, sw.ParallelPlan(**plan))
            if not tied:
                peaks.append(count.peak_bytes)
            state = sw.full_state_dict(model)
            assert all(torch.equal(value, expected[tied][name]) for name, value in state.items()), plan
            tokens = torch.arange(32).view(4, 8)
            assert torch.isfinite(sw.train_step(model, (tokens, tokens)))
    return peaks


def expected() -> dict[bool, dict[str, Tensor]]:
    found = {}
    for tied in (False, True):
        torch.manual_seed(3)
        found[tied] = build(tied=tied).state_dict()
    return found


def test_two_ranks_fill_their_parts_and_hold_no_more():
    whole = whole_bytes()
    for peaks in run_on_ranks(fill, 2, PLANS, expected()):
        # Its half, and what sharding needs for a unit of that.
        assert all(peak < 0.8 * whole for peak in peaks), (whole, peaks)


@pytest.mark.long
def test_four_ranks_fill_their_parts_and_hold_no_more():
    whole = whole_bytes()
    for peaks in run_on_ranks(fill, 4, ({"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2}), expected()):
        assert all(peak < 0.7 * whole for peak in peaks), (whole, peaks)
