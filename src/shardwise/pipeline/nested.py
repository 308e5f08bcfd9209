"""Nested tensors, which stages cannot send each other: their shapes are values."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from shardwise.spec.errors import PlanError


@contextlib.contextmanager
def refused_nested(model: nn.Module, elements: Iterable[nn.Module | None]) -> Iterator[None]:
    """Have every ``nn.TransformerEncoder`` in ``model`` whose layers are ``elements`` refuse to make nested tensors.

    It makes them where nothing is trained and a padding mask is given. A sketch of the model would not: it has no
    memory, and grad is on. So that all ranks raise, and at once, the sketch says what the model would do.
    """
    ids = {id(element) for element in elements}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoder) and any(id(layer) in ids for layer in module.layers):
                stack.callback(module.register_forward_pre_hook(_refuse, with_kwargs=True).remove)
        yield


def _refuse(encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = inspect.signature(encoder.forward).bind(*args, **kwargs).arguments
    makes_them = encoder.enable_nested_tensor and encoder.use_nested_tensor and not encoder.training
    if makes_them and given.get("src_key_padding_mask") is not None and given.get("mask") is None:
        raise nested_error("nn.TransformerEncoder")


def nested_error(name: str) -> PlanError:
    """What is said where ``name`` makes a nested tensor."""
    return PlanError(
        f"{name} makes a nested tensor, which pipeline stages cannot send each other.\n"
        "  nn.TransformerEncoder does so in evaluation with src_key_padding_mask: build it with"
        " enable_nested_tensor=False; or set pp=1."
    )
