"""Context parallelism against one plain process that reads whole sequences."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.context import ring, root
from shardwise.context.split import Division
from shardwise.fsdp.attach import runtime_of
from shardwise.fsdp.clip import grad_norm
from shardwise.fsdp.state import HeldValues
from shardwise.spec.errors import PlanError, RankDisagreement, StateError
from shardwise.testing import run_on_ranks
from tests.parity.test_tensor import (
    SEQ,
    STEPS,
    TOLERANCES,
    Case,
    Largest,
    batch,
    check,
    differences,
    optimizer_of,
    train_plain,
)
from tests.parity.test_tensor_families import Family

pytestmark = pytest.mark.preload("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama")

RECOMPUTED, BY_POSITIONS = ("activation_checkpointing", "full"), ("sequence_parallel", True)
LONG = 256
assert SEQ % 4  # sequences come out even on 3 ranks only: elsewhere there is padding


def divided(cp: int = 2, *plan: tuple[str, Any], tp: int = 1, kind: type[Case] = Case, **fields: Any) -> Any:
    return kind(tp=tp, plan=(("cp", cp), *plan), **fields)


def test_two_ranks_equal_one_process():
    check(
        2,
        divided(),
        divided(dtype=torch.float32, max_norm=0.3),
        divided(strategy="ddp", num_microbatches=2, max_norm=0.3, model=(("tied", True),)),
        divided(2, RECOMPUTED, num_microbatches=2, accumulation="unsharded"),
        divided(2, ("activation_checkpointing", "selective"), model=(("num_experts", 3), ("bias", False))),
        divided(kind=Family, name="gpt2"),
        divided(kind=Family, name="llama", num_microbatches=2, max_norm=0.3),
        divided(kind=Family, name="qwen3", has_labels=True, dtype=torch.float32),
    )


def test_four_ranks_equal_one_process():
    check(
        4,
        divided(4),
        divided(4, dtype=torch.float32),
        divided(max_norm=0.3, num_microbatches=2),
        divided(tp=2, max_norm=0.3, model=(("tied", True),)),
        divided(2, BY_POSITIONS, RECOMPUTED, tp=2),
        divided(2, ("dp_replicate", 2), strategy="hsdp"),
        divided(kind=Family, name="qwen3", tp=2, has_labels=True, dtype=torch.float32),
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp"])
def test_every_strategy_equals_one_process(strategy):
    plan = (("dp_replicate", 2),) if strategy == "hsdp" else ()
    dtypes = (torch.float64, torch.float32)
    check(4, *(divided(2, *plan, strategy=strategy, dtype=d, num_microbatches=2, max_norm=0.3) for d in dtypes))


class BegunAnew(Division):
    """Positions of each rank from 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places_T = self.positions_T
        self.positions_T = torch.arange(len(self.places_T))

    def own(self, whole_BT: Tensor) -> Tensor:
        return whole_BT.index_select(1, self.places_T)


def wrong_ways() -> list[dict[str, float]]:
    """What differs where only a rank's own keys are looked at, positions begin anew, or means are not weighted."""
    ways = (
        mock.patch.object(ring, "_join", return_value=None),
        mock.patch.object(root, "Division", BegunAnew),
        mock.patch.object(Division, "mean_loss", lambda _self, loss, *_: loss),
    )
    found = []
    for way in ways:
        with way:
            found.append(differences(divided()))
    return found


def test_what_is_computed_wrongly_is_seen():
    relative, absolute = TOLERANCES[torch.float64]
    for found in run_on_ranks(wrong_ways, 2)[0]:
        assert found["loss"] > 1e4 * relative
        assert found["parameter"] > 1e4 * absolute


def logits() -> tuple[float, float, float]:
    """The largest difference of the logits of whole sequences, of a loss of them, and of generated text."""
    plain, tokens = Case().build(), torch.arange(2 * SEQ).view(2, SEQ)
    model = sw.parallelize(Case().build(), sw.ParallelPlan(cp=2))
    expected, got = plain(tokens), model(tokens)
    losses = [
        sw.eval_step(model, tokens, lambda output, _: output.square().mean()).item(),
        expected.square().mean().item(),
    ]
    prompts = [[1, 2, 3], [4]]
    texts = [list(sw.generate(m, prompts, max_new_tokens=3)) for m in (plain, model)]
    return (expected - got).abs().max().item(), abs(losses[0] - losses[1]), float(texts[0] != texts[1])


def test_without_targets_all_logits_are_gathered_and_generation_is_not_divided():
    for found in run_on_ranks(logits, 2):
        assert max(found) < 1e-12


