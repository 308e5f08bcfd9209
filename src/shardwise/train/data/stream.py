"""Text that is tokenized while training goes on: some files at a time, into the cache that whole sources use, too.

Neighbouring files make a *chunk* of about ``CHUNK_BYTES``. An epoch takes the chunks in an order of its own, and in
each chunk the samples in an order of their own; both depend on the seed and the epoch alone. Where a run is in this
sequence is an epoch, a place in the order of chunks and the samples taken there, for any number of ranks. The first
process of a machine has the next chunk tokenized by a process of its own while one is trained on; a rank that needs a
chunk that is not there makes it. The last chunk is held out.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardwise.spec.errors import CheckpointError
from shardwise.train.data.rows import Rows, Samples, joined
from shardwise.train.data.sampler import Permutation
from shardwise.train.data.samples import Data, MappedFiles, Part, for_task
from shardwise.train.data.source import Source
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import find_tokenizer, tokenized
from shardwise.train.task import Task

#: Files are taken together up to so many bytes; a larger one is a chunk by itself.
CHUNK_BYTES = 1 << 26

_BITS = 40  # of a sample's number in its chunk


def chunks_of(source: Source) -> list[Source]:
    """The chunks of a source.

    Raises:
        DataError: There is one alone, of which none could be held out.
    """
    found: list[list[int]] = [[]]
    held = 0
    for index, length in enumerate(source.lengths):
        if found[-1] and held + length > CHUNK_BYTES:
            found.append([])
            held = 0
        found[-1].append(index)
        held += length
    if len(found) < 2 and source.evaluated is None:
        raise DataError(
            f"{source.name}: {len(source.files)} files of {source.num_tokens:,} bytes together make one chunk"
            f" (of {CHUNK_BYTES:,} bytes), and the last chunk is held out.\n"
            "  Leave data.streaming out, divide the text into more files, or name data to evaluate on in"
            " data.eval_source."
        )
    source = replace(source, evaluated=None)
    return [
        replace(source, files=tuple(source.files[i] for i in part), lengths=tuple(source.lengths[i] for i in part))
        for part in found
    ]


@dataclass(eq=False)
class Stream:
    """The samples of chunks. A sample's index is the number of its chunk, and its own in the chunk.

    Attributes:
        chunks: Those that are trained on.
        tokenizer: Its folder, or ``bytes``.
        seq_len: Tokens per sample.
        vocab_size: Ids are below.
        end: The id that ends a document, where documents do not see each other.
    """

    chunks: Sequence[Source]
    tokenizer: str
    seq_len: int
    vocab_size: int
    end: int | None
    _maker: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _asked: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.part = functools.lru_cache(2)(self._part)

    def _part(self, chunk: int) -> Part:
        return part_of(self.chunks[chunk], self.tokenizer, self.seq_len, self.vocab_size, self.end)

    @property
    def num_samples(self) -> int:
        """About as many as the first chunk lets expect of all."""
        return self.part(0).num_samples * len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """About, as above."""
        return self.part(0).num_tokens * len(self.chunks)

    def rows(self, indices: Sequence[int]) -> Rows:
        """These samples."""
        found = [self.part(index >> _BITS).rows([index & ((1 << _BITS) - 1)]) for index in indices]
        return joined(found, has_positions=self.end is not None)

    def num_targets(self, indices: Iterable[int]) -> None:
        """Every token is learned."""

    def make_ahead(self, chunk: int) -> None:
        """Have a chunk tokenized, by another process, if this is the first one of its machine."""
        is_busy = self._maker is not None and self._maker.poll() is None
        if is_busy or chunk == self._asked or int(os.environ.get("LOCAL_RANK", "0")) != 0:
            return
        self._asked = chunk
        wanted = self.chunks[chunk]
        told = [wanted.name, wanted.kind, [str(file) for file in wanted.files], wanted.lengths, wanted.column]
        code = f"from shardwise.train.data.stream import make; make({json.dumps(json.dumps([told, self.tokenizer]))})"
        self._maker = subprocess.Popen(
            [sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        weakref.finalize(self, _end, self._maker)


def _end(maker: subprocess.Popen[bytes]) -> None:
    maker.kill()
    maker.wait()


def make(told: str) -> None:
    """Tokenize a chunk into the cache; what goes wrong is said by the rank that needs it."""
    (name, kind, files, lengths, column), tokenizer = json.loads(told)
    source = Source(name, kind, tuple(map(Path, files)), tuple(lengths), None, column=column)
    tokenized(source, tokenizer, find_tokenizer(tokenizer), column=column)


def part_of(chunk: Source, tokenizer: str, seq_len: int, vocab_size: int, end: int | None) -> Part:
    """All samples of a chunk, tokenized now if it is not in the cache."""
    source = tokenized(chunk, tokenizer, find_tokenizer(tokenizer), column=chunk.column)
    return Part(MappedFiles(source), 0, source.num_tokens, seq_len, vocab_size, end)


def open_stream(
    source: Source,
    tokenizer: str,
    held_out: Samples | None = None,
    *,
    seq_len: int,
    vocab_size: int,
    end: int | None,
    task: Task,
    seed: int,
) -> Data:
    """Both parts of a source that is tokenized while it is read. The arguments are those of ``open_data``.

    Held out are the samples of ``source.evaluated`` where they are given, else those of the last chunk.

    Raises:
        DataError: The source is one chunk, of which nothing can be held out.
    """
    chunks, how = chunks_of(source), (task, seq_len, vocab_size, seed)
    if held_out is None:
        held_out = for_task(part_of(chunks.pop(), tokenizer, seq_len, vocab_size, end), *how)
    return Data(for_task(Stream(chunks, tokenizer, seq_len, vocab_size, end), *how), held_out)


def stream_of(samples: Samples) -> Stream | None:
    """The stream that samples are of, if they are."""
    found = getattr(samples, "whole", samples)
    return found if isinstance(found, Stream) else None


@dataclass(slots=True)
class StreamSampler:
    """The samples of one rank, step by step, as ``sampler.Sampler`` gives those of an epoch of known length.

    Attributes:
        stream: What is sampled.
        seed: Seed of the orders.
        micro_batch_size: Samples per forward.
        accumulation: Microbatches per step.
        data_parallel_rank: This rank among those that read different samples.
        data_parallel_size: Number of ranks that read different samples.
        epoch: Of the next sample.
        place: In the order of chunks.
        taken: Samples of this chunk that all ranks together have consumed.
    """

    stream: Stream
    seed: int
    micro_batch_size: int
    accumulation: int
    data_parallel_rank: int
    data_parallel_size: int
    epoch: int = 0
    place: int = 0
    taken: int = 0

    def whole_step(self) -> Iterator[int]:
        """The samples of the next global batch, of all ranks."""
        count = self.micro_batch_size * self.accumulation * self.data_parallel_size
        return iter([sample for sample, _ in self._walk(count)])  # now: the caller moves on before it looks

    def next_step(self) -> list[list[int]]:
        """This rank's samples of the next global batch, one list per microbatch; moves on by one global batch."""
        size, per_rank = self.micro_batch_size, self.micro_batch_size * self.accumulation
        walked = list(self._walk(per_rank * self.data_parallel_size))
        self.epoch, self.place, self.taken = walked[-1][1]
        first = self.data_parallel_rank * per_rank
        own = [sample for sample, _ in walked[first : first + per_rank]]
        return [own[start : start + size] for start in range(0, per_rank, size)]

    def _walk(self, count: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
        """The next samples, each with where the run is behind it."""
        epoch, place, taken = self.epoch, self.place, self.taken
        num_chunks = len(self.stream.chunks)
        empty = 0
        while count:
            chunk = Permutation(num_chunks, seed=self.seed, epoch=epoch)[place]
            num_samples = self.stream.part(chunk).num_samples
            following = divmod(epoch * num_chunks + place + 1, num_chunks)
            self.stream.make_ahead(Permutation(num_chunks, seed=self.seed, epoch=following[0])[following[1]])
            empty = empty + 1 if num_samples == 0 else 0
            if empty > num_chunks:
                raise DataError(
                    "no chunk of the data holds a whole sample.\n  Use a smaller data.seq_len, or more text."
                )
            order = Permutation(max(num_samples, 1), seed=self.seed + 1 + chunk, epoch=epoch)
            here = range(taken, min(num_samples, taken + count))
            for number in here:
                yield chunk << _BITS | order[number], (epoch, place, number + 1)
            count -= len(here)
            if count:
                (epoch, place), taken = following, 0

    def state(self) -> dict[str, int]:
        """What a checkpoint holds."""
        where = {"epoch": self.epoch, "place": self.place, "taken": self.taken}
        return {**where, "seed": self.seed, "num_chunks": len(self.stream.chunks)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken, on any number of ranks.

        Raises:
            CheckpointError: The state belongs to other data or another seed.
        """
        for key, own in (("seed", self.seed), ("num_chunks", len(self.stream.chunks))):
            if state.get(key) != own:
                raise CheckpointError(
                    f"the checkpoint's sampler has {key}={state.get(key)!r}, this run has {own}.\n"
                    "  Resume with the data and the seed that the run began with."
                )
        where = [state.get(key) for key in ("epoch", "place", "taken")]
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in where):
            raise CheckpointError(f"the checkpoint's sampler is at {where!r}.\n  Resume from another one.")
        self.epoch, self.place, self.taken = (int(value or 0) for value in where)
