"""Workloads and clusters that cannot be are refused where they are made, with what to set instead."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.cost.hardware import Cluster, find_gpu
from shardwise.cost.workload import Workload
from shardwise.planner import estimate
from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seq_len": 0}, "seq_len=0: expected a whole number"),
        ({"micro_batch": 0}, "micro_batch=0: expected a whole number"),
        ({"lora_rank": 0}, "lora_rank=0: expected a whole number"),
        ({"recompute": -5}, "recompute=-5: expected none, selective, full or a number of blocks"),
        ({"recompute": True}, "recompute=True: expected"),
        ({"optimizer": "adamww"}, "Did you mean 'adamw'?"),
        ({"optimizer": "banana"}, "optimizer='banana': expected adamw, adam, sgd, sgd-momentum"),
        ({"precision": "bf15"}, "Did you mean 'bf16'?"),
    ],
)
def test_workloads_that_no_step_has_are_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload(**{"seq_len": 512, "global_batch": 8, **changed})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_gpus": 0},
        {"gpus_per_node": 0},
        *({"inter_gbits_per_s_per_node": gbits} for gbits in (0, -5.0, float("inf"), float("nan"))),
    ],
)
def test_clusters_that_cannot_be_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"cluster: {next(iter(changed))}=.*: expected (.|\n)*Set for example"):
        Cluster(**{"gpu": "L4", "num_gpus": 16, **changed})


@pytest.mark.parametrize(
    ("model", "changed", "said"),
    [
        ("gpt2-xl", {"recompute": 49}, "recompute=49: gpt2-xl has 48 blocks"),
        ("llama-3-8b", {"seq_len": 1 << 17}, ""),  # rotary positions go on
    ],
)
def test_an_estimate_needs_blocks_that_the_model_has(model: str, changed: dict[str, Any], said: str) -> None:
    workload = Workload(**{"seq_len": 512, "global_batch": 8, **changed})
    made = (ModelShape.from_config(model), ParallelPlan(), Cluster(gpu="H200-141GB-SXM", num_gpus=8), workload)
    if not said:
        assert estimate(*made).step_time_s > 0
        return
    with pytest.raises(ConfigError, match=said):
        estimate(*made)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("V100", "V100 is one of V100-32GB-SXM2, V100-16GB-SXM2"),
        ("H100-80G", "Did you mean 'H100-80GB-SXM'?"),
        ("toaster", "Known are: A100-40GB-SXM"),
    ],
)
def test_names_of_gpus_that_are_not_known_say_which_are_meant(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(name)
    assert said in str(caught.value)


def test_torch_s_name_of_a_gpu_is_taken() -> None:
    assert find_gpu("NVIDIA A100-SXM4-80GB").name == "A100-80GB-SXM"
