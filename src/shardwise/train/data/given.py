"""Samples of a user's own data set or iterable, as a run reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import default_collate

from shardwise.spec.errors import CheckpointError, StateError
from shardwise.train.data.rows import Rows
from shardwise.train.data.samples import Data
from shardwise.train.data.source import is_indexed
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

    @property
    def num_tokens(self) -> int:
        """Not known."""
        return 0

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


class IterableSampler:
    """Items of an iterable in its own order: a step takes the next ones, cut over readers as ``Sampler`` cuts places.

    An iterable that ends begins again. Every rank reads all of it and keeps its share: where an item costs much, a data
    set with ``len`` and items is better.

    Attributes:
        data_parallel_rank: This rank among those that read different samples.
        position: Items consumed so far, by all ranks together.
    """

    #: What ``len`` says.
    ENDLESS = 1 << 40

    def __init__(self, data: Any) -> None:
        self._data = data
        self.position = 0
        self._items: Iterator[Any] = iter(())
        self._held: dict[int, Any] = {}

    def for_reader(self, micro: int, accumulation: int, reader: int, readers: int) -> IterableSampler:
        """Itself, that gives the items of one reader."""
        self._micro, self._own, self._total = micro, micro * accumulation, micro * accumulation * readers
        self.data_parallel_rank = reader
        return self

    def whole_step(self) -> tuple[int, ...]:
        """Nothing: a loss says by itself what it counts."""
        return ()

    def next_step(self) -> list[list[int]]:
        """The places of this reader's items in the step, by microbatch; they can be read until the next call."""
        begin = self.position + self.data_parallel_rank * self._own
        items = [self._next() for _ in range(self._total)]
        self._held = {place: items[place - self.position] for place in range(begin, begin + self._own)}
        self.position += self._total
        return [list(range(start, start + self._micro)) for start in range(begin, begin + self._own, self._micro)]

    def _next(self) -> Any:
        for _ in range(2):
            for item in self._items:
                return item
            self._items = iter(self._data)
        raise DataError(f"{type(self._data).__name__} gives no items.\n  Give TrainSpec(data=...) some.")

    def __getitem__(self, place: int) -> Any:
        """An item of the present step."""
        return self._held[place]

    def __len__(self) -> int:
        """More than a run takes."""
        return self.ENDLESS

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {"seed": 0, "position": self.position, "num_samples": self.ENDLESS}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Read up to the place where ``state`` was taken, on any number of ranks.

        Raises:
            CheckpointError: It names no place.
        """
        place = state.get("position")
        if not isinstance(place, int) or place < 0:
            raise CheckpointError(f"the checkpoint's sampler has position={place!r}.\n  Continue from another one.")
        for _ in range(place):
            self._next()
        self.position = place


def given_data(data: Any, held_out: Any, collate: Collate | None, num_held_out: int, least: int = 1) -> Data:
    """The samples of a spec; of an iterable at most ``num_held_out`` are held out.

    Rows of a ``datasets.Dataset`` are read as tensors, unless it has a format or there is a ``collate``.

    Raises:
        DataError: An iterable has fewer than ``least`` items to hold out.
    """
    if collate is None:
        data, held_out = (_as_tensors(each) for each in (data, held_out))
    collate = collate or default_collate
    part = GivenSamples(data if is_indexed(data) else IterableSampler(data), collate)
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
