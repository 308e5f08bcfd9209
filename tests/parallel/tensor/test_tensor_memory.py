"""What a rank of ``tp`` holds at most is what its dry run says, and between steps the closed form."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.distributed import get_rank, get_world_size

import shardwise as sw
from shardwise.engine.extensions import recompute
from shardwise.engine.extensions.wrap import find_units
from shardwise.engine.storage.attachment import engine_of
from shardwise.measure.meta import cut_alone
from shardwise.testing import StorageCount, probe, run_on_ranks
from tests.engine.test_memory import SEQ, VOCAB, Storages, build, everything_alive, train

pytestmark = pytest.mark.slow

PLANS = {
    "tp": sw.ParallelPlan(tp=2),
    "by positions": sw.ParallelPlan(tp=2, sequence_parallel=True),
    "by positions, recomputed": sw.ParallelPlan(tp=2, sequence_parallel=True, activation_checkpointing="full"),
}
MORE_PLANS = PLANS | {
    "recomputed": sw.ParallelPlan(tp=2, activation_checkpointing="full"),
    "ddp": sw.ParallelPlan(tp=2, strategy="ddp"),
    "tp=4": sw.ParallelPlan(tp=4),
    "tp=4 by positions": sw.ParallelPlan(tp=4, sequence_parallel=True),
}


def batch() -> tuple[Tensor, Tensor]:
    """The same on all ranks."""
    tokens_BT = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    return tokens_BT, tokens_BT.clone()


def activations_of(plan: sw.ParallelPlan, rank: int) -> int:
    """The most bytes that forward and backward of one rank of ``tp`` hold, alone, each gradient freed at once."""
    model, inputs = build(), batch()
    units = find_units(model, plan.wrap_policy)
    cut_alone(model, plan, rank=rank, device=torch.device("cpu"))
    recompute.install(recompute.find(model, units, plan.recompute), plan.recompute)
    gc.collect()
    count = StorageCount("cpu")
    count.see_all_objects()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda held: setattr(held, "grad", None))
    with count:
        before = count.live_bytes
        model(*inputs).backward()
    count.forget()
    return count.peak_bytes - before


def measure_peak(plan: sw.ParallelPlan) -> dict[str, int]:
    """Bytes after a backward and at the peak of a step, and those predicted; activations of this part."""
    before = everything_alive()
    model = sw.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = batch()
    train(model, optimizer, inputs, 2)
    gc.collect()
    count = StorageCount("cpu")
    count.see_all_objects()
    with count:
        train(model, optimizer, inputs, 1)
    peak = count.peak_bytes - before.num_bytes - Storages().see(inputs).num_bytes
    count.forget()
    model(*inputs).backward()
    held = everything_alive().without(before, Storages().see(inputs)).num_bytes
    held -= sum(comm.held_bytes for comm in engine_of(model, "a test").comms)  # what the transport receives into
    part = activations_of(plan, plan.mesh(get_world_size()).coordinate(get_rank())["tp"])
    kept = {name: size for name, size in probe(model).predicted_bytes().items() if name not in {"gathered", "reduce"}}
    return {"held": held, "held, predicted": sum(kept.values()), "peak": peak, "activations": part}


def measure_peaks(plans: dict[str, sw.ParallelPlan]) -> dict[str, dict[str, int]]:
    whole = {"activations of the whole": activations_of(sw.ParallelPlan(), 0)}
    return {name: measure_peak(plan) | whole for name, plan in plans.items()}


def check(world: int, plans: dict[str, sw.ParallelPlan]) -> None:
    for rank, results in enumerate(run_on_ranks(measure_peaks, world, plans)):
        for name, found in results.items():
            dry = sw.dry_run(build, plans[name], world_size=world, rank=rank, batch=batch(), backend="gloo")
            assert found["held"] == pytest.approx(found["held, predicted"], rel=0.01), f"rank {rank}: {name}: {found}"
            assert found["peak"] == pytest.approx(dry.peak_bytes, rel=0.02), f"rank {rank}: {name}: {found}"
            assert found["activations"] < 0.75 * found["activations of the whole"], f"rank {rank}: {name}: {found}"


def test_the_peak_under_tp_is_that_of_a_dry_run():
    check(2, PLANS)


@pytest.mark.long
def test_the_peak_under_more_ranks():
    check(4, MORE_PLANS)
