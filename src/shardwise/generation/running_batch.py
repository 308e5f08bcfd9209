"""Rows that start and end at different times: an ended row leaves the batch, and a new one joins it.

A prompt goes through the model together with other new ones. Its keys and values are then joined with those of the
running rows, and from the next step on all rows go through the model together.

Shape suffixes: ``B`` rows, ``T`` new tokens, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.generation.decoder import Decoder, MakeDecoder
from shardwise.generation.runner import Runner, round_up_length
from shardwise.generation.sample import RngStreams, Sampling
from shardwise.generation.score import Row

#: Number of tokens by which a cache grows at a time, so that a long row takes memory only when it gets long.
ROOM = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """A row to be continued."""

    number: int  # unique number of the row
    prompt: Sequence[int]  # token ids
    max_new_tokens: int  # maximum number of new tokens
    sampling: Sampling = field(default_factory=Sampling)  # how its tokens are chosen
    seed: int = 0  # seed of its random numbers
    stream: int = 0  # number of the random stream of this row under the seed


class Decision(NamedTuple):
    """The next action of a batch: rows that leave it, then a forward of the rows ``new``, or of the running rows."""

    removed: Sequence[int] = ()  # numbers of rows that have ended or are cancelled
    new: Sequence[Entry] = ()  # rows that start
    is_last: bool = False  # whether generation ends, because no batch has running rows
    #: Rows whose tokens are scored first, each with the number of most likely tokens to report.
    to_score: Sequence[tuple[Row, int]] = ()


class _Row:
    """A running row."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.newest = 0
        self.num_left = entry.max_new_tokens
        self._draws = RngStreams(entry.seed, [entry.stream])

    def choose(self, logits_1V: Tensor) -> Tensor:
        sampling = self.entry.sampling
        return sampling.choose(logits_1V, self._draws.next() if sampling.temperature else None)


class _Group(NamedTuple):
    """Rows that share a cache, and the cache of each stage on this rank."""

    rows: Sequence[_Row] = ()
    decoders: Mapping[int, Decoder] = {}


class RunningBatch:
    """Rows that go through the model together."""

    keeps_cache = True

    def __init__(
        self, index: int, make_decoder: MakeDecoder, runner: Runner, device: torch.device, positions: int | None
    ) -> None:
        self.index = index
        self.new_BT = torch.zeros(0, 1, dtype=torch.int64, device=device)  # the next input
        self.has_pending_forward = False  # whether a forward was started whose tokens have not been taken
        self._make_decoder, self._runner, self._device, self._positions = make_decoder, runner, device, positions
        self._running = _Group()
        self._prefilled = _Group()  # rows whose prompts went through the model last
        self._current = _Group()  # the group of the current forward

    @property
    def make_decoder(self) -> MakeDecoder:
        """The function that makes decoders of the model."""
        return self._make_decoder

    @property
    def is_padded(self) -> bool:
        """Whether some rows of the forward are padded."""
        return any(decoder.is_padded for decoder in self._current.decoders.values())

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Choose the next token of each row of the forward, (B,)."""
        tokens_B = logits_BV.argmax(dim=-1)
        for index, row in enumerate(self._current.rows):
            if row.entry.sampling.temperature:
                tokens_B[index] = row.choose(logits_BV[index : index + 1])[0]
        return tokens_B

    def take(self) -> dict[int, int]:
        """Return the newest token of each row of the finished forward, by the row's number."""
        if not self.has_pending_forward:
            return {}
        self.has_pending_forward = False
        for row, token in zip(self._current.rows, self._runner.take(self), strict=True):
            row.newest, row.num_left = token, row.num_left - 1
        return {row.entry.number: row.newest for row in self._current.rows}

    def begin(self, decision: Decision) -> None:
        """Remove rows, and start the next forward if there are rows for one.

        Collective:
            As :meth:`Runner.begin`. All ranks must call with the same decision, after they have taken the tokens.
        """
        self._merge_running(set(decision.removed))
        if decision.new:
            self._current = self._prefilled = self._new_group(decision.new)
        else:
            self._current = self._running
            self.new_BT = torch.tensor([[row.newest] for row in self._current.rows], device=self._device)
        self.has_pending_forward = bool(self._current.rows)
        if self.has_pending_forward:
            self._runner.begin(self, self._current.decoders)

    def _merge_running(self, removed: set[int]) -> None:
        """Join the remaining rows into one group with room for their next token."""
        groups = [group for group in (self._running, self._prefilled) if group.rows]
        self._prefilled = _Group()
        remaining = [
            [index for index, row in enumerate(group.rows) if row.entry.number not in removed and row.num_left]
            for group in groups
        ]
        rows = [group.rows[index] for group, some in zip(groups, remaining, strict=True) for index in some]
        if not rows:
            self._running = _Group()
            return
        if len(groups) == 1 and len(rows) == len(groups[0].rows) and all(d.room for d in groups[0].decoders.values()):
            self._running = groups[0]
            return
        parts = [(group, some) for group, some in zip(groups, remaining, strict=True) if some]
        room = min(ROOM, max(row.num_left for row in rows))
        first = parts[0][0].decoders
        self._running = _Group(
            rows,
            {
                stage: first[stage].join([(group.decoders[stage], some) for group, some in parts], room)
                for stage in self._runner.layers
            },
        )

    def _new_group(self, entries: Sequence[Entry]) -> _Group:
        """Return a group of new rows, and set their prompts as the next input."""
        longest = max(len(entry.prompt) for entry in entries)
        if self._runner.num_stages > 1:
            longest = min(round_up_length(longest), self._positions or round_up_length(longest))
        padding = [longest - len(entry.prompt) for entry in entries]
        padded = [[0] * pad + [*entry.prompt] for pad, entry in zip(padding, entries, strict=True)]
        self.new_BT = torch.tensor(padded, device=self._device)
        capacity = longest + min(ROOM, max(entry.max_new_tokens for entry in entries))
        layers = self._runner.layers.items()
        decoders = {stage: self._make_decoder(capacity, padding, indices) for stage, indices in layers}
        return _Group([_Row(entry) for entry in entries], decoders)
