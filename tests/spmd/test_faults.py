"""Faults, planted one at a time: forgotten and doubled sums. Types, or the comparison with the rules, must find each.

``FAULTS`` are found in the forward of a model, without values, or in the sums of its gradients. ``BACKWARDS`` change
only what a function gives back: for types a backward is what its rule says, and ``test_rules`` compares it with that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from spmd_types import SpmdTypeError

import shardwise as sw
from shardwise.comm.axes import Comms
from shardwise.comm.base import DONE
from shardwise.engine.extensions import batch_norm
from shardwise.engine.gradient import Gradient
from shardwise.engine.group import Form
from shardwise.parallel.context import ring, root
from shardwise.parallel.context.root import Division
from shardwise.parallel.experts import route
from shardwise.parallel.pipeline import pipelined
from shardwise.parallel.sharded_embedding import rows
from shardwise.parallel.tensor import apply, layer, linear, loss, mappings
from tests.spmd.checked import WrongTypes, check
from tests.spmd.families import batch, build
from tests.spmd.test_rules import cases, check_values

#: Unlike any other size of the models.
NUM_EXPERTS = 6
MIXTURE = {"num_experts": NUM_EXPERTS}
Plant = Callable[[pytest.MonkeyPatch], None]
TP, SEQUENCE = {"tp": 2}, {"tp": 2, "sequence_parallel": True}


@dataclass(frozen=True)
class Fault:
    """A fault of a model.

    Attributes:
        plant: Puts it into the code.
        says: A part of the message that finds it.
        family: The model.
        degrees: Fields of its plan.
        model: Changes of the sizes of our GPT.
    """

    plant: Plant
    says: str
    family: str = "llama"
    degrees: dict[str, Any] = field(default_factory=lambda: TP)
    model: dict[str, Any] = field(default_factory=dict)


def put(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def without_sum(x, comm, unit, bias=None):
    if "embed" in unit:
        return mappings.reduce_from_tp(x, comm, unit, bias)
    return x if bias is None else x + bias


def summed_twice(x, comm, unit, bias=None):
    return mappings.reduce_from_tp(
        mappings.reduce_from_tp(x, comm, unit) if "embed" not in unit else x, comm, unit, bias
    )


def embedding_without_sum(x, comm, unit, bias=None):
    return x if "embed" in unit else mappings.reduce_from_tp(x, comm, unit, bias)


def row_with_early_bias(self, x):
    return mappings.reduce_from_tp(self._linear(x, self.module.weight, self.module.bias), self.comm, self.name)


def plain_forward(self, *args, **kwargs):
    return type(self.module).forward(self.module, *args, **kwargs)


def column_of_unshared(x, weight, bias, plan):
    return plan.forward(x, weight, bias)


def column_of_shared_twice(x, weight, bias, plan):
    return linear.column_linear(mappings.copy_to_tp(x, plan.comm, plan.unit), weight, bias, plan)


def local_cross_entropy(self, logits, targets, unit, **_named):
    return F.cross_entropy(logits, targets)


_cross_entropy = loss.Vocabulary.cross_entropy


def summed_loss(self, *args, **named):
    return mappings.reduce_from_tp(_cross_entropy(self, *args, **named), self.comm, "loss")


def own_positions_of_a_term(x, comm, unit, bias=None):
    y = x.unflatten(1, (comm.size, -1))[:, comm.rank]
    return y if bias is None else y + bias


def experts_with_unshared_weights(self, states, chosen, weights, *args, **kwargs):
    states = mappings.copy_to_tp(states, self.comm, self.name)
    terms = type(self.module).forward(self.module, states, chosen, weights, *args, **kwargs)
    return mappings.reduce_from_tp(terms, self.comm, self.name)


def share_all_but_weights(x, comm, unit):
    """The weights of a mixture's choices, (B, T, experts)."""
    return x if x.dim() == 3 and x.shape[-1] == NUM_EXPERTS else mappings.copy_to_tp(x, comm, unit)


def share_all_but_biases(x, comm, unit):
    """The biases of a mixture's experts, (experts, C)."""
    return x if x.dim() == 2 and x.shape[0] == NUM_EXPERTS else mappings.copy_to_tp(x, comm, unit)


def attention_without_ring(self, q, k, v, *, scale=None, is_causal=True):
    return F.scaled_dot_product_attention(q, k, v, scale=scale, is_causal=is_causal, enable_gqa=True)


def reduced_twice(self, group, *args):
    _reduce(self, group, *args).wait()
    return _reduce(self, group, *args)


_reduce = Form.reduce

