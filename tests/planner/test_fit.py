import dataclasses

import pytest

from shardwise.planner import Cluster, Workload, fit
from shardwise.planner.fit import first_fit, largest, remedies, scaled
from shardwise.planner.memory import MemoryEstimate, estimate_memory
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape

SHAPE = ModelShape.from_config("llama-3-8b")
SMALL = Cluster(gpu="L4", num_gpus=2)
WORK = Workload(seq_len=2048, global_batch=4)
DEVICE_ONLY = {"offload_policy": "none"}


def test_every_change_that_is_named_makes_the_model_fit_and_is_the_only_change() -> None:
    found = remedies(SHAPE, SMALL, WORK, {**DEVICE_ONLY, "strategy": "zero2"})
    assert found
    assert all(remedy.plan.fits for remedy in found)
    assert "leave offload_policy open, which is fixed to none" in [remedy.change for remedy in found]
    for remedy in found:
        differing = [
            remedy.plan.cluster.num_gpus != 2,
            remedy.plan.cluster.gpu != "L4",
            remedy.plan.workload.seq_len != 2048,
            remedy.plan.workload.optimizer != "adamw",
            remedy.plan.plan.strategy != "zero2",
            remedy.plan.plan.offload is not None,
        ]
        assert sum(differing) == 1, remedy.change


def test_moments_in_8_bit_are_a_change_that_is_named_with_what_it_costs() -> None:
    shape, two = ModelShape.from_config("llama-3.2-3b"), Cluster(gpu="RTX4090", num_gpus=2)
    found = remedies(shape, two, dataclasses.replace(WORK, global_batch=32), {**DEVICE_ONLY, "tp": 1, "pp": 1})
    (remedy,) = [each for each in found if "adamw8bit" in each.change]
    assert remedy.change == "--optimizer adamw8bit: moments in 8 bit, other numbers"
    assert (remedy.plan.workload.optimizer, remedy.plan.fits, remedy.plan.is_tight) == ("adamw8bit", True, False)


def test_no_plan_is_measured_again_for_a_gpu_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ParallelPlan] = []

    def estimated(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload) -> MemoryEstimate:
        asked.extend([plan] * (cluster.gpu != "L4"))
        return estimate_memory(shape, plan, cluster, workload)

    monkeypatch.setattr(fit, "estimate_memory", estimated)
    remedies(SHAPE, SMALL, WORK, DEVICE_ONLY)
    assert asked
    assert all(asked.count(plan) == 1 for plan in asked)


def test_fewer_gpus_than_named_do_not_fit() -> None:
    (more,) = [remedy for remedy in remedies(SHAPE, SMALL, WORK, DEVICE_ONLY) if "instead of 2" in remedy.change]
    times = more.plan.cluster.num_gpus // 2
    assert times > 1
    fewer = dataclasses.replace(SMALL, num_gpus=2 * (times - 1))
    batch = dataclasses.replace(WORK, global_batch=4 * (times - 1))
    assert first_fit(SHAPE, fewer, batch, DEVICE_ONLY) is None


@pytest.mark.parametrize("name", ["gpt-175b", "llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("width", [1, 3, 8, 17])
def test_scaled_models_keep_their_proportions_and_can_be_built(name: str, width: int) -> None:
    shape = ModelShape.from_config(name)
    small = scaled(shape, width)
    (_, block), (_, whole) = small.stacks[0], shape.stacks[0]
    assert block.attention.heads == width
    assert block.attention.heads % block.attention.kv_heads == 0
    assert block.attention.head_dim == whole.attention.head_dim
    assert small.hidden / small.num_layers == pytest.approx(shape.hidden / shape.num_layers, rel=0.5)


def test_scaling_to_its_own_width_gives_the_model() -> None:
    for name in ("gpt-175b", "llama-3-8b", "mixtral-8x7b"):
        shape = ModelShape.from_config(name)
        again = scaled(shape, shape.stacks[0][1].attention.heads)
        assert again.num_parameters == shape.num_parameters


def test_the_next_larger_model_does_not_fit() -> None:
    cluster, work = Cluster(gpu="A100-40GB-SXM", num_gpus=8), Workload(seq_len=2048, global_batch=8)
    (found, *_) = largest(ModelShape.from_config("gpt-175b"), cluster, work, ("zero3",), {})
    assert found.plan is not None
    assert found.plan.fits
    larger = scaled(ModelShape.from_config("gpt-175b"), found.plan.shape.stacks[0][1].attention.heads + 1)
    fixed = {"strategy": "zero3", "tp": 1, "pp": 1, "cp": 1, "recompute": "none", "in_backward": False, **DEVICE_ONLY}
    assert first_fit(larger, cluster, work, fixed) is None


def test_no_cluster_larger_than_any_that_trains_one_model_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(fit, "first_fit", lambda shape, cluster, *_: tried.append(cluster.num_gpus))
    assert remedies(SHAPE, dataclasses.replace(SMALL, num_gpus=1024), WORK, {}) == []
    assert max(tried) == fit.MOST_GPUS == 1 << 15
