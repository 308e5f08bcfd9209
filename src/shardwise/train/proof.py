"""Strategies against one process, on a run's own model, data, optimizer and clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.api.parity import ParityReport
from shardwise.train.alternatives import under_strategies
from shardwise.train.batch import to_tensors
from shardwise.train.build import build_model, build_optimizer, parameter_groups
from shardwise.train.data import Data
from shardwise.train.random_state import seed_all
from shardwise.train.resolve import RunConfig


def compare_with_one_process(
    resolved: RunConfig, data: Data, device: torch.device, *, strategies: Sequence[str], num_steps: int
) -> ParityReport:
    """Train the run's model anew for a few steps under each strategy and in one process.

    Without accumulation, but for pipelines, which have their microbatches. What a strategy cannot do is left out of its
    plan (``under_strategies``). The random state of this process is afterwards what it was before.

    Collective:
        Those of ``sw.parity``. All ranks must call.

    Raises:
        PlanError: The run casts or quantizes, which one plain process does not.
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

    def batch(step: int) -> Any:
        inputs_BT, targets_BT = to_tensors(data.train, range(step * size, (step + 1) * size), device)
        if config.model.hf is None:
            return inputs_BT, targets_BT
        return {"input_ids": inputs_BT, "labels": inputs_BT}  # transformers shifts the labels itself

    generator = torch.get_rng_state()
    try:
        return sw.parity(
            build,
            [batch(step) for step in range(num_steps)],
            None,
            under_strategies(plan, strategies),
            optimizer=lambda groups: build_optimizer(config.optimizer, groups),
            parameters=lambda model: parameter_groups(config.optimizer, model),
            max_norm=config.train.clip_grad_norm or float("inf"),
        )
    finally:
        torch.set_rng_state(generator)
