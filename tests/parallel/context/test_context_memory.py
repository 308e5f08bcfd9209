"""No rank holds what belongs to a whole sequence: what a step holds besides the model is divided by ``cp``."""

from __future__ import annotations

import torch

import shardwise as sw
from shardwise.models.transformer import GPT

LONG, HIDDEN, LAYERS = 2048, 64, 4


def build() -> GPT:
    return sw.models.gpt("gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=4, vocab_size=64, seq_len=LONG)


def activations(cp: int) -> int:
    tokens = torch.zeros(1, LONG, dtype=torch.int64)
    plan = sw.ParallelPlan(strategy="ddp", cp=cp)
    return sw.dry_run(build, plan, world_size=cp, batch=(tokens, tokens)).bytes_by_category["activations"]


def test_the_activations_of_a_step_are_divided():
    """What a hop holds on top, two blocks of keys and values and two of their gradients, is of one layer."""
    whole = activations(1)
    assert whole > LAYERS * LONG * HIDDEN * 4
    for cp in (2, 8):
        blocks = 4 * 2 * LONG // cp * HIDDEN * 4
        assert whole / cp < activations(cp) < whole / cp + 2 * blocks
