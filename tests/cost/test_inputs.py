"""Workloads and clusters that cannot be are refused where they are made, with what to set instead."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.cost.hardware import Cluster, find_gpu, gpus
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
        ("H100", "H100-80GB-SXM, H100-94/96GB-HBM2e-500W, H100-80GB-PCIe, H100-94GB-NVL: name the one"),
        ("H100-80G", "Did you mean 'H100-80GB-SXM'?"),
        ("H100 80GB", "H100 80GB is one of H100-80GB-SXM, H100-80GB-PCIe"),
        ("A10", "Did you mean 'A10G'?"),
        ("toaster", "Known are: A100-40GB-SXM"),
    ],
)
def test_names_of_gpus_that_are_not_known_say_which_are_meant(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("h200", "H200-141GB-SXM"),
        ("NVIDIA B200", "B200-180GB-SXM"),
        ("H100-SXM", "H100-80GB-SXM"),
        ("A100 80GB", "A100-80GB-SXM"),
        ("RTX 4090", "RTX4090"),
        ("rtx pro 6000", "RTX-PRO-6000"),
        ("RTX A6000", "A6000"),
    ],
)
def test_a_part_of_a_name_that_only_one_gpu_has_names_it(part: str, name: str) -> None:
    assert find_gpu(part).name == name


def test_every_card_has_its_figures_and_their_source() -> None:
    for gpu in gpus().values():
        assert gpu.source
        assert gpu.arch
        assert min(gpu.peaks["fp16"], gpu.memory_bytes, gpu.memory_bandwidth, gpu.node_gbits) > 0
        assert (gpu.link_domain > 1) == (gpu.link_bandwidth > 0)
        assert gpu.peaks.get("fp8", 2 * gpu.peaks["fp16"]) == pytest.approx(2 * gpu.peaks["fp16"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "bf16", "memory_bandwidth"),
    [
        *(("RTX3090", 71.2e12, 936e9), ("A6000", 154.8e12, 768e9), ("A10G", 70e12, 600e9), ("L40S", 362e12, 864e9)),
        *(("RTX5090", 209.5e12, 1792e9), ("RTX-PRO-6000", 500e12, 1792e9), ("H20-96GB-SXM", 148e12, 4000e9)),
        *(("H100-80GB-PCIe", 756e12, 2000e9), ("H100-94GB-NVL", 835e12, 3900e9), ("B300-SXM", 2250e12, 8000e9)),
        *(("GB300-NVL72", 2500e12, 8000e9), ("MI325X", 1307e12, 6000e9), ("MI355X", 2500e12, 8000e9)),
    ],
)
def test_dense_peaks_are_without_sparsity(name: str, bf16: float, memory_bandwidth: float) -> None:
    assert (find_gpu(name).peaks["bf16"], find_gpu(name).memory_bandwidth) == (bf16, memory_bandwidth)


def test_torch_s_name_of_a_gpu_is_taken() -> None:
    assert find_gpu("NVIDIA A100-SXM4-80GB").name == "A100-80GB-SXM"
