"""Rows that come and go while others generate: each says what it says alone, on one process and over ranks."""

from __future__ import annotations

import collections

import pytest
import torch

import shardwise as sw
from shardwise.generation.continuous import ContinuousBatcher
from shardwise.generation.runner import Stages
from shardwise.generation.running_batch import Decision, Entry, round_up_length
from shardwise.generation.sample import Sampling
from shardwise.generation.score import Row
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

VOCAB, SEQ = 31, 40
PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 30, 7, 4, 4], [12, 0], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7, 7]]
#: Turn at which each row may begin, and the most new tokens of it.
COMES, COUNTS = [0, 0, 3, 5, 6, 11], [9, 4, 12, 1, 8, 15]
#: Rows that draw, with their seeds.
DRAWN = {2: 11, 4: 12}
#: The row that is wanted no longer after so many tokens.
LEAVES, AFTER = 5, 6
LEAST_MARGIN = 1e-5
#: Rows that are scored while others are under way, by turn: the number of a prompt, its first token that is scored, and
#: how many likeliest tokens are asked for.
SCORED = {4: [(2, 2, 0), (4, 1, 3)], 6: [(1, 1, 0)], 9: [(0, 1, 1)]}


def build(family="gpt", layers=2):
    torch.manual_seed(3)
    if family == "gpt":
        model = sw.models.gpt(
            "gpt-tiny", num_layers=layers, hidden=24, num_heads=4, vocab_size=VOCAB, seq_len=SEQ, tied=False
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6 if parameter.dim() > 1 else 1)  # far from uniform: the context matters
        return model.double()
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ, "initializer_range": 0.3,
    }  # fmt: skip
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes)).double().eval()
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=5)).double().eval()


def entry(number):
    sampling = Sampling(1.5, 20, 0.95) if number in DRAWN else Sampling()
    return Entry(number, PROMPTS[number], COUNTS[number], sampling, DRAWN.get(number, 0))


def alone(model):
    """What each row says by itself."""
    rows = []
    for number, prompt in enumerate(PROMPTS):
        options = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "seed": DRAWN[number]} if number in DRAWN else {}
        rows += sw.generate(model, [prompt], max_new_tokens=COUNTS[number], **options)
    rows[LEAVES] = rows[LEAVES][:AFTER]
    return rows


def scores_alone(model):
    """Log-probabilities of what is scored, by a plain forward of each row, and the likeliest token of each place."""
    found = []
    for number, start, _ in [each for turn in sorted(SCORED) for each in SCORED[turn]]:
        with torch.no_grad():
            output = model.eval()(torch.tensor([PROMPTS[number]]))
        logprobs = getattr(output, "logits", output)[0, start - 1 : -1].log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(PROMPTS[number][start:], dtype=torch.int64)[:, None])
        found.append((own[:, 0].tolist(), logprobs.argmax(dim=-1).tolist()))
    return found


def same_scores(scores, expected):
    asked = [num_top for turn in sorted(SCORED) for _, _, num_top in SCORED[turn]]
    for score, (logprobs, likeliest), num_top in zip(scores, expected, asked, strict=True):
        torch.testing.assert_close(score.logprobs, logprobs, rtol=1e-9, atol=1e-9)
        if num_top:
            assert [next(iter(each)) for each in score.top] == likeliest
            assert {len(each) for each in score.top} >= {num_top}


class Decider:
    """Lets rows come at their turns, and one leave; has some scored; notes what they say."""

    def __init__(self):
        self.scores = []
        self.said = collections.defaultdict(list)
        self.turn = 0
        self.most_together = 0
        self._begun, self._live = set(), set()

    def __call__(self, batch, tokens):
        for number, token in tokens.items():
            self.said[number].append(token)
        self.most_together = max(self.most_together, len(tokens))
        removed = {n for n in tokens if len(self.said[n]) == COUNTS[n]} | {LEAVES} & {
            n for n in tokens if len(self.said[n]) == AFTER
        }
        self._live -= removed
        new = [n for n, turn in enumerate(COMES) if turn <= self.turn and n not in self._begun][:2]
        self._begun.update(new)
        self._live.update(new)
        scored = [(Row(PROMPTS[n], start), num_top) for n, start, num_top in SCORED.get(self.turn, ())]
        self.turn += 1
        is_over = len(self._begun) == len(PROMPTS) and not self._live
        return Decision(sorted(removed), [entry(number) for number in new], is_last=is_over, to_score=scored)


def converse(model):
    decider = Decider()
    batcher = ContinuousBatcher(model)
    batcher.run(decider, decider.scores.extend)
    same_scores(decider.scores, scores_alone(model))
    assert batcher.vocab_size == VOCAB
    assert batcher.positions == SEQ
    return [decider.said[number] for number in range(len(PROMPTS))], decider.most_together


