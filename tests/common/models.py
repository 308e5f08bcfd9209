"""The models that every strategy is compared on: five blocks and more, so that units are released."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.models.transformer import GPT

NUM_BLOCKS = 5
VOCAB, SEQ = 31, 6
NAMES = ("gpt", "tied", "odd", "frozen")


def build(name: str) -> nn.Module:
    """The model of that name, with the same weights at every call."""
    torch.manual_seed(7)
    return {"gpt": _gpt, "tied": _tied, "odd": Odd, "frozen": _frozen}[name]()


def wrap_policy(name: str) -> object:
    """How the model is cut into units."""
    return sw.wrap_by_name("blocks.*", "temperature") if name == "odd" else "auto"


def merge_limit(name: str) -> int:
    """Bytes up to which the last two blocks, the largest, travel together."""
    blocks = list(build(name).blocks)[-2:]
    return sum(parameter.nbytes for block in blocks for parameter in block.parameters())


def batch(step: int, microbatch: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets; no two of them are alike."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank)
    tokens_BT = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def _gpt(*, tied: bool = False) -> GPT:
    return sw.models.gpt(
        "gpt-tiny", num_layers=NUM_BLOCKS, hidden=24, num_heads=2, vocab_size=VOCAB, seq_len=SEQ, tied=tied
    )


def _tied() -> GPT:
    """The head is the embedding; two blocks share one matrix; one block uses a bias twice."""
    model = _gpt(tied=True)
    model.blocks[3].mlp.up.weight = model.blocks[1].mlp.up.weight
    model.blocks[2].mlp.down.bias = model.blocks[2].attention.out.bias
    return model


def _frozen() -> GPT:
    """Frozen embeddings, two frozen blocks, and low-rank adapters on a frozen matrix in the others."""
    model = _gpt()
    model.token_embedding.requires_grad_(requires_grad=False)
    model.position_embedding.requires_grad_(requires_grad=False)
    model.blocks[:2].requires_grad_(requires_grad=False)
    for block in model.blocks[2:]:
        block.attention.qkv = LowRank(block.attention.qkv)
    return model


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(3, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 3) * 0.1)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.base(x_BTC) + x_BTC @ self.down.t() @ self.up.t()


class Odd(nn.Module):
    """Odd sizes, a unit that is one scalar, and everything else that a layout could stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 7)
        self.blocks = nn.ModuleList(OddBlock(index) for index in range(NUM_BLOCKS + 1))
        self.temperature = Temperature()
        self.head = nn.Linear(7, VOCAB)
        self.never_used = nn.Parameter(torch.ones(5))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        is_even = int(tokens_BT[0, 0]) % 2 == 0  # ranks use different parameters of one unit
        for block in self.blocks:
            x_BTC = block(x_BTC, is_even=is_even)
        logits_BTV = self.head(self.temperature(x_BTC))
        return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class OddBlock(nn.Module):
    """Widths that no number of ranks divides; later blocks are wider."""

    def __init__(self, index: int) -> None:
        super().__init__()
        width = 13 + 10 * index
        self.up = nn.Linear(7, width)
        self.down = nn.Parameter(torch.randn(width, 7).t() * 0.2)  # dense, but not in the usual order
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(7, 0))
        self.even = nn.Parameter(torch.full((7,), 0.01))

    def forward(self, x_BTC: Tensor, *, is_even: bool) -> Tensor:
        y_BTF = torch.tanh(self.up(torch.cat([x_BTC, x_BTC @ self.empty], dim=-1)))
        y_BTC = x_BTC + self.gain * (y_BTF @ self.down.t())
        return y_BTC + self.even if is_even else y_BTC


class Temperature(nn.Module):
    """A unit of fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value
