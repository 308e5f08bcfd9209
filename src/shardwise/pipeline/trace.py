"""Which tensors go from stage to stage, for one shape of batch: found by a forward that computes nothing.

Every element returns zeros that take no memory, of the shapes that its sketch on ``meta`` returns. What the model
computes between its elements really runs on these zeros, and marks (``taint``) tell from which elements' outputs a
value was computed. All ranks trace the same model, and find the same.

A stage has the weights of its own modules, runs the model's forward up to its last element, and sees zeros in place of
what other stages compute. So these are refused (docs/adr/0013-what-a-pipeline-follows.md): values of activations that
Python reads, weights of elements that the model's forward takes instead of calling the element, buffers outside of all
elements that it writes to, and tensors from inside of elements.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.comm.control import digest_text
from shardwise.engine.hooks import parts_of
from shardwise.pipeline.element import Element, zeros
from shardwise.pipeline.taint import Taint
from shardwise.spec.errors import PlanError

#: An output of an element: the number of the call that made it, and its place among the leaves of what that returned.
Source = tuple[int, int]


@dataclass(frozen=True, order=True)
class Weight:
    """The mark of a tensor that an element holds: its names in the model, and the first element that holds it."""

    names: tuple[str, ...]
    owner: str


@dataclass(frozen=True)
class Leaf:
    """One leaf of what a call returns.

    Attributes:
        argument: The leaf of the arguments that is handed through; ``None``: something new.
        shape: The shape of a new tensor.
        dtype: The dtype of a new tensor; ``None``: the leaf is the constant ``value``.
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
        element: The element.
        inputs: Outputs of earlier calls from which its arguments were computed.
        leaves: What it returns; ``None`` for a call that runs on every stage, because it depends on the batch alone.
        spec: The structure in which the leaves lie.
        stage: The stage that computes it.
        keeps_state: It writes to buffers of an element that every stage has, such as ``BatchNorm1d(affine=False)``.
    """

    element: Element
    inputs: frozenset[Source]
    leaves: list[Leaf] | None = None
    spec: TreeSpec | None = None
    stage: int = 0
    keeps_state: bool = False

    def give(self, arguments: Sequence[Any], make: Callable[[int, Leaf], Any]) -> Any:
        """What the call returns, with new tensors from ``make``."""
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
class StageFlow:
    """What a trace found.

    Attributes:
        calls: Calls of elements, in order.
        crossing: For each stage but the last what it sends to the next one, in order: what it made, and what it
            received and later stages need.
        last_call: The number of each stage's last call.
        writes_in_place: The model writes to what elements return or take, as torchvision's VGG does
            (``nn.ReLU(inplace=True)``): stand-ins need memory of their own.
        learned: What the stages told each other about their activations in steps of this kind.
    """

    calls: list[Call]
    crossing: list[tuple[Source, ...]] = field(default_factory=list)
    last_call: list[int] = field(default_factory=list)
    writes_in_place: bool = False
    learned: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def keepers(self) -> dict[str, int]:
        """The stage that computes each element that writes to buffers and that every stage has, by name."""
        return {call.element.name: call.stage for call in self.calls if call.keeps_state}

    def leaf(self, source: Source) -> Leaf:
        """Shape and dtype of a tensor that crosses, as the trace has it."""
        leaves = self.calls[source[0]].leaves
        assert leaves is not None
        return leaves[source[1]]

    @property
    def digest(self) -> int:
        """A number that tells flows apart."""
        shown = [(call.element.name, call.stage, sorted(call.inputs)) for call in self.calls]
        crossing = [[(source, self.leaf(source).shape) for source in sources] for sources in self.crossing]
        return digest_text(repr((shown, crossing)))


class Tracer:
    """Follows one forward of the model's sketch, whose elements send their calls to :meth:`call`."""

    def __init__(self, elements: Sequence[Element], device: torch.device, *, writes_in_place: bool = False) -> None:
        self._device = device
        self._writes_in_place = writes_in_place
        self._calls: list[Call] = []
        self._elements = elements
        self._marks = Taint(self._read_error, None if device.type == "meta" else inside_of_blocks)
        for tensor, weight in _lent_weights(elements):
            self._marks.add(tensor, {weight})

    def run(self, forward: Callable[[], Any], sketch: nn.Module, num_stages: int) -> StageFlow:
        """Follow ``forward``, which calls ``sketch``."""
        inside = {id(m) for element in self._elements if element.sketch is not None for m in element.sketch.modules()}
        outside = [(name, module) for name, module in sketch.named_modules() if id(module) not in inside]
        buffers = [
            (f"{path}.{key}" if path else key, module._buffers, key, buffer, buffer._version)  # noqa: SLF001 - torch has no public question
            for path, module in outside
            for key, buffer in module.named_buffers(recurse=False)
        ]
        with self._marks.follow():
            output = forward()
        for name, registry, key, buffer, version in buffers:
            if registry.get(key) is not buffer or buffer._version != version:  # noqa: SLF001 - the same
                raise _written_buffer(name)
        held = [value for _, module in outside for value in vars(module).values()]
        final = self._reached([*tensors_in(output), *tensors_in(held)])
        flow = StageFlow(self._calls, writes_in_place=self._writes_in_place)
        _settle(flow.calls)
        _check(flow.calls, num_stages)
        flow.crossing, flow.last_call = _crossing(flow.calls, final, num_stages)
        return flow

    def call(self, element: Element, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call of ``element``; returns a stand-in for its result."""
        arguments, spec = tree_flatten((args, dict(kwargs)))
        call = Call(element, self._reached(arguments))
        if not element.has_parameters:
            assert element.sketch is not None
            state, versions = _versions(element.sketch.buffers()), _versions(arguments)
            output = element.sketched(*args, **kwargs)
            call.keeps_state = _versions(element.sketch.buffers()) != state
            found = self._reached(tree_flatten(output)[0])
            # It depends on the batch alone, or changes what others refer to: every stage runs it.
            if _versions(arguments) != versions or not (call.keeps_state or found):
                self._calls.append(call)
                return output
            call.inputs |= found
        else:
            with self._marks.aside():
                output = self._sketched(element, arguments, spec)
        leaves, call.spec = tree_flatten(output)
        places = {id(argument): place for place, argument in enumerate(arguments) if not _is_constant(argument)}
        call.leaves = [_leaf(leaf, places) for leaf in leaves]
        number = len(self._calls)
        self._calls.append(call)
        return call.give(arguments, lambda place, leaf: self._placeholder((number, place), leaf))

    def _sketched(self, element: Element, arguments: Sequence[Any], spec: TreeSpec) -> Any:
        """What the element's sketch returns, where arguments that it hands through are the arguments themselves."""
        others = [a if isinstance(a, Tensor) else _copied(a) for a in arguments]
        given = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in arguments]
        before = _versions(given)
        try:
            with element.holding(values=False):
                leaves, out_spec = _run(element, given, spec)
        except Exception as error:  # noqa: BLE001 - whatever it is, the element may need values, as Mixtral's experts do
            given = [
                _with_memory(a.detach()) if isinstance(a, Tensor) else b for a, b in zip(arguments, others, strict=True)
            ]
            before = _versions(given)
            try:
                with element.holding(values=True):
                    leaves, out_spec = _run(element, given, spec)
            except Exception as second:
                raise PlanError(
                    f"the shapes of what {element.name!r} returns could not be found, neither on the meta device"
                    f" ({type(error).__name__}: {error}) nor with zeros for weights and activations"
                    f" ({type(second).__name__}: {second}).\n"
                    "  Let it return tensors whose shapes follow from those that it takes, or set pp=1."
                ) from second
        own = {id(a): argument for a, argument in zip(given, arguments, strict=True) if isinstance(a, Tensor)}
        if _versions(given) != before:
            if not self._writes_in_place:
                raise WritesInPlaceError
            after = dict(_versions(given))
            own = {key: argument for key, argument in own.items() if (key, after[key]) in before}
        return tree_unflatten([own.get(id(leaf), leaf) for leaf in leaves], out_spec)

    def _placeholder(self, source: Source, leaf: Leaf) -> Tensor:
        assert leaf.dtype is not None
        made = zeros(leaf.shape, leaf.dtype, self._device)
        if made.dtype.is_floating_point or made.dtype.is_complex:
            made.requires_grad_()
        elif self._writes_in_place:
            made = made.contiguous()
        self._marks.add(made, {source})
        return _with_memory(made) if self._writes_in_place and made.requires_grad else made

    def _reached(self, values: Iterable[Any]) -> frozenset[Source]:
        """The outputs of elements from which ``values`` were computed."""
        marks = self._marks.of(values)
        _refuse_weights(marks)
        return frozenset(mark for mark in marks if isinstance(mark, tuple))

    def _read_error(self, marks: set[Hashable]) -> PlanError:
        _refuse_weights(marks)
        first = min(mark for mark in marks if isinstance(mark, tuple))
        return PlanError(
            f"the model's own forward reads values of what {self._calls[first[0]].element.name!r} returns (x.item(),"
            " x.tolist(), if x.any()), but only one pipeline stage has these values: others would take another path.\n"
            "  Read them inside of a block, use torch.where, or set pp=1."
        )


