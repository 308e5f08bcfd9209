"""What people do between training steps with models of the transformers library: generate and evaluate."""

from __future__ import annotations

import warnings

import pytest
import torch

from shardwise.testing import run_on_ranks
from tests.common import families
from tests.common.families import FAMILIES
from tests.common.matrix import HYBRID
from tests.common.oracle import compare, compare_each

pytestmark = families.PRELOAD

GENERATORS = ("GPT-2", "Llama", "T5", "BART", "Whisper")
#: Of the table of ``bench/results/models.md``.
STRATEGIES = ("ddp", "zero2", "shard_grad_op", "zero3")


#: Further ones: grouped keys, sliding windows, mixtures of experts, images.
MORE_GENERATORS = ("Qwen3", "Gemma 2", "Mixtral", "Qwen3 MoE", "LLaVA", "Qwen2-VL")


def inputs(name, rank, step):
    if name == "Whisper":
        return {"input_features": families.numbers(rank, step, 2, 8, 2 * families.SEQ)}
    if name == "LLaVA":
        return families.image_prompt(rank, step)
    if name == "Qwen2-VL":
        return families.patch_prompt(rank, step)
    return {"input_ids": families.tokens(rank, step, salt=2)}


def generating(name, **how):
    """A script that generates, evaluates and trains; each rank stops at a length of its own."""
    loss_of = FAMILIES[name].loss

    def script(model, rank, step):
        model.eval()
        with torch.no_grad():
            before = loss_of(model, rank, step)
        lengths = [7, 3, 5, 4][rank]
        tokens = model.generate(**inputs(name, rank, step), max_new_tokens=lengths, **how)
        model.train()
        loss = loss_of(model, rank, step)
        loss.backward()
        yield before, tokens, loss

    return script


def generate(name, strategies, *hows):
    warnings.simplefilter("ignore")
    for mesh, some in (
        ({}, [each for each in strategies if each not in HYBRID]),
        ({"dp_replicate": 2}, [each for each in strategies if each in HYBRID]),
    ):
        for how in hows:
            compare_each(FAMILIES[name].build, generating(name, **how), some, steps=2, **mesh)


GREEDY, SAMPLED, BEAMS = {"do_sample": False}, {"do_sample": True, "top_k": 0}, {"num_beams": 3, "do_sample": False}


@pytest.mark.parametrize("name", GENERATORS)
def test_ranks_generate_the_plain_models_tokens_though_they_stop_at_different_lengths(name):
    run_on_ranks(generate, 2, name, ("zero1", "zero3"), GREEDY, timeout_s=150)


@pytest.mark.parametrize(("name", "how"), [("GPT-2", BEAMS), ("T5", SAMPLED)])
def test_generation_may_sample_and_search(name, how):
    run_on_ranks(generate, 2, name, ("zero3",), how, timeout_s=150)


class Wrapped(torch.nn.Module):
    """A model inside the user's own."""

    def __init__(self):
        super().__init__()
        self.inner = FAMILIES["Llama"].build()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, **batch):
        return self.scale * self.inner(**batch).loss


def generate_inside(model, rank, step):
    model.eval()
    tokens = model.inner.generate(**inputs("Llama", rank, step), max_new_tokens=[4, 2][rank], do_sample=False)
    model.train()
    loss = model(input_ids=families.tokens(rank, step), labels=families.tokens(rank, step, 1))
    loss.backward()
    yield tokens, loss


def wrapped():
    warnings.simplefilter("ignore")
    compare(Wrapped, generate_inside, "zero3", steps=2)


def test_a_model_inside_another_generates_in_step_too():
    run_on_ranks(wrapped, 2, timeout_s=150)


def hows(name):
    """The ways in which a model can generate."""
    return (GREEDY, SAMPLED) if name in {"Whisper", "LLaVA", "Qwen2-VL"} else (GREEDY, SAMPLED, BEAMS)


@pytest.mark.long
@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks_generate_the_plain_models_tokens(world, name):
    run_on_ranks(generate, world, name, STRATEGIES, *hows(name), timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE_GENERATORS)
@pytest.mark.parametrize("world", [2, 4])
def test_further_models_generate_the_plain_models_tokens(world, name):
    run_on_ranks(generate, world, name, STRATEGIES, *hows(name), timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("name", [*GENERATORS, *MORE_GENERATORS])
def test_two_groups_of_two_generate_the_plain_models_tokens(name):
    run_on_ranks(generate, 4, name, HYBRID, *hows(name), timeout_s=280)


@pytest.mark.slow
def test_one_model_generates_on_two_groups_of_two():
    """Of the long test above, what is run every time."""
    run_on_ranks(generate, 4, "GPT-2", ("hsdp",), GREEDY, timeout_s=150)


def checkpointed(name, use_reentrant):
    warnings.simplefilter("ignore")
    loss_of = FAMILIES[name].loss

    def script(model, rank, step):
        if step == 0:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return loss_of(model, rank, step)

    compare(FAMILIES[name].build, script, "zero3", steps=3)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_the_librarys_own_gradient_checkpointing_works_with_dropout(name, use_reentrant):
    run_on_ranks(checkpointed, 2, name, use_reentrant, timeout_s=120)
