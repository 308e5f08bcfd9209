"""Moving one module's parameters towards another's: teachers in self-distillation, target networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.dtype import memory_order
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import engine_of_unit, group_and_index
from shardwise.spec.errors import StateError
from shardwise.spec.layout import Piece
from shardwise.spec.slice import Cut, Slice, simplest, slice_of
from shardwise.weights.state.full_parameters import gather_group
from shardwise.weights.state.stored_ranges import elements_of

_CALL = "sw.lerp_parameters()"


@torch.no_grad()
def lerp_parameters(target: nn.Module, source: nn.Module, weight: float) -> None:
    """Move each parameter of ``target`` towards that of ``source``: ``target.lerp_(source, weight)``.

    This is the update of a teacher by its student (BYOL, DINO, mean teacher), of a momentum encoder (MoCo), and of a
    target network (DDPG, SAC)::

        model = sw.parallelize(SelfDistillation(student, teacher), plan)
        for batch in batches:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            sw.lerp_parameters(model.teacher, model.student, 1 - 0.996)

    The values equal bitwise those of ``lerp_`` on plain parameters. Buffers are left alone. Call this function after
    backward, like an optimizer's step: a backward of an earlier forward through ``target``'s unit is refused. To
    evaluate an average of the model itself, use :class:`sw.ExponentialMovingAverage`, which needs no second model.

    Args:
        target: A parallelized model, a module in one, or a plain module.
        source: A module with the same parameters; it may be sharded by another plan.
        weight: From 0 (no change) to 1 (copy).

    Collective:
        Nothing is sent for parameters of which every rank has the same part in both modules, as under ``zero3`` if the
        groups of both are alike. For other parameters an all-gather of each group of ``source`` on ``dp_shard``, in its
        master's dtype, as before a forward; one full group is stored at a time. All ranks must call.

    Raises:
        StateError: Names, shapes or slices differ, ``weight`` is out of range, a parameter is quantized or not of
            floating point, one of the modules is a pipeline, or a forward or backward is under way.
    """
    if not 0 <= weight <= 1:
        raise StateError(f"{_CALL} got weight={weight}: expected a number from 0 to 1.")
    pairs = _pairs(target, source)
    engines = _engines_of(pairs)
    values = {into.group: into.group.values() for into, _ in pairs if into.group is not None}
    for group in {by.group: None for _, by in pairs}:
        found = [(into, by) for into, by in pairs if by.group is group]
        is_aligned = all(_is_aligned(into, by) for into, by in found)
        flat = None if group is None else group.values() if is_aligned else gather_group(group)
        for into, by in found:
            if into.group is None and group is None:
                into.parameter.lerp_(by.parameter.to(into.parameter), weight)
                continue
            elements, piece = into.elements(None if into.group is None else values[into.group])
            if group is None or is_aligned:
                other, _ = by.elements(flat)
            else:
                assert flat is not None
                offset = group.layout.offsets[by.index]
                other = flat[offset + piece.start : offset + piece.stop]
            if group is None:
                other = other[piece.start : piece.stop]
            elements.lerp_(other.to(elements), weight)
        del flat  # frees it before the next group is gathered
    for group, changed in values.items():
        group.set_values(changed)
    for engine in engines:
        written = frozenset(id(into.shard) for into, _ in pairs if into.engine is engine)
        if written:
            engine.invalidate(written)


class _Parameter(NamedTuple):
    """A parameter of one of the two modules; ``group`` is ``None`` if it is not sharded by an engine."""

    name: str
    parameter: nn.Parameter
    group: Group | None
    index: int

    @property
    def engine(self) -> Engine | None:
        """The engine that shards it, or ``None``."""
        return None if self.group is None else engine_of_unit(self.group.unit)

    @property
    def shard(self) -> nn.Parameter:
        """The Parameter object between steps."""
        return self.parameter if self.group is None else self.group.shards[self.index]

    @property
    def form(self) -> tuple[list[int], tuple[int, ...], tuple[Cut, ...]]:
        """Shape and strides of the parameter (under tp, of this rank's slice), and the cuts of the slice."""
        if self.group is None:
            return list(self.parameter.shape), self.parameter.stride(), _cuts(slice_of(self.parameter))
        spec = self.group.layout.params[self.index]
        return list(spec.shape), tuple(spec.strides), _cuts(spec.slice)

    def elements(self, flat: Tensor | None) -> tuple[Tensor, Piece]:
        """Return this rank's elements, out of the group's values ``flat``, and their range in the parameter."""
        if self.group is None or flat is None:
            return memory_order(self.parameter.detach()), Piece(0, 0, self.parameter.numel(), 0)
        piece = self.group.pieces[self.index]
        return elements_of(self.group, piece, flat), piece


def _cuts(part: Slice | None) -> tuple[Cut, ...]:
    return () if part is None else simplest(part.shape, part.cuts)


def _parameter_of(name: str, parameter: nn.Parameter) -> _Parameter:
    group, index = group_and_index(parameter) or (None, 0)
    return _Parameter(name, parameter, group, index)


def _pairs(target: nn.Module, source: nn.Module) -> list[tuple[_Parameter, _Parameter]]:
    """Return the pairs of parameters with equal names; refuses those that do not fit."""
    ours, theirs = dict(target.named_parameters()), dict(source.named_parameters())
    if only := sorted(ours.keys() ^ theirs.keys()):
        where = "target" if only[0] in ours else "source"
        raise StateError(
            f"{_CALL}: {len(only)} parameters are in one module only, such as {only[0]!r} in the {where}.\n"
            "  Pass modules of one architecture, such as a module and a copy that was made before sw.parallelize()."
        )
    pairs = [(_parameter_of(name, ours[name]), _parameter_of(name, theirs[name])) for name in ours]
    for into, by in pairs:
        are_plain = into.group is None and by.group is None  # strides may then differ
        if into.form[0] != by.form[0] or into.form[2] != by.form[2] or (into.form[1] != by.form[1] and not are_plain):
            shapes = " and ".join(
                f"shape {shape} with strides {list(strides)}{f', cut {cuts}' if cuts else ''}"
                for shape, strides, cuts in (into.form, by.form)
            )
            raise StateError(
                f"{_CALL}: {into.name!r} has {shapes} in target and source on this rank.\n"
                "  Pass modules of one architecture; under tp give both the same tp_plan."
            )
        if into.group is not None and into.group.facts.stored_as is not None:
            raise StateError(
                f"{_CALL}: {into.name!r} is held as {into.group.facts.stored_as}, which loses small changes.\n"
                "  Leave quantize_frozen out of the plan."
            )
        if not into.parameter.is_floating_point():
            raise StateError(
                f"{_CALL}: {into.name!r} has dtype {into.parameter.dtype}: expected a floating-point one.\n"
                "  Leave it out of both modules, or convert it."
            )
    return pairs


def _engines_of(pairs: Sequence[tuple[_Parameter, _Parameter]]) -> list[Engine]:
    """Return the engines of both modules; refuses pipelines, and engines that are not between steps."""
    engines = list({engine: None for pair in pairs for side in pair if (engine := side.engine) is not None})
    for engine in engines:
        if engine.comms.pp is not None:
            raise StateError(
                f"{_CALL} got a pipeline, of which a rank has some stages only.\n  Set pp=1; tp divides a model too."
            )
        if any(unit.shown_mode is not None for unit in engine.units):
            raise StateError(f"{_CALL} works on shards.\n  Call it outside of sw.full_parameters().")
        engine.require_idle(_CALL)
    return engines


def _is_aligned(into: _Parameter, by: _Parameter) -> bool:
    """Whether every rank has the same range of both parameters. The result is the same on every rank."""
    if into.group is None or by.group is None:
        return into.group is by.group
    here, there = into.group, by.group
    if not (here.placements.shards_optimizer and there.placements.shards_optimizer):
        return here.placements.shards_optimizer is there.placements.shards_optimizer
    return _mesh_of(into) == _mesh_of(by) and here.layout.holders[into.index] == there.layout.holders[by.index]


def _mesh_of(side: _Parameter) -> tuple[object, ...]:
    """Return the axis along which a parameter is sharded, and sizes of axes: these determine the ranks of a gather."""
    assert side.group is not None
    engine, gather = side.engine, side.group.comms.gather
    assert engine is not None
    comms = engine.comms
    axes = (comms.world, comms.gather, comms.replicate, comms.tp, comms.cp, comms.ep)
    return gather.axis, gather.size, *(1 if comm is None else comm.size for comm in axes)
