"""Comparison of strategies with one process, on a run's model, data, optimizer and clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.launch.world import World, joined_world
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import check_offload
from shardwise.spec.tolerances import check_exact
from shardwise.testing.parity import ParityReport
from shardwise.train.checkpoints.random_state import seed_all
from shardwise.train.config.resolve import RunConfig, data_of, resolve
from shardwise.train.config.sections import RawConfig
from shardwise.train.data.samples import Data
from shardwise.train.data.source import is_indexed
from shardwise.train.data.token_files import DataError
from shardwise.train.data.user_data import UserSamples
from shardwise.train.model.build import build_model, build_optimizer, objective_of, parameter_groups, to_tensors
from shardwise.train.task import CLASS

#: Fields about units, which do not apply if one process runs copies of the full model.
_OF_UNITS = ("auto_wrap_policy", "merge_units", "activation_checkpointing", "compile")


def under_strategies(plan: ParallelPlan, strategies: Sequence[str]) -> dict[str, ParallelPlan]:
    """Return ``plan`` under each strategy, by a name that lists fields that the strategy does not support.

    ``reshard_after_forward`` and ``accumulation`` are reset to the strategy's defaults.
    """
    plans: dict[str, ParallelPlan] = {}
    for strategy in strategies:
        if strategy == plan.strategy:
            plans[strategy] = plan
            continue
        other = dataclasses.replace(plan, strategy=strategy, reshard_after_forward="auto", accumulation="auto")
        left_out = [field for field in _foreign(other) if getattr(plan, field) != _default(field)]
        other = dataclasses.replace(other, **{field: _default(field) for field in left_out})
        plans[strategy + "".join(f" -{field}" for field in left_out)] = other
    return plans


def _foreign(plan: ParallelPlan) -> list[str]:
    """Return the fields that the strategy of ``plan`` does not support."""
    fields = [*_OF_UNITS] if plan.placements.is_threaded else []
    fields += [] if plan.placements.shards_optimizer else ["quantized_gather"]
    try:
        check_offload(plan.offload, plan.placements)
    except PlanError:
        fields.append("offload_policy")
    return fields


def _default(field: str) -> Any:
    return next(known.default for known in dataclasses.fields(ParallelPlan) if known.name == field)


def compare_with_one_process(
    resolved: RunConfig,
    data: Data,
    device: torch.device,
    *,
    strategies: Sequence[str],
    num_steps: int,
    locate: bool | None = False,
) -> ParityReport:
    """Train the run's model again for a few steps under each strategy and in one process, by ``sw.parity``.

    Without accumulation, except for pipelines, which need their microbatches. Fields that a strategy does not support
    are removed from its plan (``under_strategies``). The random state of this process is restored at the end.

    Collective:
        Those of ``sw.parity``. All ranks must call.
    """
    config, plan = resolved.config, resolved.plan
    size = resolved.batch.micro * resolved.batch.data_parallel_size
    if plan.pipeline_policy is not None:
        count = resolved.batch.accumulation
        plan = dataclasses.replace(plan, pipeline=dataclasses.replace(plan.pipeline_policy, num_microbatches=count))
        size *= count

    def build() -> nn.Module:
        seed_all(config.train.seed)
        return build_model(resolved, device)

    spec, loss_fn = resolved.spec, None
    if not spec.is_empty:
        loss_fn = objective_of(resolved).scalar
        if spec.data is not None and not is_indexed(spec.data):
            raise PlanError(
                "parity: the spec reads an iterable; the comparison needs whole global batches.\n"
                "  Give a data set with len and items."
            )
    if resolved.source.streams is not None:
        raise PlanError(
            "parity: streamed text has no samples by number, which the comparison takes.\n"
            "  Add --set data.streaming=false."
        )
    if (needed := num_steps * size) > (num_samples := data.train.num_samples):
        raise DataError(
            f"parity: {num_steps} steps of {size} samples need {needed:,}, and the data has {num_samples:,}.\n"
            "  Lower --steps or train.micro_batch_size."
        )

    def batch(step: int) -> Any:
        if isinstance(data.train, UserSamples):
            return _check_batch(data.train.batch(range(step * size, (step + 1) * size), device), size)
        tensors = to_tensors(data.train, range(step * size, (step + 1) * size), device)
        inputs_BT = tensors.inputs
        if config.model.hf is None:  # all tokens of conversations count here, because the mean is taken per rank
            return inputs_BT, inputs_BT if "examples" in resolved.source.kinds else tensors.targets
        labels = tensors.targets if resolved.task.name == CLASS else inputs_BT  # transformers shifts the labels itself
        return {"input_ids": inputs_BT, "labels": labels}

    generator = torch.get_rng_state()
    try:
        return sw.parity(
            build,
            [batch(step) for step in range(num_steps)],
            loss_fn,
            under_strategies(plan, strategies),
            optimizer=lambda groups: build_optimizer(config.optimizer, groups, spec.optimizer),
            parameters=lambda model: parameter_groups(config.optimizer, model),
            max_norm=config.train.clip_grad_norm or float("inf"),
            locate=locate,
            forward=spec.forward,
        )
    finally:
        torch.set_rng_state(generator)


def _check_batch(batch: Any, size: int) -> Any:
    """Return a batch of ``size`` samples; refuse a batch whose tensors cannot be split by samples."""
    for tensor in tree_leaves(batch):
        if isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) != size:
            raise PlanError(
                f"parity: collate makes a tensor of shape {list(tensor.shape)} of {size} samples, which cannot be cut"
                " by samples.\n  Compare a run of `shardwise train` with --nproc 1 with one of several processes."
            )
    return batch


def compare_here(
    raw: RawConfig, world: World, *, strategies: Sequence[str], num_steps: int, locate: bool | None
) -> ParityReport:
    """Join the world, compare as :func:`compare_with_one_process`, and leave the world. All ranks must call."""
    resolved = resolve(raw, world.size, world.ranks_per_machine, raises_masters=False)
    with joined_world(world) as device:
        how = {"strategies": strategies, "num_steps": num_steps, "locate": locate}
        return compare_with_one_process(resolved, data_of(resolved), device, **how)


#: Number of steps in which the demo compares its strategy with one process, after training.
PARITY_STEPS = 3


def parity_line(resolved: RunConfig, data: Data, device: torch.device) -> str:
    """Train the run's model again, under its plan and in one process, and report whether the results are equal.

    Collective:
        Those of ``sw.parity``. All ranks must call.
    """
    strategy = resolved.config.parallel.strategy
    try:
        check_exact(resolved.plan, strategy)
        report = compare_with_one_process(resolved, data, device, strategies=[strategy], num_steps=PARITY_STEPS)
    except (PlanError, DataError) as error:
        return f"not compared with one process: {str(error).splitlines()[0]}"
    row = report.rows[0]
    ranks = f"{row.steps} steps on {row.world_size} rank{'s' if row.world_size != 1 else ''}"
    if row.is_bitwise:
        return f"{strategy} == one process, bitwise: losses, gradient norms and parameters of {ranks}"
    if row.holds:
        return f"{strategy} is as near to one process as sums in another order are, {ranks}: {row.verdict}"
    return f"{strategy} differs from one process by at most {row.verdict}, {ranks}"
