"""A ring of threads against one attention over the whole sequence."""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise.comm.base import Comm, Done, Handle
from shardwise.comm.record import RecordComm
from shardwise.comm.stall import Stamp
from shardwise.engine.extensions import selective
from shardwise.parallel.context import kernel
from shardwise.parallel.context.ring import Ring
from shardwise.parallel.context.root import Division, reorder_positions
from tests.common.products import FAMILIES, Products
from tests.common.written import Written


class Wires(RecordComm):
    """Messages between threads of one process."""

    def __init__(self, rank: int, size: int, wires: dict[tuple[int, int], queue.Queue]) -> None:
        super().__init__("cp", rank=rank, size=size)
        self.wires = wires

    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle:
        self.wires[self.rank, to].put(buffer.clone())
        return Done()

    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle:
        return Arrival(buffer, self.wires[source, self.rank])


class Arrival(Handle):
    def __init__(self, buffer: Tensor, wire: queue.Queue) -> None:
        self.buffer, self.wire = buffer, wire

    def wait(self) -> None:
        self.buffer.copy_(self.wire.get(timeout=60))


def ring_of(size: int) -> list[Comm]:
    wires = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
    return [Wires(rank, size, wires) for rank in range(size)]


def tensors(size: int, heads: int, dtype: torch.dtype, length: int) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, (B, T, H, D)."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(2, length, count, 8) for count in (4, heads, heads, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def whole(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, is_causal: bool) -> list[Tensor]:
    leaves = [t.to(torch.float64, copy=True).requires_grad_() for t in (q, k, v)]
    turned = [t.transpose(1, 2) for t in leaves]
    out = F.scaled_dot_product_attention(*turned, is_causal=is_causal, scale=0.3, enable_gqa=True).transpose(1, 2)
    out.backward(grad.double())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def by_ring(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, size: int, is_causal: bool) -> list[Tensor]:
    """The same of as many ranks, put together again."""
    found: list[Any] = [None] * size

    def run(comm: Comm) -> None:
        division = Division(q.shape[1], comm, multiple=1, device=q.device)
        leaves = [division.own_positions(t).requires_grad_() for t in (q, k, v)]
        turned = [t.transpose(1, 2) for t in leaves]
        out = Ring(comm, "test")(*turned, scale=0.3, is_causal=is_causal).transpose(1, 2)
        out.backward(division.own_positions(grad))
        found[comm.rank] = [out.detach(), *(leaf.grad for leaf in leaves)]

    threads = [threading.Thread(target=run, args=(comm,)) for comm in ring_of(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [reorder_positions(parts) for parts in zip(*found, strict=True)]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("is_fused", [True, False])
def test_a_ring_gives_the_attention_of_the_whole_sequence(monkeypatch, is_causal, size, heads, is_fused):
    if not is_fused:
        monkeypatch.setattr(kernel, "is_fused", lambda *_, **__: False)
    inputs = tensors(size, heads, torch.float64, 24)
    for expected, got in zip(
        whole(*inputs, is_causal=is_causal), by_ring(*inputs, size=size, is_causal=is_causal), strict=True
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_values_narrower_than_keys_store_no_scores(monkeypatch):
    q, k, v, grad = tensors(2, 1, torch.float64, 24)
    inputs = q, k, v[..., :5].contiguous(), grad[..., :5].contiguous()
    monkeypatch.delattr(kernel, "_scores")
    for expected, got in zip(whole(*inputs, is_causal=True), by_ring(*inputs, size=2, is_causal=True), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_narrow_numbers_are_added_up_in_fp32(dtype, tolerance):
    inputs = tensors(4, 2, dtype, 48)
    for expected, got in zip(whole(*inputs, is_causal=True), by_ring(*inputs, size=4, is_causal=True), strict=True):
        assert got.dtype is dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_backward_keeps_only_this_ranks_tensors():
    """Queries, keys, values and outputs of its own positions, and one number for each query."""
    saved: list[int] = []
    comm = RecordComm("cp", rank=1, size=4)
    q, k, v = (torch.zeros(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        Ring(comm, "test")(q, k, v)
    assert sorted(saved) == sorted([q.numel(), k.numel(), v.numel(), q.numel(), 2 * 4 * 16])


def test_no_sum_is_copied():
    """Only keys and values are, once in each direction, into the buffer that travels."""
    comm = RecordComm("cp", rank=0, size=1)
    q, k, v = (torch.ones(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    with Written() as forward:
        out = Ring(comm, "test")(q, k, v)
    assert forward.calls["copy_"] == 2
    with Written() as backward:
        out.backward(torch.ones_like(out))
    assert backward.bytes["copy_"] == k.nbytes + v.nbytes


def test_selective_recomputation_computes_no_attention_again():
    ring, counts = Ring(RecordComm("cp", rank=1, size=4), "test"), []
    q, k, v = (torch.ones(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    contexts = selective.contexts(FAMILIES)
    for run in (ring, functools.partial(checkpoint, ring, use_reentrant=False, context_fn=contexts)):
        with Products() as products:
            run(q, k, v).sin().sum().backward()
        counts.append(products.count)
    assert counts[0] == counts[1] > 0
