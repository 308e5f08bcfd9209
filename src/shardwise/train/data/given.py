"""Samples of a user's own data set or iterable, as a run reads them."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from shardwise.spec.errors import StateError
from shardwise.train.data.draws import apart, seed_host
from shardwise.train.data.rows import Rows
from shardwise.train.data.sampler import Draw, mixed_seed
from shardwise.train.data.samples import Data
from shardwise.train.data.source import is_indexed
from shardwise.train.data.stream import IterableSampler
from shardwise.train.data.token_files import DataError

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class GivenSamples(Dataset[Any]):
    """Items of a data set, read by their number, here or by worker processes.

    What an item draws at random depends on the run's seed and the item's place in the order of the run alone: it is the
    same in every worker, on any number of ranks, and after a resume. ``collate`` draws on after the last of its items:
    what it draws is the same where microbatches hold the same items.

    Attributes:
        data: The data set.
        collate: Makes a microbatch of items.
        seed: Of what they draw.
        workers: Processes that read ahead; 0: this one reads.
    """

    data: Any
    collate: Collate
    seed: int = 0
    workers: int = 0

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
        """One microbatch on ``device``, as :meth:`microbatches` gives it."""
        return next(self._made_here([[(index, index) for index in indices]], device))

    def microbatches(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        """A microbatch on ``device`` for each entry of ``draws``, which workers take ahead of time.

        Raises:
            DataError: The data set or ``collate`` raised (which items, and what it said), or a worker was killed.
        """
        return self._made_by_workers(draws, device) if self.workers else self._made_here(draws, device)

    def _made_here(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        for each in draws:
            with apart():
                made = self[each]
            yield on_device(_read(made), device)

    def _made_by_workers(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        loader = DataLoader(
            self,
            sampler=draws,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            worker_init_fn=_ignore_signals,
            multiprocessing_context="fork",  # a spec's file is no module that another process could import
            generator=torch.Generator(),  # else it draws from the one that dropout draws from
        )
        try:
            for made in loader:
                yield on_device(_read(made), device)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a process that reads {type(self.data).__name__} was lost: {error}\n"
                "  Where the machine's memory was at its end, lower data.workers."
            ) from error

    def __getitem__(self, index: Sequence[Draw]) -> Any:
        """The microbatch of these draws, made in this process, or why it could not be."""
        try:
            items = []
            for position, item in index:
                seed_host(mixed_seed(self.seed, position))
                items.append(self.data[item])
            return self.collate(items)
        except Exception as error:  # noqa: BLE001 - of the user's code, also in a worker
            return _Unread(
                f"samples {', '.join(str(item) for _, item in index)} of {type(self.data).__name__} could not be"
                f" read: {type(error).__name__}: {error}\n  Look at these items, and at TrainSpec(collate=...).",
                error if self.workers == 0 else None,
            )


@dataclass(frozen=True, slots=True)
class _Unread:
    """Why a microbatch could not be read."""

    text: str
    cause: Exception | None


def _read(made: Any) -> Any:
    if isinstance(made, _Unread):
        raise DataError(made.text) from made.cause
    return made


def _as_it_is(made: Any) -> Any:
    return made


def _ignore_signals(_worker: int) -> None:
    """Leave a request to stop, which a terminal or a scheduler sends to all processes, to the rank itself."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch whose tensors are on ``device``; any mapping, such as a ``BatchEncoding``, becomes a dict."""
    if isinstance(batch, Mapping):
        batch = dict(batch)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        waits = device.type != "cuda" or tensor.is_cuda or tensor.is_pinned()
        return (tensor if waits else tensor.pin_memory()).to(device, non_blocking=True)

    return batch if device.type == "cpu" else tree_map_only(torch.Tensor, move, batch)


def given_data(
    data: Any,
    held_out: Any,
    collate: Collate | None,
    num_held_out: int,
    least: int = 1,
    *,
    seed: int = 0,
    workers: int = 0,
) -> Data:
    """The samples of a spec; of an iterable at most ``num_held_out`` are held out.

    Rows of a ``datasets.Dataset`` are read as tensors, unless it has a format or there is a ``collate``.

    Raises:
        DataError: An iterable has fewer than ``least`` items to hold out.
    """
    if collate is None:
        data, held_out = (_as_tensors(each) for each in (data, held_out))
    collate = collate or default_collate
    part = GivenSamples(data if is_indexed(data) else IterableSampler(data=data), collate, 2 * seed, workers)
    held = held_out if held_out is None or is_indexed(held_out) else list(itertools.islice(held_out, num_held_out))
    if held is not None and len(held) < least:
        raise DataError(
            f"TrainSpec(eval_data=...) has {len(held)} samples, {least} are needed at once.\n"
            "  Give it more, or lower train.micro_batch_size."
        )
    return Data(part, GivenSamples(held or [], collate, 2 * seed + 1, workers))


def _as_tensors(data: Any) -> Any:
    has_format = getattr(data, "format", None)
    is_plain = isinstance(has_format, dict) and has_format.get("type") is None
    return data.with_format("torch") if is_plain and hasattr(data, "with_format") else data
