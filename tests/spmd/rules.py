"""The typing rule of every autograd function of ours that communicates, for ``spmd_types``.

A rule says what a function makes of the types of its inputs along the axis of its Comm, and so also what its backward
makes of gradients: the gradient of a replicated tensor (R) is partial (P) and the reverse; that of an invariant one (I)
is invariant, and that of a varying one (V) varies. ``test_rules`` compares each rule with what the function computes,
forward and backward, on ranks.

=========================  ===================================================================================
function                   along its axis
=========================  ===================================================================================
``copy_to_tp``             I to R
``copy_part_to_tp``        I to V: "invariant" here marks a parameter that must go through it before it is used
``reduce_from_tp``         P or V to I; the bias is I
``gather_from_tp``         V to I
``scatter_to_tp``          I to V
``gather_from_seq``        V to R
``reduce_scatter_to_seq``  P to V; the bias is I
``scatter_to_seq``         I to V
``gather_whole_seq``       V to I
``column_linear``          I (or V, where positions are divided) and weights V, to V
``_CrossEntropy``          V to I
``Ring``                   V to V
``_MeanLoss``              V to I
``Division.join``          V to R
``dispatch, combine``      V to V
``_Lookup``                V to V
``SyncBatchNorm``          V and weights R, to V
=========================  ===================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from spmd_types import I, P, R, S, V, assert_type, assert_type_like, get_axis_local_type, rules
from torch import Tensor

from shardwise.api.data_parallel import _Spread
from shardwise.engine.extensions.batch_norm import _Normalize
from shardwise.parallel.context.ring import _Attention
from shardwise.parallel.context.root import _GatherPositions, _MeanLoss
from shardwise.parallel.experts.route import _Combine, _Dispatch
from shardwise.parallel.pipeline.weight_grad_store import _Add, _Linear
from shardwise.parallel.sharded_embedding.rows import _Lookup
from shardwise.parallel.tensor.linear import _ColumnLinear
from shardwise.parallel.tensor.loss import _CrossEntropy
from shardwise.parallel.tensor.mappings import (
    _CopyPartToTp,
    _CopyToTp,
    _GatherFromSeq,
    _GatherFromTp,
    _GatherWholeSeq,
    _ReduceFromTp,
    _ReduceScatterToSeq,
    _ScatterToSeq,
    _ScatterToTp,
)

#: A parameter of which this rank holds a range of dimension ``_CONTRACTS`` along ``tp``: see :func:`mark_cut`.
_CONTRACTS = "_spmd_cut_dims"

#: Functions without a rule, with the reason.
WITHOUT_RULE = {_Spread: "replicas on the devices of one process are no ranks"}


def mark_cut(parameter: Tensor, dims: set[int]) -> None:
    """Note the dimensions along which the ranks of ``tp`` divide ``parameter``."""
    parameter.__dict__[_CONTRACTS] = dims


def is_contracted(weight: Any, dim: int) -> bool:
    """Whether ranks of ``tp`` divide dimension ``dim`` of a weight: a product that sums over it is a term of a sum."""
    return isinstance(weight, Tensor) and dim in weight.__dict__.get(_CONTRACTS, ())


def _term(y: Any, weight: Any, dim: int) -> Any:
    """``y``, partial along ``tp`` where ``weight`` is divided along the dimension that was summed over."""
    return rules.reinterpret(y, "tp", src=V, dst=P) if is_contracted(weight, dim) else y


def _sum(x: Any, axis: str) -> Any:
    """A sum over the ranks. Not every term is known to be one: an expert's, rows of an embedding."""
    return rules.all_reduce(x, axis, src=P if get_axis_local_type(x, axis) is P else V, dst=I)


def _with_bias(y: Any, bias: Any) -> Any:
    return y if bias is None else rules.einsum("...n,n->...n", y, bias)


def _product(x: Any, weight: Tensor, bias: Tensor | None, *, is_transposed: bool) -> Any:
    y = rules.einsum("...k,kn->...n" if is_transposed else "...k,nk->...n", x, weight)
    return _with_bias(_term(y, weight, 0 if is_transposed else 1), bias)


def _copy_to_tp(*, x, comm):
    return rules.convert(x, comm.axis, src=I, dst=R)


def _copy_part_to_tp(*, part, comm):
    return rules.reinterpret(part, comm.axis, src=I, dst=V)


