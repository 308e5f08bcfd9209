"""Application of a tensor-parallel plan: parameters become this rank's slices, and some forwards are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.parallel.tensor.layer import Column, CopiedColumn, DenseMixture, ReplacedForward, Row, SharedInput
from shardwise.parallel.tensor.linear import GradStore
from shardwise.parallel.tensor.loss import CausalLoss, VocabularyHead, has_loss, loss_of
from shardwise.parallel.tensor.mappings import (
    copy_to_tp,
    gather_from_seq,
    gather_whole_seq,
    scatter_to_seq,
)
from shardwise.parallel.tensor.sharding_plan import ShardingPlan
from shardwise.spec.slice import Slice, set_slice


def apply_sharding(model: nn.Module, plan: ShardingPlan, comm: Comm) -> None:
    """Apply the plan to ``model`` in place. Parameter objects, names and classes stay."""
    layers = {path: make(model.get_submodule(path), path, comm) for path, make in plan.replaced_forwards.items()}
    for path, layer in layers.items():
        parent = model.get_submodule(_parent(path))
        if isinstance(layer, VocabularyHead) and has_loss(parent):
            CausalLoss(layer, loss_of(parent)).install(parent)
        if isinstance(layer, Column):
            layer.plan = replace(layer.plan, divides_sequence=plan.divides_sequence(path))
        if isinstance(layer, Row | DenseMixture):
            layer.divides_sequence = plan.divides_sequence(path)
        layer.install()
    _share_inputs(model, layers, plan)
    divide_sequence(model, plan.sequence, comm)
    for (path, name), value in plan.attributes.items():
        setattr(model.get_submodule(path), name, value)
    for parameter in model.parameters():
        part = plan.slices.get(id(parameter))
        if part is not None:
            if any(parameter.shape[cut.dim] != cut.size for cut in part.cuts):  # else only this part was loaded
                parameter.data = copy_part(parameter.data, part)
            set_slice(parameter, part)


def defer_weight_grads(modules: Iterable[nn.Module], store: GradStore) -> None:
    """Make ``store`` compute the gradients of weights and biases of the linear layers among ``modules``.

    A gradient that must be summed over ranks is not deferred, so that deferred gradients need no communication.
    """
    for module in modules:
        layer = module.__dict__.get("forward")
        if isinstance(layer, Column | Row):
            layer.defer_weight_grads(store)


def _share_inputs(model: nn.Module, layers: Mapping[str, ReplacedForward], plan: ShardingPlan) -> None:
    """Make several column-parallel layers of one module share their input, also those inside adapters."""
    siblings: dict[str, list[Column | CopiedColumn]] = {}
    for path, layer in layers.items():
        if isinstance(layer, Column | CopiedColumn):
            siblings.setdefault(_parent(path.removesuffix(".base_layer")), []).append(layer)
    for path, columns in siblings.items():
        first = columns[0]
        if plan.is_in("sequence_input", first.name):
            shared = _identity
        elif len(columns) > 1 or isinstance(first, CopiedColumn):
            collective = gather_from_seq if plan.divides_sequence(first.name) else copy_to_tp
            shared = SharedInput(model.get_submodule(path), collective)
        else:
            continue
        for layer in columns:
            layer.shared = shared


def _identity(x: Tensor, _comm: Comm, _unit: str) -> Tensor:
    return x


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def part_of(plan: ShardingPlan, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``, a value of the full ``parameter``."""
    part = plan.slices.get(id(parameter))
    return value if part is None else copy_part(value, part)


def copy_part(whole: Tensor, part: Slice) -> Tensor:
    """Copy the part of ``whole`` that ``part`` describes."""
    copy = whole
    for cut in part.cuts:
        pieces = [copy.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
        copy = torch.cat(pieces, cut.dim) if len(pieces) > 1 else pieces[0]
    return copy.clone(memory_format=torch.contiguous_format)


#: Called as ``collective(x, comm, unit)``.
Collective = Callable[[Tensor, Comm, str], Tensor]

#: Function that is applied to a module's first argument, by style.
_INPUT: dict[str, Collective] = {
    "sequence_begin": scatter_to_seq,
    "sequence_input": gather_from_seq,
    "sequence_whole": gather_whole_seq,
}
#: Function that is applied to a module's output, by style.
_OUTPUT: dict[str, Collective] = {"sequence_end": gather_whole_seq, "sequence_whole": scatter_to_seq}


def divide_sequence(model: nn.Module, paths: Mapping[str, Sequence[str]], comm: Comm) -> None:
    """Divide inputs and outputs of modules by positions, or gather them, with hooks on the modules."""
    for style in paths:
        for path in paths[style]:
            module = model.get_submodule(path)
            if style in _INPUT:
                module.register_forward_pre_hook(_InputHook(_INPUT[style], comm, path), with_kwargs=True)
            if style in _OUTPUT:
                module.register_forward_hook(_OutputHook(_OUTPUT[style], comm, path))


class _InputHook:
    """Forward pre-hook that applies ``collective`` to the first argument, which transformers may pass by name."""

    def __init__(self, collective: Collective, comm: Comm, unit: str) -> None:
        self._collective = collective
        self._place = comm, unit

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._collective(args[0], *self._place), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._collective(kwargs["hidden_states"], *self._place)}


class _OutputHook:
    """Forward hook that applies ``collective`` to the output."""

    def __init__(self, collective: Collective, comm: Comm, unit: str) -> None:
        self._collective = collective
        self._place = comm, unit

    def __call__(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return self._collective(output, *self._place)
