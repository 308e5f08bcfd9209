"""What users of divided sequences see: how models may be called, what is refused, saved and said."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.spec.errors import PlanError, RankDisagreement, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama")

SEQ, VOCAB = 6, 31  # a length that 4 does not divide
CP = sw.ParallelPlan(cp=2)
LLAMA = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "pad_token_id": 0}
LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(7)
    return sw.models.gpt("gpt-tiny", num_layers=3, hidden=24, num_heads=4, vocab_size=VOCAB, seq_len=SEQ).to(dtype)


def ids() -> Tensor:
    return torch.arange(2 * SEQ).view(2, SEQ)


def logits() -> tuple[float, float, bool]:
    """The largest difference of the logits of whole sequences, of a loss of them, and whether texts are the same."""
    plain, model = build(), sw.parallelize(build(), CP)
    expected, got = plain(ids()), model(ids())
    loss = sw.eval_step(model, ids(), lambda output, _: output.square().mean())
    prompts = [[1, 2, 3], [4]]
    texts = [sw.generate(each, prompts, max_new_tokens=3) for each in (plain, model)]
    return (expected - got).abs().max().item(), abs((loss - expected.square().mean()).item()), texts[0] == texts[1]


def loss_of_one_rank() -> list[float]:
    """Where only positions of rank 1 have targets: the differences of the loss, and of the norm of the gradients."""
    targets = torch.full((2, 8), -100)
    targets[:, 3:5] = 5
    found = []
    for plan in (sw.ParallelPlan(strategy="ddp"), sw.ParallelPlan(cp=2)):
        torch.manual_seed(7)
        model = sw.parallelize(sw.models.gpt("gpt-nano").double(), plan)
        loss = sw.train_step(model, (torch.arange(16).view(2, 8), targets))
        found.append((loss.item(), sw.clip_grad_norm(model, math.inf).item()))
    return [abs(a - b) for a, b in zip(*found, strict=True)]


def calls() -> list[str]:
    """What is said of each call of a divided model that cannot be answered; of those that can, if the loss is right."""
    import transformers as tf

    def build_llama() -> Any:
        torch.manual_seed(7)
        return tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA)).train()

    plain, model = build_llama(), sw.parallelize(build_llama(), CP)
    labels, ends, left = ids(), torch.ones(2, SEQ), torch.ones(2, SEQ)
    labels[1, -2:], ends[1, -2:], left[1, :2] = -100, 0, 0
    found = [
        refusal(StateError, model, **arguments).splitlines()[0]
        for arguments in (
            {"input_ids": ids(), "labels": labels, "attention_mask": left},
            {"input_ids": ids(), "labels": ids(), "attention_mask": ends},
            {"input_ids": ids(), "labels": ids(), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
            {"input_ids": ids(), "labels": ids(), "use_cache": True},
            {"input_ids": ids(), "output_hidden_states": True},
            {"input_ids": ids(), "logits_to_keep": 1},
            {"inputs_embeds": torch.zeros(2, SEQ, 8)},
        )
    ]
    for arguments in (
        {"input_ids": ids(), "labels": labels, "attention_mask": ends},
        {"input_ids": ids(), "labels": labels, "num_items_in_batch": 5},
        {"input_ids": ids(), "labels": labels, "return_dict": False},
        {"input_ids": ids(), "labels": labels, "position_ids": torch.arange(3, 3 + SEQ)[None]},
    ):
        losses = [(output[0] if isinstance(output := m(**arguments), tuple) else output.loss) for m in (plain, model)]
        found.append(f"{abs(losses[0] - losses[1]).item() < 1e-6}")
    prompts = [[1, 2, 3], [4]]
    found.append(f"{sw.generate(plain, prompts, max_new_tokens=3) == sw.generate(model, prompts, max_new_tokens=3)}")
    return found


def reloaded(folder: str) -> list[bool]:
    """Whether a checkpoint of each plan, loaded under the other, is what was saved, and trains on as it."""
    plans = {"cp": CP, "dp": sw.ParallelPlan(strategy="zero2")}
    found = []
    for before, after in (("cp", "dp"), ("dp", "cp")):
        results: list[dict[str, Tensor]] = []
        saved: dict[str, Tensor] = {}
        for name in (before, after):
            model = sw.parallelize(build(), plans[name])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if name == before:
                step(model, optimizer)
                sw.save(f"{folder}/{before}", model, optimizer)
                saved = sw.full_state_dict(model)
            else:
                sw.load(f"{folder}/{before}", model, optimizer)
                held = sw.full_state_dict(model)
                found.append(all(torch.equal(saved[key], held[key]) for key in saved))
            step(model, optimizer)
            results.append(sw.full_state_dict(model))
        found.append(all((results[0][key] - results[1][key]).abs().max() < 1e-8 for key in results[0]))
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(ids(), ids()).backward()
    optimizer.step()
    optimizer.zero_grad()


def narrow() -> tuple[float, float]:
    """Relative differences of the loss and of the norm of gradients in 16 bit, divided and not."""
    found, policy = [], sw.PrecisionPolicy(param_dtype="bf16")
    for plan in (sw.ParallelPlan(cp=2, mp_policy=policy), sw.ParallelPlan(strategy="ddp", mp_policy=policy)):
        model = sw.parallelize(build(torch.float32), plan)
        found.append((sw.train_step(model, (ids(), ids())).item(), sw.clip_grad_norm(model, 1.0).item()))
    return abs(found[0][0] / found[1][0] - 1), abs(found[0][1] / found[1][1] - 1)


def other_samples() -> str:
    """Of ranks that read as if they were data-parallel."""
    model = sw.parallelize(build(), CP)
    tokens = torch.full((2, SEQ), distributed.get_rank())
    with pytest.raises(RankDisagreement) as caught:
        model(tokens, tokens)
    model = sw.parallelize(build(), CP)
    with pytest.raises(RankDisagreement):
        model(ids(), tokens)
    return str(caught.value)


def everything(folder: str) -> dict[str, Any]:
    return {
        "summary": str(sw.summary(sw.parallelize(build(), CP))),
        "logits": logits(),
        "one rank": loss_of_one_rank(),
        "calls": calls(),
        "reloaded": reloaded(folder),
        "narrow": narrow(),
        "other samples": other_samples(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    return run_on_ranks(everything, 2, str(tmp_path_factory.mktemp("checkpoints")))


def test_without_targets_all_logits_are_gathered_and_generation_is_not_divided(found):
    for rank in found:
        logits, loss, is_same_text = rank["logits"]
        assert max(logits, loss) < 1e-12
        assert is_same_text


def test_a_rank_without_targets_takes_part(found):
    for rank in found:
        assert max(rank["one rank"]) < 1e-9


def test_calls_of_transformers_models_mean_the_same_or_are_refused(found):
    for rank in found:
        left, counted, packed, cache, hidden, kept, embeds, *same = rank["calls"]
        assert "attention_mask hides other tokens than padding at the end" in left
        assert left == counted
        assert "position_ids that do not go up by one" in packed
        assert "called with a key-value cache in training" in cache
        assert "called with output_hidden_states" in hidden
        assert "called with logits_to_keep" in kept
        assert "called with inputs_embeds" in embeds
        assert same == ["True"] * 5


def test_checkpoints_of_divided_sequences_load_under_other_plans(found):
    assert [rank["reloaded"] for rank in found] == [[True] * 4] * 2


def test_in_16_bit_the_loss_is_near_that_of_whole_sequences(found):
    for rank in found:
        loss, norm = rank["narrow"]
        assert loss < 2e-3
        assert norm < 2e-2


def test_the_summary_says_what_is_divided(found):
    for number, rank in enumerate(found):
        assert f"this rank holds part of each sequence {number + 1} of 2 (cp)" in rank["summary"]
        assert "sequences: divided over cp=2, ring attention in 3 modules" in rank["summary"]


def test_ranks_that_are_fed_by_their_number_in_the_world_are_told(found):
    for rank in found:
        text = rank["other samples"]
        assert "the 2 ranks that divide each sequence were called with different tokens, or targets" in text


def refusals() -> list[str]:
    import transformers as tf

    found = []
    for model in (
        nn.Linear(4, 4),
        sw.models.gpt("gpt-nano", dropout=0.1),
        tf.LlamaForCausalLM(tf.LlamaConfig(**LLAMA, attention_dropout=0.1)),
        tf.LlamaForSequenceClassification(tf.LlamaConfig(**LLAMA)),
        tf.MistralForCausalLM(tf.MistralConfig(**LLAMA, sliding_window=4)),
        tf.Gemma2ForCausalLM(tf.Gemma2Config(**LLAMA, head_dim=4)),
    ):
        with pytest.raises(PlanError) as caught:
            sw.parallelize(model, CP)
        assert not distributed.is_initialized()
        found.append(str(caught.value))
    return found


def test_models_that_cannot_be_divided_are_refused_before_any_rank_is_met():
    other, dropout, rate, head, window, kinds = refusals()
    assert "Linear is none of them" in other
    assert "'dropout' of GPT has dropout" in dropout
    assert "'model.layers.0.self_attn' of LlamaForCausalLM has dropout" in rate
    assert "LlamaForSequenceClassification is none of them" in head
    assert "MistralForCausalLM is not served: its attention has a sliding_window=4" in window
    assert "Gemma2ForCausalLM is not served: its layers are of the kinds sliding_attention" in kinds
