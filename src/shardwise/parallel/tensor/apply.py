"""Application of a tensor-parallel plan: parameters become this rank's slices, and some forwards are replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.parallel.tensor.cut import ShardingPlan
from shardwise.parallel.tensor.layer import Column, CopiedColumn, DenseMixture, ReplacedForward, Row, SharedInput
from shardwise.parallel.tensor.linear import Deferral
from shardwise.parallel.tensor.loss import CausalLoss, VocabularyHead, has_loss, loss_of
from shardwise.parallel.tensor.pairs import gather_seq, join_seq, own_seq, share
from shardwise.spec.slice import Slice, set_slice


def apply_cuts(model: nn.Module, cuts: ShardingPlan, comm: Comm) -> None:
    """Apply the plan to ``model`` in place. Parameter objects, names and classes stay."""
    layers = {path: make(model.get_submodule(path), path, comm) for path, make in cuts.replaced_forwards.items()}
    for path, layer in layers.items():
        parent = model.get_submodule(_parent(path))
        if isinstance(layer, VocabularyHead) and has_loss(parent):
            CausalLoss(layer, loss_of(parent)).install(parent)
        if isinstance(layer, Column):
            layer.plan = replace(layer.plan, divides_sequence=cuts.divides_sequence(path))
        if isinstance(layer, Row | DenseMixture):
            layer.divides_sequence = cuts.divides_sequence(path)
        layer.install()
    _share_inputs(model, layers, cuts)
    divide_sequence(model, cuts.sequence, comm)
    for (path, name), value in cuts.attributes.items():
        setattr(model.get_submodule(path), name, value)
    for parameter in model.parameters():
        held = cuts.slices.get(id(parameter))
        if held is not None:
            if any(parameter.shape[cut.dim] != cut.size for cut in held.cuts):  # else only this part was loaded
                parameter.data = take(parameter.data, held)
            set_slice(parameter, held)


def defer_weights(modules: Iterable[nn.Module], deferral: Deferral) -> None:
    """Make ``deferral`` compute the gradients of weights and biases of the linear layers among ``modules``.

    A gradient that must be summed over ranks is not deferred, so that deferred gradients need no communication.
    """
    for module in modules:
        layer = module.__dict__.get("forward")
        if isinstance(layer, Column | Row):
            layer.defer(deferral)


def _share_inputs(model: nn.Module, layers: Mapping[str, ReplacedForward], cuts: ShardingPlan) -> None:
    """Make several column-parallel layers of one module share their input."""
    siblings: dict[str, list[Column | CopiedColumn]] = {}
    for path, layer in layers.items():
        if isinstance(layer, Column | CopiedColumn):
            siblings.setdefault(_parent(path), []).append(layer)
    for path, columns in siblings.items():
        first = columns[0]
        if cuts.is_in("sequence_input", first.name):
            shared = _as_given
        elif len(columns) > 1 or isinstance(first, CopiedColumn):
            pair = gather_seq if cuts.divides_sequence(first.name) else share
            shared = SharedInput(model.get_submodule(path), pair)
        else:
            continue
        for layer in columns:
            layer.shared = shared


def _as_given(x: Tensor, _comm: Comm, _unit: str) -> Tensor:
    return x


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def part_of(cuts: ShardingPlan, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``, a value of the full ``parameter``."""
    held = cuts.slices.get(id(parameter))
    return value if held is None else take(value, held)


def take(whole: Tensor, held: Slice) -> Tensor:
    """Copy the part of ``whole`` that ``held`` describes."""
    part = whole
    for cut in held.cuts:
        pieces = [part.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
        part = torch.cat(pieces, cut.dim) if len(pieces) > 1 else pieces[0]
    return part.clone(memory_format=torch.contiguous_format)


#: Called as ``pair(x, comm, unit)``.
Pair = Callable[[Tensor, Comm, str], Tensor]

#: Function that is applied to a module's first argument, by style.
_GIVEN: dict[str, Pair] = {"sequence_begin": own_seq, "sequence_input": gather_seq, "sequence_whole": join_seq}
#: Function that is applied to a module's output, by style.
_GIVES: dict[str, Pair] = {"sequence_end": join_seq, "sequence_whole": own_seq}


def divide_sequence(model: nn.Module, paths: Mapping[str, Sequence[str]], comm: Comm) -> None:
    """Divide inputs and outputs of modules by positions, or gather them, with hooks on the modules."""
    for style in paths:
        for path in paths[style]:
            module = model.get_submodule(path)
            if style in _GIVEN:
                module.register_forward_pre_hook(_Given(_GIVEN[style], comm, path), with_kwargs=True)
            if style in _GIVES:
                module.register_forward_hook(_Gives(_GIVES[style], comm, path))


class _Given:
    """Forward pre-hook that applies ``pair`` to the first argument, which transformers may pass by name."""

    def __init__(self, pair: Pair, comm: Comm, unit: str) -> None:
        self._pair = pair
        self._place = comm, unit

    def __call__(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._pair(args[0], *self._place), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._pair(kwargs["hidden_states"], *self._place)}


class _Gives:
    """Forward hook that applies ``pair`` to the output."""

    def __init__(self, pair: Pair, comm: Comm, unit: str) -> None:
        self._pair = pair
        self._place = comm, unit

    def __call__(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        return self._pair(output, *self._place)
