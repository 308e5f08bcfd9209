"""Which tensors go from stage to stage, for one shape of batch: found by a forward that computes nothing.

Every element gives zeros that take no memory, of the shapes that its sketch on ``meta`` has; what the model does
between its elements is really run on them. The zeros require grad, so that autograd tells from which elements' outputs
a value was computed. All ranks trace the same model, and find the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.pipeline.element import Element
from shardwise.spec.errors import PlanError

#: An output of an element: the number of the call that made it, and its place among the leaves of what that returned.
Source = tuple[int, int]


@dataclass(frozen=True)
class Leaf:
    """One leaf of what a call returns.

    Attributes:
        argument: The leaf of the arguments that it is, handed through; ``None`` for something new.
        shape: Of a new tensor.
        dtype: Of a new tensor; ``None``: it is the constant ``value``.
        value: A constant.
    """

    argument: int | None = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    value: Any = None


@dataclass
class Call:
    """One call of an element.

    Attributes:
        element: Which.
        inputs: Outputs of earlier calls from which its arguments were computed.
        leaves: What it returns; ``None`` for one that is run on every stage, because it depends on the batch alone.
        spec: Of the nest in which the leaves lie.
        stage: Which computes it.
    """

    element: Element
    inputs: frozenset[Source]
    leaves: list[Leaf] | None = None
    spec: TreeSpec | None = None
    stage: int = 0

    def give(self, arguments: Sequence[Any], make: Callable[[int, Leaf], Any]) -> Any:
        """What it returns, new tensors being those that ``make`` gives."""
        assert self.leaves is not None
        assert self.spec is not None
        given = []
        for place, leaf in enumerate(self.leaves):
            if leaf.argument is not None:
                given.append(arguments[leaf.argument])
            else:
                given.append(make(place, leaf) if leaf.dtype is not None else leaf.value)
        return tree_unflatten(given, self.spec)


@dataclass
class Flow:
    """What was found.

    Attributes:
        calls: Of elements, in order.
        crossing: For each stage but the last what it hands to the next one, in order: what it made, and what it was
            handed and later stages need.
        last_call: The number of each stage's last call.
    """

    calls: list[Call]
    crossing: list[tuple[Source, ...]] = field(default_factory=list)
    last_call: list[int] = field(default_factory=list)

    def leaf(self, source: Source) -> Leaf:
        """Shape and dtype of what crosses, as the trace has it."""
        leaves = self.calls[source[0]].leaves
        assert leaves is not None
        return leaves[source[1]]

    @property
    def digest(self) -> int:
        """A number that tells flows apart."""
        shown = [(call.element.name, call.stage, sorted(call.inputs)) for call in self.calls]
        crossing = [[(source, self.leaf(source).shape) for source in sources] for sources in self.crossing]
        return int.from_bytes(hashlib.blake2b(repr((shown, crossing)).encode(), digest_size=7).digest())


class Tracer:
    """Follows one forward of the model's sketch, whose elements are to send their calls to :meth:`call`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._calls: list[Call] = []
        self._sources: dict[int, Source] = {}  # of placeholders, by id
        self._held: list[Tensor] = []  # so that no id is used again

    def call(self, element: Element, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call of ``element``; returns what stands for its result."""
        arguments, spec = tree_flatten((args, dict(kwargs)))
        call = Call(element, frozenset(self._reached(arguments)))
        if not element.has_parameters:
            output = element.sketched(*args, **kwargs)
            leaves, _ = tree_flatten(output)
            if not self._reached(leaves):
                self._calls.append(call)  # it depends on the batch alone
                return output
        else:
            output = self._sketched(element, arguments, spec)
        leaves, call.spec = tree_flatten(output)
        places = {id(argument): place for place, argument in enumerate(arguments) if not _is_constant(argument)}
        call.leaves = [_leaf(leaf, places) for leaf in leaves]
        number = len(self._calls)
        self._calls.append(call)
        return call.give(arguments, lambda place, leaf: self._placeholder((number, place), leaf))

    def finish(self, output: Any, num_stages: int) -> Flow:
        """What the calls of the forward that gave ``output`` tell.

        Raises:
            PlanError: The elements cannot be run stage by stage.
        """
        flow = Flow(self._calls)
        final = frozenset(self._reached(list(_tensors(output))))
        _settle(flow.calls)
        _check(flow.calls, num_stages)
        flow.crossing, flow.last_call = _crossing(flow.calls, final, num_stages)
        return flow

    def _sketched(self, element: Element, arguments: Sequence[Any], spec: TreeSpec) -> Any:
        """What the element's sketch returns, where arguments that it hands through are the arguments themselves."""
        on_meta = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in arguments]
        args, kwargs = tree_unflatten(on_meta, spec)
        given = {id(meta): real for meta, real in zip(on_meta, arguments, strict=True) if isinstance(meta, Tensor)}
        try:
            with torch.no_grad():
                leaves, out_spec = tree_flatten(element.sketched(*args, **kwargs))
        except Exception as error:
            raise PlanError(
                f"the shapes of what {element.name!r} returns could not be found on the meta device:"
                f" {type(error).__name__}: {error}\n  A block of a pipeline must not look at values."
            ) from error
        return tree_unflatten([given.get(id(leaf), leaf) for leaf in leaves], out_spec)

    def _placeholder(self, source: Source, leaf: Leaf) -> Tensor:
        assert leaf.dtype is not None
        made = zeros(leaf.shape, leaf.dtype, self._device)
        if made.dtype.is_floating_point or made.dtype.is_complex:
            made.requires_grad_()
        self._sources[id(made)] = source
        self._held.append(made)
        return made

    def _reached(self, values: Iterable[Any]) -> set[Source]:
        """The outputs of elements from which these were computed."""
        found: set[Source] = set()
        nodes: list[Any] = []
        for value in values:
            if not isinstance(value, Tensor):
                continue
            if id(value) in self._sources:
                found.add(self._sources[id(value)])
            elif value.grad_fn is not None:
                nodes.append(value.grad_fn)
        seen: set[Any] = set(nodes)
        while nodes:
            node = nodes.pop()
            variable = getattr(node, "variable", None)
            if variable is not None and id(variable) in self._sources:
                found.add(self._sources[id(variable)])
            for below, _ in node.next_functions:
                if below is not None and below not in seen:
                    seen.add(below)
                    nodes.append(below)
        return found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _leaf(value: Any, places: Mapping[int, int]) -> Leaf:
    if id(value) in places:
        return Leaf(argument=places[id(value)])
    if isinstance(value, Tensor):
        return Leaf(shape=tuple(value.shape), dtype=value.dtype)
    return Leaf(value=value)


