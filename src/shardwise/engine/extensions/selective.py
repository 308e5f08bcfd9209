"""Selective recomputation: outputs of chosen operators are kept in forward, and used again in the recomputation.

torch's ``create_selective_checkpoint_contexts`` dispatches every operator of the module through Python, in forward and
in the recomputation, so that a GPU waits for its host (``bench/results/2026-11-27-gpu-3.md``). Here torch's checkpoint
runs the module, and a function mode intercepts its calls of torch's functions. A call that can compute a chosen
operator is handled in one of two ways; all others are untouched.

- A linear layer of plain tensors: its output is kept. The recomputation does not call it again. It passes the tensors
  that the layer saved for backward to the checkpoint, which expects as many as in forward, in the same order.
- Any other: its operators are intercepted one by one, and the chosen ones are skipped in the recomputation.

These are computed again: thin products, such as the scores of attention without a fused kernel; an output that was
changed in place; operators that draw random numbers; calls inside ``torch.func`` and ``torch.inference_mode``, which
count no changes; a layer through which the module itself calls ``torch.autograd.grad``; and an output whose
``data_ptr`` was read, because a Triton kernel may have written it, as Liger's rotary embedding does. A module that
calls collectives itself is computed again entirely, because they may write to a kept output without counting a change,
as Megatron's row-parallel layer does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwise import torch_private
from shardwise.comm import stall
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.policies import is_thin
from shardwise.torch_private import TorchDispatchMode

_T = TypeVar("_T")

#: Operators by family. Device, dtype and torch's version decide which of them computes an attention or a product.
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
    "multi_dot",
    "matrix_power",
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
_NAMESPACES = (torch, Tensor, F, torch.linalg)
_FUNCTIONS = {getattr(namespace, name) for namespace in _NAMESPACES for name in _NAMES if hasattr(namespace, name)}

#: Linear layers among them: functions that return a single product and save only their arguments for backward.
_LINEAR = {F.linear, torch.addmm}
_PLAIN = {Tensor, nn.Parameter, type(None)}
#: Functions that change tensors in place without incrementing a version counter, or that make such changes possible,
#: such as the getter of ``Tensor.data``.
_UNCOUNTED = {
    vars(Tensor.__base__)["data"].__get__,
    Tensor.data_ptr,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    *(each for name, each in vars(torch).items() if name.startswith("_foreach_") and name.endswith("_")),
}

#: Products whose first argument is added to them.
_ADDED = {"addmm", "baddbmm", "_addmm_activation"}

#: Names of the dropout probability among the arguments of operators.
_DROPOUT_RATES = {"dropout_p", "p_dropout", "dropout", "dropout_rate", "dropout_prob"}


def contexts(saved: Iterable[str]) -> Callable[[], tuple[_Forward, _Recomputation]]:
    """Make the ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.

    Args:
        saved: ``"matmul"``, ``"attention"``, or names of operators.

    Raises:
        PlanError: torch has no such operator.
    """
    names = set(saved)
    ordered = sorted(names, key=lambda name: name != "matmul")  # an operator's own name says more than its family's
    chosen = {each: name != "matmul" for name in ordered for each in operators(name) if not _written_by(each)}
    is_anywhere = not names <= set(_FAMILIES)  # any function may compute an operator given by name
    has_linear = "matmul" in names

    def make() -> tuple[_Forward, _Recomputation]:
        calls: list[_Linear | _Call] = []
        where = {"is_anywhere": is_anywhere, "has_linear": has_linear}
        return _Forward(chosen, calls, **where), _Recomputation(chosen, calls, **where)

    return make


class _Linear(NamedTuple):
    """A linear layer's call in forward.

    Attributes:
        outputs: Its output; empty once the recomputation has taken it, and for a thin layer.
        version: Version counter of the output after the call.
        saved: Indices of the arguments that it saved for backward, in order.
        needs_grad: Whether the output required grad.
    """

    outputs: list[Tensor]
    version: int
    saved: list[int]
    needs_grad: bool


class _Call(NamedTuple):
    """Another call in forward.

    Attributes:
        outputs: Outputs of its chosen operators; ``None`` for an output that the call itself changed. Empty once the
            recomputation has taken them.
        watched: Tensors in the same memory that the call returned, with their version counters.
    """

    outputs: list[Any]
    watched: list[tuple[Tensor, int]]

    @property
    def is_intact(self) -> bool:
        """Whether there are outputs, and none has been changed in place."""
        return bool(self.outputs) and all(torch_private.version_of(each) == version for each, version in self.watched)


class _Mode(TorchFunctionMode):
    """Intercepts calls of functions that may compute operators of ``chosen``; its values say whether thin ones count.

    Attributes:
        hooks: The checkpoint's hooks on tensors that autograd saves.
    """

    _is_forward = False

    def __init__(
        self, chosen: Mapping[Any, bool], calls: list[_Linear | _Call], *, is_anywhere: bool, has_linear: bool
    ) -> None:
        super().__init__()
        self._chosen = chosen
        self._calls = calls
        self._is_anywhere = is_anywhere
        self._has_linear = has_linear

    def __enter__(self) -> Self:
        self.hooks = torch_private.saved_tensors_hooks_here()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNCOUNTED:
            self._forget(_memory(args))
        is_watched = func in _FUNCTIONS or self._is_anywhere or isinstance(func, OpOverload | OpOverloadPacket)
        if not is_watched or torch.is_inference_mode_enabled() or torch_private.is_transformed():
            return func(*args, **(kwargs or {}))
        if self._has_linear and func in _LINEAR and not kwargs and self._are_saved(args):
            return self._linear(func, args)
        return self._call(func, args, kwargs or {})

    def _are_saved(self, args: Sequence[Any]) -> bool:
        """Whether a linear layer saves its arguments themselves, and for this checkpoint.

        It may not if an argument is of a subclass. Autocast casts arguments, and a layer copies non-contiguous inputs
        of three or more dimensions. Inside another checkpoint, or other saved-tensor hooks, they are saved there.
        """
        first = args[0]
        is_cast = not first.is_meta and torch.is_autocast_enabled(first.device.type)
        is_copied = first.dim() > 2 and not first.is_contiguous()
        return (
            not (is_cast or is_copied)
            and all(type(each) in _PLAIN for each in args)
            and torch_private.saved_tensors_hooks_here() == self.hooks
        )

    def _linear(self, function: Any, args: tuple[Any, ...]) -> Tensor:
        raise NotImplementedError

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def on_differentiated(self) -> None:
        """Drop kept outputs if backward uses a linear layer inside forward: recomputation then needs its graph."""
        if self._is_forward:
            self._drop()

    def _drop(self) -> None:
        """Drop the kept outputs of all calls so far."""
        for call in self._calls:
            call.outputs.clear()

    def _forget(self, memory: set[int]) -> None:
        """Drop kept outputs that share ``memory``, so that they are computed again."""
        for call in self._calls:
            if memory & _memory(call.outputs):
                call.outputs.clear()


class _Forward(_Mode):
    """Context of the module's forward: keeps the outputs of chosen operators."""

    def __enter__(self) -> Self:
        self._is_forward = True
        self._counts_before = torch_private.num_collectives(), stall.num_issued()
        return super().__enter__()

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        self._is_forward = False
        super().__exit__(exc_type, exc_val, exc_tb)
        of_others, ours = self._counts_before
        if torch_private.num_collectives() != of_others and stall.num_issued() == ours:
            self._drop()

    def _linear(self, function: Any, args: tuple[Any, ...]) -> Tensor:
        saving = _Saving(args, self)
        output = saving.call(function)
        version = torch_private.version_of(output)
        inner = args[0 if function is F.linear else 1].size(-1)
        kept = [] if is_thin(inner, output.size(-1)) else [output.detach()]
        self._calls.append(_Linear(kept, version, saving.places, output.requires_grad))
        return output

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _RecordOutputs(self._chosen) as recorded:
            output = function(*args, **kwargs)
        memory = _memory(recorded.outputs)
        found = [each for each in tree_leaves(output) if memory & _memory(each)] if memory else ()
        watched = [(part.detach(), torch_private.version_of(part)) for each in found for part in _parts(each)]
        self._calls.append(_Call(recorded.outputs, watched))
        return output