def _refuse_weights(marks: Iterable[Hashable]) -> None:
    weights = sorted(mark for mark in marks if isinstance(mark, Weight))
    if weights:
        several = f" (and {len(weights) - 1} more weights)" if len(weights) > 1 else ""
        raise PlanError(
            f"the model's own forward computes with {weights[0].names[0]!r}{several}, but a pipeline stage has only the"
            f" weights of its own modules.\n  Have forward call {weights[0].owner!r} instead of taking its weight;"
            " compute with it in a block; leave a penalty over weights to the optimizer (weight_decay); or set pp=1."
        )


def inside_of_blocks() -> PlanError:
    """The error of a model that takes a tensor from inside a block, of which there is a sketch only."""
    return PlanError(
        "the model's forward uses or returns tensors from inside its blocks that the blocks do not return, such as"
        " router logits or attention weights: a pipeline stage has only those of its own blocks.\n"
        "  Switch that off (output_router_logits=False, output_attentions=False), or set pp=1."
    )


def _written_buffer(name: str) -> PlanError:
    return PlanError(
        f"the model's own forward writes to the buffer {name!r} (self.{name.rpartition('.')[2]}.add_(...)), which every"
        " pipeline stage would do with other values.\n"
        "  Keep the buffer in the block that computes what is written to it, or set pp=1."
    )


