"""Slow ranks and losses that stand out are noticed, and saves that would take too long are left out."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import cast

import pytest

from shardwise.train.loop import Loop
from shardwise.train.steps.health import LossSpikes
from shardwise.train.steps.pending_metrics import SlowRanks


def test_a_slow_rank_is_named_once_with_the_share_of_its_data() -> None:
    slow = SlowRanks(3)
    assert slow.add(19, [1.9, 18.6, 1.9], [0.1, 17.7, 0.1]) is None
    warning = slow.add(1, [0.1, 1.0, 0.1], [0.0, 0.9, 0.0])
    assert warning == (
        "WARNING: rank 1 is 9.8x slower than the median of the other ranks (data 95%): 980 ms of work in a step, not"
        " 100 ms. All ranks wait for it."
    )
    assert slow.add(20, [2.0, 90.0, 2.0], [0.0, 0.0, 0.0]) is None


@pytest.mark.parametrize("work_s", [[0.2, 0.39], [0.02, 0.3]])
def test_what_is_less_than_twice_or_a_few_milliseconds_is_not_said(work_s: list[float]) -> None:
    assert SlowRanks(2).add(20, work_s, [0.0, 0.0]) is None


@pytest.mark.parametrize(
    ("save_s", "saved_step", "is_refused"), [(25.0, 10, True), (15.0, 10, False), (25.0, 0, False)]
)
def test_a_save_is_left_out_that_does_not_fit_the_time_left(save_s: float, saved_step: int, is_refused: bool) -> None:
    held = SimpleNamespace(
        stop=SimpleNamespace(signal_number=15, received_at_s=time.monotonic() - 10),
        config=SimpleNamespace(train=SimpleNamespace(grace_s=30.0)),
        checkpoints=SimpleNamespace(saved_step=saved_step),
        done=SimpleNamespace(step=14),
        save_s=save_s,
        _how_to_continue="continue with --resume",
        safe="checkpoint of step 10",
    )
    text = Loop._no_time_to_save(cast("Loop", held))
    assert (text is not None) == is_refused
    if text is not None:
        assert "step 14 is not saved: that needs about 25 s, and 20 of 30 s (train.grace_s) are left; safe: ch" in text


def test_a_loss_that_stands_out_is_noticed() -> None:
    draws, spikes = random.Random(0), LossSpikes(10.0)
    falling = [5 - 0.01 * step + draws.gauss(0, 0.1) for step in range(300)]
    assert [spikes.check(loss) for loss in falling] == [None] * 300
    assert spikes.check(float("nan")) is None
    text = spikes.check(9.0)
    assert text is not None
    assert text.startswith("the loss is 9.0000, ")
    assert spikes.check(2.0) is None
    assert spikes.check(9.0) is not None  # the first one has not moved the median
    constant = LossSpikes(10.0)
    assert [constant.check(1.0) for _ in range(30)] == [None] * 30
    assert constant.check(1.001) is None
    assert LossSpikes(10.0).check(100.0) is None
