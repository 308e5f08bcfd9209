"""Optimizers with 8-bit states in blocks: a small one of our own, and torchao's AdamW8bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common import models
from tests.common.blockwise import BLOCK, TORCHAO, Int8Momentum, torchao_adamw
from tests.common.oracle import compare, compare_each
from tests.common.ranks import on_ranks, refusal

SHARDING = ("zero1", "zero2", "shard_grad_op", "zero3")


class Wide(nn.Module):
    """Weights whose gradients do not depend on them."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) for shape in shapes)

    def forward(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        terms = [(p * torch.randn(p.shape, generator=generator)).sum() for p in self.weights]
        return torch.stack(terms).sum()


def wide_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(10 * step + rank)


# -- our own


def odd_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    return model(*models.batch(step, 0, rank))


def our_blocks(strategies: tuple[str, ...], granularities: tuple[object, ...]) -> None:
    sw.declare_granularity(Int8Momentum, sw.block(BLOCK))
    for granularity in granularities:
        compare_each(
            lambda: models.build("odd"),
            odd_loss,
            strategies,
            granularity=granularity,
            optimizer=Int8Momentum,
            auto_wrap_policy=models.wrap_policy("odd"),
        )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_block_optimizer_is_bitwise_where_no_block_straddles_ranks(world):
    strategies = SHARDING if world == 2 else ("zero1", "zero3")
    run_on_ranks(our_blocks, world, strategies, (sw.block(BLOCK), sw.block(3 * BLOCK), "tensor"))


def cut_blocks() -> None:
    sw.declare_granularity(Int8Momentum, "element")  # a lie
    compare(lambda: Wide((40, 64), (33, 70)), wide_loss, "zero3", optimizer=Int8Momentum)


def test_the_comparison_sees_blocks_that_straddle_ranks():
    """Negative control."""
    with pytest.raises(AssertionError, match="scales of weights"):
        run_on_ranks(cut_blocks, 2)


@on_ranks(2)
def test_where_blocks_might_straddle_the_optimizer_is_refused() -> None:
    text = refusal(StateError, our_blocks, ("zero3",), ("row",))
    assert text.startswith("Int8Momentum needs every block of 96 of a parameter on one rank, but parameter '")
    assert "is sharded by row: this rank holds" in text
    assert "Use sw.ParallelPlan(granularity=sw.block(96)), strategy 'ddp', or an element-wise optimizer." in text


# -- torchao's
#
# It quantizes what has at least 4096 elements, a multiple of its block size (256); the rest keeps its states in fp32.
# With blocks of 256 no scale ever spans two ranks. But whether a *piece* is quantized depends on its size, so one
# process and many do the same only where every piece of a quantized parameter has 4096 elements and more, and no piece
# of another is a multiple of 256: with blocks of 4096 and sizes that 4096 divides, or with whole parameters.

needs_torchao = pytest.mark.skipif(
    not TORCHAO.exists(), reason=f"torchao is not in {TORCHAO}; `make venv` puts it there"
)
EVEN = ((64, 64), (128, 96), (64,), (3, 4096), (100,))
ODD = ((65, 64), (100, 91), (64,), (4097,))


def same_as_one_process(shapes: tuple[tuple[int, ...], ...], granularity: object, strategies: tuple[str, ...]) -> None:
    with torch.compiler.set_stance("force_eager"):
        compare_each(lambda: Wide(*shapes), wide_loss, strategies, granularity=granularity, optimizer=torchao_adamw)


@needs_torchao
@pytest.mark.parametrize("world", [1, 2, 3])
def test_adamw8bit_is_bitwise_with_pieces_of_4096_elements_and_with_whole_parameters(world):
    strategies = SHARDING if world == 2 else ("zero1", "zero3")
    run_on_ranks(same_as_one_process, world, EVEN, sw.block(4096), strategies)
    run_on_ranks(same_as_one_process, world, ODD, "tensor", ("zero3",))


@needs_torchao
@pytest.mark.long
@on_ranks(2, timeout_s=300)
def test_adamw8bit_is_bitwise_as_it_compiles_itself() -> None:
    warnings.simplefilter("ignore")  # inductor's own
    compare(lambda: Wide((128, 64), (64,)), wide_loss, "zero3", granularity=("block", 4096), optimizer=torchao_adamw)


def small_pieces() -> dict[str, tuple[int, int, bool, bool]]:
    """By parameter: its elements, those here, whether its state here is quantized, whether one process has the same."""
    shapes = ((128, 96), (80, 96), (64,), (210, 101), (100,))
    plain, model = Wide(*shapes), Wide(*shapes)
    sw.parallelize(model, sw.ParallelPlan(granularity=sw.block(256)))
    optimizers = torchao_adamw(plain.parameters()), torchao_adamw(model.parameters())
    with torch.compiler.set_stance("force_eager"):
        for step in range(4):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                wide_loss(each, 0, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    parameters, found = dict(plain.named_parameters()), {}
    for shard in probe(model).shards:
        whole = parameters[shard.name]
        state = optimizers[1].state[shard.parameter] if shard.numel else {}
        is_quantized = type(state.get("exp_avg")) is not Tensor
        is_same = torch.equal(shard.values, shard.part_of(whole))
        found[shard.name] = (whole.numel(), shard.numel, is_quantized, is_same)
    return found


@needs_torchao
def test_with_blocks_of_256_small_pieces_keep_their_states_in_fp32():
    """What is true, and where the numbers then differ from one process; at 4 ranks, which all get the same data."""
    kinds = set()
    for found in run_on_ranks(small_pieces, 4):
        for name, (numel, local_numel, is_quantized, is_same) in found.items():
            if not local_numel:
                continue
            expected = local_numel >= 4096 and local_numel % 256 == 0
            would_be = numel >= 4096 and numel % 256 == 0
            assert is_quantized == expected, name
            assert is_same == (expected == would_be), name
            kinds.add((expected, would_be))
    assert kinds == {(True, True), (True, False), (False, True), (False, False)}


@needs_torchao
@on_ranks(2)
def test_adamw8bit_is_refused_where_its_blocks_might_straddle() -> None:
    texts = {}
    for granularity in ("element", "row", sw.block(128)):
        model = sw.parallelize(Wide(*EVEN), sw.ParallelPlan(granularity=granularity))
        optimizer = torchao_adamw(model.parameters())
        wide_loss(model, 0, 0).backward()
        texts[str(granularity)] = refusal(StateError, optimizer.step)
    text = texts
    for granularity, message in text.items():
        assert message.startswith("AdamW8bit needs every block of 256 of a parameter on one rank, but parameter '")
        assert f"is sharded by {granularity}: " in message
        assert "Use sw.ParallelPlan(granularity=sw.block(256))" in message


def go_on(folder: str, turn: int, granularity: object, strategy: str) -> dict[str, Any]:
    model = sw.parallelize(Wide(*EVEN), sw.ParallelPlan(granularity=granularity, strategy=strategy))
    optimizer = torchao_adamw(model.parameters())
    with torch.compiler.set_stance("force_eager"):
        if turn:
            sw.load(f"{folder}/{turn - 1}", model, optimizer)
        for step in range(2 * turn, 2 * turn + 2):
            wide_loss(model, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    sw.save(f"{folder}/{turn}", model, optimizer)
    return sw.full_state_dict(model)


def tiny_pieces(folder: str) -> str:
    model = sw.parallelize(Wide(*EVEN), sw.ParallelPlan(granularity=sw.block(256)))
    with torch.compiler.set_stance("force_eager"), pytest.raises(CheckpointError) as caught:
        sw.load(f"{folder}/0", model, torchao_adamw(model.parameters()))
    assert dist.get_world_size() == 4
    return str(caught.value)


@needs_torchao
def test_8_bit_state_goes_on_bit_for_bit_in_layouts_that_quantize_the_same(tmp_path):
    plain = Wide(*EVEN)
    optimizer = torchao_adamw(plain.parameters())
    places = ((2, sw.block(4096), "zero3"), (4, "tensor", "zero1"), (1, "element", "ddp"), (4, sw.block(4096), "zero3"))
    with torch.compiler.set_stance("force_eager"):
        for turn, (world, granularity, strategy) in enumerate(places):
            state = run_on_ranks(go_on, world, str(tmp_path), turn, granularity, strategy)[0]
            for step in range(2 * turn, 2 * turn + 2):
                wide_loss(plain, 0, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items()), places[turn]
    text = run_on_ranks(tiny_pieces, 4, str(tmp_path))
    assert len(set(text)) == 1
    assert "does not fit this layout:\n  - 'exp_avg.codes' of 'weights." in text[0]
