"""Forwards that follow one another on the same parameters, without gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from shardwise.engine.engine import Engine
from shardwise.engine.unit import State, Unit
from shardwise.features.pipeline_step import PipelineStep


@contextlib.contextmanager
def constant_parameters(engine: Engine, call: str) -> Iterator[None]:
    """Run forwards without grad between which no parameter changes.

    Where every unit can be whole all the while (it is replicated, or stays gathered after forward, or this rank has all
    of it), it is put into the modules at the beginning, and forwards go by the engine: they cost what the plain
    model's do. Else units come and go as in any forward.

    Args:
        engine: Of the model.
        call: What the user called.

    Collective:
        An all-gather on ``dp_shard`` of each unit that stays gathered after forward. All ranks must call.

    Raises:
        StateError: A forward or a backward is under way. What trains, steps or works on shards inside raises as well.
    """
    engine.settle(call)
    if any(observer.sees_every_gather for observer in engine.observers) or not all(
        _can_stay(unit) for unit in engine.units
    ):
        yield
        return
    was_open = engine.parameters_are_unchanged
    engine.refresh()
    engine.parameters_are_unchanged = True
    try:
        for unit in engine.units:
            _put(engine, unit)
        engine.pipeline_step = PipelineStep(engine)
        engine.pipeline_step.rests, engine.pipeline_step.only_for = True, call
        yield
    finally:
        engine.pipeline_step, engine.parameters_are_unchanged = None, was_open
        for unit in engine.units:
            _take_back(engine, unit)


def _can_stay(unit: Unit) -> bool:
    return unit.is_resident or not unit.reshards_after_forward or _is_whole(unit)


def _is_whole(unit: Unit) -> bool:
    """The whole parameters, as forward needs them, are this rank's master."""
    return all(group.is_alone and group.whole is None for group in unit.groups)


def _put(engine: Engine, unit: Unit) -> None:
    if unit.is_resident or not _is_whole(unit):
        engine.unshard(unit)
        unit.is_unused = False
    unit.swap_in()


def _take_back(engine: Engine, unit: Unit) -> None:
    unit.swap_out()
    if unit.state is State.UNSHARDED:
        engine.reshard(unit)
