"""What one step of our GPT sends and receives on a mesh of pipeline, data-parallel and tensor-parallel ranks, by axis.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.spec.memory.footprint import Replicas, UnitShape, own_part
from shardwise.spec.schedule import Kind, Schedule
from shardwise.spec.traffic.data import Collective, window_trace
from shardwise.spec.traffic.pipeline import Copies, CrossingBytes, messages
from shardwise.spec.traffic.tensor import TensorStep

_LOSS_BYTES = 8


@dataclass(frozen=True)
class ProductStep:
    """A training step in a pipeline.

    Attributes:
        schedule: Of the step.
        rank: Coordinate on ``pp``.
        stages: The elements of every stage (``spec.stages.gpt_stages``).
        activation_bytes: Of what one stage hands to the next, for one microbatch.
        units: Of this rank, by number.
        shard_rank: Coordinate on ``dp_shard``.
        replicas: The groups over which sums go on, with ``dp_replicate``.
        tensor: One microbatch on ``tp``; ``None``: there is one rank.
        copies: Parameters that several stages hold.
    """

    schedule: Schedule
    rank: int
    stages: Sequence[Sequence[str]]
    activation_bytes: int
    units: Mapping[int, UnitShape]
    shard_rank: int = 0
    replicas: Replicas | None = None
    tensor: TensorStep | None = None
    copies: Sequence[Copies] = ()

    def by_axis(self) -> dict[str, list[Collective]]:
        """What this rank issues on each axis; of axes with one rank nothing."""
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
        """Weights' gradients, where they come later, need no other rank of ``tp``."""
        trace: list[Collective] = []
        for action in self.schedule.actions[self.rank] if self.tensor is not None else ():
            assert self.tensor is not None
            if action.kind is Kind.FORWARD:
                trace += self.tensor.forward(self.stages[action.stage])
            elif action.kind.gives_input_gradient:
                trace += self.tensor.backward(self.stages[action.stage])
        return trace


def loss_trace(control: str, rank: int, size: int, *, pp_rank: int = 0, pp: int = 1) -> list[Collective]:
    """What ``sw.train_step`` adds for the mean loss to be known to all; in a pipeline with its dtype.

    Args:
        control: Axis of all data-parallel ranks: ``dp_shard``, with replicas ``dp``.
        rank: Coordinate on it.
        size: Its ranks.
        pp_rank: Coordinate on ``pp``.
        pp: Its ranks.
    """
    found = [Collective("all_reduce", "loss", _all_reduced(1, size, rank) * _LOSS_BYTES, control)]
    if pp > 1:
        found.append(Collective("all_reduce", "loss", _all_reduced(2, pp, pp_rank) * _LOSS_BYTES, "pp"))
    return found


def agreement_trace(pp: int) -> list[Collective]:
    """What the ranks of a pipeline tell each other before a step: two integers each."""
    return [Collective("all_gather", "step", (pp - 1) * 2 * 8, "pp")] if pp > 1 else []


def _all_reduced(numel: int, size: int, rank: int) -> int:
    own = own_part(numel, size, rank)
    return numel - own + own * (size - 1)


def totals(trace: Iterable[Any]) -> dict[str, tuple[int, int]]:
    """Number of collectives and bytes sent, by kind; of events that were recorded too."""
    found: dict[str, tuple[int, int]] = {}
    for collective in trace:
        count, sent = found.get(collective.kind, (0, 0))
        found[collective.kind] = count + 1, sent + collective.sent_bytes
    return found
