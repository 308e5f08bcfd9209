"""The samples of a source by index: how its tokens are divided, and which samples are held out.

For text and token files, sample ``i`` of a part is the ``seq_len + 1`` tokens from ``i * seq_len`` on: inputs are all
but the last, targets all but the first. The last ``held_out`` of the tokens are the held-out part, so the two parts
share no token. For examples, a sample is a row of examples (``data.packing``), and the last examples are held out.

A file is opened and mapped when a sample needs it, and only then are the sample's ids compared with the vocabulary.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.train.data.examples import Examples
from shardwise.train.data.mixture import mixed
from shardwise.train.data.packing import PackedRows, pack
from shardwise.train.data.pairs import pairs
from shardwise.train.data.rows import Rows, Samples, shift
from shardwise.train.data.source import Source, text_among_tokens
from shardwise.train.data.stream import StreamRows, StreamSampler
from shardwise.train.data.token_files import DataError, is_token_file, map_tokens, unknown_token
from shardwise.train.task import CAUSAL, Task

#: Maximum number of files that are mapped at a time.
MAPPED_FILES = 64
#: The fraction of a masked sample's tokens that is learned; of these 80% are masked, 10% replaced, and 10% unchanged
#: (Devlin et al., "BERT", 2019, 3.1).
_LEARNED, _HIDDEN, _REPLACED = 0.15, 0.8, 0.1


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one part of a source."""

    arrays: Sequence[np.ndarray]  # one array of tokens per file
    start: int  # first token of the part, counted over all files
    num_tokens: int  # tokens of the part
    seq_len: int
    vocab_size: int | None = None  # ids must be below it; ``None``: already checked
    end: int | None = None  # end-of-document token, if documents do not attend to each other
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        arrays = self.arrays
        lengths = arrays.source.lengths if isinstance(arrays, MappedFiles) else [len(array) for array in arrays]
        object.__setattr__(self, "_ends", list(itertools.accumulate(lengths)))

    @property
    def has_positions(self) -> bool:
        """Whether documents do not attend to each other."""
        return self.end is not None

    @property
    def num_samples(self) -> int:
        """Number of samples of the part."""
        return max(0, (self.num_tokens - 1) // self.seq_len)

    def sample(self, index: int) -> np.ndarray:
        """Return the ``seq_len + 1`` tokens of a sample, int64."""
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return self._read(self.start + index * self.seq_len, self.seq_len + 1)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return these samples; positions restart at 0 after every end of a document."""
        return shift(np.stack([self.sample(index) for index in indices]), self.end)

    def num_targets(self, indices: Iterable[int]) -> None:
        """Return ``None``: every token is learned."""

    def _read(self, start: int, count: int) -> np.ndarray:
        out = np.empty(count, np.int64)
        done = 0
        file = bisect.bisect_right(self._ends, start)
        while done < count:
            array, before = self.arrays[file], self._ends[file - 1] if file else 0
            piece = array[start + done - before : start + count - before]
            if self.vocab_size is not None and piece.size and int(piece.max()) >= self.vocab_size:
                raise self._unknown(file, start + done - before, piece, self.vocab_size)
            out[done : done + len(piece)] = piece
            done += len(piece)
            file += 1
        return out

    def _unknown(self, file: int, index: int, piece: np.ndarray, vocab_size: int) -> DataError:
        path = self.arrays.source.files[file] if isinstance(self.arrays, MappedFiles) else file
        return unknown_token(path, index, piece, vocab_size)


@dataclass(frozen=True, slots=True)
class RandomPart:
    """Endless uniform random tokens; sample ``i`` depends only on the seed and ``i``."""

    seed: int
    stream: int
    vocab_size: int
    seq_len: int
    num_samples: int = 1 << 40

    def sample(self, index: int) -> np.ndarray:
        """Return the ``seq_len + 1`` tokens of a sample, int64."""
        return _generator(self.seed, self.stream, index).integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return these samples."""
        return shift(np.stack([self.sample(index) for index in indices]), None)

    def num_targets(self, indices: Iterable[int]) -> None:
        """Return ``None``: every token is learned."""


@dataclass(frozen=True, slots=True)
class Data:
    """The training part and the held-out part of a source."""

    train: Samples
    held_out: Samples


def open_data(
    source: Source,
    *,
    seq_len: int,
    held_out: float | None,
    vocab_size: int,
    seed: int,
    packs: bool = True,
    end: int | None = None,
    task: Task = CAUSAL,
) -> Data:
    """Split a source of any kind except ``records``. Its files are opened when samples are read.

    Args:
        source: The source. If ``source.evaluated`` is set, all of it is held out instead of a part of the source.
        seq_len: Tokens per sample.
        held_out: Fraction of each source that is held out; ``None``: nothing.
        vocab_size: Vocabulary size of the model.
        seed: Seed of ``random`` and of masks.
        packs: Whether several examples share a row.
        end: End-of-document token of a stream, if documents do not attend to each other.
        task: The task that the model is trained for.
    """
    opened = functools.partial(
        open_data, seq_len=seq_len, vocab_size=vocab_size, seed=seed, packs=packs, end=end, task=task
    )
    if source.evaluated is not None:
        other = opened(source.evaluated, held_out=None)
        train = opened(replace(source, evaluated=None), held_out=None).train
        return Data(train, other.held_out if source.evaluated.kind == "random" else other.train)
    if source.parts:
        found = [opened(part, held_out=held_out) for part, *_ in source.parts]
        for (part, *_), data in zip(source.parts, found, strict=True):
            check_size(part, data, seq_len=seq_len, needed=1, needed_held_out=0)
        _, names, weights = zip(*source.parts, strict=True)
        train = mixed([data.train for data in found], names, weights, seq_len, is_held_out=False)
        return Data(train, mixed([data.held_out for data in found], names, weights, seq_len, is_held_out=True))
    if source.kind == "examples":
        parts = Examples.of(source.files).split(held_out)
        if task.has_pairs:
            return Data(*(pairs(part, seq_len, task) for part in parts))
        return Data(*(pack(part, seq_len, packs=packs) for part in parts))
    if source.streams is not None:
        stream = StreamSampler(data=source, seed=seed, form=source.streams, seq_len=seq_len)
        data = Data(StreamRows(stream, end), StreamRows(stream, end))
    elif source.kind == "random":
        data = Data(RandomPart(seed, 0, vocab_size, seq_len), RandomPart(seed, 1, vocab_size, seq_len))
    else:
        train_tokens = source.num_tokens if held_out is None else split_point(source.num_tokens, held_out, seq_len)
        arrays = Examples.of(source.files).documents() if source.content else MappedFiles(source)
        below = vocab_size if source.kind == "tokens" else None
        data = Data(
            Part(arrays, 0, train_tokens, seq_len, below, end),
            Part(arrays, train_tokens, source.num_tokens - train_tokens, seq_len, below, end),
        )
        if held_out is not None:
            check_size(source, data, seq_len=seq_len, needed=1)
    if task.mask is None:
        return data
    return Data(*(MaskedSamples(part, seq_len, task.mask, vocab_size, seed) for part in (data.train, data.held_out)))


def split_point(num_tokens: int, held_out: float, seq_len: int) -> int:
    """Return the number of tokens for training; the rest, at least one sample if there are two, is held out."""
    num_held_out = max(int(num_tokens * held_out), min(seq_len + 1, num_tokens // 2))
    return num_tokens - num_held_out


def check_size(source: Source, data: Data, *, seq_len: int, needed: int, needed_held_out: int = 1) -> None:
    """Refuse a source with fewer than ``needed`` training or ``needed_held_out`` held-out samples."""
    parts = (
        ("training", source, data.train, needed),
        ("held-out", source.evaluated or source, data.held_out, needed_held_out),
    )
    for label, of, part, least in parts:
        if part.num_samples < least:
            is_cut_off = part is data.held_out and source.evaluated is None
            advice = " You may also name data to evaluate on in data.eval_source." if is_cut_off else ""
            size, left_out = "a smaller", ""
            if isinstance(part, PackedRows) and part.num_left_out:
                size, left_out = "a larger", f"; of {part.num_left_out:,} conversations no token would be learned"
            raise DataError(
                f"{of.name}: {of.num_tokens:,} tokens leave {part.num_samples:,} samples of {seq_len:,} for the {label}"
                f" part{left_out}; {least:,} {'is' if least == 1 else 'are'} needed.\n"
                f"  Use more text, {size} data.seq_len, or a smaller global batch.{advice}"
            )


class MappedFiles(Sequence[np.ndarray]):
    """The tokens of each file of a source, mapped when first read; at most ``MAPPED_FILES`` stay mapped."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._map = functools.lru_cache(MAPPED_FILES)(self._map_file)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.source.files)

    def __getitem__(self, index: int) -> np.ndarray:  # pyrefly: ignore[bad-override]
        """Return the tokens of a file."""
        return self._map(index)

    def _map_file(self, index: int) -> np.ndarray:
        file, length = self.source.files[index], self.source.lengths[index]
        if self.source.kind == "text":
            return np.memmap(file, np.uint8, "r", shape=(length,))
        if not is_token_file(file):
            raise text_among_tokens(file, self.source.name)
        tokens = map_tokens(file)
        if len(tokens) != length:
            raise DataError(
                f"{file}: {len(tokens):,} tokens, but the other files of {self.source.name!r} are such that its size"
                f" stands for {length:,}.\n  Write all of them with one vocabulary, and do not change them while a run"
                " reads them."
            )
        return tokens


@dataclass(frozen=True, slots=True)
class MaskedSamples:
    """Samples in which some tokens are masked and learned. The choice depends only on the seed and the sample."""

    unmasked: Samples
    seq_len: int
    mask: int  # id of masked tokens
    vocab_size: int  # replacement ids are below it
    seed: int  # seed of the choice

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.unmasked.num_samples

    @property
    def _num_learned(self) -> int:
        return max(1, round(_LEARNED * self.seq_len))

    def num_targets(self, indices: Iterable[int]) -> int:
        """Return the number of learned tokens, which is the same for each sample."""
        return self._num_learned * sum(1 for _ in indices)

    def rows(self, indices: Sequence[int]) -> Rows:
        """Return these samples."""
        inputs = self.unmasked.rows(indices).inputs.copy()
        targets = np.full_like(inputs, -100)
        for row, index in enumerate(indices):
            draw = _generator(self.seed, 2, index)
            columns = draw.permutation(self.seq_len)[: self._num_learned]
            targets[row, columns] = inputs[row, columns]
            fate = draw.random(len(columns))
            inputs[row, columns[fate < _HIDDEN]] = self.mask
            other = columns[(fate >= _HIDDEN) & (fate < _HIDDEN + _REPLACED)]
            inputs[row, other] = draw.integers(0, self.vocab_size, len(other))
        return Rows(inputs, targets)


def _generator(seed: int, stream: int, index: int) -> np.random.Generator:
    """Return the generator of a sample in one of several streams of a seed."""
    key, counter = np.array([seed, stream], np.uint64), np.array([0, 0, 0, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
