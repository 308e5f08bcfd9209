"""Flat tensors for the optimizer: one for a run of a group's parameters instead of one per parameter.

A flat parameter is a view of this rank's master, over neighbouring parameters of one weight-decay group. Element-wise
optimizers compute the same numbers on it in one kernel call. Its ``.grad`` is a view of the memory of those parameters'
gradients.

An optimizer skips a parameter without a gradient (no decay, no count of steps), but cannot skip a part of a tensor. A
flat parameter of which only some parameters have a gradient is therefore *split* before the step: its parameters
replace it in the optimizer permanently, with views of its state.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from shardwise import torch_private
from shardwise.engine.storage.attachment import engine_of, group_and_index
from shardwise.engine.storage.ignored import ignored_of
from shardwise.engine.storage.waiting import WaitingGradient
from shardwise.spec.errors import Uncopyable
from shardwise.spec.layout import FlatRange, flat_ranges

if TYPE_CHECKING:
    from shardwise.engine.group import Group

#: Returns whether weight decay applies to a parameter, given its name and shard.
DecayRule = Callable[[str, nn.Parameter], bool]


def flat_parameters(model: nn.Module, decay: DecayRule | None = None) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer with one flat tensor per unit and weight-decay group instead of one per name.

    Pass the result to one element-wise optimizer. Its numbers equal those of an optimizer over ``model.parameters()``
    bitwise. With ``fused=True``, elements at the end of a parameter may differ in the last bit, because fused kernels
    compute them differently. Checkpoints are the same: optimizer state is saved and loaded by parameter name. Frozen
    parameters are left out; ignored ones (``ParallelPlan.ignored``) are passed unchanged. If a step uses only some
    parameters of a flat tensor, it is split into parameters.

    Args:
        model: A parallelized model.
        decay: ``decay(name, parameter)`` returns whether weight decay applies to a parameter (a tied one has its first
            name). The others form a second group with ``weight_decay=0.0``. ``None``: one group with the optimizer's
            weight decay.

    Returns:
        One or two groups, the decayed parameters first: two on every rank if the model has parameters of both kinds.

    Collective:
        None.

    Raises:
        StateError: The model is not parallelized.
    """
    engine = engine_of(model, "sw.flat_parameters")
    engine.apply_user_changes()
    groups: list[list[nn.Parameter]] = [[], []]
    is_there = [decay is None, False]
    for group in engine.groups:
        kinds: list[int | None] = []
        for spec, shard in zip(group.layout.params, group.shards, strict=True):
            is_decayed = decay is None or bool(decay(spec.name, shard))
            kinds.append(int(not is_decayed) if shard.requires_grad else None)
        group.update_facts(flat_kinds=tuple(kinds))
        for kind in range(2):
            is_there[kind] = is_there[kind] or kind in kinds
            groups[kind] += _of_group(group, kind)
    for name, parameter in ignored_of(engine).parameters.items():
        if parameter.requires_grad:
            kind = int(decay is not None and not decay(name, parameter))
            groups[kind].append(parameter)
            is_there[kind] = True
    made: list[dict[str, Any]] = [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}]
    return [settings for settings, is_used in zip(made, is_there, strict=True) if is_used]


def _of_group(group: Group, kind: int) -> Iterator[nn.Parameter]:
    assert group.facts.flat_kinds is not None
    for span in flat_ranges(group.pieces, group.facts.flat_kinds):
        if span.kind == kind:
            yield FlatParameter.of(group, span)
    own = [index for index, other in enumerate(group.facts.flat_kinds) if other == kind]
    empty = [index for index in own if group.layout.params[index].numel == 0]
    for index in empty:
        yield group.shards[index]  # no range includes it, but optimizers keep state for it
    if own and not empty and not any(group.pieces[index].numel for index in own):
        yield group.shards[own[0]]  # this rank owns none of them: links the optimizer to its engine


