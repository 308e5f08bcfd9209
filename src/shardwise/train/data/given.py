"""Samples of a user's own data set or iterable, as a run reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from shardwise.spec.errors import StateError
from shardwise.train.data.rows import Rows
from shardwise.train.data.samples import Data
from shardwise.train.data.source import is_indexed
from shardwise.train.data.stream import IterableSampler
from shardwise.train.data.token_files import DataError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class GivenSamples:
    """Items of a data set, read by their number.

    Attributes:
        data: The data set.
        collate: Makes a microbatch of items.
    """

    data: Any
    collate: Collate

    @property
    def num_samples(self) -> int:
        """Items."""
        return len(self.data)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Items are no rows of tokens: see :meth:`batch`."""
        raise StateError(f"samples {[*indices]} of a user's data set are no rows of tokens")

    def num_targets(self, indices: Iterable[int]) -> None:
        """A loss says by itself what it counts."""

    def batch(self, indices: Sequence[int], device: torch.device) -> Any:
        """A microbatch on ``device``.

        Raises:
            DataError: The data set or ``collate`` raised; which items, and what it said.
        """
        try:
            items = [self.data[index] for index in indices]
            made = self.collate(items)
        except Exception as error:
            raise DataError(
                f"samples {', '.join(map(str, indices))} of {type(self.data).__name__} could not be read:"
                f" {type(error).__name__}: {error}\n  Look at these items, and at TrainSpec(collate=...)."
            ) from error
        return on_device(made, device)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are on ``device``; any mapping, such as a ``BatchEncoding``, becomes a dict."""
    if isinstance(batch, Mapping):
        batch = dict(batch)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        held = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
        return held.to(device, non_blocking=True)

    return batch if device.type == "cpu" else tree_map_only(torch.Tensor, move, batch)


def given_data(data: Any, held_out: Any, collate: Collate | None, num_held_out: int, least: int = 1) -> Data:
    """The samples of a spec; of an iterable at most ``num_held_out`` are held out.

    Rows of a ``datasets.Dataset`` are read as tensors, unless it has a format or there is a ``collate``.

    Raises:
        DataError: An iterable has fewer than ``least`` items to hold out.
    """
    if collate is None:
        data, held_out = (_as_tensors(each) for each in (data, held_out))
    collate = collate or default_collate
    part = GivenSamples(data if is_indexed(data) else IterableSampler(data=data), collate)
    held = held_out if held_out is None or is_indexed(held_out) else list(itertools.islice(held_out, num_held_out))
    if held is not None and len(held) < least:
        raise DataError(
            f"TrainSpec(eval_data=...) has {len(held)} samples, {least} are needed at once.\n"
            "  Give it more, or lower train.micro_batch_size."
        )
    return Data(part, GivenSamples(held or [], collate))


def _as_tensors(data: Any) -> Any:
    has_format = getattr(data, "format", None)
    is_plain = isinstance(has_format, dict) and has_format.get("type") is None
    return data.with_format("torch") if is_plain and hasattr(data, "with_format") else data
