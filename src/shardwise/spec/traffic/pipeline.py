"""The messages of one step of a pipeline; and what a step of our GPT sends on a mesh of several axes, by axis.

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
from typing import Any, NamedTuple

from shardwise.spec.facts import UnitFacts
from shardwise.spec.memory.footprint import Replicas
from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.traffic.data import Collective, all_reduced_numel, window_trace
from shardwise.spec.traffic.tensor import TensorStep


@dataclass(frozen=True)
class CrossingBytes:
    """A tensor of one microbatch that is sent from a stage to the next.

    Attributes:
        num_bytes: Size of the tensor.
        has_gradient: Whether its gradient, of the same size, is sent back.
    """

    num_bytes: int
    has_gradient: bool = True


@dataclass(frozen=True)
class Copies:
    """A parameter that several stages hold.

    Attributes:
        name: Name of the parameter.
        ranks: Pipeline ranks that hold it.
        num_bytes: Bytes of its whole gradient, in the dtype in which gradients are added up.
    """

    name: str
    ranks: Sequence[int]
    num_bytes: int


class Traffic(NamedTuple):
    """Messages of one rank in one step, and their bytes."""

    sent: int
    sent_bytes: int
    received: int
    received_bytes: int


def messages(
    schedule: Schedule,
    rank: int,
    crossing: Sequence[Sequence[CrossingBytes]],
    copies: Sequence[Copies] = (),
    *,
    is_early: bool = True,
) -> list[Collective]:
    """The messages that ``rank`` sends and receives in one step.

    In a chain of blocks one tensor of ``batch * sequence * hidden`` elements crosses every boundary: a rank with one
    stage between two others then issues four messages for each microbatch, two of them sent. The headers that announce
    shapes before the first step with a new kind of batch are not included.

    Args:
        schedule: The step's schedule.
        rank: Coordinate on ``pp``.
        crossing: For each stage but the last, the tensors that it sends to the next.
        copies: Parameters that several stages hold: once a step each rank sends its gradient of them to the others.
        is_early: Whether receives are posted one computation early, as over Gloo.
    """
    found = [
        message
        for action in schedule.issued(rank, is_early=is_early)
        if action.kind.is_message
        for message in action_messages(action, crossing)
    ]
    return found + copy_messages(copies, rank)


def action_messages(action: Action, crossing: Sequence[Sequence[CrossingBytes]]) -> list[Collective]:
    """One end of the messages of an action: one for each tensor that crosses the boundary; arguments as above."""
    is_gradient = action.kind in {Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT}
    # A boundary has the number of the stage before it: of the sender's for activations, of the receiver's for
    # gradients.
    boundary = action.stage - (action.kind in {Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT})
    unit = f"{'gradient' if is_gradient else 'activation'} of stage {boundary}"
    kind = "send" if action.kind.is_send else "receive"
    return [
        Collective(kind, unit, tensor.num_bytes if action.kind.is_send else 0, "pp")
        for tensor in crossing[boundary]
        if tensor.has_gradient or not is_gradient
    ]


def copy_messages(copies: Sequence[Copies], rank: int) -> list[Collective]:
    """What ``rank`` sends and receives of the gradients of parameters that several stages hold."""
    found = []
    for held in copies:
        others = [peer for peer in held.ranks if peer != rank]
        if rank in held.ranks:
            found += [Collective("send", f"copies of {held.name}", held.num_bytes, "pp") for _ in others]
            found += [Collective("receive", f"copies of {held.name}", 0, "pp") for _ in others]
    return found


def step_traffic(
    ranks: Sequence[int], num_microbatches: int, rank: int, crossings: Sequence[Sequence[CrossingBytes]]
) -> Traffic:
    """Number and bytes of the messages between stages, in closed form.

    They depend on which rank has which stage, not on the order of the computations. For every microbatch and every
    stage whose next stage is on another rank, the stage's rank sends the tensors and receives their gradients, and the
    next stage's rank does the opposite. With one tensor of ``b`` bytes from stage to stage, ``p`` ranks with ``v``
    stages each and ``m`` microbatches, both directions together:

    ====================================  ====================  =======================================
    schedule                              messages of a step    sent by a rank
    ====================================  ====================  =======================================
    ``gpipe``, ``1f1b``, ``zb-h1``        2m (p - 1)            m at either end, 2m between
    ``interleaved-1f1b``                  2m (vp - 1)           m (2v - 1) at either end, 2mv between
    ``zb-v``                              4m (p - 1)            2m at either end, 4m between
    ====================================  ====================  =======================================

    of ``b`` bytes each. With one rank there are none.

    Args:
        ranks: The rank of each stage (``Schedule.ranks``).
        num_microbatches: Microbatches of the step.
        rank: The rank whose messages are counted.
        crossings: For each stage but the last, the tensors that it sends to the next.
    """
    sent = sent_bytes = received = received_bytes = 0
    for stage, passed in enumerate(crossings):
        source, target = ranks[stage], ranks[stage + 1]
        if source == target or rank not in {source, target}:
            continue
        there = [crossing.num_bytes for crossing in passed]
        back = [crossing.num_bytes for crossing in passed if crossing.has_gradient]
        out, into = (there, back) if rank == source else (back, there)
        sent, sent_bytes = sent + len(out), sent_bytes + sum(out)
        received, received_bytes = received + len(into), received_bytes + sum(into)
    m = num_microbatches
    return Traffic(m * sent, m * sent_bytes, m * received, m * received_bytes)


_LOSS_BYTES = 8


@dataclass(frozen=True)
class ProductStep:
    """A training step of our GPT in a pipeline.

    Attributes:
        schedule: The step's schedule.
        rank: Coordinate on ``pp``.
        stages: By stage, names of the modules in it (``spec.chain.gpt_stages``).
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
        found.append(Collective("all_reduce", "loss", all_reduced_numel(2, pp, pp_rank) * _LOSS_BYTES, "pp"))
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