def _settle(calls: Sequence[Call]) -> None:
    """Set the stage of every call that is made on one stage."""
    users: list[set[int]] = [set() for _ in calls]
    for number, call in enumerate(calls):
        for source, _ in call.inputs:
            users[source].add(number)
    for number, call in enumerate(calls):
        earliest = max((calls[source].stage for source, _ in call.inputs), default=0)
        held = call.element.stages
        if not held:
            call.stage = earliest  # where what it takes is made
        elif len(held) == 1:
            call.stage = held[0]
        else:  # as late as those that use it allow, so that little is sent
            latest = _first_use(number, calls, users)
            call.stage = max([stage for stage in held if earliest <= stage <= latest] or [held[0]])


def _first_use(number: int, calls: Sequence[Call], users: Sequence[set[int]]) -> int:
    """The first stage that certainly uses what a call returns."""
    waiting, seen = [number], set()
    found = []
    while waiting:
        for user in users[waiting.pop()]:
            if user in seen:
                continue
            seen.add(user)
            if calls[user].element.stages:
                found.append(calls[user].element.stages[0])
            else:
                waiting.append(user)
    return min(found, default=calls[number].element.stages[-1])


def _check(calls: Sequence[Call], num_stages: int) -> None:
    for call in calls:
        for source, _ in call.inputs if call.leaves is not None else ():
            if calls[source].stage > call.stage:
                raise PlanError(
                    f"{call.element.name!r} on pipeline stage {call.stage} takes what {calls[source].element.name!r} on"
                    f" stage {calls[source].stage} of {num_stages} gives: the model's forward does not run its modules"
                    " in the order in which they are registered.\n"
                    "  Name the first module of every stage: PipelinePolicy(first_of_stage=...), or register them in"
                    " the order of forward."
                )


def _crossing(
    calls: Sequence[Call], final: frozenset[Source], num_stages: int
) -> tuple[list[tuple[Source, ...]], list[int]]:
    needed_until: dict[Source, int] = dict.fromkeys(final, num_stages - 1)
    last_call = [-1] * num_stages
    for number, call in enumerate(calls):
        if call.leaves is None:
            continue
        last_call[call.stage] = number
        for source in call.inputs:
            needed_until[source] = max(needed_until.get(source, 0), call.stage)
    crossing = [
        tuple(sorted(source for source, last in needed_until.items() if calls[source[0]].stage <= stage < last))
        for stage in range(num_stages - 1)
    ]
    return crossing, last_call


def _tensors(value: Any, levels: int = 4) -> Iterator[Tensor]:
    """Every tensor in an output of any common shape."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, held.name, None) for held in fields(value)]
    else:
        return
    for part in parts if levels else ():
        yield from _tensors(part, levels - 1)


def shape_key(batch: Any) -> Hashable:
    """What two batches of the same shapes have in common."""
    leaves, spec = tree_flatten(batch)
    shapes = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
    return str(spec), tuple(shapes)
