"""``sw.trace_model``: the computation and saved tensors of any module's step, for the planner."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.cost.traced import TracedModel
from shardwise.cost.unit import UnitWork
from shardwise.engine.extensions.precision import castable_buffers
from shardwise.measure.meta import hides_tokens, without_values, without_values_error
from shardwise.measure.storage import buffer_bytes, storage_bytes
from shardwise.measure.trace import trace
from shardwise.nested import forgets_meta
from shardwise.parallel.pipeline.batch import Forward, LossFn, forward_loss, num_rows
from shardwise.spec.errors import StateError
from shardwise.spec.text import first_line


@forgets_meta()
def trace_model(
    module: nn.Module, example_batch: Any, loss_fn: LossFn | None = None, *, forward: Forward | None = None
) -> TracedModel:
    """Trace one step of any module without values, for ``sw.planner.estimate`` in place of a ``ModelShape``.

    Forward and backward run on meta tensors, once in 16 bit and once in fp32, in train mode, with the kernels that a
    GPU has for attention and dropout. The module itself is not changed, and nothing is allocated, whatever its size.

    Example::

        traced = sw.trace_model(model, {"input_ids": ids, "labels": ids})
        cluster = sw.planner.Cluster(gpu="H100-80GB-SXM", num_gpus=8)
        workload = sw.planner.Workload(seq_len=ids.shape[1], global_batch=64, micro_batch=4)
        print(sw.planner.estimate(traced, sw.ParallelPlan(strategy="zero3"), cluster, workload).reason)

    Args:
        module: A plain module, on any device, meta included. Units are those of ``auto_wrap_policy="auto"``.
        example_batch: Samples of one microbatch, as for ``sw.train_step``; only shapes and dtypes matter, and whether
            its attention mask hides tokens (one on meta is assumed to). Estimates for another number of samples are
            scaled in proportion.
        loss_fn: As for ``sw.train_step``: ``loss_fn(output, batch)``. ``None``: the output's ``loss``, or the output.
        forward: As for ``sw.train_step``.

    Raises:
        StateError: The module cannot run without values, gave no scalar loss, or the batch has no samples.
    """
    rows = num_rows(example_batch)
    if not rows:
        raise StateError(
            f"sw.trace_model: the example batch ({type(example_batch).__name__}) has no samples.\n"
            "  Pass what one call of the model gets, such as {'input_ids': torch.zeros(1, 2048, dtype=torch.long)}."
        )
    batch = without_values(example_batch)
    found: dict[torch.dtype, tuple[UnitWork, ...]] = {}
    refusals: dict[str, Exception] = {}
    for dtype, word in ((torch.bfloat16, "16 bit"), (torch.float32, "fp32")):
        inputs = _in_dtype(batch, dtype)
        try:
            step = functools.partial(forward_loss, module, inputs, loss_fn, forward)
            found[dtype] = trace(module, step, dtype, hides_tokens=hides_tokens(example_batch))
        except (NotImplementedError, RuntimeError) as caught:
            if isinstance(caught, StateError):
                raise
            refusals[word] = caught
    if not found:
        error = refusals["16 bit"]
        raise without_values_error(module, error, "sw.trace_model") from error
    castable = [owner.get_buffer(key) for _, owner, key in castable_buffers(module)]
    return TracedModel(
        name=type(module).__name__,
        narrow=found.get(torch.bfloat16, ()),
        wide=found.get(torch.float32, ()),
        batch=rows,
        seq_len=_seq_len(example_batch),
        buffer_bytes=buffer_bytes(module),
        castable_buffers=(sum(each.numel() for each in castable), storage_bytes(castable)),
        refusals=tuple((word, first_line(error)) for word, error in refusals.items()),
    )


def _in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(cast, batch)


def _seq_len(batch: Any) -> int:
    """Return the tokens per sequence: the columns of the first integer tensor of two dimensions, or 0."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point():
            return leaf.shape[1]
    return 0
