"""Parameters on the host are updated by torch's fused kernel, in one pass over flat tensors."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.testing import run_on_ranks
from shardwise.train.config.sections import OptimizerSection
from shardwise.train.model.build import build_optimizer, parameter_groups
from tests.common.own import own

pytestmark = pytest.mark.slow


def fused_where(offload: str) -> tuple[list[bool | None], int, float]:
    """What optimizers of a model, flat and by name, are told; tensors of the first; what its step changes."""
    model = sw.parallelize(sw.models.gpt("gpt-nano"), sw.ParallelPlan(offload_policy=offload))
    sections = OptimizerSection(), OptimizerSection(flat=False)
    made = [build_optimizer(section, parameter_groups(section, model)) for section in sections]
    before = [own(parameter).clone() for parameter in model.parameters()]
    tokens = torch.arange(9).view(1, 9)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    made[0].step()
    changes = [float((own(p) - old).abs().sum()) for p, old in zip(model.parameters(), before, strict=True)]
    return [each.defaults["fused"] for each in made], sum(len(g["params"]) for g in made[0].param_groups), sum(changes)


def test_what_is_offloaded_is_updated_in_one_pass() -> None:
    """In one tensor for each unit and weight-decay group, of which the kernel reads and writes every element once."""
    for offload, fused in (("cpu", True), ("none", None)):
        for told, num_tensors, change in run_on_ranks(fused_where, 2, offload):
            assert told == [fused, fused]
            assert num_tensors < len(list(sw.models.gpt("gpt-nano").parameters())) / 2
            assert change > 0
