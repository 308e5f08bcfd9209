"""State dicts of what is trained alone: the frozen base is neither gathered nor in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks

HIDDEN = 32


class Block(nn.Module):
    """A frozen layer with a trained adapter beside it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(HIDDEN, HIDDEN)
        self.down, self.up = nn.Linear(HIDDEN, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)
        self.register_buffer("scale", torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.up(self.down(x)) * self.scale


def build() -> nn.Module:
    torch.manual_seed(4)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(HIDDEN, 4))
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up" in name or "down" in name)
    model[4].bias.requires_grad_(True)
    return model


def states(plans: list[dict[str, Any]]) -> list[tuple[list[str], int, int]]:
    """Under each plan the names that are wrong (on rank 0), and the bytes that this rank sends for the state dicts."""
    found = []
    plain = build()
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    expected = {n: v for n, v in plain.state_dict().items() if n in trained or n.endswith("scale")}
    for plan in plans:
        model = sw.parallelize(build(), sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class({Block}), **plan))
        sent = []
        for trainable_only in (True, False):
            with sw.record_collectives(model) as events:
                state = sw.full_state_dict(model, trainable_only=trainable_only)
            sent.append(sum(event.sent_bytes for event in events if event.unit != "control"))
            if trainable_only:
                wrong = (
                    [] if not state or list(state) == list(expected) else [*(state.keys() ^ expected.keys()), "order"]
                )
                wrong += [name for name, value in state.items() if not torch.equal(value, expected[name])]
                is_empty = not state
            else:
                wrong += [] if not state or state.keys() == plain.state_dict().keys() else ["all"]
        found.append((wrong if not is_empty else ["empty"], *sent))
        if not is_empty:
            sw.load_full_state_dict(model, {name: value + 1 for name, value in expected.items()}, strict=False)
        else:
            sw.load_full_state_dict(model, {}, strict=False)
        after = sw.full_state_dict(model)
        for name, value in after.items():
            if not torch.equal(value, plain.state_dict()[name] + (1 if name in expected else 0)):
                found[-1][0].append(f"loaded {name}")
    return found


PLANS: list[dict[str, Any]] = [
    {"strategy": "zero3"},
    {"strategy": "zero1"},
    {"strategy": "ddp"},
    {"tp": 2, "tp_plan": {"*.base": "colwise_gather_output"}},
    {"pp": 2},
]


@pytest.mark.parametrize("plan", PLANS)
def test_frozen_parameters_are_neither_sent_nor_in_the_state_dict(plan: dict[str, Any]) -> None:
    (first, *_), (second, *_) = run_on_ranks(states, 2, [plan])
    assert first[0] == []
    assert second[0] == ["empty"]
    _, only_trained, everything = second
    adapters = 4 * (4 * 2 * 2 * HIDDEN + 4)
    assert only_trained <= 1.3 * adapters + 4 * 64 * 5
    if plan.get("strategy") == "zero3":
        assert everything > 4 * only_trained
