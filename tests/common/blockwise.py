"""Optimizers for the tests that look at blocks and at rows, small enough to be read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 96  # slices begin at multiples of 64 elements anyway: a block that these divide would never be cut


class Int8Momentum(torch.optim.Optimizer):
    """SGD with its momentum in 8 bits: for each block of a parameter one scale, for each element one code."""

    def __init__(self, params: object, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["codes"] = torch.zeros_like(p, dtype=torch.int8)
                    state["scales"] = torch.zeros(-(-p.numel() // BLOCK))
                momentum = _unpack(state["codes"], state["scales"]).mul_(0.9).add_(p.grad)
                p.sub_(momentum, alpha=group["lr"])
                codes, scales = _pack(momentum)
                state["codes"].copy_(codes)
                state["scales"].copy_(scales)


def _blocks(flat: Tensor) -> Tensor:
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def _pack(values: Tensor) -> tuple[Tensor, Tensor]:
    blocks = _blocks(values.flatten())
    scales = blocks.abs().amax(dim=1)
    codes = torch.round(127 * blocks / scales.clamp(min=1e-12).unsqueeze(1)).to(torch.int8)
    return codes.flatten()[: values.numel()].view(values.shape), scales


def _unpack(codes: Tensor, scales: Tensor) -> Tensor:
    values = _blocks(codes.flatten().float()) * scales.unsqueeze(1) / 127
    return values.flatten()[: codes.numel()].view(codes.shape)


class RowAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum for each row of a parameter's last dimension; of a vector one for each element."""

    def __init__(self, params: object, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                square = p.grad.square()
                square = square.sum(dim=-1, keepdim=True) if p.dim() > 1 else square
                total = self.state[p].setdefault("sum", torch.zeros_like(square))
                total += square
                p.sub_(p.grad / (total.sqrt() + 1e-6), alpha=group["lr"])


#: Where `make venv` puts torchao: apart, because transformers imports it, slowly, wherever it finds it.
TORCHAO = Path(sys.prefix) / "torchao"


def torchao_adamw(parameters: object) -> torch.optim.Optimizer:
    """torchao's AdamW with 8-bit states."""
    if str(TORCHAO) not in sys.path:
        sys.path.append(str(TORCHAO))
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2, weight_decay=0.1)
