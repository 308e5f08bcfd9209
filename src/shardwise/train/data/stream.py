"""Samples without an index: items of a user's iterable, and text that is tokenized during training.

Every rank reads all samples and keeps its share, so that a step has the same samples on any number of ranks.

Text is read in windows of neighbouring files. The order of files in an epoch, and the order of samples in a window, are
random and depend only on the seed and the start of the window. The start of the window and the number of samples taken
from it are the only state. A thread tokenizes the next window while training uses the current one. The remainder at the
end of a window, less than a sample, is left out.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardwise.spec.errors import CheckpointError
from shardwise.train.data.records import Form, read_rows
from shardwise.train.data.rows import Rows, shift
from shardwise.train.data.sampler import Draw, Permutation, Sampler, natural
from shardwise.train.data.token_files import DataError

#: Minimum number of tokens of a window, unless the epoch ends earlier.
WINDOW_TOKENS = 1 << 22
#: ``len`` of an iterable: more items than a run uses.
ENDLESS = 1 << 40


@dataclass(slots=True)
class IterableSampler(Sampler):
    """Items of an iterable, in its order. A step takes the next ones. At its end the iterable restarts (``set_epoch``).

    A resume reads all earlier items again, unless the iterable has a ``state_dict``. If items are expensive, that is
    better, or a data set with ``len`` and items.
    """

    num_samples: int = ENDLESS
    seed: int = 0
    micro_batch_size: int = 1
    accumulation: int = 1
    data_parallel_rank: int = 0
    data_parallel_size: int = 1
    data: Any = field(kw_only=True)
    _items: Iterator[Any] = field(default=iter(()), init=False)
    _epoch: int = field(default=-1, init=False)
    _own_items: dict[int, Any] = field(default_factory=dict, init=False)
    _own: list[list[int]] = field(default_factory=list, init=False)

    def for_reader(self, micro: int, accumulation: int, reader: int, readers: int) -> IterableSampler:
        """Set the reader's share of the items, and return this object."""
        self.micro_batch_size, self.accumulation = micro, accumulation
        self.data_parallel_rank, self.data_parallel_size = reader, readers
        return self

    def sample(self, position: int) -> int:
        """Return ``position``, because items are numbered in their order."""
        return position

    def next_step(self) -> list[list[int]]:
        """Read the next global batch; return this rank's items by microbatch, readable until the next call."""
        items = {number: self._next() for number in range(self.position, self.position + self.global_batch_size)}
        self._own = Sampler.next_step(self)
        self._own_items = {number: items[number] for each in self._own for number in each}
        return self._own

    def upcoming(self) -> Iterator[list[Draw]]:
        """Return this rank's microbatches of the step that :meth:`next_step` has read, and of the steps after it."""
        while True:
            for numbers in self._own:
                yield [(number, number) for number in numbers]

    def _next(self) -> Any:
        for _ in range(2):
            for item in self._items:
                return item
            self._start(self._epoch + 1)
        raise DataError(f"{type(self.data).__name__} gives no items.\n  Give TrainSpec(data=...) some.")

    def _start(self, epoch: int) -> None:
        self._epoch = epoch
        for each in (self.data, getattr(self.data, "sampler", None)):  # a DataLoader has a sampler
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        self._items = iter(self.data)

    def __getitem__(self, number: int) -> Any:
        """Return an item of the current step."""
        return self._own_items[number]

    def __len__(self) -> int:
        """Return more than a run uses."""
        return ENDLESS

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, including that of an iterable with ``state_dict``."""
        data_state = {"epoch": self._epoch, "state": self.data.state_dict()} if has_state(self.data) else None
        return Sampler.state(self) | ({} if data_state is None else {"own": data_state})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, on any number of ranks. An iterable without a state is read up to the position."""
        Sampler.load_state(self, state)
        if "own" in state and has_state(self.data):
            self._load_own(state["own"])
            return
        for _ in range(self.position):
            self._next()

    def _load_own(self, data_state: Mapping[str, Any]) -> None:
        self.data.load_state_dict(data_state["state"])
        self._start(data_state["epoch"])


def has_state(data: Any) -> bool:
    """Return whether an iterable can save and restore its position."""
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