def largest_tensors() -> list[int]:
    """Of a training step: of one process, and of two."""
    sizes = {"num_layers": 2, "hidden": 8, "num_heads": 2, "vocab_size": 16, "seq_len": LONG}
    tokens, found = torch.zeros(1, LONG, dtype=torch.int64), []
    for plan in (sw.ParallelPlan(), sw.ParallelPlan(cp=2)):
        model = sw.models.gpt("gpt-tiny", **sizes)
        if distributed.get_world_size() == plan.cp:
            model = sw.parallelize(model, plan)
        with Largest() as largest:
            model(tokens, tokens).backward()
        found.append(largest.numel)
    return found


def test_no_rank_holds_an_activation_of_the_whole_sequence():
    """The widest ones are of the feed-forward, 4 x 8 of each position; a matrix of scores would be as wide as LONG."""
    assert run_on_ranks(largest_tensors, 2) == [[32 * LONG, 32 * LONG // 2]] * 2


def refusals() -> list[str]:
    import transformers as tf

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    found = []
    for model in (
        nn.Linear(4, 4),
        sw.models.gpt("gpt-nano", dropout=0.1),
        tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, attention_dropout=0.1)),
        tf.LlamaForSequenceClassification(tf.LlamaConfig(**sizes)),
        tf.MistralForCausalLM(tf.MistralConfig(**sizes, sliding_window=4)),
        tf.Gemma2ForCausalLM(tf.Gemma2Config(**sizes, head_dim=4)),
    ):
        with pytest.raises(PlanError) as caught:
            sw.parallelize(model, sw.ParallelPlan(cp=2))
        found.append(str(caught.value))
    assert not distributed.is_initialized()
    return found


def test_models_that_cannot_be_divided_are_refused_before_any_rank_is_met():
    other, dropout, rate, head, window, capped = refusals()
    assert "Linear is none of them" in other
    assert "'dropout' of GPT has dropout" in dropout
    assert "'model.layers.0.self_attn' of LlamaForCausalLM has dropout" in rate
    assert "LlamaForSequenceClassification is none of them" in head
    assert "MistralForCausalLM is not served: its attention has a sliding_window=4" in window
    assert "Gemma2ForCausalLM is not served: its layers are of the kinds sliding_attention" in capped


def calls() -> list[str]:
    """What is said of each call of a divided model that cannot be answered, and of those that can, the loss."""
    plain = Family(name="llama").build()
    model = sw.parallelize(Family(name="llama").build(), sw.ParallelPlan(cp=2))
    ids = torch.arange(2 * SEQ).view(2, SEQ)
    labels, ends, left = ids.clone(), torch.ones_like(ids), torch.ones_like(ids)
    labels[1, -2:], ends[1, -2:], left[1, :2] = -100, 0, 0
    found = []
    for arguments in (
        {"input_ids": ids, "labels": labels, "attention_mask": left},
        {"input_ids": ids, "labels": ids, "attention_mask": ends},
        {"input_ids": ids, "labels": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])},
        {"input_ids": ids, "labels": ids, "use_cache": True},
        {"input_ids": ids, "output_hidden_states": True},
        {"inputs_embeds": torch.zeros(2, SEQ, 16, dtype=torch.float64)},
    ):
        with pytest.raises(StateError) as caught:
            model(**arguments)
        found.append(str(caught.value).splitlines()[0])
    for arguments in (
        {"input_ids": ids, "labels": labels, "attention_mask": ends},
        {"input_ids": ids, "labels": labels, "num_items_in_batch": 5},
        {"input_ids": ids, "labels": labels, "return_dict": False},
    ):
        losses = [(output[0] if isinstance(output := m(**arguments), tuple) else output.loss) for m in (plain, model)]
        found.append(f"{abs(losses[0] - losses[1]).item() < 1e-6}")
    return found


def test_calls_of_transformers_models_mean_the_same_or_are_refused():
    for found in run_on_ranks(calls, 2):
        left, counted, packed, cache, hidden, embeds, *same = found
        assert "attention_mask hides other tokens than padding at the end" in left
        assert left == counted
        assert "position_ids that do not go up by one" in packed
        assert "called with a key-value cache in training" in cache
        assert "called with output_hidden_states" in hidden
        assert "called with inputs_embeds" in embeds
        assert same == ["True"] * 3


