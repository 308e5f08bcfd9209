"""Continuous batching: before every step one rank decides which rows leave and which start, and all ranks follow.

There are as many batches of rows as the model has pipeline stages. Each stage computes a different batch at a time, so
that no stage waits. A model without a pipeline (one process, ``tp``) has one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from pydantic import TypeAdapter
from torch import nn

from shardwise.comm.base import Comm
from shardwise.comm.control import broadcast_json
from shardwise.generation.decode import generating_engine, inference
from shardwise.generation.decoder import decoder_of
from shardwise.generation.runner import Runner, Stages, WholeModel
from shardwise.generation.running_batch import Decision, RunningBatch
from shardwise.generation.score import BATCH_TOKENS, Score, Scorer
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import StateError

#: The first rank's decisions: ``decide(batch, tokens)`` gets the newest tokens of a batch, by the numbers of its rows,
#: and returns the batch's next action.
Decide = Callable[[int, Mapping[int, int]], Decision]
#: Called on the first rank with the scores of a decision's rows.
Report = Callable[[Sequence[Score]], object]

_DECISION = TypeAdapter(Decision)


class ContinuousBatcher:
    """Continues rows that start and end at different times.

    The model is our GPT, or a causal language model of transformers; plain, or one parallelized copy on all ranks.

    Attributes:
        vocab_size: Vocabulary size of the model.
        positions: Maximum number of tokens of a row, if limited.

    Raises:
        StateError: The model cannot generate, new rows cannot be added to its cache, or the ranks hold several copies
            of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._engine = model, generating_engine(model)
        if self._engine is not None and self._engine.comms.control.size > 1:
            raise StateError(
                f"the {self._engine.comms.world.size} ranks hold {self._engine.comms.control.size} copies of the model,"
                " and continuous batching feeds one.\n  Set tp and pp so that their product is the number of ranks."
            )
        decoding = decoder_of(model)
        self._make_decoder, self.vocab_size, self.positions = decoding.make, decoding.vocab_size, decoding.positions
        if decoding.is_shifted_by_padding:
            raise StateError(
                f"rows of a {type(model).__name__} cannot join others on their way: padding would shift their"
                " positions.\n  Use sw.generate with prompts of one length in each call."
            )
        self._make_decoder(1, (0,), None).check_joins()
        pipelined = pipelined_of(model)
        #: Number of batches, which take turns: 0, 1, ..., 0, 1, ...
        self.num_batches = 1 if pipelined is None else len(pipelined.layout()[2])

    def run(self, decide: Decide | None, report: Report | None = None) -> None:
        """Generate until ``decide`` ends it. The model is in eval mode during the call.

        On rank 0 ``decide`` returns each batch's next action, and ``report`` receives scores.

        Collective:
            A broadcast of small JSON for each turn of a batch, and the collectives of its forward; for scored rows
            those of :meth:`Scorer.score`. All ranks must call.
        """
        world = None if self._engine is None else self._engine.comms.world
        device = next(self._model.parameters()).device if world is None else world.device
        with inference(self._model, self._engine, "continuous batching"):
            self._run(decide, report, None if world is None or world.size == 1 else world, device)

    def _run(self, decide: Decide | None, report: Report | None, world: Comm | None, device: torch.device) -> None:
        pipelined = pipelined_of(self._model)
        runner: Runner = WholeModel(self._model) if pipelined is None else Stages(self._model, (), *pipelined.layout())
        batches = [
            RunningBatch(index, self._make_decoder, runner, device, self.positions) for index in range(self.num_batches)
        ]
        stages = sorted(runner.stages, reverse=True)
        turn = 0
        while True:
            batch = batches[turn % len(batches)]
            # Stage s works on the batch that started s turns ago. The last stage's tokens arrive one turn later.
            work = [(batches[(turn - stage) % len(batches)], stage) for stage in (runner.num_stages, *stages)]
            runner.exchange([(other, stage) for other, stage in work if stage and other.has_pending_forward])
            decision = _broadcast_decision(decide, world, batch.index, batch.take())
            if decision.is_last:
                break
            if decision.to_score:
                rows, num_top = zip(*decision.to_score, strict=True)
                scores = Scorer(self._model, self._engine, BATCH_TOKENS, max(num_top)).score(rows)
                if report is not None:
                    report(scores)
            batch.begin(decision)
            for other, stage in work[1:]:
                if other.has_pending_forward:
                    runner.compute(other, stage)
            turn += 1
        runner.finish()


def _broadcast_decision(decide: Decide | None, world: Comm | None, batch: int, tokens: Mapping[int, int]) -> Decision:
    """Return the first rank's decision, on every rank."""
    if world is None:
        assert decide is not None
        return decide(batch, tokens)
    is_first = world.rank == 0
    assert decide is not None or not is_first
    decision = decide(batch, tokens) if decide is not None and is_first else None
    message = broadcast_json(world, None if decision is None else _DECISION.dump_python(decision, mode="json"))
    return _DECISION.validate_python(message) if decision is None else decision
