"""Selective recomputation: the outputs of chosen operators are kept in forward, and given again in the recomputation.

torch's ``create_selective_checkpoint_contexts`` sends every operator of the module through Python, in forward and in
the recomputation: four times the host's time of a step without recomputation (`bench/results/2026-11-27-gpu-3.md`).
Here torch's checkpoint runs the module, and a function mode looks at its calls of torch's functions. A call that can
compute a chosen operator is watched in one of two ways; all others pass.

- A linear layer of plain tensors: its output is kept. The recomputation does not call it again, but hands the tensors
  that it had saved for backward to the checkpoint, which asks for as many as in forward, in the same order.
- Any other: its operators are looked at one by one, and the chosen ones are skipped in the recomputation.

What was changed in place since it was computed is computed again, and so is what draws random numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise import torch_private
from shardwise.spec.errors import PlanError
from shardwise.torch_private import TorchDispatchMode

#: Operators by family. Which of them an attention or a product becomes depends on device, dtype and torch's version.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "matmul": (
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten._addmm_activation",
        "aten._scaled_mm",
        "aten._grouped_mm",
    ),
    "attention": (
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_efficient_attention",
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_fused_attention_overrideable",
    ),
}

#: Functions of torch, of its tensors and of ``torch.nn.functional`` that compute operators of the families.
_NAMES = (
    "linear",
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "addbmm",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "einsum",
    "tensordot",
    "inner",
    "chain_matmul",
    "bilinear",
    "_scaled_mm",
    "scaled_mm",
    "_grouped_mm",
    "grouped_mm",
    "_addmm_activation",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
)
_FUNCTIONS = {getattr(home, name) for home in (torch, Tensor, F) for name in _NAMES if hasattr(home, name)}

#: Of them, linear layers: one product, whose output is theirs, and which saves for backward what it is given.
_LINEAR = {F.linear, torch.addmm}
_PLAIN = {Tensor, nn.Parameter, type(None)}
#: The getter of ``Tensor.data``, behind which changes in place are not counted.
_DATA = vars(Tensor.__base__)["data"].__get__

#: What operators call the probability with which they drop numbers.
_RATES = {"dropout_p", "p_dropout", "dropout", "dropout_rate", "dropout_prob"}


def contexts(saved: Iterable[str]) -> Callable[[], tuple[_Forward, _Again]]:
    """The ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    Args:
        saved: ``"matmul"``, ``"attention"``, or names of operators.

    Raises:
        PlanError: torch has no such operator.
    """
    names = set(saved)
    chosen = frozenset(operator for name in names for operator in operators(name))
    is_anywhere = not names <= set(_FAMILIES)  # a call of any function may compute an operator that was named
    has_linear = "matmul" in names

    def make() -> tuple[_Forward, _Again]:
        calls: list[_Linear | _Call] = []
        where = {"is_anywhere": is_anywhere, "has_linear": has_linear}
        return _Forward(chosen, calls, **where), _Again(chosen, calls, **where)

    return make


class _Linear(NamedTuple):
    """A linear layer's call in forward.

    Attributes:
        output: Its output; empty where the recomputation has it.
        version: The number of changes in place that autograd had counted of the output.
        saved: Places, among the arguments, of the tensors that it saved for backward, in order.
        needs_grad: Whether the output needed a gradient.
    """

    output: deque[Tensor]
    version: int
    saved: list[int]
    needs_grad: bool


class _Call(NamedTuple):
    """Another call in forward.

    Attributes:
        outputs: What its chosen operators gave; empty where the recomputation has it.
        count: Their number.
        watched: Tensors in the same memory that the call returned, with their versions.
    """

    outputs: deque[Any]
    count: int
    watched: list[tuple[Tensor, int]]

    @property
    def is_whole(self) -> bool:
        """Whether the outputs are all there, as they were computed."""
        is_same = all(torch_private.version_of(each) == version for each, version in self.watched)
        return 0 < self.count == len(self.outputs) and is_same


class _Mode(TorchFunctionMode):
    """Watches the calls of functions in which operators of ``chosen`` may be computed."""

    def __init__(
        self, chosen: frozenset[Any], calls: list[_Linear | _Call], *, is_anywhere: bool, has_linear: bool
    ) -> None:
        super().__init__()
        self._chosen = chosen
        self._calls = calls
        self._is_anywhere = is_anywhere
        self._has_linear = has_linear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            self._forget(args[0])
        if func in _FUNCTIONS or self._is_anywhere or isinstance(func, OpOverload | OpOverloadPacket):
            is_linear = self._has_linear and func in _LINEAR and not kwargs and _are_plain(args)
            return self._linear(func, args) if is_linear else self._call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _linear(self, function: Any, args: tuple[Any, ...]) -> Tensor:
        raise NotImplementedError

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _forget(self, tensor: Tensor) -> None:
        """Drop what is kept in the memory of a tensor: it is computed again."""
        memory = torch_private.storage_identity(tensor)
        for call in self._calls:
            held = call.output if isinstance(call, _Linear) else call.outputs
            if any(torch_private.storage_identity(each) == memory for each in _tensors(held)):
                held.clear()


class _Forward(_Mode):
    """Around the module's forward."""

    def _linear(self, function: Any, args: tuple[Any, ...]) -> Tensor:
        saving = _Saving(args)
        with saved_tensors_hooks(saving.pack, saving.unpack):
            output = function(*args)
        saving.args = ()  # autograd keeps the hooks
        version = torch_private.version_of(output)
        self._calls.append(_Linear(deque([output.detach()]), version, saving.places, output.requires_grad))
        return output

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _Keep(self._chosen) as keeping:
            output = function(*args, **kwargs)
        memory = {torch_private.storage_identity(each) for each in _tensors(keeping.outputs)}
        same = [each for each in _tensors(output) if torch_private.storage_identity(each) in memory] if memory else ()
        watched = [(each.detach(), torch_private.version_of(each)) for each in same]
        self._calls.append(_Call(keeping.outputs, len(keeping.outputs), watched))
        return output


