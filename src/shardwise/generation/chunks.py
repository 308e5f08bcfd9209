"""Chunks of a batch that are generated concurrently. The rows of a chunk go through the model together.

Without a pipeline there is one chunk. With a pipeline there are several, so that every stage has work: stage ``s``
computes chunk ``j`` while stage ``s - 1`` computes chunk ``j + 1``. The rank of the last stage chooses the tokens and
sends them to the other ranks; the first stage embeds them.

Shape suffixes: ``B`` rows, ``T`` new tokens, ``V`` vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_int
from shardwise.generation.decoder import Decoder, MakeDecoder
from shardwise.generation.sample import RngStreams, Sampling


class Settings(NamedTuple):
    """Settings of a generation: the factory of decoders, how to choose tokens, the seed, and the maximum length."""

    make_decoder: MakeDecoder
    sampling: Sampling
    seed: int
    max_new_tokens: int


class Chunk:
    """Several rows of a batch.

    Random numbers depend on the rows' ``numbers`` in the batch. A rank without rows computes one dummy prompt, so that
    it takes part in every collective.
    """

    keeps_cache = True

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        prompts: Sequence[Sequence[int]],
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.index = index
        self.num_rows = len(numbers)
        prompts = prompts or [[0]]
        self._longest = max(map(len, prompts))
        self.padding = [self._longest - len(prompt) for prompt in prompts]
        padded = [[0] * pad + list(prompt) for pad, prompt in zip(self.padding, prompts, strict=True)]
        self.new_BT = torch.tensor(padded, device=device)  # the next input
        self.is_over = False  # whether all rows have ended, on every rank that computes in step with this one
        self.settings = settings
        self._draws = RngStreams(settings.seed, numbers or [0])

    @property
    def make_decoder(self) -> MakeDecoder:
        """The function that makes decoders of the model."""
        return self.settings.make_decoder

    @property
    def is_padded(self) -> bool:
        """Whether some rows are padded."""
        return any(self.padding)

    def decoder(self, layers: Collection[int] | None = None) -> Decoder:
        """Return a new decoder for these rows, with a cache for ``layers`` (``None``: all layers)."""
        return self.settings.make_decoder(self._longest + self.settings.max_new_tokens - 1, self.padding, layers)

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Choose the next token of each row, (B,)."""
        sampling = self.settings.sampling
        return sampling.choose(logits_BV, self._draws.next() if sampling.temperature else None)


class RowSplit:
    """The rows that each data-parallel rank generates, divided into chunks.

    If ``is_divided``, all ranks have the same batch, and each generates some of its rows; otherwise each rank has a
    different batch. All ranks have the same number of chunks, some of which may be empty.
    """

    def __init__(self, num_rows: Sequence[int], comm: Comm | None, *, is_divided: bool, max_chunks: int) -> None:
        self._comm = comm
        self._is_divided = is_divided
        self._rank = 0 if comm is None else comm.rank
        self.num_rows = num_rows[self._rank]
        by_rank = divide(self.num_rows, len(num_rows)) if is_divided else [range(count) for count in num_rows]
        self.num_chunks = min(max_chunks, max(map(len, by_rank)))
        self._chunks = [
            [rows[chunk.start : chunk.stop] for chunk in divide(len(rows), self.num_chunks)] for rows in by_rank
        ]

    def own(self, chunk: int) -> range:
        """Return this rank's rows in a chunk."""
        return self._chunks[self._rank][chunk]

    def exchange(self, chunk: int, tokens: Sequence[int]) -> dict[int, int]:
        """Return the new tokens of a chunk by row, from ``tokens`` of this rank's rows and those of the other ranks.

        Collective:
            If the rows are divided, an all-gather of eight bytes per row on the data-parallel axes.
        """
        if not self._is_divided or self._comm is None:
            return dict(zip(self.own(chunk), tokens, strict=True))
        every = [rows[chunk] for rows in self._chunks]
        width = max(map(len, every))
        buffer = torch.zeros(len(every), width, dtype=torch.int64, device=self._comm.device)
        buffer[self._rank, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        self._comm.all_gather(buffer.view(-1), unit="tokens").wait()
        return {
            row: token
            for rows, found in zip(every, buffer.tolist(), strict=True)
            for row, token in zip(rows, found[: len(rows)], strict=True)
        }

    def is_over(self, chunk: int, is_live: Sequence[bool]) -> bool:
        """Return whether all rows of a chunk have ended, on every rank.

        Collective:
            If the rows are not divided, an all-gather of eight bytes on the data-parallel axes.
        """
        if self._comm is None or self._is_divided:
            return not any(is_live[row] for rows in self._chunks for row in rows[chunk])
        return not any(all_gather_int(self._comm, int(any(is_live[row] for row in self.own(chunk)))))


class Turn(NamedTuple):
    """One computation of a stage: ``chunk`` of the batch, for its new token number ``step``.

    A ``stage`` after the last one means that the tokens arrive which the last stage has chosen.
    """

    step: int
    chunk: int
    stage: int


def slots(stages: Sequence[int], num_stages: int, num_chunks: int, num_steps: int) -> Iterator[tuple[Turn, ...]]:
    """Yield the turns of the rank that holds ``stages``, one tuple for each time slot; a tuple may be empty.

    Stage ``s`` processes chunk ``j`` of step ``t`` in slot ``t * max(num_chunks, num_stages) + j + s``: after the
    previous stage, and after step ``t - 1`` of the chunk, which gives the input token. With at least ``num_stages``
    chunks no rank with one stage ever waits, because a chunk's token has arrived when its turn comes.

    Results of one slot are used in the next. Between two slots a rank sends all results and receives all inputs of its
    next turns, as one exchange. This cannot deadlock, even if messages wait for each other, because both ends of a
    message are between the same two slots. So messages between two ranks arrive in the order of sending.
    """
    period = max(num_chunks, num_stages)
    for slot in range((num_steps - 1) * period + num_chunks + num_stages):
        turns = [(*divmod(slot - stage, period), stage) for stage in (num_stages, *sorted(stages, reverse=True))]
        yield tuple(Turn(*turn) for turn in turns if 0 <= turn[0] < num_steps and turn[1] < num_chunks)


def divide(count: int, num_parts: int) -> list[range]:
    """Divide ``count`` rows into ``num_parts`` consecutive ranges, as evenly as possible, larger ones first."""
    least, more = divmod(count, num_parts)
    starts = [part * least + min(part, more) for part in range(num_parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]
