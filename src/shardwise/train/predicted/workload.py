"""A run in the planner's terms: the model's shape, the plan with every degree, and the computation of a step."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cost.workload import Workload
from shardwise.planner.time import model_flops
from shardwise.spec.bound import read_json
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import RecomputePolicy
from shardwise.spec.shape import ModelShape
from shardwise.spec.text import first_line
from shardwise.train.config.resolve import RunConfig
from shardwise.train.config.sections import OptimizerSection

if TYPE_CHECKING:
    from shardwise.train.model.build import OptimizerFactory


@functools.lru_cache(maxsize=1)
def trace_model(resolved: RunConfig, *, reads_iterables: bool = False) -> Any:
    """Trace a microbatch of a spec's model and loss without values: an ``sw.TracedModel``.

    ``reads_iterables`` as in ``blank_batch``.
    """
    import torch

    from shardwise.api.trace_model import trace_model
    from shardwise.train.model.build import blank_batch, build_model, objective_of

    meta = torch.device("meta")
    try:
        objective, batch = objective_of(resolved), blank_batch(resolved, meta, reads_iterables=reads_iterables)
        return trace_model(build_model(resolved, meta), batch, objective.scalar, forward=objective.forward)
    except Exception as error:
        raise ConfigError(
            f"the spec's model is not known to the planner: {first_line(error)}\n"
            "  A forward and a loss are traced that read no values, and make tensors on their inputs' device."
        ) from error


def shape_of(resolved: RunConfig, *, reads_iterables: bool = False) -> ModelShape:
    """Return the shape of the run's model; ``reads_iterables`` as in ``blank_batch``."""
    if not resolved.spec.is_empty:
        return trace_model(resolved, reads_iterables=reads_iterables)
    if resolved.model is not None:
        return ModelShape.from_config(resolved.model, resolved.config.model.preset or "the model")
    if resolved.config.model.hf is None:
        raise ConfigError("the shape of this model is not known")
    folder = Path(resolved.config.model.hf).expanduser()
    try:
        return ModelShape.from_config(read_json(folder / "config.json"), folder.name)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: {error}") from None


def workload_of(resolved: RunConfig, shape: ModelShape) -> Workload:
    """Return the planner's workload for a step of the run. Samples of a spec's data were already traced."""
    plan, section = resolved.plan, resolved.config.optimizer
    dtype = plan.precision.param_dtype if plan.mp_policy is not None else None
    return Workload(
        seq_len=resolved.seq_len or getattr(shape, "seq_len", 0) or 1,
        global_batch=resolved.batch.total,
        micro_batch=resolved.batch.micro,
        precision={"auto": "bf16", "fp64": "fp32", None: "fp32"}.get(dtype, dtype or "fp32"),
        optimizer=optimizer_of(section, resolved.spec.optimizer),
        recompute=_recompute(plan.recompute, resolved),
        compile=plan.compile,
        in_backward=section.in_backward,
        chunked_loss=resolved.config.train.chunked_cross_entropy,
        has_average=resolved.config.train.ema_decay is not None,
        lora_rank=resolved.config.lora.rank,
    )


def optimizer_of(section: OptimizerSection, factory: OptimizerFactory | None = None) -> str:
    """Return the planner's name of the optimizer. The momentum of ``sgd`` is not 0 by default.

    A spec's optimizer, ``factory``, makes a trial step, and is mapped to the optimizer with about as much state.
    """
    if factory is not None:
        from shardwise.train.model.build import num_states

        states = num_states(section, factory)
        return "sgd" if not states else "adamw8bit" if states < 1 else "sgd-momentum" if states < 2 else "adamw"
    return "sgd-momentum" if section.name == "sgd" and section.momentum != 0 else section.name


def flops_per_step(resolved: RunConfig) -> float | None:
    """Return the FLOPs of a model's step, forward and backward; ``None`` if the shape is unknown."""
    try:
        shape = shape_of(resolved)
        return model_flops(shape, workload_of(resolved, shape))
    except (ShardwiseError, ArithmeticError, LookupError):
        return None


def _recompute(policy: RecomputePolicy | None, resolved: RunConfig) -> str | int:
    """Return recomputation in the planner's terms; modules selected by name count as all modules."""
    if policy is None:
        return "full" if resolved.model is not None and resolved.model.activation_checkpointing else "none"
    if policy.save:
        return "selective"
    layers = shape_of(resolved).num_layers
    return "full" if policy.every == 1 else -(-layers // policy.every)


def resolved_plan(resolved: RunConfig) -> ParallelPlan:
    """The run's plan with every degree filled in."""
    mesh = resolved.mesh
    return replace(resolved.plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
