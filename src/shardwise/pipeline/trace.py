"""Which tensors go from stage to stage, for one shape of batch: found by a forward that computes nothing.

Every element gives zeros that take no memory, of the shapes that its sketch on ``meta`` has; what the model does
between its elements is really run on them. They are marked, and marks tell from which elements' outputs, and from which
weights, a value was computed. All ranks trace the same model, and find the same.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwise.pipeline.element import Element
from shardwise.pipeline.model_buffers import Kept, ModelBuffers
from shardwise.pipeline.taint import Taint
from shardwise.spec.errors import PlanError

#: An output of an element: the number of the call that made it, and its place among the leaves of what that returned.
Source = tuple[int, int]


#: The mark of what lies inside an element.
_INSIDE = "inside"


@dataclass(frozen=True)
class Weight:
    """The mark of what an element holds, and the model's forward looks at from outside.

    Attributes:
        names: In the model: several where it is tied.
        owner: The first element that holds it.
        stages: All that have it.
    """

    names: tuple[str, ...]
    owner: str
    stages: tuple[int, ...]


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
        weights: What its arguments were computed from besides.
        state: The names of buffers outside of all elements from which they were.
        leaves: What it returns; ``None`` for one that is run on every stage, because it depends on the batch alone.
        spec: Of the nest in which the leaves lie.
        stage: Which computes it.
        keeps_state: It writes to buffers of an element that every stage has.
    """

    element: Element
    inputs: frozenset[Source]
    weights: frozenset[Weight] = frozenset()
    state: frozenset[str] = frozenset()
    leaves: list[Leaf] | None = None
    spec: TreeSpec | None = None
    stage: int = 0
    keeps_state: bool = False

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
class StageFlow:
    """What was found.

    Attributes:
        calls: Of elements, in order.
        crossing: For each stage but the last what it hands to the next one, in order: what it made, and what it was
            handed and later stages need.
        last_call: The number of each stage's last call.
        writes_in_place: The model writes to what elements return or take: it needs memory of its own.
        reads_values: The model looks at values of what elements return: it may take another path than was traced.
        written: Names of buffers outside of all elements that the model's forward writes to.
        on_last_stage: Names of buffers outside of all elements that the last stage alone has right.
        learned: What stages were told about each other's activations in steps of this kind.
    """

    calls: list[Call]
    crossing: list[tuple[Source, ...]] = field(default_factory=list)
    last_call: list[int] = field(default_factory=list)
    writes_in_place: bool = False
    reads_values: bool = False
    written: tuple[str, ...] = ()
    on_last_stage: tuple[str, ...] = ()
    learned: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def keepers(self) -> dict[str, int]:
        """The stage that computes each element that writes to buffers and that every stage has, by name."""
        return {call.element.name: call.stage for call in self.calls if call.keeps_state}

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
    """Follows one forward of the model's sketch, whose elements are to send their calls to :meth:`call`.

    Args:
        elements: Of the model, with stages.
        device: Where activations are.
        writes_in_place: Give what can be written to. It takes the memory of all activations.
    """

    def __init__(self, elements: Sequence[Element], device: torch.device, *, writes_in_place: bool = False) -> None:
        self._device = device
        self._writes_in_place = writes_in_place
        self._calls: list[Call] = []
        self._elements = elements
        self._state: ModelBuffers | None = None
        self._marks = Taint(foreign=None if device.type == "meta" else _INSIDE)
        for tensor, weight in lent_weights(elements):
            self._marks.add(tensor, {weight})

    def run(self, forward: Callable[[], Any], sketch: nn.Module, num_stages: int) -> StageFlow:
        """Follow ``forward``, which calls ``sketch``.

        Raises:
            PlanError: The elements cannot be run stage by stage.
        """
        self._state = ModelBuffers(_outside(sketch, self._elements), self._marks)
        with self._marks.follow():
            output = forward()
        self._state.look(len(self._calls))
        held = [value for module in _root_modules(sketch, self._calls) for value in vars(module).values()]
        return self._finish([*tensors_in(output), *tensors_in(held)], num_stages)

    def call(self, element: Element, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call of ``element``; returns what stands for its result."""
        arguments, spec = tree_flatten((args, dict(kwargs)))
        assert self._state is not None
        self._state.look(len(self._calls))
        call = Call(element, *self._reached(arguments), self._kept(arguments))
        if not element.has_parameters:
            assert element.sketch is not None
            state, versions = _state_of(element.sketch), _versions(arguments)
            output = element.sketched(*args, **kwargs)
            call.keeps_state = _state_of(element.sketch) != state
            leaves, _ = tree_flatten(output)
            found, weights = self._reached(leaves)
            # It depends on the batch alone, or changes what others hold on to: every stage runs it.
            if _versions(arguments) != versions or not (call.keeps_state or found):
                self._calls.append(call)
                return output
            call.inputs, call.weights = call.inputs | found, call.weights | weights
        else:
            with self._marks.aside():
                output = self._sketched(element, arguments, spec)
        leaves, call.spec = tree_flatten(output)
        places = {id(argument): place for place, argument in enumerate(arguments) if not _is_constant(argument)}
        call.leaves = [_leaf(leaf, places) for leaf in leaves]
        number = len(self._calls)
        self._calls.append(call)
        return call.give(arguments, lambda place, leaf: self._placeholder((number, place), leaf))

    def _finish(self, kept: Sequence[Tensor], num_stages: int) -> StageFlow:
        flow = StageFlow(self._calls, writes_in_place=self._writes_in_place)
        final, weights = self._reached(kept)
        flow.reads_values = any(not isinstance(mark, Kept) for mark in self._marks.read)
        _settle(flow.calls)
        _check(flow.calls, num_stages)
        _check_weights([(call.stage, call.weights) for call in flow.calls if call.leaves is not None], num_stages)
        _check_weights([(num_stages - 1, weights)], num_stages)
        flow.crossing, flow.last_call = _crossing(flow.calls, final, num_stages)
        assert self._state is not None
        flow.written = self._state.written
        flow.on_last_stage = self._state.on_last_stage(flow.calls, flow.last_call, num_stages)
        return flow

    def _sketched(self, element: Element, arguments: Sequence[Any], spec: TreeSpec) -> Any:
        """What the element's sketch returns, where arguments that it hands through are the arguments themselves."""
        others = [a if isinstance(a, Tensor) else _copied(a) for a in arguments]
        given = [a.detach().to("meta") if isinstance(a, Tensor) else a for a in arguments]
        before = _versions(given)
        try:
            with element.on_meta():
                leaves, out_spec = _run(element, given, spec)
        except Exception as error:  # noqa: BLE001 - whatever it is, values may be what it lacks
            given = [_real(a) if isinstance(a, Tensor) else b for a, b in zip(arguments, others, strict=True)]
            before = _versions(given)
            try:
                with element.on_meta(), _filled(element, self._device):
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
        return _real(made, detach=False) if self._writes_in_place and made.requires_grad else made

    def _reached(self, values: Iterable[Any]) -> tuple[frozenset[Source], frozenset[Weight]]:
        """The outputs of elements, and the weights, from which these were computed, or on which their being depends."""
        marks = self._marks.of(values) | self._marks.read
        if _INSIDE in marks:
            raise inside_of_blocks()
        weights = frozenset(mark for mark in marks if isinstance(mark, Weight))
        return frozenset(mark for mark in marks if isinstance(mark, tuple)), weights

    def _kept(self, values: Iterable[Any]) -> frozenset[str]:
        """The buffers of the model's own from which these were computed, or on which their being depends."""
        marks = self._marks.of(values) | self._marks.read
        return frozenset(mark.name for mark in marks if isinstance(mark, Kept))


def inside_of_blocks() -> PlanError:
    """What is said where a model has taken a tensor that lies inside a block, of which there is a sketch only."""
    return PlanError(
        "the model's forward uses or returns tensors from inside its blocks that the blocks do not return, such as"
        " router logits or attention weights: a pipeline stage has only those of its own blocks.\n"
        "  Switch that off (output_router_logits=False, output_attentions=False), or set pp=1."
    )


class WritesInPlaceError(RuntimeError):
    """What a tracer gave was to be written to."""


def _run(element: Element, arguments: Sequence[Any], spec: TreeSpec) -> tuple[list[Any], TreeSpec]:
    args, kwargs = tree_unflatten(list(arguments), spec)
    with torch.no_grad():
        return tree_flatten(element.sketched(*args, **kwargs))


@contextlib.contextmanager
def _filled(element: Element, device: torch.device) -> Iterator[None]:
    """Let what the element's sketch holds on ``meta`` be zeros."""
    assert element.sketch is not None
    found: dict[int, Tensor] = {}
    places = []
    for module in element.sketch.modules():
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            if tensor.is_meta:
                places.append((module, name, tensor))
    try:
        for module, name, tensor in places:
            if id(tensor) not in found:
                filled = torch.zeros_like(tensor, device=device)
                is_parameter = isinstance(tensor, nn.Parameter)
                found[id(tensor)] = nn.Parameter(filled, requires_grad=False) if is_parameter else filled
            setattr(module, name, found[id(tensor)])
        yield
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)


