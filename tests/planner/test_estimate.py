import dataclasses

import pytest

from shardwise.planner import Cluster, Workload, estimate
from shardwise.spec.errors import MeshError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import ModelShape

SHAPE = ModelShape.from_config("llama-3.2-1b")
CLUSTER = Cluster(gpu="A100-80GB-SXM", num_gpus=8)
WORK = Workload(seq_len=2048, global_batch=16)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("none", "none"), ("full", "full"), ("selective", "selective"), ({"every": 3}, 6), ({"every": 1}, "full")],
)
def test_recomputation_may_be_said_by_the_plan(policy: object, expected: object) -> None:
    said = estimate(SHAPE, ParallelPlan(activation_checkpointing=policy), CLUSTER, WORK)  # pyrefly: ignore
    assert said.workload.recompute == expected
    again = estimate(SHAPE, ParallelPlan(), CLUSTER, dataclasses.replace(WORK, recompute=expected))
    assert said.memory.device_bytes == again.memory.device_bytes


def test_the_plan_gets_every_degree() -> None:
    made = estimate(SHAPE, ParallelPlan(strategy="hsdp", tp=2), dataclasses.replace(CLUSTER, num_gpus=16), WORK)
    assert (made.plan.dp_replicate, made.plan.dp_shard) == (2, 4)


def test_a_batch_that_the_ranks_do_not_divide_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(PlanError, match=r"global_batch=20 is no multiple .* = 16.\n  Set global_batch=16 or 32"):
        estimate(SHAPE, ParallelPlan(), CLUSTER, dataclasses.replace(WORK, global_batch=20, micro_batch=2))


def test_microbatches_of_a_pipeline_must_be_those_of_the_batch() -> None:
    plan = ParallelPlan(pp=2, pipeline=PipelinePolicy("1f1b", num_microbatches=8))
    with pytest.raises(PlanError, match="num_microbatches=8, but the batch makes 4"):
        estimate(SHAPE, plan, CLUSTER, WORK)


def test_degrees_that_do_not_make_the_world_are_refused() -> None:
    with pytest.raises(MeshError):
        estimate(SHAPE, ParallelPlan(tp=3), CLUSTER, WORK)


def test_the_reason_says_what_is_too_much_in_gib() -> None:
    small = dataclasses.replace(CLUSTER, gpu="V100-16GB-SXM2")
    made = estimate(SHAPE, ParallelPlan(strategy="ddp"), small, dataclasses.replace(WORK, precision="fp16"))
    assert not made.fits
    assert made.reason.startswith("needs ")
    assert "of a device's 15.8 GiB: optimizer " in made.reason
