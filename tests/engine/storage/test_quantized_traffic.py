"""Parameters and gradients sent as int8 blocks: parity with one process that rounds alike, and how far off that is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import checks, run_on_ranks
from tests.common import casts, models
from tests.common.casts import DTYPES, PRESETS
from tests.common.own import own
from tests.common.ranks import on_ranks
from tests.engine.storage.test_quantized_weights import through_int8

#: What is gathered and reduced as, and the dtypes of compute and reduction.
CASES = (
    ("int8", "none", "fp32", "fp32"),
    ("none", "int8", "fp32", "fp32"),
    ("int8", "int8", "fp32", "fp32"),
    ("int8", "int8", "bf16", "bf16"),
)


def plan_of(
    preset: str, gather: str, reduce: str, param: str = "fp32", summed: str = "fp32", **more
) -> sw.ParallelPlan:
    policy = sw.PrecisionPolicy(param_dtype=param, reduce_dtype=summed) if param != "fp32" else None
    gather = "none" if preset == "ddp" else gather
    return sw.ParallelPlan(strategy=preset, mp_policy=policy, quantized_gather=gather, quantized_reduce=reduce, **more)


def train(plan: sw.ParallelPlan, name: str = "tied", num_microbatches: int = 1) -> casts.Numbers:
    return casts.train(lambda: models.build(name), plan, num_microbatches=num_microbatches)


def train_all(presets: tuple[str, ...]) -> dict[tuple, casts.Numbers]:
    with checks():
        return {(preset, *case): train(plan_of(preset, *case)) for preset in presets for case in CASES}


def mean_of_int8(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Every rank's gradient through int8 blocks of ``dtype``, added up in fp32, divided, rounded to ``dtype``."""
    total = None
    for grad in grads:
        # Read with fp32 digits: a block's largest value is that of the elements in ``dtype``.
        read = through_int8(grad.to(dtype).float())
        total = read if total is None else total + read
    return (total / len(grads)).to(dtype).float()


def read_through(gather: str) -> Callable[[Tensor], Tensor]:
    return through_int8 if gather == "int8" else lambda value: value


def one_process(world: int, gather: str, reduce: str, param: str, summed: str) -> list[casts.Numbers]:
    """``tied`` has no parameter of its own of a size that blocks would share, but for what they are aligned to."""
    return casts.one_process(
        models.build("tied"),
        models.build("tied").to(DTYPES[param]),
        world,
        read=read_through(gather),
        send=lambda _name, grad: grad.to(DTYPES[summed]),
        mean=(lambda grads: mean_of_int8(grads, DTYPES[summed])) if reduce == "int8" else casts.mean_of,
    )


@pytest.mark.parametrize(
    ("world", "presets"),
    [(2, PRESETS), (3, ("ddp", "zero2", "zero3")), pytest.param(1, PRESETS, marks=pytest.mark.long)],
)
def test_every_preset_equals_one_process_that_rounds_at_the_same_points(world: int, presets: tuple[str, ...]) -> None:
    expected = {case: one_process(world, *case) for case in CASES}
    expected |= {("none", *case[1:]): one_process(world, "none", *case[1:]) for case in CASES}
    for rank, results in enumerate(run_on_ranks(train_all, world, presets)):
        for (preset, gather, *rest), got in results.items():
            got.check(expected["none" if preset == "ddp" else gather, *rest][rank], (preset, gather, *rest))


@on_ranks(2)
def test_accumulation_odd_sizes_and_frozen_parts_do_not_depend_on_the_strategy() -> None:
    """What else reductions and gathers go through: accumulation, groups of ranks, unequal slices, odd sizes."""
    both = {"quantized_gather": "int8", "quantized_reduce": "int8"}
    got = {
        "sharded": train(sw.ParallelPlan(strategy="zero2", **both), num_microbatches=2),
        "sharded zero3": train(sw.ParallelPlan(strategy="zero3", **both), num_microbatches=2),
        "unsharded": train(sw.ParallelPlan(strategy="zero1", **both), num_microbatches=2),
        "unsharded ddp": train(sw.ParallelPlan(strategy="ddp", quantized_reduce="int8"), num_microbatches=2),
        "odd": train(sw.ParallelPlan(**both), "odd"),
        "odd zero1": train(sw.ParallelPlan(strategy="zero1", **both), "odd"),
        "odd rows": train(sw.ParallelPlan(granularity="row", **both), "odd"),
        "odd tensors": train(sw.ParallelPlan(granularity="tensor", **both), "odd"),
        "frozen": train(sw.ParallelPlan(quantize_frozen="int8", **both), "frozen"),
        "frozen rows": train(sw.ParallelPlan(quantize_frozen="int8", granularity="row", **both), "frozen"),
    }
    for name, numbers in got.items():
        assert numbers.as_predicted, name
    alike = [("odd", f"odd {other}") for other in ("zero1", "rows", "tensors")]
    for one, other in (("sharded", "sharded zero3"), ("frozen", "frozen rows"), *alike):
        assert got[one].losses == got[other].losses
        for name, value in got[one].state.items():
            assert torch.equal(value, got[other].state[name]), (one, name)


