"""Cutting a model: parameters become this rank's parts, forwards are replaced where they must talk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.spec.slice import Slice, set_slice
from shardwise.tensor.cut import Cuts
from shardwise.tensor.layer import Column, CopiedColumn, Row, SharedInput
from shardwise.tensor.loss import CausalLoss, VocabularyHead, has_loss, loss_of
from shardwise.tensor.pairs import gather_seq, own_seq, share


def apply_cuts(model: nn.Module, cuts: Cuts, comm: Comm) -> None:
    """Cut ``model`` in place. Parameter objects, names and classes stay.

    Args:
        model: The whole model, the same on every rank of ``tp``.
        cuts: Of this rank.
        comm: On ``tp``.
    """
    shared: dict[str, SharedInput] = {}
    pair = gather_seq if cuts.begins else share
    for path, make in cuts.stands.items():
        layer = make(model.get_submodule(path), path, comm)
        parent = path.rpartition(".")[0]
        if isinstance(layer, VocabularyHead) and has_loss(model.get_submodule(parent)):
            CausalLoss(layer, loss_of(model.get_submodule(parent))).install(model.get_submodule(parent))
        if isinstance(layer, Column | CopiedColumn):
            layer.shared = shared.get(parent) or shared.setdefault(
                parent, SharedInput(model.get_submodule(parent), pair)
            )
        if isinstance(layer, Row):
            layer.divides_sequence = bool(cuts.begins)
        layer.install()
    for path in cuts.begins:
        model.get_submodule(path).register_forward_pre_hook(_Divide(comm, path))
    for (path, name), value in cuts.attributes.items():
        setattr(model.get_submodule(path), name, value)
    for parameter in model.parameters():
        held = cuts.slices.get(id(parameter))
        if held is not None:
            parameter.data = take(parameter.data, held)
            set_slice(parameter, held)


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
