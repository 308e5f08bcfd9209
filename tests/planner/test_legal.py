"""What the table of families says, beside what ``sw.parallelize`` accepts for models of transformers."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import shardwise as sw
from shardwise.api.dry_run import rehearse
from shardwise.cost.work import model_work
from shardwise.measure.meta import build_on_meta, cut_alone
from shardwise.planner import Cluster, Workload, search
from shardwise.planner.legal import SUPPORT, context_degrees, expert_degrees, schedules, tensor_degrees
from shardwise.spec.errors import PlanError
from shardwise.spec.shape import ModelShape
from shardwise.spec.shape.families import from_config

_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_MORE: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "mistral": {"sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "gpt_oss"), _EXPERTS),
}
CAUSAL = sorted(set(SUPPORT) - {"gpt", "t5", "bert", "vit"})


@functools.cache
def config_of(family: str) -> Any:
    return CONFIG_MAPPING[family](**(_SIZES | _MORE.get(family, {})))


def build(family: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(copy.deepcopy(config_of(family)))


@pytest.mark.cases(3)
@pytest.mark.filterwarnings("ignore")  # transformers', about configurations of four layers
@pytest.mark.parametrize("family", CAUSAL)
def test_what_a_family_takes_is_accepted_all_at_once(family: str) -> None:
    held = SUPPORT[family]
    degrees: dict[str, Any] = {axis: 2 for axis in ("tp", "cp", "pp", "ep") if getattr(held, axis)}
    if held.sequence_parallel and not held.ep:
        degrees["sequence_parallel"] = True
    plan = sw.ParallelPlan(strategy="zero3", dp_shard=1 if held.cp else 2, **degrees)
    world = plan.dp_shard * plan.cp * plan.tp * plan.pp
    rehearse(lambda: build(family), plan, world_size=world, ranks_per_machine=world)


@pytest.mark.cases(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("family", [family for family in CAUSAL if SUPPORT[family].tp])
def test_a_rank_of_tp_holds_the_parameters_that_the_planner_counts(family: str, *, is_tied: bool) -> None:
    config = copy.deepcopy(config_of(family))
    config.tie_word_embeddings = is_tied
    plan = sw.ParallelPlan(tp=2)
    model = build_on_meta(lambda: AutoModelForCausalLM.from_config(copy.deepcopy(config)))
    cut_alone(model, plan, rank=0, device=torch.device("meta"))
    units = model_work(from_config(config.to_dict(), family), plan, Workload(seq_len=32, global_batch=1))
    assert sum(unit.count * unit.num_parameters for unit in units) == sum(p.numel() for p in model.parameters())


#: What a family is said not to take, and cannot. GPT-2 and OPT could take cp if they had no dropout.
REFUSED = [
    (family, axis)
    for family in ("mistral", "gemma2", "gpt_oss", "opt", "gpt2", "olmoe")
    for axis in ("tp", "cp", "ep", "sequence_parallel")
    if not getattr(SUPPORT[family], axis)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "axis"), REFUSED)
def test_what_a_family_does_not_take_is_refused(family: str, axis: str) -> None:
    degrees: dict[str, Any] = {"tp": 2, "sequence_parallel": True} if axis == "sequence_parallel" else {axis: 2}
    with pytest.raises(PlanError):
        rehearse(lambda: build(family), sw.ParallelPlan(**degrees), world_size=2, ranks_per_machine=2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3-8b", [1, 2, 4, 8]),  # 8 heads of keys and values
        ("qwen2.5-7b", [1, 2, 4]),  # 28 heads, 4 of keys and values: 7 divides neither way
        ("qwen2.5-0.5b", [1, 2]),  # 14 heads
        ("gpt2-xl", [1, 5]),  # 25 heads
        ("gemma-2b", [1, 2, 4, 8]),  # one head of keys and values, copied
        ("opt-13b", [1]),
    ],
)
def test_tp_divides_heads_and_divides_or_copies_those_of_keys_and_values(name: str, expected: list[int]) -> None:
    assert tensor_degrees(ModelShape.from_config(name), 8) == expected


def test_ep_divides_the_experts_and_the_ranks_that_share_parameters() -> None:
    assert expert_degrees(ModelShape.from_config("mixtral-8x7b"), 12) == [1, 2, 4]
    assert expert_degrees(ModelShape.from_config("llama-3-8b"), 8) == [1]


def test_cp_leaves_each_rank_as_many_tokens_as_it_is_told() -> None:
    shape = ModelShape.from_config("llama-3-8b")
    assert context_degrees(shape, 8, 8, least_tokens=2) == [1, 2, 4]
    assert context_degrees(shape, 8, 8191, least_tokens=4096) == [1]
    assert context_degrees(ModelShape.from_config("mistral-7b"), 8, 8192, least_tokens=2) == [1]  # it has a window


@pytest.mark.parametrize(
    ("pp", "num_microbatches", "fixed", "expected"),
    [
        (4, 8, {}, ["1f1b", "zb-h1", "zb-v 2", "interleaved-1f1b 2"]),  # gpt2 has 12 layers, less than 4 x 4
        (3, 6, {}, ["1f1b", "zb-h1", "zb-v 2", "interleaved-1f1b 2", "interleaved-1f1b 4"]),
        (4, 9, {}, ["1f1b", "zb-h1", "zb-v 2"]),  # interleaved stages take microbatches pp at a time
        (12, 12, {}, ["1f1b", "zb-h1"]),
        (4, 8, {"schedule": "gpipe"}, ["gpipe"]),
        (1, 8, {"schedule": "gpipe"}, []),
    ],
)
def test_schedules_are_those_that_the_layers_and_microbatches_allow(
    pp: int, num_microbatches: int, fixed: dict[str, object], expected: list[str]
) -> None:
    found = schedules(ModelShape.from_config("gpt2"), pp, num_microbatches, fixed)
    assert [name if stages == 1 else f"{name} {stages}" for name, stages in found] == expected


def _small_llama() -> Any:
    return from_config(config_of("llama").to_dict(), "small")


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_proposals_runs_dry() -> None:
    """Plans for a small Llama on eight GPUs, drawn at random among all that are legal, in the real engine."""
    from shardwise.planner.candidate import candidates

    cluster, workload = Cluster(gpu="L4", num_gpus=8), Workload(seq_len=32, global_batch=16)
    every = list(candidates(_small_llama(), cluster, workload, {}))
    for candidate in random.Random(0).sample(every, 6):
        plan = candidate.plan(workload, {})
        tokens = torch.empty(candidate.micro_batch, 32, dtype=torch.int64, device="meta")
        found = sw.dry_run(
            lambda: build("llama"),
            plan,
            world_size=8,
            batch={"input_ids": tokens, "labels": tokens},
            ranks_per_machine=8,
            num_microbatches=candidate.accumulation,
        )
        assert found.peak_bytes > 0


def test_proposals_for_a_model_that_is_not_known_are_data_parallel() -> None:
    shape = dataclasses.replace(ModelShape.from_config("gpt2"), family="traced")
    for made in search(shape, Cluster(gpu="L4", num_gpus=8), Workload(seq_len=512, global_batch=8)):
        assert (made.plan.tp, made.plan.pp, made.plan.cp, made.plan.ep) == (1, 1, 1, 1)