@pytest.mark.parametrize("family", ["gpt", "llama", "mistral"])
def test_rows_that_join_others_on_their_way_say_what_they_say_alone(family):
    model = build(family)
    said, most_together = converse(model)
    assert most_together >= 3
    assert said == alone(model)


#: Models of transformers, with what their configurations ask for beyond the usual sizes.
FURTHER = {
    "Gemma2": {"head_dim": 8, "sliding_window": 4},
    "Gemma3": {"head_dim": 8, "sliding_window": 4},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4},
    "DeepseekV3": {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 6, "first_k_dense_replace": 1,
    },
    "Bloom": {"n_layer": 2, "n_head": 4},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER)
def test_rows_of_further_models_say_what_they_say_alone(name):
    import transformers

    usual = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": SEQ, "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    torch.manual_seed(3)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**usual | FURTHER[name])).eval()
    decider = Decider()
    ContinuousBatcher(model).run(decider)
    assert [decider.said[number] for number in range(len(PROMPTS))] == alone(model)


def test_a_cache_grows_when_its_room_is_used_up(monkeypatch):
    monkeypatch.setattr("shardwise.generation.running_batch.ROOM", 2)
    for family in ("gpt", "llama", "mistral"):
        model = build(family)
        assert converse(model)[0] == alone(model)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused_before_any_row_comes():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    assert "cannot join others on their way: its cache has a LinearAttentionLayer" in refusal(
        StateError, ContinuousBatcher, Lfm2ForCausalLM(config)
    )


def test_prompts_are_padded_to_few_lengths():
    assert [round_up_length(length) for length in (1, 32, 33, 256, 257, 513, 1000)] == [32, 32, 64, 256, 320, 640, 1024]
    assert len({round_up_length(length) for length in range(1, 1 << 14)}) == 32


def over_ranks(expected, plans):
    traced, trace = set(), Stages._trace_flow
    Stages._trace_flow = lambda self, rows, ids: traced.add(ids.shape[1]) or trace(self, rows, ids)
    for family, layers, plan in plans:
        model = sw.parallelize(build(family, layers).train(), plan)
        decider = Decider()
        is_first = torch.distributed.get_rank() == 0
        ContinuousBatcher(model).run(decider if is_first else None, decider.scores.extend if is_first else None)
        if is_first:
            rows, scores = expected[family, layers]
            assert [decider.said[number] for number in range(len(PROMPTS))] == rows, (family, plan)
            same_scores(decider.scores, scores)
        else:
            assert not decider.said
        assert all(module.training for module in model.modules())
    assert traced == {1, 32}  # over a pipeline, for prompts of five lengths
    whole = sw.parallelize(build(), sw.ParallelPlan())
    assert "hold 2 copies of the model, and continuous batching feeds one" in refusal(
        StateError, ContinuousBatcher, whole
    )


def margin(model, prompt, tokens):
    """How far the likeliest token was above the second, at least."""
    with torch.no_grad():
        output = model(torch.tensor([prompt + tokens[:-1]]))
    logits = getattr(output, "logits", output)[0, len(prompt) - 1 :]
    best = logits.topk(2).values
    return (best[:, 0] - best[:, 1]).min().item()


@pytest.mark.preload("transformers.models.llama.modeling_llama")
def test_two_ranks_of_tp_and_of_pp_say_what_one_process_says():
    zb = sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy("interleaved-1f1b"))
    plans = [
        ("gpt", 2, sw.ParallelPlan(tp=2)),
        ("gpt", 2, sw.ParallelPlan(pp=2)),
        ("gpt", 4, zb),
        ("llama", 2, sw.ParallelPlan(tp=2)),
        ("llama", 2, sw.ParallelPlan(pp=2)),
    ]
    expected = {}
    for family, layers, _ in plans:
        model = build(family, layers).eval()
        rows = alone(model)
        expected[family, layers] = rows, scores_alone(model)
        greedy = [number for number in range(len(PROMPTS)) if number not in DRAWN]
        assert min(margin(model, PROMPTS[number], rows[number]) for number in greedy) > LEAST_MARGIN
    run_on_ranks(over_ranks, 2, expected, plans, timeout_s=120)


@pytest.mark.long
def test_four_ranks_of_both_axes_say_what_one_process_says():
    plans = [("gpt", 2, sw.ParallelPlan(tp=2, pp=2)), ("gpt", 4, sw.ParallelPlan(pp=4))]
    expected = {(family, layers): alone(build(family, layers)) for family, layers, _ in plans}
    run_on_ranks(over_four, 4, expected, plans, timeout_s=120)


def over_four(expected, plans):
    for family, layers, plan in plans:
        decider = Decider()
        ContinuousBatcher(sw.parallelize(build(family, layers), plan)).run(decider)
        if torch.distributed.get_rank() == 0:
            assert [decider.said[number] for number in range(len(PROMPTS))] == expected[family, layers], plan
