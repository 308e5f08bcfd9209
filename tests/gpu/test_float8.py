"""Linear layers that compute in float8 on a GPU, a world of one over NCCL, beside the plain model."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common.blockwise import TORCHAO

sys.path.append(str(TORCHAO))
pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")

STRATEGIES = ("ddp", "zero2", "zero3")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 512, bias=False), nn.Linear(512, 256)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(recipe: str) -> nn.Module:
    sys.path.append(str(TORCHAO))
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(256, 16)).cuda()
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: path != "2")


def losses_of(recipe: str, **plan: object) -> tuple[list[float], list[Tensor]]:
    """Losses and the final weights of some steps; without a plan, of the plain model."""
    model = build(recipe)
    if plan:
        model = sw.parallelize(model, sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class(Block), **plan))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(6):
        x = torch.randn(32, 64, 256, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = sw.full_state_dict(model) if plan else model.state_dict()
    return losses, [value.float().cpu() for value in weights.values()]


def train(recipe: str) -> dict[str, tuple[list[float], list[float], bool]]:
    """By plan: losses, those of the plain model, and whether these and all weights are the same bits."""
    expected, weights = losses_of(recipe)
    found = {}
    for name in STRATEGIES:
        for compiles in (False, True):
            got, held = losses_of(recipe, strategy=name, compile=compiles)
            same = got == expected and all(map(torch.equal, held, weights))
            found[f"{name}{', compiled' * compiles}"] = got, expected, same
    return found


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8_layers_train_as_the_plain_model_does(recipe: str) -> None:
    (found,) = run_on_ranks(train, 1, recipe, process_group=False, timeout_s=240)
    for name, (got, expected, same) in found.items():
        # Fused kernels round elsewhere, so that other elements fall on other codes.
        assert same or name.endswith("compiled"), (name, got, expected)
        assert got == pytest.approx(expected, rel=0.03), name
        assert got[-1] < got[0], name