@dataclass(slots=True)
class StreamSampler(IterableSampler):
    """Samples of text, or of texts in rows of a data set (``data``), tokenized during training."""

    form: Form = field(kw_only=True)  # converts rows to tokens
    seq_len: int = field(kw_only=True)
    _begin: tuple[int, int, int] = field(default=(0, 0, 0), init=False)  # epoch, file's place in it, row in the file
    _window: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)), init=False)
    _num_taken: int = field(default=0, init=False)
    _order: Sequence[int] | Permutation = field(default=(), init=False)
    _windows_ahead: Iterator[Any] | None = field(default=None, init=False)

    def _next(self) -> np.ndarray:
        if self._windows_ahead is None:
            self._windows_ahead = _prefetch(self._windows((0, 0, 0)))
        while self._num_taken >= len(self._window):
            self._open(num_taken=0)
        self._num_taken += 1
        return self._window[self._order[self._num_taken - 1]]

    def _open(self, num_taken: int) -> None:
        assert self._windows_ahead is not None
        self._begin, self._window = next(self._windows_ahead)
        epoch, file_index, row = self._begin
        self._order = Permutation(max(len(self._window), 1), seed=self.seed + 1 + file_index, epoch=epoch + row)
        self._num_taken = num_taken

    def _windows(self, begin: tuple[int, int, int]) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
        """Yield windows from ``begin`` on, each with its start, as tokens (number of samples, seq_len + 1)."""
        (epoch, file_index, row), is_empty = begin, False
        files = list(zip(self.data.files, self.data.lengths, strict=True))
        found: list[np.ndarray] = []
        while True:
            file, length = files[Permutation(len(files), seed=self.seed, epoch=epoch)[file_index]]
            rows = itertools.islice(read_rows(replace(self.data, files=(file,), lengths=(length,))), row, None)
            while some := list(itertools.islice(rows, 8 if self.data.kind == "text" else 200)):
                if not threading.main_thread().is_alive():
                    return  # the process is exiting and would wait for this thread
                found += [np.asarray(example.ids) for example in self.form.encode(some)]
                row += len(some)
                if sum(map(len, found)) >= max(WINDOW_TOKENS, self.seq_len + 1):
                    yield begin, self._cut(found)
                    begin, found, is_empty = (epoch, file_index, row), [], False
            last, (epoch, file_index), row = epoch, divmod(epoch * len(files) + file_index + 1, len(files)), 0
            if epoch > last:
                window = self._cut(found)
                if is_empty and not len(window):
                    raise DataError(f"{self.data.name}: no whole sample.\n  Use a smaller data.seq_len, or more text.")
                yield begin, window
                begin, found, is_empty = (epoch, file_index, row), [], True

    def _cut(self, found: Sequence[np.ndarray]) -> np.ndarray:
        tokens = np.concatenate([np.zeros(0, np.int64), *found])
        count = max(len(tokens) - 1, 0) // self.seq_len
        starts = np.arange(count)[:, None] * self.seq_len
        return tokens[starts + np.arange(self.seq_len + 1)]

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint."""
        where = dict(zip(("epoch", "place", "row"), self._begin, strict=True))
        return {**Sampler.state(self), **where, "taken": self._num_taken, "num_files": len(self.data.files)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, on any number of ranks; reads the window again."""
        Sampler.load_state(self, state)
        epoch, file_index, row, num_taken = (natural(state, key) for key in ("epoch", "place", "row", "taken"))
        if file_index < len(self.data.files):
            self._windows_ahead = _prefetch(self._windows((epoch, file_index, row)))
            self._open(num_taken)
        if num_taken > len(self._window):
            raise CheckpointError(f"the checkpoint's sampler has no such place: {state}.\n  Resume from another one.")


def _prefetch(items: Iterator[Any]) -> Iterator[Any]:
    """Yield the same items; a thread computes each of them while the item before is used."""
    future = _start_next(items)
    while True:
        found, future = future.result(), _start_next(items)
        yield found


def _start_next(items: Iterator[Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def make() -> None:
        try:
            future.set_result(next(items))
        except BaseException as error:  # noqa: BLE001  raised in the thread that needs the item
            future.set_exception(error)

    threading.Thread(target=make, name="shardwise-window").start()  # an executor's thread would ignore the exit
    return future


@dataclass(frozen=True, slots=True)
class StreamRows:
    """The rows of a sampler of text, as samples of the current step."""

    data: StreamSampler
    end: int | None  # end-of-document token, if documents do not attend to each other
    num_samples: int = ENDLESS  # more than a run uses

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return these samples."""
        return shift(np.stack([self.data[index] for index in indices]), self.end)

    def num_targets(self, indices: Iterable[int]) -> None:
        """Return ``None``: every token is learned."""