def reloaded(folder: str) -> list[bool]:
    """Whether a checkpoint of each plan, loaded under the other, is what was saved, and trains on as it."""
    plans = {"cp": sw.ParallelPlan(cp=2), "dp": sw.ParallelPlan(strategy="zero2")}
    tokens, found = torch.arange(2 * SEQ).view(2, SEQ), []
    for before, after in (("cp", "dp"), ("dp", "cp")):
        results = []
        for name in (before, after):
            model = sw.parallelize(Case().build(), plans[name])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            if name == before:
                step(model, optimizer, tokens)
                sw.save(f"{folder}/{before}", model, optimizer)
                saved = sw.full_state_dict(model)
            else:
                sw.load(f"{folder}/{before}", model, optimizer)
                held = sw.full_state_dict(model)
                found.append(all(torch.equal(saved[key], held[key]) for key in saved))
            step(model, optimizer, tokens)
            results.append(sw.full_state_dict(model))
        found.append(all((results[0][key] - results[1][key]).abs().max() < 1e-8 for key in results[0]))
    return found


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_checkpoints_of_divided_sequences_load_under_other_plans(tmp_path):
    assert run_on_ranks(reloaded, 2, str(tmp_path)) == [[True] * 4] * 2


def narrow() -> tuple[float, float]:
    """The loss in 16 bit, divided and not, and the largest difference of a gradient, by the largest gradient."""
    tokens = torch.arange(2 * SEQ).view(2, SEQ)
    losses, norms = [], []
    for plan in (sw.ParallelPlan(cp=2, mp_policy=BF16), sw.ParallelPlan(strategy="ddp", mp_policy=BF16)):
        model = sw.parallelize(Case(dtype=torch.float32).build(), plan)
        losses.append(sw.train_step(model, (tokens, tokens)).item())
        norms.append(sw.clip_grad_norm(model, 1.0).item())
    return abs(losses[0] / losses[1] - 1), abs(norms[0] / norms[1] - 1)


BF16 = sw.PrecisionPolicy(param_dtype="bf16")


def test_in_16_bit_the_loss_is_near_that_of_whole_sequences():
    for loss, norm in run_on_ranks(narrow, 2):
        assert loss < 2e-3
        assert norm < 2e-2


def summary() -> str:
    return str(sw.summary(sw.parallelize(Case().build(), sw.ParallelPlan(cp=2))))


def test_the_summary_says_what_is_divided():
    for rank, text in enumerate(run_on_ranks(summary, 2)):
        assert f"this rank holds part of each sequence {rank + 1} of 2 (cp)" in text
        assert "sequences: divided over cp=2, ring attention in 3 modules" in text


def readers_of_different_samples() -> str:
    model = sw.parallelize(Case().build(), sw.ParallelPlan(cp=2))
    tokens = torch.full((2, SEQ), distributed.get_rank())
    with pytest.raises(RankDisagreement) as caught:
        model(tokens, tokens)
    return str(caught.value)


def test_ranks_that_are_fed_by_their_number_in_the_world_are_told():
    for text in run_on_ranks(readers_of_different_samples, 2):
        assert "the 2 ranks that divide each sequence were called with different tokens" in text


def in_stages(cases: tuple[Case, ...]) -> list[tuple[float, float, float]]:
    """Of pipelines whose sequences are divided, the largest differences of losses, norms and parameters."""
    found = []
    for case in cases:
        count = case.num_microbatches
        plain, losses, norms = train_plain(case, 1)
        model = sw.parallelize(case.build(), sw.ParallelPlan(tp=case.tp, strategy=case.strategy, **dict(case.plan)))
        optimizer, worst = optimizer_of(model), [0.0, 0.0]
        for number in range(STEPS):
            parts = [batch(number, place, 0) for place in range(count)]
            whole = tuple(torch.cat(each) for each in zip(*parts, strict=True))
            loss = sw.train_step(model, whole, num_microbatches=count).item()
            norm = grad_norm(runtime_of(model, "test")).item()
            expected = sum(losses[number * count : (number + 1) * count])
            worst = [max(worst[0], abs(loss / expected - 1)), max(worst[1], abs(norm / norms[number] - 1))]
            optimizer.step()
            optimizer.zero_grad()
        whole, errors = dict(plain.named_parameters()), [0.0]
        for extent, values in HeldValues(model).extents:
            local = whole[extent.name].detach().reshape(-1)[extent.start : extent.start + values.numel()]
            errors += [(local - values).abs().max().item()] if values.numel() else []
        found.append((*worst, max(errors)))
    return found


def test_stages_of_divided_sequences_equal_one_process():
    cases = (
        divided(2, ("pp", 2), num_microbatches=2),
        divided(2, ("pp", 2), ("pipeline", "zb-h1"), RECOMPUTED, strategy="zero1", num_microbatches=4),
    )
    for results in run_on_ranks(in_stages, 4, cases):
        for loss, norm, parameter in results:
            assert max(loss, norm) < TOLERANCES[torch.float64][0]
            assert parameter < TOLERANCES[torch.float64][1]
