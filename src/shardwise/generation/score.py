"""Log-probabilities of given tokens: one forward for each batch of rows, by the same runners as generation.

Rows are padded on the right, where padding does not affect earlier tokens of a causal model. Rows of similar length
share a batch, and logits are computed only for the columns from the first scored token of a batch on.

Shape suffixes: ``B`` rows, ``T`` tokens, ``K`` columns with logits, ``V`` vocabulary, ``N`` scored tokens, ``W``
numbers per token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.engine.engine import Engine
from shardwise.generation.chunks import slots
from shardwise.generation.decode import (
    Prompts,
    batches_of_readers,
    check_ids,
    generating_engine,
    inference,
    made_together,
    rows_of,
)
from shardwise.generation.decoder import Forward, decoder_of
from shardwise.generation.runner import Runner, Stages, WholeModel, round_up_length
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import ConfigError

#: Default of the maximum number of tokens of a forward.
BATCH_TOKENS = 4096
#: Maximum number of logits that are normalized at a time.
_NORMALISED_NUMEL = 1 << 24


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of a continuation.

    Attributes:
        logprobs: The natural logarithm of each token's probability after the tokens before it.
        is_greedy: Whether each token is the most likely one after the tokens before it.
        top: For each position the most likely tokens with their log-probabilities, as many as requested.
    """

    logprobs: list[float]
    is_greedy: bool
    top: list[dict[int, float]]


class Row(NamedTuple):
    """Token ids, which are scored from ``start`` on."""

    ids: Sequence[int]
    start: int


def score(
    model: nn.Module,
    prompts: Prompts,
    continuations: Prompts,
    *,
    batch_tokens: int = BATCH_TOKENS,
    top_logprobs: int = 0,
) -> list[Score]:
    """Compute log-probabilities of continuations after their prompts.

    A parallelized model computes under its plan. All ranks must call; ranks that hold parts of one model (``tp``,
    ``pp``) with the same arguments. Data-parallel ranks may pass the same rows, each of which one rank then computes,
    and all get all scores; or different rows. Ranks of ``cp`` compute different rows, like data-parallel ranks.

    Args:
        model: Our GPT, or a causal language model of transformers; plain or parallelized. In eval mode during the call.
        prompts: Token ids, a tensor (B, T) or a list for each row. Lengths may differ; no row may be empty.
        continuations: Token ids that follow each prompt, in the same form.
        batch_tokens: Maximum number of tokens of one forward, including padding; a longer row gets a separate forward.
        top_logprobs: Also report this number of the most likely tokens at each position.

    Returns:
        A score for each row.

    Collective:
        The collectives of one forward for each batch, an all-gather of small JSON at the beginning, and at the end the
        scores: 16 bytes for each token of a continuation (and 16 for each of ``top_logprobs``), broadcast along ``pp``
        and, if data-parallel ranks share the rows, all-gathered over them.

    Raises:
        ConfigError: Rows are invalid, or do not fit the model.
        StateError: The model does not predict next tokens.
        RankDisagreement: Ranks that hold parts of one model were called with different arguments.
    """
    engine = generating_engine(model, "sw.score")
    scorer = made_together(engine, lambda: Scorer(model, engine, batch_tokens, top_logprobs))
    rows = made_together(engine, lambda: scorer.checked_rows(prompts, continuations))
    shares, own_share, num_batches = [range(len(rows))], 0, 0
    if engine is not None and engine.comms.world.size > 1:
        arguments = {"num_batches": len(scorer.batches(rows, shares[0]))}
        every = batches_of_readers(engine, [rows, batch_tokens, top_logprobs], arguments, "sw.score")
        num_batches = max(each["num_batches"] for each in every)
        if len(every) > 1 and len({each["digest"] for each in every}) == 1:
            by_length = sorted(shares[0], key=lambda row: -len(rows[row].ids))  # gives ranks rows of similar length
            shares = [by_length[rank :: len(every)] for rank in range(len(every))]
            own_share = engine.comms.control.rank
    plans = [scorer.batches(rows, share) for share in shares]
    if len(plans) > 1:
        num_batches = max(map(len, plans))
    with inference(model, engine, "sw.score"):
        scores_NW = scorer.compute(rows, plans[own_share], num_batches)
    if len(plans) > 1:
        assert engine is not None
        scores_NW = _gather_scores(engine.comms.control, scores_NW, [_num_scored(rows, plan) for plan in plans])
    return scorer.scores(rows, [batch for plan in plans for batch in plan], scores_NW)


