"""Dropout of a plain model as the ranks of ``tp`` have it, so that what they train can be compared with one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise.parallel.tensor.dropout import FeatureDropout, HeadDropout, SequenceDropout, rank_rng
from shardwise.parallel.tensor.sharding_plan import plan_sharding


def draw_as_ranks(model: nn.Module, plan: sw.ParallelPlan) -> None:
    """Have a plain model on the CPU drop what the ranks of ``tp`` drop, each of its own part."""
    if plan.tp == 1:
        return
    cuts = plan_sharding(model, plan.tp_plan, plan.tp, divides_sequence=plan.sequence_parallel)
    for path, kind in cuts.replaced_forwards.items():
        module = model.get_submodule(path)
        if kind is HeadDropout:
            module.__dict__["forward"] = partial(_with_heads_by_rank, module, plan.tp)
        elif kind in {FeatureDropout, SequenceDropout}:
            module.__dict__["forward"] = partial(_drop_by_rank, module, plan.tp, -1 if kind is FeatureDropout else 1)


def _drop_by_rank(module: Any, tp: int, dim: int, x: Tensor) -> Tensor:
    drop = partial(F.dropout, p=module.p, training=module.training)
    return _by_rank(drop, [(part,) for part in x.tensor_split(tp, dim)], dim) if module.p else x


def _with_heads_by_rank(module: nn.Module, tp: int, *args: Any, **kwargs: Any) -> Any:
    with _HeadsByRank(tp) if module.training else contextlib.nullcontext():
        return type(module).forward(module, *args, **kwargs)


class _HeadsByRank(TorchFunctionMode):
    """Has each rank draw for its heads, which are dimension 1 of queries, keys, values and weights."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.tp = tp

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention and not (func is F.dropout and args[0].dim() == 4):
            return func(*args, **given)
        bias = given.get("attn_mask")  # T5's has a part for each head
        biases = [bias] * self.tp if bias is None or bias.shape[1] == 1 else bias.tensor_split(self.tp, 1)
        divided = sum(isinstance(value, Tensor) for value in args[:3])
        parts = zip(*(value.tensor_split(self.tp, 1) for value in args[:divided]), biases, strict=True)

        def call(*part: Any) -> Tensor:
            *heads, bias = part
            return func(*heads, *args[divided:], **(given if bias is None else given | {"attn_mask": bias}))

        return _by_rank(call, list(parts), 1)


def _by_rank(call: Callable[..., Tensor], parts: list[tuple[Any, ...]], dim: int) -> Tensor:
    state, found = torch.get_rng_state(), []
    for rank, part in enumerate(parts):
        torch.set_rng_state(state)
        with rank_rng(rank, torch.device("cpu")):
            found.append(call(*part))
    return torch.cat(found, dim)
