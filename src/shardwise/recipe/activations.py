"""What a plain model holds in forward and backward besides its parameters, measured from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from shardwise.recipe.storage import StorageCount
from shardwise.spec.waiting import Activations


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
