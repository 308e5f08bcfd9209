"""What a model without an engine holds in forward and backward besides its parameters, measured from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from shardwise.comm.record import RecordComm
from shardwise.measure.storage import StorageCount
from shardwise.spec.memory.activations import Activations
from shardwise.spec.plan import ParallelPlan
from shardwise.tensor.apply import apply_cuts
from shardwise.tensor.cut import find_cuts


def cut_alone(model: nn.Module, plan: ParallelPlan, *, rank: int, device: torch.device) -> None:
    """Make a plain model compute what ``rank`` of ``plan.tp`` does, without peers: no value will be right."""
    if plan.tp > 1:
        comm = RecordComm("tp", rank=rank, size=plan.tp, device=device, receives=device.type == "cpu")
        apply_cuts(model, find_cuts(model, plan.tp_plan, plan.tp, rank, divides_sequence=plan.sequence_parallel), comm)


def measure_activations(model: nn.Module, count: StorageCount, forward_and_backward: Callable[[], None]) -> Activations:
    """Run ``forward_and_backward`` of a plain ``model`` under ``count``, letting go of each gradient once it is there.

    Args:
        model: Hooks stay on its parameters: it is good for nothing else afterwards.
        count: Open, or shown all that lives; what it counts already is not counted again.
        forward_and_backward: One microbatch.
    """
    arrivals: list[tuple[str, int]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_let_go, name, count, arrivals, count.live_bytes))
    held_bytes = count.live_bytes
    count.begin_peak()
    forward_and_backward()
    return Activations(tuple(arrivals), count.peak_bytes - held_bytes)


def _let_go(
    name: str, count: StorageCount, arrivals: list[tuple[str, int]], held_bytes: int, parameter: Tensor
) -> None:
    """A gradient is complete."""
    if parameter.grad is None:  # torch calls this for an undefined gradient, too
        return
    arrivals.append((name, count.peak_bytes - held_bytes))
    parameter.grad = None
    count.begin_peak()
