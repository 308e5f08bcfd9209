"""The models whose runs are on record, and their batches.

Nothing here may change: numbers and collectives of every case depend on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw

VOCAB, SEQ, ROWS = 31, 8, 2  # a vocabulary that no degree divides
WIDTH = 12

Build = Callable[[], nn.Module]


def gpt(**changes: Any) -> nn.Module:
    """Five layers and an untied head."""
    torch.manual_seed(7)
    sizes = {"num_layers": 5, "hidden": 16, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ, "tied": False}
    return sw.models.gpt("gpt-tiny", **(sizes | changes))


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x_BC: Tensor) -> Tensor:
        return x_BC + self.down(torch.tanh(self.up(self.norm(x_BC))))


class Branching(nn.Module):
    """Each block takes one of two layers: which one, the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x_BC: Tensor, choice: Tensor) -> Tensor:
        for index, gate in enumerate(self.gates):
            x_BC = gate(x_BC, bool(choice[index]))
        return self.head(x_BC).square().mean()


class Gate(nn.Module):
    """Two layers, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x_BC: Tensor, is_second: bool) -> Tensor:
        return self.second(x_BC) if is_second else self.first(x_BC)


class Dropping(nn.Module):
    """Leaves out layers: which ones, the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x_BC: Tensor, is_used: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if is_used[index]:
                x_BC = block(x_BC)
        return self.head(x_BC).square().mean()


class Recommender(nn.Module):
    """A table of rows that are looked up, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(53, 6, padding_idx=5)
        self.dense = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, ids_BN: Tensor) -> Tensor:
        return self.dense(self.table(ids_BN).mean(1)).square().mean()


def frozen() -> nn.Module:
    """Three of five blocks are frozen, and so are the embeddings."""
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("blocks.0.", "blocks.1.", "blocks.3.", "token_", "position_")))
    return model


def _seeded(build: Build) -> Build:
    def seeded() -> nn.Module:
        torch.manual_seed(7)
        return build()

    return seeded


MODELS: dict[str, Build] = {
    "gpt": gpt,
    "tied gpt": lambda: gpt(tied=True),
    "experts": lambda: gpt(num_experts=4),
    "frozen": frozen,
    "branches": _seeded(Branching),
    "drops": _seeded(Dropping),
    "recommender": _seeded(Recommender),
}


def batch(model: str, step: int, call: int, microbatch: int, reader: int) -> tuple[Tensor, ...]:
    """Of one data-parallel rank; no two are alike."""
    generator = torch.Generator().manual_seed(1000 * step + 200 * call + 20 * microbatch + reader)
    if model == "recommender":
        return (torch.randint(0, 53, (5, 7), generator=generator),)
    if model in {"branches", "drops"}:
        return torch.randn(3, WIDTH, generator=generator), torch.randint(0, 2, (5,), generator=generator)
    tokens_BT = torch.randint(0, VOCAB, (ROWS, SEQ + 1), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
