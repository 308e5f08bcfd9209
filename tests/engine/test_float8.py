"""Linear layers of torchao that compute in float8, under strategies that shard their weights, beside one process."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import compare_with_one_process, probe
from tests.common.blockwise import TORCHAO
from tests.common.oracle import presets
from tests.common.ranks import on_ranks, refusal

pytestmark = pytest.mark.skipif(not TORCHAO.exists(), reason=f"torchao is not in {TORCHAO}; `make venv` puts it there")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(recipe: str, *, casts_before_gather: bool = False) -> nn.Module:
    sys.path.append(str(TORCHAO))
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 8))
    config = Float8LinearConfig.from_recipe_name(recipe)  # emulated: a CPU multiplies what float8 has rounded
    config = dataclasses.replace(config, emulate=True, enable_fsdp_float8_all_gather=casts_before_gather)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path != "2")
    assert sum(isinstance(module, Float8Linear) for module in model.modules()) == 4
    return model


def loss_of(model: nn.Module, reader: int, step: int) -> Tensor:
    x = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(100 * step + reader))
    return model(x).float().square().mean()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@on_ranks(2)
def test_layers_that_compute_in_float8_train_as_in_one_process(recipe):
    for options in (*({"strategy": name} for name in presets()), {"activation_checkpointing": "full"}):
        plan = sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class(Block), **options)
        result = compare_with_one_process(
            lambda: build(recipe), loss_of, lambda model, plan=plan: sw.parallelize(model, plan), where=str(options)
        )
        assert [unit.name for unit in probe(result.model).units] == ["root", "0", "1"]


@on_ranks(2)
def test_what_would_lose_float8_is_refused():
    def with_casts() -> None:
        sw.parallelize(build("tensorwise", casts_before_gather=True), sw.ParallelPlan(strategy="zero3"))

    def divided() -> None:
        sw.parallelize(build("tensorwise"), sw.ParallelPlan(tp=2, tp_plan={"*.up": "colwise"}))

    assert "Leave torchao's enable_fsdp_float8_all_gather off" in refusal(StateError, with_casts)
    assert "Float8Linear has a forward of its own" in refusal(PlanError, divided)
