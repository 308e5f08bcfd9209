"""Trace of one step of any module without values: each unit's computation, memory traffic and saved tensors.

Forward and backward run on meta tensors. A dispatch mode observes every operation below autograd, and hooks observe the
tensors that autograd saves. A forward operation belongs to the unit whose forward is running. A backward operation
belongs to the unit whose outputs' gradients were computed last. All other operations belong to the root: to
"embedding" before the first unit, to "head" after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from shardwise import torch_private
from shardwise.cost.part import Part
from shardwise.cost.unit import AttentionWork, Product, UnitWork
from shardwise.engine.extensions.selective import is_random, operators
from shardwise.engine.extensions.wrap import assign_parameters, find_units
from shardwise.measure.meta import FusedAttention, on_meta
from shardwise.measure.shapes import KnownShapes
from shardwise.spec.policies import is_thin

_aten = torch.ops.aten

#: Operations that read as much of their first argument as they write.
_LOOKUPS = {_aten.embedding, _aten.index_select, _aten.gather, _aten.index, _aten.take_along_dim}

#: Operations that read only the shape of their first argument.
_FILLS = {
    _aten.new_zeros,
    _aten.new_ones,
    _aten.new_full,
    _aten.zeros_like,
    _aten.ones_like,
    _aten.full_like,
    _aten.bernoulli_,
    _aten.zero_,
    _aten.fill_,
}

EMBEDDING, HEAD = "embedding", "head"


@dataclass
class _Found:
    """The observed work of one unit."""

    products: list[Product] = field(default_factory=list)
    attention: list[AttentionWork] = field(default_factory=list)
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    saved_bytes: float = 0.0
    largest_bytes: float = 0.0  # of the largest saved tensor
    selective_bytes: float = 0.0
    input_bytes: float = 0.0
    num_kernels: int = 0


def trace(
    model: nn.Module, compute_loss: Callable[[], Tensor], dtype: torch.dtype, *, hides_tokens: bool
) -> tuple[UnitWork, ...]:
    """The work of a model's units in one step.

    Args:
        model: Any module. Its tensors are replaced by meta tensors during the trace, and restored afterwards.
        compute_loss: Runs the model's forward on meta tensors, and returns the loss.
        dtype: Dtype of floating-point parameters in the trace.
        hides_tokens: As in ``FusedAttention``.

    Returns:
        The work before the first unit, of the units of ``auto_wrap_policy="auto"`` in the order of their forwards
        (equal neighbours are one entry), and the work outside of units after the first unit.
    """
    units = find_units(model, "auto")
    with on_meta(model, dtype), torch.device("meta"), _in_training(model):
        tracer = _Tracer(model, units)
        attention = FusedAttention(is_cuda=True, hides_tokens=hides_tokens)
        with KnownShapes(), torch_private.no_autocast_on_meta(), tracer, attention:
            loss = compute_loss()
            tracer.begin_backward()
            torch_private.backward_under_modes([loss])
        return tracer.work(assign_parameters(model, units))


@contextlib.contextmanager
def _in_training(model: nn.Module) -> Iterator[None]:
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for attributes, were in before:  # a forward may have kept a tensor in one, such as a table of positions
            attributes.clear()
            attributes.update(were)


class _Tracer(TorchDispatchMode):
    """Observes every operation and every saved tensor, and assigns each to a unit."""

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._model, self._units = model, units
        self._running: list[str] = []  # units whose forwards are running, the innermost last
        self._order: list[str] = []
        self._found: dict[str, _Found] = {EMBEDDING: _Found(), HEAD: _Found()}
        self._in_backward: str | None = None
        tensors = [*model.parameters(), *model.buffers()]
        self._own = {torch_private.storage_identity(tensor): tensor for tensor in tensors}
        self._frozen = {torch_private.storage_identity(p) for p in model.parameters() if not p.requires_grad}
        self._makers: dict[int, str] = {}
        self._alive: dict[int, Any] = {}  # storages by identity; the references keep identities from being reused
        self._saved: dict[int, tuple[Tensor, list[str]]] = {}
        self._entered: dict[int, list[str]] = {}
        self._entries: dict[str, list[Tensor]] = {}
        self._before: set[nn.Module] = set()  # modules that ran before the first unit
        self._stack = contextlib.ExitStack()

    @property
    def _current_unit(self) -> str:
        if self._in_backward is not None:
            return self._in_backward
        return self._running[-1] if self._running else HEAD if self._order else EMBEDDING

    # -- hooks

    def __enter__(self) -> Self:
        for name, module in self._units.items():
            self._hook(module.register_forward_pre_hook(partial(self._enter_unit, name), with_kwargs=True))
            self._hook(module.register_forward_hook(self._leave_unit, always_call=True))
        for module in self._model.modules():
            self._hook(module.register_forward_pre_hook(self._see_module))
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._record_saved, lambda tensor: tensor))
        return super().__enter__()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._stack.close()

    def _hook(self, handle: Any) -> None:
        self._stack.callback(handle.remove)

    def _see_module(self, module: nn.Module, _args: Any) -> None:
        if not self._order:
            self._before.add(module)

    def _enter_unit(self, name: str, _module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._in_backward is not None:
            return  # recomputed
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in inputs:
            self._watch_gradient(tensor)
        self._running.append(name)
        self._found.setdefault(name, _Found())
        self._order.append(name)
        self._entries[name] = inputs
        for tensor in inputs:
            self._entered.setdefault(torch_private.storage_identity(tensor), []).append(name)

    def _leave_unit(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._in_backward is not None:
            return
        self._running.pop()
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor):
                self._watch_gradient(tensor)

    def _watch_gradient(self, tensor: Tensor) -> None:
        """Note that backward enters the unit that made ``tensor`` when the gradient of ``tensor`` is computed."""
        if tensor.requires_grad:
            maker = self._makers.get(torch_private.storage_identity(tensor), EMBEDDING)
            tensor.register_hook(partial(self._gradient_of, maker))

    def _gradient_of(self, name: str, _gradient: Tensor) -> None:
        """Note that backward has entered the unit ``name``."""
        self._in_backward = name

    def begin_backward(self) -> None:
        self._in_backward = HEAD if self._order else EMBEDDING

    def _record_saved(self, tensor: Tensor) -> Tensor:
        key = torch_private.storage_identity(tensor)
        if self._in_backward is None and key not in self._own and key in self._makers:
            self._saved.setdefault(key, (tensor, []))[1].append(self._current_unit)
        return tensor

    # -- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in _NOTHING:
            self._note_makers(result)
            return result
        found = self._found[self._current_unit]
        outputs = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        is_forward = self._in_backward is None
        if _is_computation(func):
            if is_forward:
                self._see_computation(found, func, args, outputs)
        elif outputs:
            num_bytes = sum(map(_extent, outputs)) + sum(map(_extent, self._inputs_read(func, inputs, outputs)))
            if is_forward:
                found.forward_bytes += num_bytes
                found.num_kernels += 1
            else:
                found.backward_bytes += num_bytes
        self._note_makers(result)
        return result

    def _see_computation(self, found: _Found, func: Any, args: Any, outputs: list[Tensor]) -> None:
        product = _PRODUCTS.get(func.overloadpacket)
        if product is not None:
            weights = [t for t in tree_iter(args) if isinstance(t, Tensor)]
            is_trained = not any(torch_private.storage_identity(t) in self._frozen for t in weights)
            found.products.append(dataclasses.replace(product(args, outputs[0]), is_trained=is_trained))
            if is_thin(found.products[-1].inner, found.products[-1].columns):
                return
        else:
            found.attention.append(_attention(func, args))
            found.num_kernels += 1
        if func in _KEPT and not is_random(func, args, {}):
            found.selective_bytes += sum(map(_extent, outputs))

    def _inputs_read(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
        if func.overloadpacket in _FILLS:
            return []
        return outputs[:1] + inputs[1:] if func.overloadpacket in _LOOKUPS else inputs

    def _note_makers(self, result: Any) -> None:
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                key = torch_private.storage_identity(tensor)
                if key not in self._own:
                    self._makers.setdefault(key, self._current_unit)
                    self._alive.setdefault(key, tensor.untyped_storage())

    # -- the result

    def work(self, owned: Mapping[str, Any]) -> tuple[UnitWork, ...]:
        """The observed work, by unit."""
        for key, (tensor, users) in self._saved.items():
            maker = self._makers[key]
            is_shared = len(set(users)) > 1 and maker in {EMBEDDING, HEAD}  # cosines and sines, masks
            unit = self._found[maker if is_shared else users[0]]
            unit.saved_bytes += tensor.untyped_storage().nbytes()
            unit.largest_bytes = max(unit.largest_bytes, tensor.untyped_storage().nbytes())
        for name, inputs in self._entries.items():
            for key, tensor in {torch_private.storage_identity(t): t for t in inputs}.items():
                if key in self._makers and len(self._entered[key]) == 1:
                    self._found[name].input_bytes += tensor.untyped_storage().nbytes()
        parameters = {name: [entry.parameter for entry in entries] for name, entries in owned.items()}
        before, after = self._root_parameters(owned[""])
        made = [
            self._unit(EMBEDDING, self._found[EMBEDDING], before),
            *(self._unit("block", self._found[name], parameters[name]) for name in dict.fromkeys(self._order)),
            self._unit(HEAD, self._found[HEAD], after),
        ]
        unused = [p for name, uses in parameters.items() if name and name not in self._found for p in uses]
        if unused:
            made[-1] = self._unit(HEAD, self._found[HEAD], [*after, *unused])
        runs = [
            dataclasses.replace(unit, name=f"block{index}", count=len(list(equal)))
            for index, (unit, equal) in enumerate(itertools.groupby(made[1:-1]))
        ]
        return (made[0], *runs, made[-1])

    def _root_parameters(self, entries: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Split parameters into those of modules that ran before the first unit, and the others."""
        before, after = [], []
        for entry in entries:
            is_early = any(module in self._before for module, _, _ in entry.uses)
            (before if is_early else after).append(entry.parameter)
        return before, after

    def _unit(self, name: str, found: _Found, parameters: list[Tensor]) -> UnitWork:
        is_root = name in {EMBEDDING, HEAD}
        part = Part("traced", found.forward_bytes, found.backward_bytes, found.saved_bytes, found.num_kernels)
        logits = max((p.rows * p.columns for p in found.products), default=0) if name == HEAD else 0
        wide = max((p.element_size() for p in parameters if p.is_floating_point()), default=2)
        return UnitWork(
            name=name,
            count=1,
            num_parameters=sum(p.numel() for p in parameters),
            num_trained=sum(p.numel() for p in parameters if p.requires_grad),
            products=tuple(found.products),
            attention=tuple(found.attention),
            parts=(part,),
            largest_bytes=found.largest_bytes,
            stream_bytes=found.input_bytes,
            inner_bytes=wide * logits,
            selective_bytes=found.saved_bytes if is_root else found.input_bytes + found.selective_bytes,
            input_bytes=found.saved_bytes if is_root else found.input_bytes,
        )


