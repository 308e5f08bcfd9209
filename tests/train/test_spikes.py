"""A loss that stands out is noticed; a noisy or a falling one is not."""

from __future__ import annotations

import random

from shardwise.train.steps.health import LossSpikes


def test_a_loss_that_stands_out_is_noticed() -> None:
    draws, spikes = random.Random(0), LossSpikes(10.0)
    falling = [5 - 0.01 * step + draws.gauss(0, 0.1) for step in range(300)]
    assert [spikes.look(loss) for loss in falling] == [None] * 300
    assert spikes.look(float("nan")) is None
    text = spikes.look(9.0)
    assert text is not None
    assert text.startswith("the loss is 9.0000, ")
    assert spikes.look(2.0) is None
    assert spikes.look(9.0) is not None  # the first one has not moved the median
    constant = LossSpikes(10.0)
    assert [constant.look(1.0) for _ in range(30)] == [None] * 30
    assert constant.look(1.001) is None
    assert LossSpikes(10.0).look(100.0) is None
