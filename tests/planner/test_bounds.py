"""The bound by which the search leaves plans out without estimating them is never above the estimate."""

from typing import Any

import pytest

from shardwise.planner import Cluster, Workload, search
from shardwise.planner.bounds import MemoryBound
from shardwise.planner.candidate import candidates, check_fixed
from shardwise.planner.memory import estimate_memory
from shardwise.planner.planned import fastest_of
from shardwise.spec.shape import find_shape

H100S = Cluster(gpu="H100-80GB-SXM", num_gpus=16)


@pytest.mark.parametrize(
    ("name", "lora", "given"),
    [
        ("mixtral-8x7b", None, {}),
        ("mixtral-8x7b", None, {"mp_policy": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}),
        ("llama-3-8b", None, {"offload_policy": "cpu"}),
        ("llama-3-8b", None, {"offload_policy": {"parameters": False}}),
        ("llama-3-8b", 16, {"quantize_frozen": "int8"}),
    ],
)
def test_no_plan_holds_less_than_the_bound(name: str, lora: int | None, given: dict[str, Any]) -> None:
    shape, fixed = find_shape(name), check_fixed(given)
    workload = Workload(seq_len=2048, global_batch=32, lora_rank=lora)
    bound = MemoryBound(shape, H100S, workload, fixed)
    every = list(candidates(shape, H100S, workload, fixed))
    for each in every[:: len(every) // 500]:
        held = estimate_memory(shape, each.plan(workload, fixed), H100S, each.workload(workload))
        assert bound(each) <= held.device_bytes, each


def test_offloading_that_is_asked_for_hides_no_faster_plan() -> None:
    cluster, workload = Cluster(gpu="H100-80GB-SXM", num_gpus=8), Workload(seq_len=8192, global_batch=64)
    plans = search(find_shape("llama-3-8b"), cluster, workload, offload_policy="cpu")
    assert plans[0].step_time_s < 1.3 * fastest_of(plans).step_time_s


def test_the_nearest_plan_has_the_smallest_microbatch_of_those_that_hold_as_much() -> None:
    plans = search(find_shape("deepseek-v3"), H100S, Workload(seq_len=4096, global_batch=256))
    assert not plans[0].fits
    assert plans[0].workload.micro_batch == 1