def train_in_groups() -> dict[str, casts.Numbers]:
    mesh = {"dp_replicate": 2, "dp_shard": 2, "quantized_reduce": "int8"}
    return {
        "zero3": train(sw.ParallelPlan(strategy="zero3", quantized_gather="int8", **mesh)),
        "ddp": train(sw.ParallelPlan(strategy="ddp", **mesh)),
        "deferred": train(sw.ParallelPlan(accumulation="defer_replicate", **mesh), num_microbatches=2),
    }


def test_sums_in_groups_are_sent_in_int8_inside_and_whole_across() -> None:
    """One process: ranks 0 and 1 are added up, then 2 and 3, then both sums, then they are divided by 4."""
    expected = {
        name: casts.one_process(
            models.build("tied"),
            models.build("tied"),
            4,
            read=read_through(gather),
            send=lambda _name, grad: through_int8(grad),
            mean=lambda grads: ((grads[0] + grads[1]) + (grads[2] + grads[3])) / 4,
        )
        for name, gather in (("zero3", "int8"), ("ddp", "none"))
    }
    for rank, got in enumerate(run_on_ranks(train_in_groups, 4)):
        assert got["deferred"].as_predicted
        for name, numbers in expected.items():
            got[name].check(numbers[rank], name)


# -- how far off


class Weighted(nn.Module):
    """The gradient of the weight is the input."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


NUMEL = 3000


def gradients_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(NUMEL, generator=generator) * torch.logspace(-3, 3, NUMEL)


def mean_of_gradients(preset: str) -> dict[str, Tensor]:
    model = sw.parallelize(Weighted(NUMEL), sw.ParallelPlan(strategy=preset, quantized_reduce="int8"))
    model(gradients_of(distributed.get_rank())).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    return sw.full_state_dict(model)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_the_mean_is_off_by_no_more_than_the_bound(preset: str) -> None:
    world = 3
    mean = -run_on_ranks(mean_of_gradients, world, preset)[0]["weight"].double()
    exact = sum(gradients_of(rank).double() for rank in range(world)) / world
    blocks = [gradients_of(rank).split(128) for rank in range(world)]
    for index, (got, wanted) in enumerate(zip(mean.split(128), exact.split(128), strict=True)):
        bound = sum(float(of_rank[index].abs().max()) for of_rank in blocks) / (254 * world)
        assert (got - wanted).abs().max() <= bound * (1 + 1e-4)
        assert (got - wanted).abs().max() > 0


@on_ranks(2)
def test_an_inf_is_found_through_int8() -> None:
    """An inf in one rank's gradients: its block is nan on the rank that owns it, and the step is skipped on both."""
    model = sw.parallelize(Weighted(NUMEL), sw.ParallelPlan(quantized_reduce="int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = sw.GradScaler("cpu", init_scale=8.0)
    x = gradients_of(0)
    if distributed.get_rank() == 0:
        x[-1] = float("inf")
    scaler.scale(model(x)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert [scaler.get_scale(), own(model.weight).abs().sum().item()] == [4.0, 0.0]


# -- convergence


def learn(gather: str, reduce: str) -> list[float]:
    """Our GPT on a text of its own making: every token follows from the one before it."""
    torch.manual_seed(11)
    model = sw.models.gpt("gpt-tiny", num_layers=2, hidden=64, num_heads=4, vocab_size=32, seq_len=32)
    sw.parallelize(model, sw.ParallelPlan(quantized_gather=gather, quantized_reduce=reduce))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(60):
        generator = torch.Generator().manual_seed(2 * step + distributed.get_rank())
        tokens = torch.randint(0, 32, (8, 33), generator=generator)
        for place in range(1, 33):
            tokens[:, place] = (tokens[:, place - 1] * 5 + 3) % 32
        losses.append(sw.train_step(model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def learn_both() -> dict[str, list[float]]:
    return {"plain": learn("none", "none"), "gather": learn("int8", "none"), "both": learn("int8", "int8")}


@pytest.mark.slow
def test_training_with_int8_traffic_converges_as_without() -> None:
    """Bound: averaged over ten steps, the loss is never off by more than 2% of where it began."""
    curves, _ = run_on_ranks(learn_both, 2)
    plain = torch.tensor(curves["plain"]).view(-1, 10).mean(1)
    assert plain[-1] < 0.7 * plain[0]
    for name in ("gather", "both"):
        assert curves[name] != curves["plain"]
        quantized = torch.tensor(curves[name]).view(-1, 10).mean(1)
        assert (quantized - plain).abs().max() < 0.02 * curves["plain"][0], name


# -- refused


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"quantized_gather": "int4"}, "quantized_gather='int4': expected one of 'none', 'int8'"),
        ({"quantized_reduce": "bf16"}, "quantized_reduce='bf16': expected one of 'none', 'int8'"),
    ],
)
def test_unknown_forms_are_refused(wish: dict[str, str], message: str) -> None:
    with pytest.raises(sw.PlanError, match=message):
        sw.ParallelPlan(**wish)


def test_where_nothing_is_gathered_the_wish_is_refused() -> None:
    with pytest.raises(sw.PlanError, match="quantized_gather='int8' has no meaning for strategy 'ddp'"):
        sw.parallelize(nn.Linear(2, 2), sw.ParallelPlan(strategy="ddp", quantized_gather="int8"))
