"""Our mixture of experts, each expert cut over the ranks: what all experts give is added up once.

Shape suffixes: ``B`` batch, ``T`` sequence, ``C`` hidden, ``E`` experts, ``K`` experts per token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.tensor.layer import Column, Layer, Row
from shardwise.tensor.pairs import add_up, gather_seq, scatter_seq, share


class Mixture(Layer):
    """Stands in for a ``MixtureOfExperts``.

    Attributes:
        divides_sequence: It gets and gives this rank's positions.
    """

    divides_sequence = False

    def __call__(self, x_BTC: Tensor) -> Tensor:
        """(B, T, C), replicated, to the same.

        Collective:
            One all-reduce on ``tp``, and two in backward: of the input's gradient and of the experts' weights'. With
            positions divided, two all-gathers and a reduce-scatter, and in backward the opposite, after an all-reduce
            of the experts' biases' gradients.
        """
        module, place = self.module, (self.comm, self.name)
        layers = [(_forward(expert.up), _forward(expert.down)) for expert in module.experts]
        if not all(isinstance(up, Column) and isinstance(down, Row) for up, down in layers):
            return type(module).forward(module, x_BTC)  # a table of the user's leaves experts whole
        scores_BTE = module.router(x_BTC)
        top_BTK, chosen_BTK = scores_BTE.topk(module.experts_per_token, dim=-1)
        own_BTE = torch.zeros_like(scores_BTE).scatter(-1, chosen_BTK, top_BTK.softmax(dim=-1))
        given = gather_seq if self.divides_sequence else share
        x_BTC, weight_BTE = given(x_BTC, *place), given(own_BTE, *place)
        y_BTC = torch.zeros_like(x_BTC)
        for expert, (up, down), weight_BT in zip(module.experts, layers, weight_BTE.unbind(dim=-1), strict=True):
            with _alone(up, down):
                y_BTC = y_BTC + weight_BT.unsqueeze(-1) * expert(x_BTC)
        biases = [expert.down.bias for expert in module.experts]
        if biases[0] is None:
            return scatter_seq(y_BTC, *place) if self.divides_sequence else add_up(y_BTC, *place)
        bias_EC = torch.stack(biases)
        if self.divides_sequence:
            after_BTC = own_BTE @ share(bias_EC, *place)
            return scatter_seq(y_BTC, *place) + after_BTC
        after_BTC = own_BTE @ bias_EC
        return add_up(y_BTC, *place) + after_BTC


def _forward(module: nn.Module) -> Any:
    return module.__dict__.get("forward")


@contextlib.contextmanager
def _alone(up: Column, down: Row) -> Iterator[None]:
    """Have an expert take what it is given and give its part of the sum. A recomputation of it alone need not know."""
    up.talks = down.talks = False
    try:
        yield
    finally:
        up.talks = down.talks = True