class WritesInPlaceError(RuntimeError):
    """A stand-in without memory of its own was to be written to."""


def _run(element: Element, arguments: Sequence[Any], spec: TreeSpec) -> tuple[list[Any], TreeSpec]:
    args, kwargs = tree_unflatten(list(arguments), spec)
    with torch.no_grad():
        return tree_flatten(element.sketched(*args, **kwargs))


def _with_memory(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _copied(value: Any) -> Any:
    """An argument that the block may write to, such as a cache, as it is now."""
    try:
        return value if _is_constant(value) else copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - objects copy themselves as they like
        return value


def _versions(values: Iterable[Any]) -> list[tuple[int, int]]:
    """How often each tensor among ``values`` has been written to."""
    return [(id(value), value._version) for value in values if isinstance(value, Tensor)]  # noqa: SLF001


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
    keepers: dict[str, int] = {}
    for call in calls:
        if call.keeps_state and keepers.setdefault(call.element.name, call.stage) != call.stage:
            raise PlanError(
                f"{call.element.name!r} keeps state in buffers, and is called on pipeline"
                f" stage {keepers[call.element.name]} and on stage {call.stage} of {num_stages}: each would"
                " see a part only.\n"
                "  Make it a module for each place, or set pp=1."
            )
        for source, _ in call.inputs if call.leaves is not None else ():
            if calls[source].stage > call.stage:
                raise PlanError(
                    f"{call.element.name!r} on pipeline stage {call.stage} takes what {calls[source].element.name!r} on"
                    f" stage {calls[source].stage} of {num_stages} gives: the model's forward does not run its modules"
                    " in the order in which they are registered, which is that of the stages.\n"
                    f"  Register {calls[source].element.name!r} before {call.element.name!r}. A module that is deleted"
                    " and set again comes last: norm = model.norm; del model.norm; model.norm = norm before"
                    " sw.parallelize. Or let both be on one stage: PipelinePolicy(first_of_stage=...)."
                )


def _lent_weights(elements: Iterable[Element]) -> Iterator[tuple[Tensor, Weight]]:
    """The zeros that stand for what elements hold, each with its mark."""
    found: dict[int, tuple[Tensor, Weight]] = {}
    for element in elements:
        for lent in element.lent:
            tensor, weight = found.get(id(lent.zeros), (lent.zeros, Weight((), element.name)))
            found[id(tensor)] = tensor, Weight((*weight.names, f"{element.name}.{lent.name}"), weight.owner)
    yield from found.values()


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


def tensors_in(value: Any, levels: int = 4) -> Iterator[Tensor]:
    """Every tensor in an output of any common shape."""
    if isinstance(value, Tensor):
        yield value
        return
    for part in (parts_of(value) or ()) if levels else ():
        yield from tensors_in(part, levels - 1)


def shape_key(batch: Any) -> Hashable:
    """What two batches of the same shapes have in common."""
    leaves, spec = tree_flatten(batch)
    return str(spec), tuple(_kind(leaf) for leaf in leaves)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{list(leaf.shape)} {leaf.dtype}"
    if _is_constant(leaf) or isinstance(leaf, (torch.dtype, torch.device, enum.Enum)):
        return repr(leaf)
    return f"{type(leaf).__module__}.{type(leaf).__qualname__}"  # what it is said to be may be its address
