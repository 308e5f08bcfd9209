"""Samples of a user's data set or iterable, or batches of a user's loader, as a run reads them."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, default_collate

from shardwise.spec.errors import StateError
from shardwise.train.data.rows import Rows
from shardwise.train.data.sampler import Draw, Sampler, mix_seed
from shardwise.train.data.samples import Data
from shardwise.train.data.source import is_indexed, is_loader
from shardwise.train.data.stream import IterableSampler, has_state
from shardwise.train.data.token_files import DataError
from shardwise.train.data.workers import exit_with_this_rank


def seed_host(seed: int) -> None:
    """Seed the host's generators: Python's, numpy's and torch's CPU generator."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - as users' code does
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the host's random generators at the end of the block."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - as users' code does
        torch.set_rng_state(cpu)


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class UserSamples(Dataset[Any]):
    """Items of a data set, read by index, in this process or by workers.

    Random numbers that an item draws depend only on the run's seed and the item's global position: they are the same in
    every worker, on any number of ranks, and after a resume. ``collate`` continues the generator of its last item: its
    random numbers are the same if microbatches contain the same items.
    """

    data: Any
    collate: Collate  # makes a microbatch from items
    seed: int = 0  # seed of the random numbers of items
    workers: int = 0  # processes that read ahead; 0: this process reads

    @property
    def num_samples(self) -> int:
        """Number of items."""
        return len(self.data)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Not supported, because items are not rows of tokens; see :meth:`batch`."""
        raise StateError(f"samples {[*indices]} of a user's data set are not rows of tokens")

    def num_targets(self, indices: Iterable[int]) -> None:
        """Return ``None``: a user's loss counts its own targets."""

    def batch(self, indices: Sequence[int], device: torch.device) -> Any:
        """Return one microbatch on ``device``, as :meth:`microbatches` does."""
        return next(self._read_here([[(index, index) for index in indices]], device))

    def microbatches(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        """Yield a microbatch on ``device`` for each entry of ``draws``, which workers read ahead of time."""
        return self._read_by_workers(draws, device) if self.workers else self._read_here(draws, device)

    def _read_here(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        for each in draws:
            with preserve_random_state():
                batch = self[each]
            yield on_device(_read(batch), device)

    def _read_by_workers(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        loader = DataLoader(
            self,
            sampler=draws,
            batch_size=None,
            collate_fn=_identity,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            multiprocessing_context="fork",  # a spec's file is not a module that a new process could import
            generator=torch.Generator(),  # so that it does not use the generator of dropout
        )
        exit_with_this_rank(loader)
        try:
            for batch in loader:
                yield on_device(_read(batch), device)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a process that reads {type(self.data).__name__} was lost: {error}\n"
                "  Where the machine's memory was at its end, lower data.workers."
            ) from error

    def __getitem__(self, index: Sequence[Draw]) -> Any:
        """Return the microbatch of these draws, or an ``_ReadFailure`` with the reason if it could not be read."""
        try:
            items = []
            for position, item in index:
                seed_host(mix_seed(self.seed, position))
                items.append(self.data[item])
            return self.collate(items)
        except Exception as error:  # noqa: BLE001 - raised by the user's code, possibly in a worker
            return _ReadFailure(
                f"samples {', '.join(str(item) for _, item in index)} of {type(self.data).__name__} could not be"
                f" read: {type(error).__name__}: {error}\n  Look at these items, and at TrainSpec(collate=...).",
                error if self.workers == 0 else None,
            )


@dataclass(slots=True)
class LoaderSampler(IterableSampler):
    """Microbatches of a user's loader; each reader makes its own with ``data(reader, readers)``.

    Random numbers that a loader draws for a batch depend on the run's seed, the reader and the number of the batch.
    """

    draws: int = field(kw_only=True)  # seed of the random numbers of batches
    _num_read: int = field(default=0, init=False)

    def for_reader(self, micro: int, accumulation: int, reader: int, readers: int) -> LoaderSampler:
        """Create the loader of one reader, and return this object."""
        IterableSampler.for_reader(self, micro, accumulation, reader, readers)
        self.data = self._call("was not made", lambda: self.data(reader, readers))
        if isinstance(self.data, DataLoader):
            exit_with_this_rank(self.data)
        return self

    def next_step(self) -> list[list[int]]:
        """Return the numbers of the samples of this rank's next microbatches; reads nothing."""
        self._own = Sampler.next_step(self)
        return self._own

    def next_batch(self) -> Any:
        """Read the next microbatch."""
        self._num_read += 1
        return self._call(f"did not give its batch {self._num_read}", self._next)

    def first(self, most: int) -> list[Any]:
        """Read the first batches of the loader."""
        return self._call("could not be read", lambda: list(itertools.islice(self.data, most)))

    def _call(self, what: str, read: Callable[[], Any]) -> Any:
        name = getattr(self.data, "__name__", type(self.data).__name__)
        try:
            with preserve_random_state():
                seed_host(mix_seed(mix_seed(self.draws, self.data_parallel_rank), self._num_read))
                return read()
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"the loader {name} {what}: {type(error).__name__}: {error}") from error

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; ``own`` is this reader's part."""
        own: dict[str, Any] = {"batches": self._num_read, "epoch": self._epoch}
        if has_state(self.data):
            own["state"] = self.data.state_dict()
        return Sampler.state(self) | {"own": own}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, with the loader's own state or by reading and dropping the earlier batches."""
        Sampler.load_state(self, state)
        reader_state = state["own"]
        if "state" in reader_state and has_state(self.data):
            self._num_read = reader_state["batches"]
            self._call("did not continue", lambda: self._load_own(reader_state))
        while self._num_read < reader_state["batches"]:
            self.next_batch()


@dataclass(frozen=True, slots=True)
class UserBatches(UserSamples):
    """Microbatches of a loader, in its order, whatever the draws; ``data`` is a :class:`LoaderSampler`."""

    def microbatches(self, draws: Iterable[Sequence[Draw]], device: torch.device) -> Iterator[Any]:
        """Yield a microbatch on ``device`` for each entry of ``draws``."""
        for _ in draws:
            yield on_device(self.data.next_batch(), device)

    def batch(self, indices: Sequence[int], device: torch.device) -> Any:
        """Return the first microbatch of the first reader, with as many samples as its loader gives."""
        return on_device(self.data.for_reader(len(indices), 1, 0, 1).next_batch(), device)

    def store_first(self, share: tuple[int, int, int, int], most: int, agreed: Callable[[int], int]) -> UserSamples:
        """Store the first ``most`` batches of a reader, and return them as samples that are read by index.

        ``share`` is the size of a microbatch, microbatches per step, the reader, and the number of readers. ``agreed``
        returns the minimum over all readers of the number of batches.
        """
        batches = self.data.for_reader(*share).first(most)
        number, at_once = agreed(len(batches)), share[0] * share[3]
        if not number:
            raise DataError("TrainSpec(eval_data=...): the loader of a reader gives no batches.\n  Give it some.")
        return UserSamples(_StoredBatches(batches[:number], at_once), lambda items: items[0])


@dataclass(frozen=True, slots=True)
class _StoredBatches:
    """Stored batches. Each one counts as many items as all readers together forward at once."""

    batches: Sequence[Any]
    at_once: int

    def __len__(self) -> int:
        return len(self.batches) * self.at_once

    def __getitem__(self, index: int) -> Any:
        return self.batches[index // self.at_once]


@dataclass(frozen=True, slots=True)
class _ReadFailure:
    """The reason why a microbatch could not be read."""

    text: str
    cause: Exception | None


def _read(batch: Any) -> Any:
    if isinstance(batch, _ReadFailure):
        raise DataError(batch.text) from batch.cause
    return batch


def _identity(batch: Any) -> Any:
    return batch


def on_device(batch: Any, device: torch.device) -> Any:
    """Move a batch's tensors to ``device``; any mapping, such as a ``BatchEncoding``, becomes a dict."""
    if isinstance(batch, Mapping):
        batch = dict(batch)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        waits = device.type != "cuda" or tensor.is_cuda or tensor.is_pinned()
        return (tensor if waits else tensor.pin_memory()).to(device, non_blocking=True)

    return batch if device.type == "cpu" else tree_map_only(torch.Tensor, move, batch)


def open_user_data(
    data: Any,
    held_out: Any,
    collate: Collate | None,
    num_held_out: int,
    least: int = 1,
    *,
    seed: int = 0,
    workers: int = 0,
) -> Data:
    """Return the samples of a spec. Of an iterable at most ``num_held_out`` are held out. Loaders are not read yet.

    Rows of a ``datasets.Dataset`` are read as tensors, unless it has a format or there is a ``collate``.
    """
    if collate is None:
        data, held_out = (_as_tensors(each) for each in (data, held_out))
    collate = collate or default_collate
    for each in (data, held_out):
        if isinstance(each, DataLoader):
            exit_with_this_rank(each)
    if is_loader(data):
        part: UserSamples = UserBatches(LoaderSampler(data=data, draws=2 * seed), collate)
    else:
        part = UserSamples(data if is_indexed(data) else IterableSampler(data=data), collate, 2 * seed, workers)
    if is_loader(held_out):
        return Data(part, UserBatches(LoaderSampler(data=held_out, draws=2 * seed + 1), collate))
    eval_data = held_out if held_out is None or is_indexed(held_out) else list(itertools.islice(held_out, num_held_out))
    if eval_data is not None and len(eval_data) < least:
        raise DataError(
            f"TrainSpec(eval_data=...) has {len(eval_data)} samples, {least} are needed at once.\n"
            "  Give it more, or lower train.micro_batch_size."
        )
    return Data(part, UserSamples(eval_data or [], collate, 2 * seed + 1, workers))


def _as_tensors(data: Any) -> Any:
    has_format = getattr(data, "format", None)
    is_plain = isinstance(has_format, dict) and has_format.get("type") is None
    return data.with_format("torch") if is_plain and hasattr(data, "with_format") else data
