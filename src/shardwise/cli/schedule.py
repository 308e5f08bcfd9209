"""``schedule``: a pipeline's schedule drawn as text."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import show
from shardwise.spec.errors import PlanError

if TYPE_CHECKING:
    from shardwise.spec.schedule.actions import Action, Schedule
    from shardwise.spec.schedule.simulate import Durations, Span, Timing


def schedule(
    pp: Annotated[int, typer.Option(help="Ranks of the pipeline.")],
    microbatches: Annotated[
        int | None, typer.Option(help="Microbatches of a step; by default as many as ranks.")
    ] = None,
    name: Annotated[str, typer.Option("--schedule", help="Name of the schedule.")] = "1f1b",
    virtual_stages: Annotated[int | None, typer.Option(help="Stages of each rank.")] = None,
    forward: Annotated[str, typer.Option(help="Time of one stage's forward of one microbatch.")] = "1",
    backward_input: Annotated[str, typer.Option(help="Time of the gradient of its input.")] = "1",
    backward_weight: Annotated[str, typer.Option(help="Time of the gradients of its weights.")] = "1",
    communication: Annotated[str, typer.Option(help="Time that a message takes.")] = "0",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Draw what the ranks of a pipeline do and when, a row per rank and a column per unit of time.

    F3 is the forward of microbatch 3, B3 its backward; where backward is in two parts, B3 is the gradient of the
    stage's input and W3 those of its weights. With several stages per rank a letter tells them apart. Schedules: gpipe,
    1f1b, interleaved-1f1b, zb-h1, zb-v.

    Examples:

      shardwise schedule --pp 4 --microbatches 8 --schedule zb-h1

      shardwise schedule --pp 4 --microbatches 8 --schedule interleaved-1f1b --virtual-stages 2

      shardwise schedule --pp 4 --microbatches 8 --schedule zb-v --forward 1 --backward-input 1.5 --communication 0.5
    """
    from shardwise.spec.schedule import PipelinePolicy, check
    from shardwise.spec.schedule.simulate import Durations, simulate

    durations = Durations(
        _number("forward", forward),
        _number("backward-input", backward_input),
        _number("backward-weight", backward_weight),
        _number("communication", communication),
    )
    try:
        built = PipelinePolicy(name, microbatches, virtual_stages).build(pp)
    except PlanError as error:  # the message names fields of a configuration
        named = re.sub(r"\b(?:num_)?(microbatches|virtual_stages|schedule|pp)(?:=| (?=out))", r"--\1 ", str(error))
        raise PlanError(named.replace("_stages", "-stages")) from None
    check(built)
    timing = simulate(built, durations)
    show(json.dumps(_facts(built, timing, durations), indent=1) if as_json else picture(built, timing, durations))


def _number(option: str, text: str) -> Fraction:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise PlanError(f"--{option} {text!r}: expected a number, such as 1, 1.5 or 2/3.\n  Correct it.") from None


def picture(built: Schedule, timing: Timing, durations: Durations) -> str:
    """Return the drawing, and below it the costs of the schedule."""
    from shardwise.spec.schedule.closed import rows, stored_pairs

    v = built.num_virtual_stages
    outer = _closed_form(built, durations, is_inner=False)
    stages = "1 stage" if v == 1 else f"{v} stages"
    lines = [
        f"{built.name}: {built.num_ranks} ranks, {stages} per rank, {built.num_microbatches} microbatches",
        "",
        *rows(built, timing),
        "",
        f"time         {float(timing.makespan):g}, of which each rank computes {float(timing.ideal):g}",
        f"bubble       {float(timing.bubble_share):.1%} of the step, {_both(timing.bubble, outer)}",
    ]
    inner = _closed_form(built, durations, is_inner=True)
    if timing.inner_bubble != timing.bubble:
        lines.append(f"inner bubble {_both(timing.inner_bubble, inner)}, between a rank's first and last computation")
    counted = [stored_pairs(actions) for actions in built.actions]
    lines.append(f"in flight    {_per_rank([h.in_flight for h in counted])} of {built.num_microbatches * v}, at most")
    if built.is_split:
        lines.append(f"activations  {_per_rank([h.activations for h in counted])}, until the input's gradient is there")
    sent = [sum(action.kind.is_send for action in actions) for actions in built.actions]
    lines.append(f"messages     {_per_rank(sent)} sent, {sum(sent)} in all")
    return "\n".join(lines)


def _closed_form(built: Schedule, durations: Durations, *, is_inner: bool) -> Fraction | None:
    from shardwise.spec.schedule import closed

    form = closed.inner_bubble if is_inner else closed.bubble
    return form(built.name, built.num_ranks, built.num_microbatches, built.num_virtual_stages, durations)


def _both(found: Fraction, closed: Fraction | None) -> str:
    from shardwise.spec.schedule.closed import fraction_text

    expected = "no closed form for these times" if closed is None else f"closed form {fraction_text(closed)}"
    return f"{float(found):.1%} of ideal time ({fraction_text(found)} simulated, {expected})"


def _per_rank(counts: list[int]) -> str:
    return " ".join(map(str, counts)) if len(set(counts)) > 1 else f"{counts[0]} on each rank"


def _facts(built: Schedule, timing: Timing, durations: Durations) -> dict[str, Any]:
    """Return the schedule and its timing as plain data, with times and bubbles as numbers."""
    from shardwise.spec.schedule.closed import stored_pairs

    when = {span.action: span for spans in timing.spans for span in spans}
    closed = [_closed_form(built, durations, is_inner=is_inner) for is_inner in (False, True)]
    return {
        "schedule": built.name,
        "pp": built.num_ranks,
        "num_microbatches": built.num_microbatches,
        "num_virtual_stages": built.num_virtual_stages,
        "time": float(timing.makespan),
        "ideal_time": float(timing.ideal),
        "bubble": float(timing.bubble),
        "bubble_share": float(timing.bubble_share),
        "closed_bubble": None if closed[0] is None else float(closed[0]),
        "inner_bubble": float(timing.inner_bubble),
        "closed_inner_bubble": None if closed[1] is None else float(closed[1]),
        "ranks": [
            {
                "stages": built.stages(rank),
                "in_flight": stored_pairs(actions).in_flight,
                "activations": stored_pairs(actions).activations,
                "sent_messages": sum(action.kind.is_send for action in actions),
                "received_messages": sum(action.kind.is_receive for action in actions),
                "actions": [_action_facts(action, when.get(action), timing.unit) for action in actions],
            }
            for rank, actions in enumerate(built.actions)
        ],
    }


def _action_facts(action: Action, span: Span | None, unit: Fraction) -> dict[str, Any]:
    facts: dict[str, Any] = {"kind": str(action.kind), "stage": action.stage, "microbatch": action.microbatch}
    if action.peer is not None:
        facts["peer"] = action.peer
    if span is not None:
        facts |= {"start": float(span.start * unit), "end": float(span.end * unit)}
    return facts
