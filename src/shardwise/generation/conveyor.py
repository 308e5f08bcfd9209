"""Endless generation: before every step one rank decides which rows leave and which start, and all ranks follow.

There are as many lanes of rows as the model has pipeline stages. Each stage computes a different lane at a time, so
that no stage waits. A model without a pipeline (one process, ``tp``) has one lane.
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
from shardwise.generation.lane import Lane, Order
from shardwise.generation.runner import Runner, Stages, WholeModel
from shardwise.generation.score import BATCH_TOKENS, Score, Scorer
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import StateError

#: The first rank's decisions: ``decide(lane, tokens)`` gets the newest tokens of a lane, by the numbers of its rows,
#: and returns the lane's next action.
Decide = Callable[[int, Mapping[int, int]], Order]
#: Called on the first rank with the scores of an order's rows.
Report = Callable[[Sequence[Score]], object]

_ORDER = TypeAdapter(Order)


class Conveyor:
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
                " and a conveyor feeds one.\n  Set tp and pp so that their product is the number of ranks."
            )
        decodes = decoder_of(model)
        self._make_decoder, self.vocab_size, self.positions = decodes.make, decodes.vocab_size, decodes.positions
        if decodes.is_shifted_by_padding:
            raise StateError(
                f"rows of a {type(model).__name__} cannot join others on their way: padding would shift their"
                " positions.\n  Use sw.generate with prompts of one length in each call."
            )
        self._make_decoder(1, (0,), None).check_joins()
        pipelined = pipelined_of(model)
        #: Number of lanes, which take turns: 0, 1, ..., 0, 1, ...
        self.num_lanes = 1 if pipelined is None else len(pipelined.around()[2])

    def run(self, decide: Decide | None, report: Report | None = None) -> None:
        """Generate until ``decide`` orders the end. The model is in eval mode during the call.

        On rank 0 ``decide`` orders the lanes' actions, and ``report`` receives scores.

        Collective:
            A broadcast of small JSON for each turn of a lane, and the collectives of its forward; for scored rows those
            of :meth:`Scorer.whole`. All ranks must call.
        """
        world = None if self._engine is None else self._engine.comms.world
        device = next(self._model.parameters()).device if world is None else world.device
        with inference(self._model, self._engine, "a conveyor"):
            self._run(decide, report, None if world is None or world.size == 1 else world, device)

    def _run(self, decide: Decide | None, report: Report | None, world: Comm | None, device: torch.device) -> None:
        pipelined = pipelined_of(self._model)
        runner: Runner = WholeModel(self._model) if pipelined is None else Stages(self._model, (), *pipelined.around())
        lanes = [Lane(index, self._make_decoder, runner, device, self.positions) for index in range(self.num_lanes)]
        held = sorted(runner.stages, reverse=True)
        time = 0
        while True:
            lane = lanes[time % len(lanes)]
            # Stage s works on the lane that started s turns ago. The last stage's tokens arrive one turn later.
            at = [(lanes[(time - stage) % len(lanes)], stage) for stage in (runner.num_stages, *held)]
            runner.exchange([(other, stage) for other, stage in at if stage and other.is_under_way])
            order = _ordered(decide, world, lane.index, lane.take())
            if order.is_last:
                break
            if order.scored:
                scorer = Scorer(self._model, self._engine, BATCH_TOKENS, max(num_top for _, num_top in order.scored))
                scores = scorer.whole([row for row, _ in order.scored])
                if report is not None:
                    report(scores)
            lane.begin(order)
            for other, stage in at[1:]:
                if other.is_under_way:
                    runner.compute(other, stage)
            time += 1
        runner.finish()


def _ordered(decide: Decide | None, world: Comm | None, lane: int, tokens: Mapping[int, int]) -> Order:
    """Return the first rank's order, on every rank."""
    if world is None:
        assert decide is not None
        return decide(lane, tokens)
    is_first = world.rank == 0
    assert decide is not None or not is_first
    order = decide(lane, tokens) if decide is not None and is_first else None
    told = broadcast_json(world, None if order is None else _ORDER.dump_python(order, mode="json"))
    return _ORDER.validate_python(told) if order is None else order
