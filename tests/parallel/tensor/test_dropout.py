"""Dropout of divided activations: each rank drops places of its own. CUDA's generator has a stand-in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.record import RecordComm
from shardwise.parallel.tensor import dropout
from shardwise.parallel.tensor.dropout import FeatureDropout, HeadDropout, SequenceDropout, rank_rng
from shardwise.testing import run_on_ranks


class Philox:
    """A generator of CUDA: what is drawn follows from a seed and an offset."""

    def __init__(self) -> None:
        self.manual_seed(7)

    def manual_seed(self, seed: int) -> None:
        assert 0 <= seed < 2**63
        self.seed, self.offset = seed, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def draw(self) -> tuple[int, int]:
        self.offset += 4
        return self.seed, self.offset


def draws_of(rank: int, generator: Philox) -> list[tuple[int, int]]:
    """Of a replicated activation, a divided one, and a replicated one."""
    found = [generator.draw()]
    with contextlib.suppress(KeyError), rank_rng(rank, torch.device("cuda", 0)):
        found.append(generator.draw())
        raise KeyError
    return [*found, generator.draw()]


def test_ranks_draw_the_same_for_replicated_and_each_its_own_for_divided_activations(monkeypatch):
    found = []
    for rank in range(4):
        generator = Philox()
        monkeypatch.setattr(torch.cuda, "default_generators", [generator])
        found.append(draws_of(rank, generator))
        assert (generator.seed, generator.offset) == (7, 12)
        generator.manual_seed(7)  # as a recomputation and a resumed run restore the state
        assert draws_of(rank, generator) == found[-1]
    assert all(draws[0] == (7, 4) and draws[2] == (7, 12) for draws in found)
    seeds = {draws[1][0] for draws in found}
    assert len(seeds) == 4
    assert not seeds & set(range(100))  # of other data-parallel ranks


def masks_of(rank: int) -> list[list[float]]:
    """Of a replicated activation, two divided ones, and a replicated one, on the CPU."""
    ones, found = torch.ones(64), []
    for is_divided in (False, True, True, False):
        with rank_rng(rank, torch.device("cpu")) if is_divided else contextlib.nullcontext():
            found.append(F.dropout(ones).tolist())
    return found


def test_on_the_cpu_as_well():
    torch.manual_seed(7)
    state, found = torch.get_rng_state(), []
    for rank in range(4):
        for _ in range(2):  # the second time as a recomputation has it
            torch.set_rng_state(state)
            found.append(masks_of(rank))
    assert all(found[2 * rank] == found[2 * rank + 1] for rank in range(4))
    assert all(masks[0] == found[0][0] and masks[3] == found[0][3] for masks in found)
    assert len({tuple(mask) for masks in found for mask in masks}) == 2 + 4 * 2


def test_fake_tensors_draw_nothing():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with FakeTensorMode(), rank_rng(1, torch.device("cpu")):
        assert F.dropout(torch.ones(3)).shape == (3,)
    assert torch.equal(torch.get_rng_state(), state)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.own, self.down, self.common = nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 32), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.common(self.down(self.own(self.up(x)))).sum(-1, keepdim=True))


def masks_in_training(recompute: str) -> dict[str, list[list[bool]]]:
    """The places that each dropout drops, once for each run of its forward."""
    torch.manual_seed(3)
    plan = {"*.up": "colwise", "*.own": "dropout_features", "*.down": "rowwise"}
    model = sw.parallelize(
        nn.Sequential(Block(), Block()),
        sw.ParallelPlan(
            strategy="ddp",
            tp=2,
            tp_plan=plan,
            auto_wrap_policy=sw.wrap_by_class({Block}),
            activation_checkpointing=recompute,
        ),
    )
    found: dict[str, list[list[bool]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _module, _args, output, name=name: found.setdefault(name, []).append(
                    (output == 0).flatten().tolist()
                )
            )
    model(torch.randn(5, 4)).sum().backward()
    return found


@pytest.mark.parametrize(("recompute", "runs"), [("none", 1), ("full", 2)])
def test_tp_drops_alike_what_is_replicated_and_otherwise_what_is_divided(recompute, runs):
    first, second = run_on_ranks(masks_in_training, 2, recompute)
    assert [len(each) for each in first.values()] == [runs] * 4
    for name, masks in first.items():
        assert 40 < sum(masks[0]) < 120
        assert all(mask == masks[0] for mask in masks)
        assert all(mask == second[name][0] for mask in second[name])
        assert (second[name][0] == masks[0]) == name.endswith("common")
    assert len({tuple(masks[0]) for found in (first, second) for masks in found.values()}) == 2 * 2 + 2


class Attention(nn.Module):
    """Drops weights of its heads twice, and places of its replicated output."""

    dropout = 0.1

    def forward(self, q_BHTD: Tensor) -> Tensor:
        F.scaled_dot_product_attention(q_BHTD, q_BHTD, q_BHTD, dropout_p=self.dropout)
        F.dropout(q_BHTD, self.dropout)
        return F.dropout(q_BHTD.flatten(2), self.dropout)


@pytest.mark.parametrize(
    ("kind", "module", "expected"),
    [
        (FeatureDropout, nn.Dropout(0.1), 1),
        (SequenceDropout, nn.Dropout(0.1), 1),
        (FeatureDropout, nn.Dropout(0.0), 0),
        (FeatureDropout, nn.Dropout(0.1).eval(), 0),
        (HeadDropout, Attention(), 2),
        (HeadDropout, Attention().eval(), 0),
    ],
)
def test_what_is_divided_is_drawn_under_the_ranks_own_seed(monkeypatch, kind, module, expected):
    entered: list[int] = []

    @contextlib.contextmanager
    def noting(rank: int, device: torch.device) -> Iterator[None]:
        assert device.type == "meta"
        entered.append(rank)
        yield

    monkeypatch.setattr(dropout, "rank_rng", noting)
    forward: Any = kind(module, "path", RecordComm("tp", rank=1, size=2, device="meta"))
    assert forward(torch.zeros(2, 4, 6, 8, device="meta")).device.type == "meta"
    assert entered == [1] * expected