class _Again(_Mode):
    """Around a recomputation, which calls the same functions in the same order."""

    def __enter__(self) -> Self:
        self._ahead = iter(self._calls)
        return super().__enter__()

    def _linear(self, function: Any, args: tuple[Any, ...]) -> Tensor:
        call = next(self._ahead)
        assert isinstance(call, _Linear)
        pack, _ = torch_private.saved_tensors_hooks_here()
        for place in call.saved:
            pack(args[place])
        if call.output and torch_private.version_of(call.output[0]) == call.version:
            return call.output.popleft().requires_grad_(call.needs_grad)
        with saved_tensors_hooks(_drop, _not_saved):
            return function(*args)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = next(self._ahead)
        assert isinstance(call, _Call)
        if not call.is_whole:
            return function(*args, **kwargs)
        call.watched.clear()
        with _Give(self._chosen, call.outputs):
            return function(*args, **kwargs)


class _Saving:
    """Hooks on what a linear layer saves for backward: the checkpoint's, on the argument in whose memory it lies.

    Attributes:
        args: The layer's arguments.
        places: Places of those that the checkpoint was given, in order.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args
        self.places: list[int] = []
        self._pack, self._unpack = torch_private.saved_tensors_hooks_here()
        memory = [0 if each is None else torch_private.storage_identity(each) for each in args]
        self._places = {each: place for place, each in reversed(list(enumerate(memory))) if each}

    def pack(self, tensor: Tensor) -> Any:
        """A tensor in no argument's memory, such as a copy with other strides, stays."""
        place = self._places.get(torch_private.storage_identity(tensor))
        if place is None:
            return tensor
        self.places.append(place)
        given = self.args[place]
        moved = tensor.storage_offset() - given.storage_offset()
        return self._pack(given), tensor.size(), tensor.stride(), moved

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        held, size, stride, moved = packed
        given = self._unpack(held)
        return given.as_strided(size, stride, given.storage_offset() + moved)


def _drop(_: object) -> None:
    """Save nothing: what is computed again is not differentiated."""


def _not_saved(_: object) -> Tensor:
    raise AssertionError


class _Keep(TorchDispatchMode):
    """Keeps what chosen operators give; nothing, if an operator of the call changes a tensor in place."""

    def __init__(self, chosen: frozenset[Any]) -> None:
        super().__init__()
        self._chosen = chosen
        self._changes = False
        self.outputs: deque[Any] = deque()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.endswith("_"):
            self._changes = True
            self.outputs.clear()
        elif not self._changes and func in self._chosen and not _draws(func, args, kwargs or {}):
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, output))
        return output


class _Give(TorchDispatchMode):
    """Gives in place of a chosen operator's output what was kept of it."""

    def __init__(self, chosen: frozenset[Any], outputs: deque[Any]) -> None:
        super().__init__()
        self._chosen = chosen
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._chosen and not _draws(func, args, kwargs or {}):
            return self._outputs.popleft()
        return func(*args, **(kwargs or {}))


def _are_plain(args: Sequence[Any]) -> bool:
    """Whether a linear layer saves its arguments themselves: no subclass handles them, and autocast casts nothing."""
    first = args[0]
    is_cast = not first.is_meta and torch.is_autocast_enabled(first.device.type)
    return not is_cast and all(type(each) in _PLAIN for each in args)


def _tensors(value: Any) -> list[Tensor]:
    return [
        each for each in tree_leaves(list(value) if isinstance(value, deque) else value) if isinstance(each, Tensor)
    ]


def _draws(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers, as attention with dropout does.

    A recomputation that skipped it would leave its numbers to the next operator that draws: other masks, and gradients
    that are wrong without an error.
    """
    names = [name for name, *_ in torch_private.schema_of(operator)[1]]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rates = [given.get(name, 0.0) for name in names if name in _RATES]
    if rates:  # operators of others rarely have the tag
        return any(isinstance(rate, float) and rate > 0 for rate in rates)
    return torch.Tag.nondeterministic_seeded in operator.tags


def operators(name: str) -> list[Any]:
    """Every overload of the operators that ``name`` means: ``"matmul"``, ``"attention"``, or an operator's name."""
    if name in _FAMILIES:
        return [operator for member in _FAMILIES[name] for operator in _overloads(member)]
    found = _overloads(name)
    if not found:
        raise PlanError(
            f"activation_checkpointing: torch has no operator {name!r}.\n"
            "  Names are those under torch.ops: 'aten.gelu', 'aten.gelu.default', 'my_library.my_op'."
        )
    return found


def _overloads(name: str) -> list[Any]:
    library, _, rest = name.partition(".")
    operator, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, library), operator, None)
    if packet is None:
        return []
    if overload:
        only = getattr(packet, overload, None)
        return [] if only is None else [only]
    return [getattr(packet, known) for known in packet.overloads()]
