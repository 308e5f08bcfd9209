"""What a forward leaves behind for backward, measured: a recomputed block keeps its input, and what it is told to."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.testing import StorageCount, run_on_ranks
from tests.common.oracle import descend

BATCH, SEQ, HIDDEN, HEADS, LAYERS = 16, 48, 64, 4, 6
ROW = BATCH * SEQ * 4  # bytes of one feature of every token


def build() -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=HEADS, vocab_size=128, seq_len=SEQ)


def saved_bytes(way: str | sw.RecomputePolicy) -> tuple[int, int]:
    """Bytes alive after the third step's forward that were not before it, and the most in its backward."""
    model = sw.parallelize(build(), sw.ParallelPlan(activation_checkpointing=way))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 128, (BATCH, SEQ))
    descend(optimizer, (model(tokens, tokens) for _ in range(2)))
    gc.collect()
    count = StorageCount("cpu")
    count.see_all_objects()
    before = count.live_bytes
    with count:
        loss = model(tokens, tokens)
        saved_bytes = count.live_bytes - before
        loss.backward()
    peak = count.peak_bytes - before
    count.forget()
    return saved_bytes, peak


def measure() -> dict[str, tuple[int, int]]:
    ways = {
        "none": "none",
        "full": "full",
        "selective": "selective",
        "every second": sw.RecomputePolicy(every=2),
        "attention": sw.RecomputePolicy(save="attention"),
    }
    return {name: saved_bytes(way) for name, way in ways.items()}


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[int, int]]:
    return run_on_ranks(measure, 1)[0]


def test_a_recomputed_block_keeps_its_input_alone(measured):
    plain, full = (measured[way][0] for way in ("none", "full"))
    half = measured["every second"][0]
    per_block = (plain - half) // (LAYERS // 2)  # what recomputing one block saves
    assert plain - full == LAYERS * per_block
    # Of a block the plain model keeps, in features per token: its input, the first norm's output, its mean and spread;
    # q, k and v; attention's output and logsumexp; their sum, the second norm's output, mean and spread; before and
    # after the activation four times the width. Recomputed, it keeps its input (and the generator's 5 kB, which no
    # operator makes, so that they are not counted here).
    kept = 2 * HIDDEN + 2 + 3 * HIDDEN + HIDDEN + HEADS + 2 * HIDDEN + 2 + 2 * 4 * HIDDEN
    assert per_block == (kept - HIDDEN) * ROW
    assert full < plain / 3


def test_operators_that_are_kept_add_exactly_their_outputs(measured):
    full = measured["full"][0]
    attention = HIDDEN + HEADS  # its output and its logsumexp
    assert measured["attention"][0] - full == LAYERS * attention * ROW
    products = 3 * HIDDEN + HIDDEN + 4 * HIDDEN + HIDDEN  # q, k and v; out; up; down
    assert measured["selective"][0] - full == LAYERS * (attention + products) * ROW


def test_the_peak_falls_in_the_order_of_what_is_recomputed(measured):
    peaks = [measured[way][1] for way in ("full", "attention", "selective", "none")]
    assert peaks == sorted(set(peaks))