# -- kinds of operations


def _extent(tensor: Tensor) -> int:
    """Bytes of a tensor's elements in memory; elements of an expanded tensor are counted once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _mm(args: Any, output: Tensor) -> Product:
    first = args[0]
    return Product(first.shape[0], first.shape[1], output.shape[1])


def _addmm(args: Any, output: Tensor) -> Product:
    return _mm(args[1:], output)


def _bmm(args: Any, output: Tensor) -> Product:
    batch, rows, inner = args[0].shape
    return Product(rows, inner, output.shape[2], batch, is_batched=True)


def _baddbmm(args: Any, output: Tensor) -> Product:
    return _bmm(args[1:], output)


def _convolution(args: Any, output: Tensor) -> Product:
    weight, groups, is_transposed = args[1], args[8], args[6]
    field_size = weight[0, 0].numel()
    inner = weight.shape[0 if is_transposed else 1] * field_size
    positions = output[:, 0].numel()
    options = {"is_batched": True, "is_convolution": True}
    if is_transposed:
        positions, inner = args[0][:, 0].numel(), weight.shape[0] // groups
        return Product(positions, inner, weight.shape[1] * field_size, groups, **options)
    return Product(positions, inner, weight.shape[0] // groups, groups, **options)


def _grouped_mm(args: Any, output: Tensor) -> Product:
    rows, weights = args[0], args[1]
    count = weights.shape[0] if weights.dim() == 3 else 1
    return Product(rows.shape[-2] / count, rows.shape[-1], output.shape[-1], count, is_batched=True)


_PRODUCTS: dict[Any, Callable[..., Product]] = {
    _aten.mm: _mm,
    _aten.addmm: _addmm,
    _aten.bmm: _bmm,
    _aten.baddbmm: _baddbmm,
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution,
    _aten._grouped_mm: _grouped_mm,  # noqa: SLF001 - an operator's name
}
_ATTENTION = set(operators("attention"))
_KEPT = {*_ATTENTION, *operators("matmul")}
_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_backward,  # noqa: SLF001 - an operator's name
    _aten._scaled_dot_product_efficient_attention_backward,  # noqa: SLF001 - an operator's name
}
#: Operations without computation.
_NOTHING = {
    _aten.detach,
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.lift_fresh,
    _aten._unsafe_view,  # noqa: SLF001 - an operator's name
    _aten._reshape_alias,  # noqa: SLF001 - an operator's name
}


def _is_computation(func: Any) -> bool:
    """Whether an operation is a product or attention, of forward or backward."""
    return func.overloadpacket in _PRODUCTS or func in _ATTENTION or func.overloadpacket in _ATTENTION_BACKWARD


def _attention(func: Any, args: Any) -> AttentionWork:
    query, key, value = args[:3]
    index = _CAUSAL[func.overloadpacket]
    is_causal = bool(args[index]) if len(args) > index else False
    batch, heads, length, width = query.shape
    return AttentionWork(batch * length, key.shape[2], heads * (width + value.shape[3]) / 2, heads, is_causal=is_causal)


#: Index of ``is_causal`` among an operator's arguments.
_CAUSAL = {
    _aten._scaled_dot_product_flash_attention: 4,  # noqa: SLF001 - an operator's name
    _aten._scaled_dot_product_flash_attention_for_cpu: 4,  # noqa: SLF001 - an operator's name
    _aten._scaled_dot_product_efficient_attention: 6,  # noqa: SLF001 - an operator's name
    _aten._scaled_dot_product_cudnn_attention: 6,  # noqa: SLF001 - an operator's name
    _aten._scaled_dot_product_fused_attention_overrideable: 5,  # noqa: SLF001 - an operator's name
}
