"""From sample numbers to tensors, and the held-out loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.engine.unit import engine_of
from shardwise.pipeline.pipelined import Call, pipelined_of
from shardwise.train.build import Loss
from shardwise.train.control import Control
from shardwise.train.data import Part, RandomPart
from shardwise.train.resolve import Batch


def to_tensors(part: Part | RandomPart, samples: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a microbatch, both (B, T), int64."""
    tokens = torch.from_numpy(np.stack([part.sample(index) for index in samples]))
    if device.type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def held_out_samples(part: Part | RandomPart, batch: Batch, num_batches: int) -> int:
    """How many held-out samples an evaluation takes.

    ``num_batches`` global batches, or all there are where that is less, cut to a multiple of what all ranks forward at
    once. So the number does not depend on the world as long as the global batch does not.
    """
    at_once = batch.micro * batch.data_parallel_size
    return min(part.num_samples // at_once * at_once, num_batches * batch.total)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loss_of: Loss,
    call: Call,
    part: Part | RandomPart,
    *,
    batch: Batch,
    count: int,
    control: Control,
    rank: int,
) -> float:
    """The mean loss over ``count`` held-out samples, spread evenly over the part; the same value on every rank.

    Collective:
        The model's forwards, then one all-gather of 16 bytes per rank.
    """
    device = engine_of(model, "evaluate").comms.control.device  # parameters may be kept elsewhere
    at_once = batch.micro * batch.data_parallel_size
    stride = part.num_samples // count
    was_training = model.training
    model.eval()
    try:
        parts = [
            to_tensors(part, [index * stride for index in range(start, start + batch.micro)], device)
            for start in range(rank * batch.micro, count, at_once)
        ]
        pipelined = pipelined_of(model)
        if pipelined is None:
            found = [loss_of(model, *tensors) for tensors in parts]
        else:
            found = pipelined.losses(model, parts, call, lambda m, p: loss_of(m, *p))
        losses = torch.stack(list(found)).tolist() if found else []  # read once, when all have been computed
    finally:
        model.train(was_training)
    rows = [row for row in control.rows([sum(losses), float(bool(losses))]) if row[1]]
    return sum(row[0] for row in rows) * batch.micro / count / (len(rows) / batch.data_parallel_size)
