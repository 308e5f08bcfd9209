"""Bytes of pipelines: what ranks hold at the peak of a step is what their dry runs and the closed forms say."""

from __future__ import annotations

import gc

import pytest
import torch

import shardwise as sw
from shardwise.testing import StorageCount, probe, run_on_ranks
from tests.common.pipelines import peak_stored_pairs

SEQ, ROWS = 16, 2
#: Schedule, strategy, what is recomputed.
CASES = (
    ("gpipe", "zero3", "none"),
    ("1f1b", "ddp", "none"),
    ("1f1b", "zero3", "full"),
    ("interleaved-1f1b", "zero2", "none"),
    ("zb-h1", "zero3", "none"),
    ("zb-v", "zero1", "none"),
)


def num_microbatches(pp):
    """As many as a rank could hold of two stages: more than are in flight under 1f1b."""
    return 2 * pp


def build(pp):
    """Two blocks for each rank, so that each of two stages has one."""
    torch.manual_seed(0)
    return sw.models.gpt("gpt-tiny", num_layers=2 * pp, hidden=32, num_heads=2, vocab_size=64, seq_len=SEQ, tied=False)


def plan_of(case, pp, tp=1):
    schedule, strategy, recompute = case
    pipeline = sw.PipelinePolicy(schedule, num_microbatches(pp))
    return sw.ParallelPlan(strategy=strategy, pp=pp, tp=tp, pipeline=pipeline, activation_checkpointing=recompute)


def measure(cases, pp, tp=1):
    """The most that each rank holds in a step of the steady state."""
    found = []
    tokens = torch.zeros(ROWS * num_microbatches(pp), SEQ, dtype=torch.int64)
    gc.collect()
    gc.disable()  # what is held until cycles are collected is held
    for case in cases:
        with StorageCount("cpu") as count:
            model = sw.parallelize(build(pp), plan_of(case, pp, tp))
            optimizer = torch.optim.AdamW(model.parameters())
            between, seen = [], probe(model)
            for _ in range(3):
                seen.free_gradients()
                count.begin_peak()
                before = count.live_bytes
                rest = sum(seen.held_bytes(optimizer).values())
                sw.train_step(model, (tokens, tokens))
                optimizer.step()
                optimizer.zero_grad()
                between.append(count.live_bytes)
            peak_bytes = rest + count.peak_bytes - before
            count.forget()
        assert between[1] == between[2], "a step leaves nothing behind"
        found.append(peak_bytes)
    return found


def check(cases, pp, tp=1):
    ranks = run_on_ranks(measure, pp * tp, cases, pp, tp, timeout_s=200)
    tokens = torch.zeros(ROWS, SEQ, dtype=torch.int64)
    for place, case in enumerate(cases):
        for rank, results in enumerate(ranks):
            plan = plan_of(case, pp, tp)
            dry = sw.dry_run(lambda: build(pp), plan, world_size=pp * tp, rank=rank, batch=(tokens, tokens))
            # Gloo keeps 8 bytes for each peer: what the mean of the losses was received in.
            assert 0 <= results[place] - dry.peak_bytes <= 8 * (pp * tp - 1), (case, rank)


def test_two_stages_hold_what_their_dry_runs_say():
    check(CASES, 2)


def test_tensor_parallel_stages_hold_what_their_dry_runs_say():
    check(tuple((schedule, "zero3", "none") for schedule in ("gpipe", "zb-h1", "zb-v")), 2, tp=2)


@pytest.mark.long
def test_four_stages_hold_what_their_dry_runs_say():
    check(CASES, 4)


def activation_bytes(schedule, pp, rank, count):
    plan = sw.ParallelPlan(pp=pp, pipeline=sw.PipelinePolicy(schedule, count))
    tokens = torch.zeros(ROWS, SEQ, dtype=torch.int64)
    run = sw.dry_run(lambda: build(pp), plan, world_size=pp, rank=rank, batch=(tokens, tokens))
    return run.bytes_by_category["activations"]


@pytest.mark.parametrize("rank", [0, 2])
def test_activations_are_those_of_the_microbatches_in_flight(rank):
    """Each takes what its forward keeps, beside one in its backward; two gradients are sent."""
    two, three = (activation_bytes("gpipe", 4, rank, count) for count in (2, 3))
    message_bytes = 0 if rank == 0 else ROWS * SEQ * 32 * 4
    for schedule, count in (("gpipe", 6), ("1f1b", 3), ("1f1b", 5), ("1f1b", 8)):
        in_flight = peak_stored_pairs(schedule, 4, count, 1, rank).activations
        pending = min(2, count - in_flight) * message_bytes
        expected = two + (in_flight - 2) * (three - two) + pending
        assert activation_bytes(schedule, 4, rank, count) == expected, (schedule, count)