class Scorer:
    """Scores rows with a model.

    The caller must set the model to eval mode. The ``num_top`` most likely tokens are reported at each position.

    Raises:
        ConfigError: A number is invalid.
        StateError: The model does not predict next tokens.
    """

    def __init__(self, model: nn.Module, engine: Engine | None, batch_tokens: int, num_top: int) -> None:
        self._model = model
        decoding = decoder_of(model, "sw.score", with_cache=False)
        self._make, self._vocab_size, self._positions = decoding.make_once, decoding.vocab_size, decoding.positions
        if batch_tokens < 1:
            raise ConfigError(f"batch_tokens={batch_tokens}: expected at least 1.\n  Leave it out.")
        if not 0 <= num_top <= self._vocab_size:
            raise ConfigError(f"top_logprobs={num_top}: expected 0 to {self._vocab_size}.\n  Leave it out.")
        self._batch_tokens, self._num_top = batch_tokens, num_top
        self._device = next(model.parameters()).device if engine is None else engine.comms.world.device
        self._pipelined = pipelined_of(model)

    def checked_rows(self, prompts: Prompts, continuations: Prompts) -> list[Row]:
        """Return the checked rows."""
        before = rows_of(prompts, "prompt", "sw.score")
        after = rows_of(continuations, "continuation", "sw.score")
        if len(before) != len(after):
            raise ConfigError(
                f"there are {len(before)} prompts and {len(after)} continuations.\n"
                "  Pass one continuation for each prompt; repeat a prompt that has several."
            )
        for number, (prompt, continuation) in enumerate(zip(before, after, strict=True)):
            if not prompt:
                raise ConfigError(
                    f"prompt {number} is empty, and the first token of a continuation needs one before it.\n"
                    "  Begin with the token that texts begin with: the tokenizer's BOS, or EOS where it has none."
                )
            if not continuation:
                raise ConfigError(f"continuation {number} is empty.\n  Pass at least one token, or leave the row out.")
            excess = 0 if self._positions is None else len(prompt) + len(continuation) - 1 - self._positions
            if excess > 0:
                advice = f"Leave out the first {excess} tokens of the prompt"
                if excess >= len(prompt):
                    advice = f"Score the continuation in parts of at most {self._positions} tokens"
                raise ConfigError(
                    f"prompt {number} has {len(prompt)} tokens and its continuation {len(continuation)}, of which the"
                    f" last needs no position: {excess} more than the model's {self._positions} positions.\n  {advice}."
                )
            check_ids(prompt, self._vocab_size, f"prompt {number}")
            check_ids(continuation, self._vocab_size, f"continuation {number}")
        return [Row(prompt + after[number], len(prompt)) for number, prompt in enumerate(before)]

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Score rows that every rank has, if all ranks hold one copy of the model.

        Collective:
            As :meth:`compute`.
        """
        batches = self.batches(rows, range(len(rows)))
        return self.scores(rows, batches, self.compute(rows, batches))

    def batches(self, rows: Sequence[Row], numbers: Sequence[int]) -> list[list[int]]:
        """Return the rows ``numbers`` in batches that go through the model together, longest rows first.

        With a pipeline there are as many batches as the plan has microbatches, if there are enough rows.
        """
        remaining = [number for number in numbers if rows[number].start < len(rows[number].ids)]
        remaining.sort(key=lambda number: (-len(rows[number].ids), rows[number].start))
        most = len(remaining) if self._pipelined is None else -(-len(remaining) // self._pipelined.num_microbatches)
        found: list[list[int]] = []
        while remaining:
            count = max(1, min(most, self._batch_tokens // self._width(rows[remaining[0]])))
            found.append(remaining[:count])
            remaining = remaining[count:]
        return found

    def compute(self, rows: Sequence[Row], batches: Sequence[Sequence[int]], num_batches: int = 0) -> Tensor:
        """Compute the numbers of each scored token, in the order of the batches.

        ``num_batches`` is the maximum over all ranks; this rank takes part in that many forwards.

        Returns:
            (N, W), float64, on the model's device: the log-probability, whether the token is the most likely, then the
            most likely tokens, and their log-probabilities.

        Collective:
            Those of a forward for each batch; with a pipeline a broadcast of the result from the last stage.
        """
        model, pipelined = self._model, self._pipelined
        runner: Runner = WholeModel(model) if pipelined is None else Stages(model, (), *pipelined.layout())
        every = [self._batch(index, [rows[row] for row in batch]) for index, batch in enumerate(batches)]
        every += [self._batch(index, []) for index in range(len(every), num_batches)]
        for batch in every:
            runner.begin(batch, {stage: batch.make_decoder(0, (), None) for stage in runner.stages})
        for slot in slots(runner.stages, runner.num_stages, len(every), 1) if every else ():
            runner.exchange([(every[turn.chunk], turn.stage) for turn in slot])
            for turn in slot:
                if turn.stage < runner.num_stages:
                    runner.compute(every[turn.chunk], turn.stage)
        runner.finish()
        if every and runner.num_stages - 1 in runner.stages:
            found_NW = torch.cat([batch.found_NW for batch in every])
        else:
            shape = _num_scored(rows, batches), 2 + 2 * self._num_top
            found_NW = torch.empty(shape, dtype=torch.float64, device=self._device)
        if pipelined is not None and len(found_NW):
            _, comm, ranks = pipelined.layout()
            comm.broadcast(found_NW.view(-1), root=ranks[-1], unit="scores").wait()
        return found_NW

    def scores(self, rows: Sequence[Row], batches: Sequence[Sequence[int]], found_NW: Tensor) -> list[Score]:
        """Return the score of each row, from the result of :meth:`compute`; empty for rows without scored tokens."""
        numbers, top = iter(found_NW.tolist()), self._num_top
        scores = [Score([], is_greedy=True, top=[]) for _ in rows]
        for row in (row for batch in batches for row in batch):
            of_row = [next(numbers) for _ in rows[row].ids[rows[row].start :]]
            likeliest = [dict(zip(map(int, each[2 : 2 + top]), each[2 + top :], strict=True)) for each in of_row]
            is_greedy = all(each[1] for each in of_row)
            scores[row] = Score([each[0] for each in of_row], is_greedy, likeliest if top else [])
        return scores

    def _width(self, row: Row) -> int:
        """Return the columns of a batch with this longest row; with a pipeline there are only few different widths."""
        width = len(row.ids) - 1
        return (
            width if self._pipelined is None else min(round_up_length(width), self._positions or round_up_length(width))
        )

    def _batch(self, index: int, rows: Sequence[Row]) -> _Batch:
        width = max(map(self._width, rows), default=1)
        num_rows = max(1, len(rows))
        if self._pipelined is not None:
            num_rows = 1 << (num_rows - 1).bit_length()
        return _Batch(index, rows, (num_rows, width), self._make, self._num_top, self._device)


class _Batch:
    """Rows that go through the model together; a rank without rows computes a dummy row."""

    keeps_cache = False
    is_padded = False

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        index: int,
        rows: Sequence[Row],
        shape: tuple[int, int],
        make: Callable[[int], Forward],
        num_top: int,
        device: torch.device,
    ) -> None:
        self.index = index
        ids_BT = torch.zeros(shape, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids_BT[number, : len(row.ids) - 1] = torch.tensor(row.ids[:-1])
        self.new_BT = ids_BT.to(device)
        self.found_NW = torch.empty(0, 2 + 2 * num_top, dtype=torch.float64, device=device)
        first = min((row.start - 1 for row in rows), default=shape[1] - 1)
        self._make, self._num_logits, self._num_top = make, shape[1] - first, num_top
        positions = [
            (number, column - first, row.ids[column + 1])
            for number, row in enumerate(rows)
            for column in range(row.start - 1, len(row.ids) - 1)
        ]
        self._places_N3 = torch.tensor(positions, dtype=torch.int64, device=device).view(-1, 3)

    def make_decoder(self, _capacity: int, _padding: Sequence[int], _layers: Collection[int] | None) -> Forward:
        """The function that makes the object that calls the model."""
        return self._make(self._num_logits)

    def choose(self, logits_BKV: Tensor) -> Tensor:
        """Score the rows. Returns zeros, because no row has a next token."""
        at_once = max(1, _NORMALISED_NUMEL // logits_BKV.shape[-1])
        found = [self._found(logits_BKV, positions) for positions in self._places_N3.split(at_once)]
        self.found_NW = torch.cat(found)
        return torch.zeros(logits_BKV.shape[0], dtype=torch.int64, device=logits_BKV.device)

    def _found(self, logits_BKV: Tensor, places_N3: Tensor) -> Tensor:
        row_N, column_N, token_N = places_N3.unbind(dim=1)
        dtype = torch.promote_types(logits_BKV.dtype, torch.float32)
        logprobs_NV = logits_BKV[row_N, column_N].log_softmax(dim=-1, dtype=dtype)
        top = logprobs_NV.topk(self._num_top, dim=-1)
        own_N1 = logprobs_NV.gather(1, token_N[:, None])
        is_greedy_N1 = logprobs_NV.argmax(dim=-1, keepdim=True) == token_N[:, None]
        return torch.cat([each.double() for each in (own_N1, is_greedy_N1, top.indices, top.values)], dim=1)


def _num_scored(rows: Sequence[Row], batches: Sequence[Sequence[int]]) -> int:
    return sum(len(rows[row].ids) - rows[row].start for batch in batches for row in batch)


def _gather_scores(comm: Comm, found_NW: Tensor, counts: Sequence[int]) -> Tensor:
    """Join the results of all data-parallel ranks, with ``counts`` tokens each."""
    buffer = found_NW.new_zeros(comm.size, max(counts), found_NW.shape[1])
    buffer[comm.rank, : len(found_NW)] = found_NW
    comm.all_gather(buffer.view(-1), unit="scores").wait()
    return torch.cat([each[:count] for each, count in zip(buffer, counts, strict=True)])
