"""What one rank of a simulated pipeline does, and when: to be compared with what a real one did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.sim.streams import COMPUTE, Span, Task, Timeline
from shardwise.spec.schedule.actions import Action, Kind, Schedule
from shardwise.spec.traffic.data import Collective
from tests.parallel.pipeline.messages import CrossingBytes, action_messages


def rank_timeline(
    step: SimulatedPipeline,
    rank: int,
    schedule: Schedule,
    *,
    crossing: Sequence[Sequence[CrossingBytes]] = (),
    window: Sequence[Collective] = (),
    exchanges: Callable[[Action], Sequence[Collective]] = lambda _action: (),
) -> Timeline:
    """What one rank of a simulated pipeline does, and when.

    Receives are posted one computation early, as over Gloo. Messages begin when they are issued and end when they have
    arrived. Exchanges inside a computation begin with it;
    gathers with the first forward, and reductions after the last backward: when exactly ``stage_seconds`` knows.

    Args:
        step: The simulated step.
        rank: Coordinate on ``pp``.
        schedule: The same schedule with messages.
        crossing: For each stage but the last, the tensors that it sends to the next.
        window: What the rank sends on the data-parallel axes (``spec.traffic.data.window_trace``).
        exchanges: The collectives inside a computation.
    """
    unit = float(step.timing.unit)
    times = {
        (span.action.kind, span.action.stage, span.action.microbatch): (span.start * unit, span.end * unit)
        for spans in step.timing.spans
        for span in spans
    }
    spans: list[Span] = []
    now = step.timing.spans[rank][0].start * unit

    def put(stream: str, begin: float, end: float, label: str, collective: Collective | None = None) -> None:
        category = "" if stream == COMPUTE else stream
        spans.append(Span(begin, end, Task(stream, end - begin, (), label, category, collective)))

    def put_all(collectives: Iterable[Collective]) -> None:
        for collective in collectives:
            stream = {"all_gather": "gather"}.get(collective.kind, "reduce")
            put(stream, now, now, collective.unit, collective)

    put_all(collective for collective in window if collective.kind == "all_gather")
    for action in schedule.issued(rank, is_early=True):
        if action.kind.is_message:
            arrives = max(now, _made_at(step, action, times) + step.stages[_sender(action)].message_s)
            for collective in action_messages(action, crossing) if crossing else ():
                put("pp", now, arrives, f"{action.kind} {action.microbatch}", collective)
            continue
        begin, now = times[action.kind, action.stage, action.microbatch]
        put(COMPUTE, begin, now, f"{action.kind} {action.microbatch}, stage {action.stage}")
        for collective in exchanges(action):
            put(collective.axis, begin, begin, collective.unit, collective)
    put_all(collective for collective in window if collective.kind != "all_gather")
    return Timeline(tuple(spans))


def _sender(action: Action) -> int:
    """The stage that made what a message carries."""
    if action.kind.is_send:
        return action.stage
    return action.stage - 1 if action.kind is Kind.RECEIVE_ACTIVATION else action.stage + 1


def _made_at(
    step: SimulatedPipeline, action: Action, times: Mapping[tuple[Kind, int, int], tuple[float, float]]
) -> float:
    if action.kind in {Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION}:
        kind = Kind.FORWARD
    else:
        kind = Kind.BACKWARD_INPUT if step.schedule.is_split else Kind.BACKWARD
    return times[kind, _sender(action), action.microbatch][1]
