"""Selective recomputation: which products are computed once, which again, and that no bit changes, in one process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.engine.extensions import selective
from shardwise.spec.errors import StateError
from shardwise.torch_private import TorchDispatchMode
from tests.common.products import FAMILIES, Products

WIDTH = 8


class Weights(nn.Module):
    def __init__(self, run: Callable[[Weights, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, torch.sin(x))


def heads(m: Weights, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(-1, (2, -1)).transpose(1, 2) for part in m.inner(x).chunk(3, -1))


def layers(m: Weights, x: Tensor) -> Tensor:
    return F.silu(m.outer(torch.tanh(m.inner(x)[..., :WIDTH])))


def adapts(m: Weights, x: Tensor) -> Tensor:
    down = m.outer(x).flatten(0, 1)
    return torch.sin(m.up(down) + torch.addmm(down[:, :1], down, m.up.weight.t())).unflatten(0, x.shape[:2])[
        ..., :WIDTH
    ]


def attends(m: Weights, x: Tensor) -> Tensor:
    return m.outer(F.scaled_dot_product_attention(*heads(m, x), is_causal=True).transpose(1, 2).flatten(2))


def attends_eagerly(m: Weights, x: Tensor) -> Tensor:
    query, key, value = heads(m, x)
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores += torch.ones_like(scores).tril()  # as T5 adds its positions, in place
    return m.outer((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def attends_by_module(m: Weights, x: Tensor) -> Tensor:
    return m.attention(x, x, x, need_weights=False)[0]


def sums_by_einstein(m: Weights, x: Tensor) -> Tensor:
    return torch.einsum("bti,oi->bto", torch.tanh(m.inner(x))[..., :WIDTH], m.outer.weight)


def multiplies_as_gpt2(m: Weights, x: Tensor) -> Tensor:
    flat = torch.tanh(x).flatten(0, 1)
    return torch.addmm(m.inner.bias[:WIDTH], flat, m.outer.weight).view_as(x).cos()


def calls_operators(m: Weights, x: Tensor) -> Tensor:
    return torch.ops.aten.mm(torch.tanh(x).flatten(0, 1), m.outer.weight).view_as(x).cos()


def multiplies_a_copy(m: Weights, x: Tensor) -> Tensor:
    return m.outer(torch.tanh(x).transpose(0, 1)).transpose(0, 1).cos()


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)


def differentiates_by_hand(m: Weights, x: Tensor) -> Tensor:
    return ByHand.apply(torch.tanh(x), m.outer.weight).cos()


def casts(m: Weights, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return layers(m, x).float()


def freezes(m: Weights, x: Tensor) -> Tensor:
    return F.silu(F.linear(torch.tanh(m.outer(x)), m.outer.weight.detach()))


def adds_to_a_layer(m: Weights, x: Tensor) -> Tensor:
    found = m.inner(x)
    found[..., :WIDTH].add_(1)
    return torch.tanh(found[..., :WIDTH])


def clips_a_layer(m: Weights, x: Tensor) -> Tensor:
    return F.relu(m.outer(x), inplace=True) * x


def writes_behind_autograd(m: Weights, x: Tensor) -> Tensor:
    found = m.outer(x)
    found.data.mul_(2)
    return torch.tanh(found) * x


def writes_as_numpy(m: Weights, x: Tensor) -> Tensor:
    found = m.outer(x)
    found.detach().numpy()[...] *= 2
    return torch.tanh(found) * x


def writes_by_address(m: Weights, x: Tensor) -> Tensor:
    """As a Triton kernel does."""
    found = m.outer(x)
    (ctypes.c_float * found.numel()).from_address(found.data_ptr())[0] = 3.0
    return torch.tanh(found) * x


def writes_lists(m: Weights, x: Tensor) -> Tensor:
    found = m.outer(x)
    with torch.no_grad():
        torch._foreach_mul_([found], 2.0)  # counts no change
    return torch.tanh(found) * x


def writes_into_what_it_made(m: Weights, x: Tensor) -> Tensor:
    gate = torch.zeros(5, WIDTH)
    with torch.no_grad():
        torch.mm(x[0], m.outer.weight, out=gate)
    return torch.tanh(m.outer(x)) * gate


def writes_in_inference_mode(m: Weights, x: Tensor) -> Tensor:
    with torch.inference_mode():
        gate = m.outer(x).mul_(3)
    return torch.tanh(m.outer(x)) * gate.clone()


def writes_in_vmap(m: Weights, x: Tensor) -> Tensor:
    return torch.tanh(torch.func.vmap(lambda row: torch.matmul(m.outer(row), m.outer.weight).mul_(3))(x)) * x


def checkpoints_itself(m: Weights, x: Tensor) -> Tensor:
    return torch.tanh(m.outer(checkpoint(lambda x: layers(m, x), torch.tanh(x), use_reentrant=False)))


def differentiates_inside(m: Weights, x: Tensor) -> Tensor:
    slope = torch.autograd.grad(m.outer(x).sin().sum(), x, retain_graph=True, materialize_grads=True)[0]
    return torch.tanh(m.outer(x)) * slope


def multiplies_by_its_conjugate(m: Weights, x: Tensor) -> Tensor:
    value = torch.complex(x[0], m.inner(x)[0, :, :WIDTH]).sin()
    return F.linear(value.conj(), value).abs().sum() + F.linear(value.conj().imag, value.real) @ x[0]


def drops_in_attention(m: Weights, x: Tensor) -> Tensor:
    m.attention.dropout = 0.5
    return F.dropout(m.attention(x, x, x)[0], 0.5)


def multiplies_a_chain(m: Weights, x: Tensor) -> Tensor:
    return torch.linalg.multi_dot([x[0], m.outer.weight, m.inner.weight.T])[:, :WIDTH].sin()


#: What is computed, and how many products are computed again: those that are changed in place.
CASES = {
    layers: 0,
    attends: 0,
    attends_eagerly: 1,
    attends_by_module: 0,
    sums_by_einstein: 0,
    multiplies_as_gpt2: 0,
    calls_operators: 0,
    multiplies_a_copy: 0,
    differentiates_by_hand: 0,
    casts: 0,
    freezes: 0,
    adds_to_a_layer: 1,
    clips_a_layer: 1,
    writes_behind_autograd: 1,
    writes_as_numpy: 1,
    writes_by_address: 1,
    writes_lists: 1,
    writes_into_what_it_made: 1,
    writes_in_inference_mode: 1,
    writes_in_vmap: 2,
    checkpoints_itself: 0,
    differentiates_inside: 2,  # the layer, and the gradient inside
    multiplies_by_its_conjugate: 0,
    drops_in_attention: 0,
    multiplies_a_chain: 0,
    adapts: 2,  # thin layers
}


def gradients(run: Callable[..., Tensor], *, recomputes: bool, times: int = 1) -> tuple[list[Tensor], int]:
    """The loss, the gradients, and the number of products."""
    model = Weights(run)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with Products() as products:
        if recomputes:
            out = checkpoint(model, x, use_reentrant=False, context_fn=selective.contexts(FAMILIES))
        else:
            out = model(x)
        loss = (out * torch.arange(WIDTH)).sum()
        for last in reversed(range(times)):
            loss.backward(retain_graph=last > 0)
    grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return [loss.detach(), *grads], products.count


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_no_product_is_computed_again_but_what_was_changed_in_place(run):
    plain, once = gradients(run, recomputes=False)
    found, count = gradients(run, recomputes=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert count - once == CASES[run]


def test_a_named_operator_s_output_that_is_written_behind_autograd_is_computed_again():
    x = torch.ones(4).requires_grad_()

    def run(x: Tensor) -> Tensor:
        found = torch.exp(x)
        found.data.mul_(2)
        return torch.sin(found)

    run(x).sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(run, x, use_reentrant=False, context_fn=selective.contexts(["aten.exp"])).sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_a_second_backward_computes_products_again(run):
    plain, _ = gradients(run, recomputes=False, times=2)
    found, _ = gradients(run, recomputes=True, times=2)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_outputs_of_named_operators_alone_are_kept():
    x = torch.ones(4).requires_grad_()
    made = []

    def run(x: Tensor) -> Tensor:
        made.append(1)
        return torch.exp(torch.sin(x)) * x

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(operator.overloadpacket.__name__)
            return operator(*args, **(kwargs or {}))

    names: list[str] = []
    with Names():
        checkpoint(run, x, use_reentrant=False, context_fn=selective.contexts(["aten.exp"])).sum().backward()
    assert len(made) == 2
    assert (names.count("sin"), names.count("exp")) == (2, 1)
    assert torch.equal(x.grad, torch.exp(torch.sin(x)) * (1 + torch.cos(x) * x))


@pytest.mark.parametrize("turns", [False, True])
def test_between_forward_and_backward_only_products_and_the_input_lie_in_memory(turns):
    """Three times 4,096 elements: the input of the module, and the outputs of two layers.

    A layer makes a copy of an input that is turned, and saves that for backward.
    """
    first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    made: list[Any] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = operator(*args, **(kwargs or {}))
            if out.numel() == 64 * 64:  # torch 2.11 has an empty one of its own
                made.append(torch.multiprocessing.reductions.StorageWeakRef(out.untyped_storage()))
            return out

    x = torch.randn(8, 8, 64).requires_grad_()
    with Made():
        out = checkpoint(
            lambda x: second(F.gelu(first(torch.sin(x).transpose(0, int(turns))))).cos(),
            x,
            use_reentrant=False,
            context_fn=selective.contexts(FAMILIES),
        )
    weights = {each.untyped_storage()._cdata for each in (x, out, first.weight, second.weight)}
    alive = {ref.cdata for ref in made if not ref.expired()} - weights
    assert len(alive) == 2
    out.sum().backward()
    assert all(ref.expired() or ref.cdata in weights for ref in made)


def test_on_meta_as_a_dry_run_has_it_nothing_else_happens():
    with torch.device("meta"):
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        x = torch.empty(64, 64, requires_grad=True)
    with Products() as products:
        run = selective.contexts(FAMILIES)
        checkpoint(lambda x: second(F.gelu(first(x))), x, use_reentrant=False, context_fn=run).sum().backward()
    assert products.count == 2 + 4


def test_a_module_that_computes_other_products_in_its_recomputation_is_named():
    weight = torch.ones(4, 4, requires_grad=True)
    runs = []

    def run(x: Tensor) -> Tensor:
        runs.append(1)
        return torch.tanh(F.linear(x, weight) if len(runs) == 1 else x @ weight)

    out = checkpoint(run, torch.ones(2, 4), use_reentrant=False, context_fn=selective.contexts(FAMILIES))
    with pytest.raises(StateError, match="computes other products in its recomputation than in forward"):
        out.sum().backward()
