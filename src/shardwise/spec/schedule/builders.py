"""``PipelinePolicy``, which chooses a schedule, and the builders of schedules."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.spec.errors import PlanError
from shardwise.spec.policies import field_names, from_fields, is_positive
from shardwise.spec.schedule.actions import Action, Kind, Orders, Schedule, folded_ranks, looped_ranks
from shardwise.spec.schedule.simulate import Durations, simulate

#: Names of schedules.
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """The schedule of a pipeline, and its stages.

    Attributes:
        schedule: ``"gpipe"``: all forwards, then all backwards. ``"1f1b"``: the same bubble, and activations of at most
            ``pp`` microbatches. ``"interleaved-1f1b"``: several stages per rank, a smaller bubble for more messages.
            ``"zb-h1"``: 1F1B with backward in two parts; if forward and both parts need the same time, a third of
            1F1B's bubble. ``"zb-v"``: two stages per rank in the shape of a V; under the same condition no bubble
            with ``2 pp - 1`` microbatches or more.
        num_microbatches: Number of microbatches of a step; ``None``: the number of ranks in a pipeline.
            ``interleaved-1f1b`` accepts only multiples of that number.
        num_virtual_stages: Stages of each rank; ``None``: 2 for ``interleaved-1f1b`` (which accepts more) and
            ``zb-v``, 1 for the others.
        first_of_stage: Name of the first module of each stage except the first: a block, or a module outside of the
            blocks, such as a head. Empty: stages are balanced by the matrix products of a token.

    Raises:
        PlanError: A value is out of range, or does not fit the schedule.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None
    first_of_stage: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"schedule={self.schedule!r}: there is no such pipeline schedule.\n  Use one of {', '.join(SCHEDULES)}."
            )
        for name in ("num_microbatches", "num_virtual_stages"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        _ = self.virtual_stages
        object.__setattr__(self, "first_of_stage", tuple(self.first_of_stage))

    @property
    def virtual_stages(self) -> int:
        """Stages of each rank."""
        default = 2 if self.schedule in {"interleaved-1f1b", "zb-v"} else 1
        count = default if self.num_virtual_stages is None else self.num_virtual_stages
        if self.schedule == "interleaved-1f1b":
            if count < 2:
                raise PlanError(
                    f"schedule='interleaved-1f1b' interleaves the stages of a rank, but num_virtual_stages={count}.\n"
                    "  Set num_virtual_stages=2 or more, or use schedule='1f1b'."
                )
        elif count != default:
            has = "one stage" if default == 1 else "two stages"
            raise PlanError(
                f"schedule={self.schedule!r} has {has} per rank, but num_virtual_stages={count}.\n"
                "  Leave num_virtual_stages out, or use schedule='interleaved-1f1b'."
            )
        return count

    @property
    def is_split(self) -> bool:
        """Whether backward has two parts: gradients of inputs, and later gradients of weights."""
        return self.schedule in {"zb-h1", "zb-v"}

    def microbatches(self, pp: int) -> int:
        """Microbatches of a step in a pipeline of ``pp`` ranks."""
        return pp if self.num_microbatches is None else self.num_microbatches

    def check(self, pp: int) -> None:
        """Refuse numbers of microbatches that the schedule cannot run on ``pp`` ranks.

        Raises:
            PlanError: The number does not fit.
        """
        _check_positive("pp", pp)
        m = self.microbatches(pp)
        if self.schedule == "interleaved-1f1b" and m % pp:
            below = m // pp * pp
            use = f"{below} or {below + pp}" if below else f"{pp}"
            raise PlanError(
                f"schedule='interleaved-1f1b' takes microbatches in groups of pp={pp}, but num_microbatches={m} ="
                f" {m // pp} x {pp} + {m % pp}.\n"
                f"  Set num_microbatches={use}, or use schedule='1f1b'."
            )

    def build(self, pp: int) -> Schedule:
        """The schedule for a pipeline of ``pp`` ranks.

        Raises:
            PlanError: The number of microbatches does not fit the schedule and ``pp``.
        """
        _check_positive("pp", pp)
        return build(self.schedule, pp, self.microbatches(pp), self.virtual_stages)


def _check_positive(name: str, value: object) -> None:
    if not is_positive(value):
        raise PlanError(f"{name}={value!r}: expected a whole number of at least 1.\n  Set {name}=1 or more.")


def build(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int | None = None) -> Schedule:
    """The actions of every rank in one step of one of ``SCHEDULES``, on ``pp`` ranks.

    Raises:
        PlanError: The numbers do not fit the schedule.
    """
    plain = computations(schedule, pp, num_microbatches, num_virtual_stages)
    return with_messages(schedule, plain.actions, num_microbatches, plain.ranks)


@functools.lru_cache(maxsize=32)
def computations(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int | None = None) -> Schedule:
    """The same as :func:`build` without messages, which simulation does not need."""
    policy = PipelinePolicy(schedule, num_microbatches, num_virtual_stages)
    policy.check(pp)
    virtual = policy.virtual_stages
    ranks = looped_ranks(pp, virtual)
    if schedule == "zb-v":
        orders, ranks = zb_v(pp, num_microbatches), folded_ranks(pp)
    elif schedule == "interleaved-1f1b":
        orders = interleaved(pp, num_microbatches, virtual)
    else:
        orders = _ONE_STAGE_PER_RANK[schedule](pp, num_microbatches)
    return Schedule(schedule, tuple(tuple(order) for order in orders), num_microbatches, ranks)


def pipeline_policy(value: object) -> PipelinePolicy:
    """Convert ``None``, the name of a schedule, a policy, or a mapping of its fields to a policy.

    Raises:
        PlanError: The value cannot be converted.
    """
    if value is None:
        return PipelinePolicy()
    if isinstance(value, PipelinePolicy):
        return value
    if isinstance(value, str):
        return PipelinePolicy(schedule=value)
    if not isinstance(value, Mapping):
        raise PlanError(
            f"pipeline={value!r}: expected the name of a schedule, or a PipelinePolicy (in a file a mapping of its"
            f" fields).\n  Its fields are: {', '.join(field_names(PipelinePolicy))}."
        )
    return from_fields(PipelinePolicy, value, "pipeline")


def with_messages(name: str, orders: Orders, num_microbatches: int, ranks: Sequence[int]) -> Schedule:
    """The schedule that computes in these orders, with a message wherever the next stage is on another rank.

    All computations and messages are sorted into one order over all ranks. A computation's key is its start time; a
    message's key is the time at which its content is computed. These times assume that every part of a computation
    needs one unit of time and a message none. Send and receive of a message have the same key. Ranks that follow the
    order never deadlock, even if sends block: both ranks of the first unfinished action are free.
    """
    plain = Schedule(name, tuple(tuple(order) for order in orders), num_microbatches, tuple(ranks))
    timing = simulate(plain, Durations())
    placed: list[tuple[int, int, int, int, int, Action]] = []
    for rank, order in enumerate(timing.spans):
        for span in order:
            action = span.action
            placed.append((span.start, 1, 0, action.stage, rank, action))
            for owner, end in _message(action, plain):
                kind_first = 0 if action.kind is Kind.FORWARD else 1
                placed.append((span.end, 0, kind_first, action.stage, owner, end))
    actions: list[list[Action]] = [[] for _ in orders]
    for *_, owner, action in sorted(placed, key=lambda item: item[:4]):
        actions[owner].append(action)
    return Schedule(name, tuple(tuple(order) for order in actions), num_microbatches, tuple(ranks))


def _message(made_by: Action, schedule: Schedule) -> list[tuple[int, Action]]:
    """The send and the receive that follow a computation, each with its rank; empty if nothing is sent."""
    stage, j = made_by.stage, made_by.microbatch
    if made_by.kind is Kind.FORWARD:
        send, receive, other = Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, stage + 1
    elif made_by.kind.gives_input_gradient:
        send, receive, other = Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, stage - 1
    else:
        return []
    if not 0 <= other < schedule.num_stages or schedule.ranks[other] == schedule.ranks[stage]:
        return []
    source, target = schedule.ranks[stage], schedule.ranks[other]
    return [(source, Action(send, stage, j, target)), (target, Action(receive, other, j, source))]


def gpipe(pp: int, num_microbatches: int) -> list[list[Action]]:
    """All forwards, then all backwards (Huang et al. 2018, arXiv 1811.06965).

    Backwards process the microbatches in the order of forward, so that gradients are added up in the same order as by
    one process that accumulates.
    """
    return [
        [Action(kind, rank, j) for kind in (Kind.FORWARD, Kind.BACKWARD) for j in range(num_microbatches)]
        for rank in range(pp)
    ]


def one_forward_one_backward(pp: int, num_microbatches: int) -> list[list[Action]]:
    """1F1B: one forward for each later stage, then forwards and backwards in turn, then the remaining backwards.

    Narayanan et al. 2021, arXiv 2104.04473 ("PipeDream-Flush"). A rank stores the activations of at most ``pp - rank``
    microbatches; with GPipe it stores those of all.
    """
    orders = []
    for rank in range(pp):
        ahead = min(pp - rank - 1, num_microbatches)
        order = [Action(Kind.FORWARD, rank, j) for j in range(ahead)]
        for j in range(num_microbatches - ahead):
            order += [Action(Kind.FORWARD, rank, j + ahead), Action(Kind.BACKWARD, rank, j)]
        order += [Action(Kind.BACKWARD, rank, j) for j in range(num_microbatches - ahead, num_microbatches)]
        orders.append(order)
    return orders


def interleaved(pp: int, num_microbatches: int, num_virtual_stages: int) -> list[list[Action]]:
    """Interleaved 1F1B: rank ``r`` has stages ``r``, ``pp + r``, ``2 pp + r``, ...

    Narayanan et al. 2021, arXiv 2104.04473. Microbatches are processed in groups of ``pp``: a full group in the first
    stage of a rank, then in its second, and so on; backward processes a rank's stages in reverse. With ``v`` stages per
    rank the bubble is that of 1F1B divided by ``v``, and there are ``v`` times as many messages.
    """
    group = pp * num_virtual_stages
    total = num_microbatches * num_virtual_stages

    def location(turn: int, rank: int, *, is_backward: bool) -> tuple[int, int]:
        """Stage and microbatch of a rank's ``turn``-th forward or backward."""
        groups, within = divmod(turn, group)
        chunk, microbatch = divmod(within, pp)
        if is_backward:
            chunk = num_virtual_stages - 1 - chunk
        return chunk * pp + rank, groups * pp + microbatch

    orders = []
    for rank in range(pp):
        ahead = min(forwards_ahead(pp, rank, num_virtual_stages), total)
        forwards = [Action(Kind.FORWARD, *location(turn, rank, is_backward=False)) for turn in range(total)]
        backwards = [Action(Kind.BACKWARD, *location(turn, rank, is_backward=True)) for turn in range(total)]
        order = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            order += [forward, backward]
        orders.append(order + backwards[total - ahead :])
    return orders


def forwards_ahead(pp: int, rank: int, num_virtual_stages: int) -> int:
    """Forwards of a rank before it alternates forwards and backwards.

    These are a group in each of the rank's stages except the last, and two for each later rank, until the rank receives
    its first gradient.
    """
    return 2 * (pp - rank - 1) + (num_virtual_stages - 1) * pp


F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741  the field's letters


def zb_h1(pp: int, num_microbatches: int) -> list[list[Action]]:
    """ZB-H1: 1F1B in which rank ``r`` computes the weights' gradients ``r`` microbatches late.

    The previous rank receives input gradients sooner, and delayed W fill the idle time at the end of 1F1B. No rank
    stores more than the first rank of 1F1B: ``pp - r`` microbatches between F and I, and ``r`` between I and W.
    """
    orders = []
    for rank in range(pp):
        ahead = min(pp - rank - 1, num_microbatches)
        order = [Action(F, rank, j) for j in range(ahead)]
        for j in range(num_microbatches):
            if ahead + j < num_microbatches:
                order.append(Action(F, rank, ahead + j))
            order.append(Action(I, rank, j))
            if j >= rank:
                order.append(Action(W, rank, j - rank))
        order += [Action(W, rank, j) for j in range(max(num_microbatches - rank, 0), num_microbatches)]
        orders.append(order)
    return orders


def zb_v(pp: int, num_microbatches: int) -> list[list[Action]]:
    """ZB-V: two stages per rank, the model folded into a V, so that rank 0 has the first and the last stage.

    Each row below is one phase of rank ``r``. Lower case letters are its first stage (number ``r``), upper case letters
    its second (``2 pp - 1 - r``). ``n x`` repeats the phase n times:

    ===================  =================================================================================
    f, 2(p - r) - 1 x    until the first microbatch reaches the second stage
    F f, r x             forwards of both stages
    F I W, p - r x       backward has begun in the last stage, on rank 0, but has not reached stage ``r``
    f i w F I W          all six in turn; later without f, when every microbatch has begun
    i I, r x             forwards are over: input gradients first, because other ranks wait for them
    i w, p - r x         backwards of the first stage
    W, w, r x each       delayed gradients of weights
    ===================  =================================================================================

    With fewer than ``2 pp - 1`` microbatches the order is that of ``2 pp - 1``, without the missing ones.
    """
    room = max(num_microbatches, 2 * pp - 1)
    orders = []
    for rank in range(pp):
        first, second = rank, 2 * pp - 1 - rank
        back = [(F, second), (I, second), (W, second)]
        turns = [(F, first)] * (2 * (pp - rank) - 1)
        turns += [(F, second), (F, first)] * rank
        turns += back * (pp - rank)
        turns += [(F, first), (I, first), (W, first), *back] * (room - 2 * pp + 1 + rank)
        turns += [(I, first), (W, first), *back] * (pp - 1 - rank)
        turns += [(I, first), (I, second)] * rank
        turns += [(I, first), (W, first)] * (pp - rank)
        turns += [(W, second)] * rank + [(W, first)] * rank
        done: Counter[tuple[Kind, int]] = Counter()
        order = []
        for kind, stage in turns:
            if done[kind, stage] < num_microbatches:
                order.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1
        orders.append(order)
    return orders


@functools.lru_cache(maxsize=32)
def forward_only(ranks: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Forwards without backwards, for evaluation: microbatch ``j`` reaches stage ``s`` at time ``j + s``."""
    orders = [
        [
            Action(Kind.FORWARD, stage, j)
            for _, stage, j in sorted(
                (stage + j, stage, j)
                for stage, owner in enumerate(ranks)
                for j in range(num_microbatches)
                if owner == rank
            )
        ]
        for rank in range(max(ranks) + 1)
    ]
    return with_messages("forward-only", orders, num_microbatches, ranks)


_ONE_STAGE_PER_RANK = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zb-h1": zb_h1}
