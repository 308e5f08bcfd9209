"""What a step of our GPT sends on a mesh of several axes, by axis: what the tests of the product expect.

The order on each axis is that in which a rank issues. Between axes there is none to keep: each has its own groups.

With ``m`` microbatches a rank issues in a step::

    axis          what                                                             times
    dp_shard      the gather of every unit of its stages (zero3: of parameters,    1
                  zero1, zero2: of what the optimizer has updated)
    tp            a stage's sums: four for each block, one for the embedding,      m for each of its stages
                  two collectives for the head
    pp            an activation to the next stage, a gradient to the one before,   m for each of its stages
                  and as many the other way
    pp            the gradient of a parameter that other stages hold, to each      1
    dp_shard      the sum of every unit's gradients, in the last backward of its   1
                  stage; of the root's at the end
    dp_replicate  the sum of these over the groups                                 1

Without a pipeline the engine accumulates as its strategy does, which ``spec.traffic.data.step_trace`` predicts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.spec.memory.footprint import Replicas
from shardwise.spec.module_chain import balance
from shardwise.spec.schedule.actions import Kind, Schedule
from shardwise.spec.traffic.data import Collective, all_reduced_numel, window_trace
from shardwise.spec.unit_facts import UnitFacts
from tests.parallel.pipeline.messages import Copies, CrossingBytes, messages
from tests.parallel.tensor.step import TensorStep, gpt_elements

_LOSS_BYTES = 8


def gpt_stages(num_layers: int, block_cost: int, head_cost: int, num_stages: int) -> list[list[str]]:
    """The elements of each balanced stage of our GPT with an untied output projection, by elements of matrices."""
    elements = gpt_elements(num_layers)
    starts = balance([0, 0, *[block_cost] * num_layers, 0, head_cost], num_stages)
    return [elements[start:stop] for start, stop in itertools.pairwise([*starts, len(elements)])]


@dataclass(frozen=True)
class ProductStep:
    """A training step of our GPT in a pipeline.

    Attributes:
        schedule: The step's schedule.
        rank: Coordinate on ``pp``.
        stages: By stage, names of the modules in it (:func:`gpt_stages`).
        activation_bytes: Bytes that one stage sends to the next for one microbatch.
        units: This rank's units, by number.
        shard_rank: Coordinate on ``dp_shard``.
        replicas: Coordinate on ``dp_replicate``; ``None``: it has one rank.
        tensor: One microbatch on ``tp``; ``None``: it has one rank.
        copies: Parameters that several stages hold.
    """

    schedule: Schedule
    rank: int
    stages: Sequence[Sequence[str]]
    activation_bytes: int
    units: Mapping[int, UnitFacts]
    shard_rank: int = 0
    replicas: Replicas | None = None
    tensor: TensorStep | None = None
    copies: Sequence[Copies] = ()

    def by_axis(self) -> dict[str, list[Collective]]:
        """The collectives of this rank by axis; axes with one rank are left out."""
        crossing = [[CrossingBytes(self.activation_bytes)]] * (len(self.stages) - 1)
        found = [
            *window_trace(self.units, rank=self.shard_rank, replicas=self.replicas),
            *self._tensor(),
            *messages(self.schedule, self.rank, crossing, self.copies),
        ]
        axes: dict[str, list[Collective]] = {}
        for collective in found:
            axes.setdefault(collective.axis, []).append(collective)
        return axes

    def _tensor(self) -> list[Collective]:
        """Collectives on ``tp``; computing the gradients of weights, where that is an action of its own, has none."""
        trace: list[Collective] = []
        for action in self.schedule.actions[self.rank] if self.tensor is not None else ():
            assert self.tensor is not None
            if action.kind is Kind.FORWARD:
                trace += self.tensor.forward(self.stages[action.stage])
            elif action.kind.gives_input_gradient:
                trace += self.tensor.backward(self.stages[action.stage])
        return trace


def loss_trace(control: str, rank: int, size: int, *, pp_rank: int = 0, pp: int = 1) -> list[Collective]:
    """The all-reduces by which ``sw.train_step`` tells every rank the mean loss (and in a pipeline its dtype).

    Args:
        control: Axis of all data-parallel ranks: ``dp_shard``, or with replicas ``dp``.
        rank: Coordinate on ``control``.
        size: Ranks of ``control``.
        pp_rank: Coordinate on ``pp``.
        pp: Ranks of ``pp``.
    """
    found = [Collective("all_reduce", "loss", all_reduced_numel(1, size, rank) * _LOSS_BYTES, control)]
    if pp > 1:
        found += 2 * [Collective("all_reduce", "loss", all_reduced_numel(1, pp, pp_rank) * _LOSS_BYTES, "pp")]
    return found


def agreement_trace(pp: int) -> list[Collective]:
    """The all-gather by which the ranks of a pipeline compare two integers each before a step."""
    return [Collective("all_gather", "step", (pp - 1) * 2 * 8, "pp")] if pp > 1 else []


def totals(trace: Iterable[Any]) -> dict[str, tuple[int, int]]:
    """Number of collectives and bytes sent by kind, of predicted collectives or recorded events."""
    found: dict[str, tuple[int, int]] = {}
    for collective in trace:
        count, sent = found.get(collective.kind, (0, 0))
        found[collective.kind] = count + 1, sent + collective.sent_bytes
    return found