FAULTS = {
    "a row-parallel layer forgets its sum": Fault(put(layer, "reduce_from_tp", without_sum), "Partial"),
    "a row-parallel layer sums twice": Fault(put(layer, "reduce_from_tp", summed_twice), "expects its input to be V"),
    "a bias is added before the sum": Fault(
        put(layer.Row, "__call__", row_with_early_bias), "Partial|Invariant", "gpt"
    ),
    "an embedding of some ids forgets its sum": Fault(
        put(layer, "reduce_from_tp", embedding_without_sum), "Invariant", "gpt"
    ),
    "the gradient of a column-parallel layer's input is not summed": Fault(
        put(layer, "column_linear", column_of_unshared), "Invariant"
    ),
    "the gradient of a column-parallel layer's input is summed twice": Fault(
        put(layer, "column_linear", column_of_shared_twice), "expects its input to be I", "gpt"
    ),
    "the loss is that of this rank's ids": Fault(
        put(loss.Vocabulary, "cross_entropy", local_cross_entropy), "the loss is"
    ),
    "the loss is summed over tp once more": Fault(put(loss.Vocabulary, "cross_entropy", summed_loss), "to be V"),
    "copies of a key head get their own gradients": Fault(
        put(layer, "copy_part_to_tp", lambda parameter, *_: parameter), "Invariant", degrees={"tp": 8}
    ),
    "gradients of routing weights are not summed, stacked experts": Fault(
        put(layer.Experts, "__call__", experts_with_unshared_weights), "Invariant", "mixtral"
    ),
    "gradients of routing weights are not summed, experts cut over tp": Fault(
        put(layer, "copy_to_tp", share_all_but_weights), "Invariant|Partial", "gpt", model=MIXTURE
    ),
    "a norm's gradient is not summed under sequence_parallel": Fault(
        put(layer.SharedParameters, "__call__", plain_forward), "Invariant", degrees=SEQUENCE
    ),
    "biases of experts are not shared under sequence_parallel": Fault(
        put(layer, "copy_to_tp", share_all_but_biases), "Invariant", "gpt", SEQUENCE, MIXTURE
    ),
    "each rank takes its positions of its own term": Fault(
        put(layer, "reduce_scatter_to_seq", own_positions_of_a_term), "Partial|Invariant", degrees=SEQUENCE
    ),
    "the gradient of gathered positions is cut, not summed": Fault(
        put(apply, "_INPUT", apply._INPUT | {"sequence_input": mappings.gather_whole_seq}),
        "Invariant",
        degrees=SEQUENCE,
    ),
    "positions are not joined behind the last norm": Fault(
        put(apply, "_OUTPUT", apply._OUTPUT | {"sequence_end": lambda x, comm, unit: x}), "to be I", degrees=SEQUENCE
    ),
    "attention reads this rank's positions alone": Fault(
        put(ring.Ring, "__call__", attention_without_ring), "no ring passes them on", degrees={"cp": 2}
    ),
    "the loss is that of this rank's positions": Fault(
        put(Division, "mean_loss", lambda self, loss, *_: loss), "the loss is", degrees={"cp": 2}
    ),
    "a user's table leaves the slopes of an activation whole": Fault(
        lambda _: None, "Invariant", "apertus", TP | {"tp_plan": {"model.layers.*.mlp.act_fn": "replicate"}}
    ),
    "gradients are not summed": Fault(put(Form, "reduce", lambda self, *_: DONE), "missing", degrees={"dp_shard": 8}),
    "gradients are summed twice": Fault(put(Form, "reduce", reduced_twice), "without need", degrees={"dp_shard": 8}),
    "gradients are not summed over groups": Fault(
        put(Gradient, "_reduce_over_replicas", lambda *_: DONE),
        "missing",
        degrees={"strategy": "hsdp", "dp_replicate": 2},
    ),
    "gradients of experts are summed over ranks with other experts": Fault(
        put(Comms, "of", lambda self, _: self), "without need", "mixtral", {"ep": 2}
    ),
    "gradients of all that is no expert are summed over some ranks": Fault(
        put(Comms, "of", lambda self, _: self.expert), "missing", "mixtral", {"ep": 2}
    ),
    "a tied weight gets each stage's own gradient": Fault(
        put(pipelined, "sum_over_copies", lambda *_: None), "missing", "gpt", {"pp": 2}
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_types_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    plan = sw.ParallelPlan(**({"strategy": "zero3"} | fault.degrees))
    fault.plant(monkeypatch)
    with pytest.raises((SpmdTypeError, WrongTypes), match=fault.says):
        check(lambda: build(fault.family, fault.degrees, **fault.model), plan, world_size=8, batch=batch(fault.family))


# -- what a function gives back


def backward(function: type[torch.autograd.Function]) -> Callable[[Callable[..., Any]], Plant]:
    """A plant that gives a function another backward: ``change(old, ctx, *grads)``."""

    def make(change: Callable[..., Any]) -> Plant:
        old = function.backward
        return put(function, "backward", staticmethod(lambda ctx, *grads: change(old, ctx, *grads)))

    return make


def first_only(old: Any, ctx: Any, *grads: Any) -> Any:
    del old, ctx
    return grads[0], None, None


def own_positions(old: Any, ctx: Any, grad: Any) -> Any:
    del old
    return mappings._own_positions(grad, ctx.place[0]), None, None


def zeros_elsewhere(old: Any, ctx: Any, grad: Any) -> Any:
    del old
    comm = ctx.place[0]
    whole = grad.new_zeros(comm.size, *grad.shape)
    whole[comm.rank] = grad
    return whole.transpose(0, 1).flatten(1, 2), None, None


def zeros_elsewhere_last(old: Any, ctx: Any, grad: Any) -> Any:
    del old
    sizes, comm, _ = ctx.place
    whole = grad.new_zeros(*grad.shape[:-1], sum(sizes))
    whole[..., sum(sizes[: comm.rank]) :][..., : grad.shape[-1]] = grad
    return whole, None, None, None


def bias_of_own_positions(old: Any, ctx: Any, grad: Any) -> Any:
    to_x, to_bias, *rest = old(ctx, grad)
    return to_x, None if to_bias is None else grad.flatten(0, -2).sum(0), *rest


def twice(old: Any, ctx: Any, grad: Any) -> Any:
    to_x, *rest = old(ctx, grad)
    return 2 * to_x, *rest


def of_own_rank(old: Any, ctx: Any, grad: Any) -> Any:
    del old
    division = ctx.division
    return grad.index_select(1, division.positions_T), None, None


def of_first_choice(old: Any, ctx: Any, grad: Any) -> Any:
    del old
    return route._scatter_to_choices(route._send_back(grad, ctx.route), ctx.route)[0], None


def summed_input_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(linear, "start_all_reduce", lambda x, *_: (x, DONE))


def keys_of_others_forgotten(patch: pytest.MonkeyPatch) -> None:
    old = ring.attend_backward

    def attend_backward(*args: Any, is_causal: bool) -> Any:
        dq, dk, dv = old(*args, is_causal=is_causal)
        return dq, dk * is_causal, dv * is_causal

    patch.setattr(ring, "attend_backward", attend_backward)


def unweighted(old: Any, ctx: Any, grad: Any) -> Any:
    del old, ctx
    return grad, None, None, None


def means_of_own_samples(patch: pytest.MonkeyPatch) -> None:
    old = batch_norm._Normalize.backward

    def without_sum(ctx: Any, *grads: Any) -> Any:
        ctx.comm = type("Alone", (), {"all_reduce": lambda *_, **__: DONE})()
        return old(ctx, *grads)

    patch.setattr(batch_norm._Normalize, "backward", staticmethod(without_sum))


BACKWARDS: dict[str, tuple[str, Plant]] = {
    "copy_to_tp: no all-reduce": ("_CopyToTp", backward(mappings._CopyToTp)(first_only)),
    "copy_to_tp: summed twice": ("_CopyToTp", backward(mappings._CopyToTp)(twice)),
    "reduce_from_tp: summed once more": ("_ReduceFromTp", backward(mappings._ReduceFromTp)(twice)),
    "scatter_to_tp: zeros for other ranks' features": (
        "_ScatterToTp",
        backward(mappings._ScatterToTp)(zeros_elsewhere_last),
    ),
    "gather_from_seq: this rank's part": (
        "_GatherFromSeq",
        backward(mappings._GatherFromSeq)(own_positions),
    ),
    "reduce_scatter_to_seq: the bias's not summed": (
        "_ReduceScatterToSeq",
        backward(mappings._ReduceScatterToSeq)(bias_of_own_positions),
    ),
    "scatter_to_seq: zeros for other ranks' positions": (
        "_ScatterToSeq",
        backward(mappings._ScatterToSeq)(zeros_elsewhere),
    ),
    "column_linear: the input's not summed": ("_ColumnLinear", summed_input_forgotten),
    "cross entropy: twice": ("_CrossEntropy", backward(loss._CrossEntropy)(twice)),
    "ring: keys and values of other ranks": ("_Attention", keys_of_others_forgotten),
    "mean loss: not weighted by targets": ("_MeanLoss", backward(root._MeanLoss)(unweighted)),
    "join: this rank's part": ("_GatherPositions", backward(root._GatherPositions)(of_own_rank)),
    "dispatch: of a token's first choice": ("_Dispatch", backward(route._Dispatch)(of_first_choice)),
    "lookup: not averaged": ("_Lookup", backward(rows._Lookup)(twice)),
    "batch norm: means of own samples": ("_Normalize", means_of_own_samples),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_the_comparison_with_rules_finds_a_wrong_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, plant = BACKWARDS[name]
    plant(monkeypatch)
    found = 0
    for case in cases(3):
        if case.function == function:
            try:
                check_values(case, 3)
            except AssertionError:
                found += 1
    assert found