def _real(tensor: Tensor, *, detach: bool = True) -> Tensor:
    """A copy with memory of its own."""
    return (tensor.detach() if detach else tensor).clone(memory_format=torch.contiguous_format)


def _copied(value: Any) -> Any:
    """What the block may write to, such as a cache, as it is now."""
    try:
        return value if _is_constant(value) else copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - it copies itself as it likes
        return value


def _versions(values: Iterable[Any]) -> list[tuple[int, int]]:
    """How often each tensor among ``values`` has been written to."""
    return [(id(value), value._version) for value in values if isinstance(value, Tensor)]  # noqa: SLF001


def _state_of(module: nn.Module) -> list[tuple[int, int]]:
    return _versions(module.buffers())


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


def _check_weights(uses: Iterable[tuple[int, Iterable[Weight]]], num_stages: int) -> None:
    """A weight is used by a stage that has it."""
    for stage, weights in uses:
        foreign = sorted((w for w in weights if stage not in w.stages), key=lambda weight: weight.names)
        if not foreign:
            continue
        first, more = foreign[0], len(foreign) - 1
        several = f" (and {more} more weights)" if more else ""
        raise PlanError(
            f"the model's own forward computes with {first.names[0]!r}{several}, which is held on pipeline stage"
            f" {first.stages[0]}, for what stage {stage} of {num_stages} computes: a stage has only the weights of its"
            f" own modules.\n  Have forward call {first.owner!r} instead of taking its weight; tie the weight to that"
            " of a module that is called there (head.weight = embedding.weight); compute with it in a block; let both"
            " be on one stage (register the module where it is used, or PipelinePolicy(first_of_stage=...)); leave a"
            " penalty over weights to the optimizer (weight_decay); or set pp=1."
        )