class _Recomputation(_Mode):
    """Context of a recomputation, which calls the same functions in the same order and gets the kept outputs."""

    def __enter__(self) -> Self:
        self._remaining = iter(self._calls)
        return super().__enter__()

    def _next(self, kind: type[_T]) -> _T:
        call = next(self._remaining, None)
        if isinstance(call, kind):
            return call
        raise StateError(
            "a module under activation_checkpointing='selective' computes other products in its recomputation than in"
            " forward.\n  Make its forward depend on its inputs and parameters alone, or set 'none'."
        )

    def _linear(self, function: Any, args: tuple[Any, ...]) -> Tensor:
        call = self._next(_Linear)
        output = call.outputs.pop() if call.outputs else None
        if output is None or torch_private.version_of(output) != call.version:
            return _Saving(args, self).call(function)
        pack, _ = self.hooks
        for place in call.saved:
            pack(args[place])
        return output.requires_grad_(call.needs_grad)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._next(_Call)
        outputs = call.outputs[::-1] if call.is_intact else []
        call.outputs.clear()
        call.watched.clear()
        if not outputs:
            return function(*args, **kwargs)
        with _ReplayOutputs(self._chosen, outputs):
            return function(*args, **kwargs)


class _Saving:
    """Saved-tensor hooks of a linear layer: the checkpoint gets the argument whose memory the layer saves.

    Attributes:
        places: Indices of the arguments that the checkpoint was given, in order.
    """

    def __init__(self, args: tuple[Any, ...], mode: _Mode) -> None:
        self.places: list[int] = []
        self._args = args
        self._mode = mode
        self._pack, self._unpack = mode.hooks
        self._places = {_start(each): place for place, each in reversed(list(enumerate(args))) if each is not None}

    def call(self, function: Any) -> Tensor:
        with saved_tensors_hooks(self.pack, self.unpack):
            output = function(*self._args)
        self._args = ()  # autograd keeps the hooks
        return output

    def pack(self, tensor: Tensor) -> Any:
        """Pass the argument in whose memory ``tensor`` is to the checkpoint; any other tensor is saved as usual."""
        place = self._places.get(_start(tensor))
        if place is None:
            return tensor
        self.places.append(place)
        return self._pack(self._args[place]), tensor.size(), tensor.stride()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self._mode.on_differentiated()
        handle, size, stride = packed
        return self._unpack(handle).as_strided(size, stride)


