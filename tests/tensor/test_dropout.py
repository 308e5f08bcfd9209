"""Dropout of divided activations on a GPU, without one: a stand-in for CUDA's generator, and tensors without values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.record import RecordComm
from shardwise.tensor import dropout
from shardwise.tensor.dropout import FeatureDropout, HeadDropout, SequenceDropout, drawing_own


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
    with contextlib.suppress(KeyError), drawing_own(rank, torch.device("cuda", 0)):
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

    monkeypatch.setattr(dropout, "drawing_own", noting)
    forward: Any = kind(module, "path", RecordComm("tp", rank=1, size=2, device="meta"))
    assert forward(torch.zeros(2, 4, 6, 8, device="meta")).device.type == "meta"
    assert entered == [1] * expected