def lent_weights(elements: Iterable[Element]) -> Iterator[tuple[Tensor, Weight]]:
    """What elements hold, as it is seen from outside."""
    found: dict[int, tuple[Tensor, Weight]] = {}
    for element in elements:
        for lent in element.lent:
            name = f"{element.name}.{lent.name}"
            tensor, weight = found.get(id(lent.zeros), (lent.zeros, Weight((), element.name, ())))
            stages = tuple(sorted({*weight.stages, *element.stages}))
            found[id(tensor)] = tensor, Weight((*weight.names, name), weight.owner, stages)
    yield from found.values()


def _outside(sketch: nn.Module, elements: Iterable[Element]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``sketch`` outside of all elements, with their names."""
    inside = {id(m) for element in elements if element.sketch is not None for m in element.sketch.modules()}
    return ((name, module) for name, module in sketch.named_modules() if id(module) not in inside)


def _root_modules(sketch: nn.Module, calls: Iterable[Call]) -> Iterator[nn.Module]:
    """The modules whose own forward is run on every stage: what it leaves in their attributes is kept."""
    inside = {id(m) for call in calls if call.element.sketch is not None for m in call.element.sketch.modules()}
    return (module for module in sketch.modules() if id(module) not in inside)


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
    if isinstance(value, Mapping):
        parts: Iterable[Any] = value.values()
    elif isinstance(value, (tuple, list, set)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, held.name, None) for held in fields(value)]
    else:
        return
    for part in parts if levels else ():
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
