"""Cutting a model: parameters become this rank's parts, forwards are replaced where they must talk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.spec.slice import Slice, set_slice
from shardwise.tensor.cut import Cuts
from shardwise.tensor.layer import Column, CopiedColumn, Layer, Row, SharedInput
from shardwise.tensor.loss import CausalLoss, VocabularyHead, has_loss, loss_of
from shardwise.tensor.pairs import gather_seq, own_seq, share


def apply_cuts(model: nn.Module, cuts: Cuts, comm: Comm) -> None:
    """Cut ``model`` in place. Parameter objects, names and classes stay.

    Args:
        model: The whole model, the same on every rank of ``tp``.
        cuts: Of this rank.
        comm: On ``tp``.
    """
    layers = {path: make(model.get_submodule(path), path, comm) for path, make in cuts.stands.items()}
    for path, layer in layers.items():
        parent = model.get_submodule(_parent(path))
        if isinstance(layer, VocabularyHead) and has_loss(parent):
            CausalLoss(layer, loss_of(parent)).install(parent)
        if isinstance(layer, Column):
            layer.way = replace(layer.way, divides_sequence=bool(cuts.begins))
        if isinstance(layer, Row):
            layer.divides_sequence = bool(cuts.begins)
        layer.install()
    _share_inputs(model, layers, gather_seq if cuts.begins else share)
    for path in cuts.begins:
        model.get_submodule(path).register_forward_pre_hook(_Divide(comm, path))
    for (path, name), value in cuts.attributes.items():
        setattr(model.get_submodule(path), name, value)
    for parameter in model.parameters():
        held = cuts.slices.get(id(parameter))
        if held is not None:
            parameter.data = take(parameter.data, held)
            set_slice(parameter, held)


def _share_inputs(model: nn.Module, layers: Mapping[str, Layer], pair: Callable[[Tensor, Comm, str], Tensor]) -> None:
    """Let the column-parallel layers of one module have one input together, where it has several."""
    siblings: dict[str, list[Column | CopiedColumn]] = {}
    for path, layer in layers.items():
        if isinstance(layer, Column | CopiedColumn):
            siblings.setdefault(_parent(path), []).append(layer)
    for path, columns in siblings.items():
        if len(columns) > 1 or isinstance(columns[0], CopiedColumn):
            shared = SharedInput(model.get_submodule(path), pair)
            for layer in columns:
                layer.shared = shared


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


class _Divide:
    """Forward pre-hook that leaves of the first argument this rank's positions."""

    def __init__(self, comm: Comm, name: str) -> None:
        self._place = comm, name

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return own_seq(args[0], *self._place), *args[1:]


def take(whole: Tensor, held: Slice) -> Tensor:
    """A copy of what ``held`` says is this rank's."""
    part = whole
    for cut in held.cuts:
        pieces = [part.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges]
        part = torch.cat(pieces, cut.dim) if len(pieces) > 1 else pieces[0]
    return part.clone(memory_format=torch.contiguous_format)
