"""What is offloaded is on the host, byte by byte as predicted, and nothing else of it is left on the device."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import PRESETS
from tests.engine.test_dry_run import check_bytes
from tests.engine.test_memory import SEQ, SMALL_BYTES, Storages, batch, build, everything_alive, most_in_use, train

pytestmark = pytest.mark.slow

POLICIES = ("cpu", sw.OffloadPolicy(ratio=0.5), sw.OffloadPolicy(parameters=False))
DTYPES = (None, sw.PrecisionPolicy(param_dtype="bf16"), sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16"))


def names_on_host(model: nn.Module) -> set[str]:
    groups = [group for unit in sw.summary(model).units for group in unit.groups if group.is_offloaded]
    return {name for group in groups for name, _, _ in group.parameters}


def plan_of(preset: str, policy: int, dtypes: int) -> sw.ParallelPlan:
    return sw.ParallelPlan(strategy=preset, offload_policy=POLICIES[policy], mp_policy=DTYPES[dtypes])


def measure(plan: sw.ParallelPlan) -> tuple[dict[str, int], dict[str, int]]:
    """Measured minus predicted of either side, and the prediction."""
    before = everything_alive()
    model = sw.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = batch()
    with most_in_use(probe(model)) as most:
        train(model, optimizer, inputs, 2)
        model(*inputs).backward()
    offloaded = names_on_host(model)
    host, kept = Storages(), Storages()  # what the optimizer works on, by side
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}).values()
        (host if name in offloaded else kept).see([parameter, parameter.grad, *state])
    rest = everything_alive().without(before, Storages().see(inputs), host, kept)
    large = sum(size for size in rest.values() if size > SMALL_BYTES)
    assert sum(rest.values()) - large <= 8 * SMALL_BYTES  # flags: a header for each view of a gradient buffer
    predicted = probe(model).predicted_bytes()
    shapes = [shape for unit in probe(model).unit_facts.values() for shape in unit.groups]
    host_sums = sum(shape.host_sum_bytes(distributed.get_rank()) for shape in shapes)
    predicted_on_device = sum(predicted.values()) - predicted["host"]
    on_host = sum(p.shape.numel() for name, p in model.named_parameters() if name in offloaded)
    numbers = {
        "host": host.num_bytes + host_sums - predicted["host"],
        "device": kept.num_bytes + large + sum(most.values()) - host_sums - predicted_on_device,
        "share": round(100 * on_host / max(1, sum(p.shape.numel() for p in model.parameters()))),
    }
    return numbers, predicted


#: Preset, policy, dtypes: each preset with each policy at two ranks, with one at one.
CASES = {
    1: [(preset, place % 3, (place + 1) % 3) for place, preset in enumerate(PRESETS)],
    2: [(preset, number, (place + number) % 3) for place, preset in enumerate(PRESETS) for number in range(3)],
}


def measure_all() -> dict[tuple[str, int, int], tuple[dict[str, int], dict[str, int]]]:
    return {case: measure(plan_of(*case)) for case in CASES[distributed.get_world_size()]}


@pytest.mark.parametrize("world", [1, 2])
def test_host_and_device_hold_what_is_predicted(world):
    for rank, found in enumerate(run_on_ranks(measure_all, world, timeout_s=120)):
        for case, (numbers, predicted) in found.items():
            assert numbers.pop("share") == pytest.approx(50 if case[1] == 1 else 100, abs=10), case
            assert numbers == {"host": 0, "device": 0}, (rank, case)
            if rank == world - 1 and case[1] == 1:
                _run_dry(plan_of(*case), rank, predicted)


def _run_dry(plan: sw.ParallelPlan, rank: int, predicted: dict[str, int]) -> None:
    inputs = (torch.zeros(2, SEQ, dtype=torch.int64),) * 2
    dry = sw.dry_run(build, plan, world_size=rank + 1, rank=rank, batch=inputs, backend="gloo")
    check_bytes(dry, predicted, plan)
    assert dry.peak_bytes == sum(dry.bytes_by_category.values()) - predicted["host"]