def _reduce_from_tp(*, x, bias, comm):
    return _with_bias(_sum(x, comm.axis), bias)


def _gather_from_tp(*, x, comm):
    return rules.all_gather(x, comm.axis, src=S(-1), dst=I)


def _scatter_to_tp(*, x, comm):
    return rules.convert(x, comm.axis, src=I, dst=S(-1))


def _gather_from_seq(*, x, comm):
    return rules.all_gather(x, comm.axis, src=S(1), dst=R)


def _reduce_scatter_to_seq(*, x, bias, comm):
    y = rules.reduce_scatter(x, comm.axis, src=P, dst=S(1))
    return y if bias is None else _with_bias(y, rules.convert(bias, comm.axis, src=I, dst=R))


def _scatter_to_seq(*, x, comm):
    return rules.convert(x, comm.axis, src=I, dst=S(1))


def _gather_whole_seq(*, x, comm):
    return rules.all_gather(x, comm.axis, src=S(1), dst=I)


def _column_linear(*, x, weight, bias, plan):
    axis = plan.comm.axis
    x = _gather_from_seq(x=x, comm=plan.comm) if plan.divides_sequence else _copy_to_tp(x=x, comm=plan.comm)
    assert_type(weight, {axis: V})
    return _product(x, weight, bias, is_transposed=plan.is_transposed)


def _cross_entropy(*, logits, targets, vocabulary):
    rules.ignore(targets)
    return rules.all_reduce(rules.einsum("nv->n", logits), vocabulary.comm.axis, src=V, dst=I)


def _attention(*, q, k, v, ring):
    passed_on = [rules.all_to_all(each, ring.comm.axis, src=V, dst=V) for each in (q, k, v)]
    return rules.einsum("bhtd,bgsd,bgsd->bhtd", *passed_on)


def _mean_loss(*, loss, num_own, num_all, comm):
    rules.ignore(*(each for each in (num_own, num_all) if isinstance(each, Tensor)))
    return rules.all_reduce(loss, comm.axis, src=V, dst=I)


def _join(*, own_BTV, division):
    return rules.all_gather(own_BTV, division.comm.axis, src=S(1), dst=R)


def _moved(made, x, comm):
    """Rows that go to other ranks of ``comm``."""
    if comm is not None:
        rules.all_to_all(x, comm.axis, src=V, dst=V)
    assert_type_like(made, x)


def _dispatch(made, *, x_NC, route):
    _moved(made, x_NC, route.comm)


def _combine(made, *, rows_MC, route):
    _moved(made, rows_MC, route.comm)


def _lookup(made, *, weight, wanted, inverse, route):
    rules.ignore(wanted, inverse)
    _moved(made, weight, route.comm)


def _normalize(made, *, x, weight, bias, comm):
    y, *statistics = made
    axis = comm.axis
    for each in (weight, bias):
        if each is not None:
            assert_type(each, {axis: R})
    rules.all_to_all(x, axis, src=V, dst=V)
    assert_type_like(y, x)
    for each in statistics:
        assert_type_like(each, x, {axis: R})


def _linear(*, x, weight, bias, is_transposed):
    return _product(x, weight, bias, is_transposed=is_transposed)


def _add(*, output, bias):
    return _with_bias(output, bias)


RULES: dict[type[torch.autograd.Function], Any] = {
    _CopyToTp: _copy_to_tp,
    _CopyPartToTp: _copy_part_to_tp,
    _ReduceFromTp: _reduce_from_tp,
    _GatherFromTp: _gather_from_tp,
    _ScatterToTp: _scatter_to_tp,
    _GatherFromSeq: _gather_from_seq,
    _ReduceScatterToSeq: _reduce_scatter_to_seq,
    _ScatterToSeq: _scatter_to_seq,
    _GatherWholeSeq: _gather_whole_seq,
    _ColumnLinear: _column_linear,
    _CrossEntropy: _cross_entropy,
    _Attention: _attention,
    _MeanLoss: _mean_loss,
    _GatherPositions: _join,
    _Dispatch: _dispatch,
    _Combine: _combine,
    _Lookup: _lookup,
    _Normalize: _normalize,
    _Linear: _linear,
    _Add: _add,
}

for _function, _rule in RULES.items():
    _function.spmd_typecheck = staticmethod(_rule)
