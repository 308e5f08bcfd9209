"""What is sent takes at least as long as the network needs for it, wherever the ranks lie."""

from __future__ import annotations

import itertools

import pytest

from shardwise.planner import Cluster, Estimate, Workload, estimate
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import find_shape

SHAPE = find_shape("llama-3-8b")


def step(plan: ParallelPlan, num_gpus: int, *, node: int = 8, gbits: float | None = None, batch: int = 32) -> Estimate:
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=num_gpus, gpus_per_node=node, inter_gbits_per_s_per_node=gbits)
    return estimate(SHAPE, plan, cluster, Workload(seq_len=2048, global_batch=batch))


@pytest.mark.parametrize(
    ("strategy", "node", "gbits"), list(itertools.product(["ddp", "zero2", "zero3"], [1, 2, 4, 8], [1, 25]))
)
def test_a_step_lasts_as_long_as_its_bytes_take_on_the_network(strategy: str, node: int, gbits: float) -> None:
    made = step(ParallelPlan(strategy=strategy), 16, node=node, gbits=gbits)
    assert made.step_time_s >= made.time.sent_bytes["dp_shard"] / (gbits / 8 * 1e9)


def test_smaller_nodes_are_slower() -> None:
    times = [step(ParallelPlan(strategy="zero3"), 8, node=node, gbits=100).step_time_s for node in (8, 4, 2, 1)]
    assert times == sorted(times)
    assert times[0] * 2 < times[1]


@pytest.mark.parametrize(
    ("pp", "schedule"), list(itertools.product([2, 4, 16], ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"]))
)
def test_a_pipeline_over_several_nodes_waits_for_its_messages(pp: int, schedule: str) -> None:
    """Each microbatch crosses every boundary between nodes twice, of which a link carries one at a time."""
    virtual = 2 if schedule == "interleaved-1f1b" else None
    plan = ParallelPlan(strategy="ddp", pp=pp, pipeline=PipelinePolicy(schedule, num_virtual_stages=virtual))
    batch = 64 * 16 // pp
    made = step(plan, 16, gbits=0.1, batch=batch)
    message = 2 * 2048 * SHAPE.hidden
    assert made.step_time_s >= 64 * message / (0.1e9 / 8 / 8)
    assert made.step_time_s > 10 * step(plan, 16, batch=batch).step_time_s


def test_a_pipeline_inside_a_node_does_not_see_the_network() -> None:
    plan = ParallelPlan(strategy="ddp", pp=2, dp_replicate=1, dp_shard=4, pipeline="1f1b")
    assert step(plan, 8, gbits=0.1).step_time_s == step(plan, 8, gbits=1000).step_time_s


def test_what_is_kept_after_forward_is_not_sent_again() -> None:
    kept, few, again = (
        step(ParallelPlan(strategy="zero3", reshard_after_forward=value), 32, gbits=25) for value in (False, 8, True)
    )
    whole = 2 * SHAPE.num_parameters * 31 / 32  # gathered once; gradients are twice as wide
    assert [made.time.sent_bytes["dp_shard"] for made in (kept, few, again)] == pytest.approx(
        [3 * whole, 3 * whole + 2 * SHAPE.num_parameters * 7 / 8, 4 * whole]
    )
    assert kept.step_time_s < again.step_time_s
    assert few.step_time_s < again.step_time_s
    assert kept.memory.allocated_bytes > few.memory.allocated_bytes > again.memory.allocated_bytes


def test_a_pipeline_that_releases_its_units_gathers_them_for_every_microbatch() -> None:
    pipeline = PipelinePolicy("1f1b")
    stays, leaves = (
        step(ParallelPlan(strategy="zero3", pp=2, pipeline=pipeline, reshard_after_forward=value), 32, gbits=100)
        for value in ("auto", True)
    )
    gathered = 2 * SHAPE.num_parameters / 2 * 15 / 16
    more = leaves.time.sent_bytes["dp_shard"] - stays.time.sent_bytes["dp_shard"]
    assert more == pytest.approx((2 * 2 - 1) * gathered)  # two microbatches, forward and backward
    assert leaves.step_time_s > stays.step_time_s
