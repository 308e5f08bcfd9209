"""A model on meta under tensor, pipeline and expert parallelism: a rank fills its part, and never holds the whole."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import StorageCount, run_on_ranks

pytestmark = pytest.mark.preload("transformers.models.mixtral.modeling_mixtral")

PLANS = ({"tp": 2}, {"pp": 2}, {"tp": 2, "strategy": "ddp"}, {"pp": 2, "strategy": "zero1"})
EXPERT_PLANS = ({"ep": 2}, {"ep": 2, "strategy": "ddp"})


def build(name: str) -> nn.Module:
    if name == "mixtral":
        import transformers

        sizes = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 4}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    sizes = {"num_layers": 8, "hidden": 64, "num_heads": 4, "vocab_size": 96, "seq_len": 8, "tied": name == "tied"}
    return sw.models.gpt("gpt-tiny", **sizes, num_experts=4 if name == "experts" else 0)


def whole_bytes(name: str) -> int:
    return sum(parameter.nbytes for parameter in build(name).parameters())


def build_on_meta(name: str, how: str) -> nn.Module:
    """Its construction recorded, or to be initialised module by module, under one seed."""
    torch.manual_seed(3)
    if how == "recorded":
        return sw.deferred_init(lambda: build(name))
    with torch.device("meta"):
        return build(name)


def fill(
    plans: tuple[dict[str, object], ...], models: tuple[tuple[str, str], ...], expected: dict[str, dict[str, Tensor]]
) -> list[tuple[str, int]]:
    """The most bytes that each plan holds while it fills the models; the values are those of a plain construction."""
    peaks = []
    for plan in plans:
        for name, how in models:
            model = build_on_meta(name, how)
            gc.collect()
            with StorageCount("cpu") as count:
                model = sw.parallelize(model, sw.ParallelPlan(**plan))
            peaks.append((name, count.peak_bytes))
            state = sw.full_state_dict(model)
            assert all(torch.equal(value, expected[name][key]) for key, value in state.items()), (plan, name, how)
            tokens = torch.arange(32).view(4, 8)
            batch = {"input_ids": tokens, "labels": tokens} if name == "mixtral" else (tokens, tokens)
            assert torch.isfinite(sw.train_step(model, batch))
    return peaks


def check(size: int, plans: tuple[dict[str, object], ...], models: tuple[tuple[str, str], ...], most: float) -> None:
    expected, whole = {}, {name: whole_bytes(name) for name, _ in models}
    for name in whole:
        torch.manual_seed(3)
        expected[name] = build(name).state_dict()
    for peaks in run_on_ranks(fill, size, plans, models, expected, timeout_s=250):
        for name, peak in peaks:
            assert peak < most * whole[name], (name, peak / whole[name])


def test_two_ranks_fill_their_parts_and_hold_no_more():
    # Their half, and what sharding needs for a unit of that.
    check(2, PLANS, (("plain", "recorded"), ("tied", "recorded"), ("tied", "reset")), 0.8)


def test_two_ranks_fill_their_experts_and_hold_no_more():
    check(2, EXPERT_PLANS, (("experts", "recorded"), ("experts", "reset"), ("mixtral", "recorded")), 0.8)


@pytest.mark.long
def test_four_ranks_fill_their_parts_and_hold_no_more():
    models = (("plain", "recorded"), ("plain", "reset"))
    check(4, ({"tp": 4}, {"pp": 4}, {"tp": 2, "pp": 2}), models, 0.7)


@pytest.mark.long
def test_four_ranks_fill_their_experts_and_hold_no_more():
    plans = ({"ep": 4}, {"ep": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "pp": 2}, {"tp": 2, "pp": 2})
    check(4, plans, (("experts", "recorded"), ("experts", "reset")), 0.6)
    check(4, plans, (("mixtral", "recorded"),), 0.7)