class FlatParameter(Uncopyable, nn.Parameter):
    """A run of a group's parameters as one tensor, a view of this rank's master, for the optimizer.

    Attributes:
        span: The run of parameters.
        shards: Its parameters.
    """

    span: FlatRange
    shards: tuple[nn.Parameter, ...]
    _group: weakref.ref[Group]
    _memory_and_view: tuple[Tensor, Tensor] | None
    _cached: Tensor | None

    @classmethod
    def of(cls, group: Group, span: FlatRange) -> Self:
        """Make the flat parameter of a run: a view of the group's master."""
        made = cls(group.master[span.start : span.stop])
        made.span = span
        made.shards = tuple(group.shards[piece.index] for piece in span.pieces)
        made._group = weakref.ref(group)
        made._memory_and_view = None  # memory of gradients, and the run's view of it
        made._cached = None
        return made

    @property
    def group(self) -> Group | None:
        """The group, while its model lives."""
        return self._group()

    @property
    def is_partial(self) -> bool:
        """Whether some of its parameters have a gradient and some have none."""
        first = self.shards[0].grad is None
        for shard in self.shards:  # noqa: SIM110 - on a hot path
            if (shard.grad is None) is not first:
                return True
        return False

    @property
    def grad(self) -> Tensor | None:  # pyrefly: ignore[bad-override]
        """The gradients of its parameters, as one view of their memory; ``None`` if all of them are ``None``."""
        if self._cached is not None:
            return self._cached
        if all(shard.grad is None for shard in self.shards):
            return None
        if self._has_waiting_sums:
            return WaitingGradient.of(self, functools.partial(_zero_waiting, weakref.ref(self)))
        memory = self._find_views()
        if memory is None:
            return None
        flat, views = memory
        for shard, view in zip(self.shards, views, strict=True):
            grad = shard.grad
            if grad is view:
                continue
            if grad is None:
                view.zero_()
            else:  # the user has replaced it
                view.copy_(grad)
                shard.grad = view
        return flat

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._cached = None
        if value is None:
            for shard in self._all_shards() if self._has_waiting_sums else self.shards:
                shard.grad = None
            return
        memory = self._find_views()
        if memory is not None:
            memory[0].copy_(value)
            for shard, view in zip(self.shards, memory[1], strict=True):
                shard.grad = view

    def cache_gradient(self) -> None:
        """Compute ``grad`` once for a whole step, which reads it several times."""
        self._cached = None
        self._cached = self.grad

    def drop_cached_gradient(self) -> None:
        """Undo :meth:`cache_gradient`."""
        self._cached = None

    def views_in(self, tensor: Tensor) -> list[Tensor]:
        """Return a view of ``tensor``, which has this one's shape, for each parameter, in the shape of its shard."""
        group = self.group
        assert group is not None
        return [group.view_in(piece.index, tensor, first=self.span.start) for piece in self.span.pieces]

    @property
    def _has_waiting_sums(self) -> bool:
        """Whether sums of accumulated microbatches wait for their reduction."""
        group = self.group
        return group is not None and group.gradient.is_local

    def zero_waiting_sums(self) -> None:
        """Zero the gradients of the parameters while their sums wait."""
        for shard in self._all_shards():
            if shard.grad is not None:
                shard.grad.zero_()

    def _all_shards(self) -> Iterator[nn.Parameter]:
        """Its parameters, and those of the same kind of which this rank owns no element but stores sums."""
        yield from self.shards
        group = self.group
        if group is not None:
            for shard, storage, kind in zip(group.shards, group.pieces, group.facts.flat_kinds or (), strict=True):
                if kind == self.span.kind and storage.numel == 0:
                    yield shard

    def _find_views(self) -> tuple[Tensor, list[Tensor]] | None:
        """Return the run's view of the memory of gradients, and that of each parameter."""
        group = self.group
        if group is None:
            return None
        storage = group.gradient.storage
        memory = storage.make()
        storage.replace_moved_views()
        if self._memory_and_view is None or self._memory_and_view[0] is not memory:

            def view() -> tuple[Tensor, Tensor]:
                flat = memory[self.span.start : self.span.stop]
                return memory, storage.as_part(flat, None) if group.facts.has_part_grads else flat

            self._memory_and_view = storage.add_view(view)
        return self._memory_and_view[1], [storage.views[piece.index] for piece in self.span.pieces]


torch_private.allow_foreach(FlatParameter)


def _zero_waiting(flat_ref: weakref.ref[FlatParameter]) -> None:
    flat = flat_ref()
    if flat is not None:
        flat.zero_waiting_sums()


def group_of(parameter: Tensor) -> Group | None:
    """The group of a shard or of a flat parameter; ``None`` for a parameter that is not sharded."""
    if isinstance(parameter, FlatParameter):
        return parameter.group
    place = group_and_index(parameter)
    return place[0] if place is not None else None


def flats_of(optimizer: torch.optim.Optimizer) -> list[FlatParameter]:
    """The flat parameters among the parameters of an optimizer."""
    return [p for settings in optimizer.param_groups for p in settings["params"] if isinstance(p, FlatParameter)]


def before_step(optimizer: torch.optim.Optimizer) -> None:
    """Split partial flat parameters, and compute the gradients of the others once for the step."""
    if any(flat.is_partial for flat in flats_of(optimizer)):
        split(optimizer, lambda flat: flat.is_partial)
    for flat in flats_of(optimizer):
        flat.cache_gradient()


def after_step(optimizer: torch.optim.Optimizer) -> None:
    """Release the gradients that :func:`before_step` has computed."""
    for flat in flats_of(optimizer):
        flat.drop_cached_gradient()


# -- between flat and by name


def split(optimizer: torch.optim.Optimizer, is_split: Callable[[FlatParameter], bool]) -> None:
    """Replace flat parameters in the optimizer by their parameters, with views of the state."""
    for settings in optimizer.param_groups:
        params: list[nn.Parameter] = settings["params"]
        chosen = {id(p) for p in params if isinstance(p, FlatParameter) and is_split(p)}
        if not chosen:
            continue
        new_params: list[nn.Parameter] = []
        for parameter in params:
            if not isinstance(parameter, FlatParameter) or id(parameter) not in chosen:
                new_params.append(parameter)
                continue
            parts = parameter.shards
            for shard, state in zip(parts, _split_state(parameter, optimizer.state.pop(parameter, {})), strict=True):
                if state:
                    optimizer.state[shard] = state
            new_params += parts
        params[:] = new_params  # in place, because schedulers and the user may refer to the list


def states_by_name(optimizer: torch.optim.Optimizer) -> Mapping[Tensor, Mapping[str, Any]]:
    """Return the optimizer's state by parameter, also of flat ones; state with one value per element as views."""
    found: dict[Tensor, Mapping[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, FlatParameter):
            found |= zip(parameter.shards, _split_state(parameter, state), strict=True)
        else:
            found[parameter] = state
    return found


def _split_state(flat: FlatParameter, state: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
    """Return the state of each parameter of a flat one: views if it has one value per element, otherwise copies."""
    parts: list[dict[str, Any]] = [{} for _ in flat.span.pieces]
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == flat.shape:
            values = flat.views_in(value)
        else:
            values = [value.clone() if isinstance(value, Tensor) else value for _ in parts]
        for part, own in zip(parts, values, strict=True):
            part[key] = own
    return parts