class _RecordOutputs(TorchDispatchMode):
    """Keeps the outputs of chosen operators, except those that later operators change in place."""

    def __init__(self, chosen: Mapping[Any, bool]) -> None:
        super().__init__()
        self._chosen = chosen
        self.outputs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _is_kept(func, args, kwargs or {}, self._chosen):
            self.outputs.append(tree_map_only(Tensor, Tensor.detach, output))
        elif _written_by(func):
            arguments = _arguments_of(func, args, kwargs or {})
            memory = _memory([arguments.get(name) for name in _written_by(func)])
            self.outputs = [None if memory & _memory(each) else each for each in self.outputs]
        return output


class _ReplayOutputs(TorchDispatchMode):
    """Returns kept outputs in place of calling chosen operators; ``outputs`` is in reverse order."""

    def __init__(self, chosen: Mapping[Any, bool], outputs: list[Any]) -> None:
        super().__init__()
        self._chosen = chosen
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = self._outputs.pop() if _is_kept(func, args, kwargs or {}, self._chosen) else None
        return func(*args, **(kwargs or {})) if output is None else output


def _start(tensor: Tensor) -> tuple[object, ...]:
    """Return the storage and offset of a tensor, and its conjugate and negative bits."""
    return torch_private.storage_identity(tensor), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()


def _memory(value: Any) -> set[int]:
    """Return the identities of the storages of all tensors in a value."""
    found = [part for each in tree_leaves(value) if isinstance(each, Tensor) for part in _parts(each)]
    return {torch_private.storage_identity(part) for part in found} - {0}


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return a tensor and the tensors that it wraps, such as the local tensor of a ``DTensor``."""
    wrapped = torch_private.wrapped_tensors(tensor) or {}
    return [tensor, *(part for each in wrapped.values() for part in _parts(each))]


@functools.cache
def _written_by(operator: Any) -> tuple[str, ...]:
    """Names of the arguments that an operator changes in place."""
    if not isinstance(operator, OpOverload):
        return ()
    return tuple(name for name, _, is_written in torch_private.schema_of(operator)[1] if is_written)


def _arguments_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = [name for name, *_ in torch_private.schema_of(operator)[1]]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_kept(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], chosen: Mapping[Any, bool]) -> bool:
    if operator not in chosen or is_random(operator, args, kwargs):
        return False
    return chosen[operator] or not is_thin_product(operator, args)


def is_thin_product(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether a product is thin (:func:`is_thin`), as the one of queries and keys is."""
    first, second = args[1:3] if operator.overloadpacket.__name__ in _ADDED else args[:2]
    return is_thin(first.size(-1), second.size(-1))


def is_random(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers, as attention with dropout does.

    If a recomputation skipped it, the next operator would draw its random numbers: different masks, and silently wrong
    gradients.
    """
    arguments = _arguments_of(operator, args, kwargs)
    rates = [arguments.get(name, 0.0) for name, *_ in torch_private.schema_of(operator)[1] if name in _DROPOUT_RATES]
    if rates:  # custom operators rarely have the tag
        return any(isinstance(rate, float) and rate > 0 for rate in rates)
    return torch.Tag.nondeterministic_seeded in operator.tags


def operators(name: str) -> list[Any]:
    """Return every overload of the operators that ``name`` selects: ``"matmul"``, ``"attention"``, or one operator."""
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
