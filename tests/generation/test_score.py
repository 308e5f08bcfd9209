"""Log-probabilities of given tokens are those of one plain forward over each row, under every plan."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.spec.errors import ConfigError, RankDisagreement, StateError
from shardwise.testing import run_on_ranks
from tests.generation.test_generate import VOCAB, build, build_family

PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 30, 7, 4, 4], [12, 0], [5, 3, 8]]
CONTINUATIONS = [[4, 1], [7, 7, 7, 2, 11, 3], [6], [1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 29, 3]]
#: fp32 sums in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def plain(model, continuations=CONTINUATIONS):
    """By a forward of each row alone, without padding: log-probabilities, greedy or not, the two likeliest tokens."""
    model, found = model.eval().double(), []
    for prompt, continuation in zip(PROMPTS, continuations, strict=True):
        with torch.no_grad():
            output = model(torch.tensor([prompt + continuation]))
        logits = output if isinstance(output, torch.Tensor) else output.logits
        logprobs = logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
        own = logprobs[torch.arange(len(continuation)), continuation]
        is_greedy = bool((logprobs.argmax(dim=-1) == torch.tensor(continuation)).all())
        found.append((own.tolist(), is_greedy, logprobs.topk(2, dim=-1)))
    return found


def with_greedy_row(model):
    """The continuations, one of which is what the model says itself."""
    return [*CONTINUATIONS[:2], sw.generate(model, [PROMPTS[2]], max_new_tokens=4)[0], *CONTINUATIONS[3:]]


def same(scores, expected, tolerance):
    assert len(scores) == len(expected)
    for score, (logprobs, is_greedy, _) in zip(scores, expected, strict=True):
        torch.testing.assert_close(score.logprobs, logprobs, **tolerance)
        assert score.is_greedy is is_greedy
        assert score.top == []
    return True


EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("overrides", [{}, {"num_experts": 3}, {"dropout": 0.3, "tied": False}])
@pytest.mark.parametrize("batch_tokens", [1, 20, 4096])
def test_scores_of_a_batch_are_those_of_each_row_alone(overrides, batch_tokens):
    model = build(**overrides).double()
    continuations = with_greedy_row(model)
    expected = plain(model, continuations)
    assert sum(is_greedy for _, is_greedy, _ in expected) == 1
    model.train()
    widths = []
    hook = model.lm_head.register_forward_pre_hook(lambda _m, args: widths.append(args[0].shape[:2].numel()))
    same(sw.score(model, PROMPTS, continuations, batch_tokens=batch_tokens), expected, EXACT)
    hook.remove()
    assert {1: len(widths) == 5, 20: 1 < len(widths) < 5 and max(widths) <= 20, 4096: len(widths) == 1}[batch_tokens]
    assert batch_tokens > 1 or sum(widths) == sum(map(len, continuations))  # the head sees what it is needed for
    assert all(module.training for module in model.modules())
    likeliest = sw.score(model, torch.tensor(PROMPTS[:1]), [torch.tensor(continuations[0])], top_logprobs=2)[0].top
    assert [list(each) for each in likeliest] == expected[0][2].indices.tolist()
    torch.testing.assert_close([list(each.values()) for each in likeliest], expected[0][2].values.tolist(), **EXACT)
    assert sw.score(model, [], []) == []


@pytest.mark.parametrize("name", ["gpt2", "llama", "mamba"])
def test_causal_models_of_transformers(name):
    if name == "mamba":
        from transformers import MambaConfig, MambaForCausalLM

        torch.manual_seed(3)
        model = MambaForCausalLM(
            MambaConfig(vocab_size=VOCAB, hidden_size=24, state_size=4, num_hidden_layers=2, initializer_range=0.3)
        )
    else:
        model = build_family(name)
    expected = plain(model)
    same(sw.score(model, PROMPTS, CONTINUATIONS), expected, {"rtol": 1e-9, "atol": 1e-9})


def test_half_precision_is_normalised_in_single():
    model = build().bfloat16()
    scores = sw.score(model, PROMPTS[:1], CONTINUATIONS[:1])
    with torch.no_grad():
        logits = model(torch.tensor([PROMPTS[0] + CONTINUATIONS[0]]))[0, 2:4].float()
    exact = logits.log_softmax(dim=-1)[[0, 1], CONTINUATIONS[0]].tolist()
    torch.testing.assert_close(scores[0].logprobs, exact, rtol=0.02, atol=0.02)
    assert scores[0].logprobs != torch.tensor(scores[0].logprobs).bfloat16().tolist()


@pytest.mark.parametrize(
    ("prompts", "continuations", "options", "message"),
    [
        ([[]], [[1]], {}, "prompt 0 is empty, and the first token of a continuation needs one before it"),
        ([[1]], [[]], {}, "continuation 0 is empty"),
        ([[1], [2]], [[1]], {}, "2 prompts and 1 continuations"),
        ([[1], [2] * 20], [[1], [3] * 7], {}, r"2 more than the model's 24 positions.\n  Leave out the first 2 tokens"),
        ([[1]], [[3] * 25], {}, r"1 more than .*\n  Score the continuation in parts of at most 24 tokens"),
        ([[1, 31]], [[1]], {}, "prompt 0: token 1 is 31"),
        ([[1]], [[-1]], {}, "continuation 0: token 0 is -1"),
        (["text"], [[1]], {}, r"prompt 0 is 'text', expected a list of token ids.\n  Tokenize text before sw.score"),
        ([[1]], [["a"]], {}, "continuation 0 is"),
        ([[1]], [[1]], {"batch_tokens": 0}, "batch_tokens=0: expected at least 1"),
        ([[1]], [[1]], {"top_logprobs": 32}, "top_logprobs=32: expected 0 to 31"),
    ],
)
def test_rows_that_make_no_sense_are_refused(prompts, continuations, options, message):
    with pytest.raises(ConfigError, match=message):
        sw.score(build(), prompts, continuations, **options)


def test_the_longest_row_that_fits_is_scored_and_other_models_are_refused():
    model = build()
    assert len(sw.score(model, [[2] * 18], [[3] * 7])[0].logprobs) == 7  # as the errors above say
    assert len(sw.score(model, [[1]], [[3] * 24])[0].logprobs) == 24
    with pytest.raises(StateError, match=r"sw\.score takes our GPT or a causal language model"):
        sw.score(torch.nn.Linear(2, 2), [[1]], [[1]])


PLANS = [
    ("zero3", sw.ParallelPlan(), {}),
    ("ddp", sw.ParallelPlan(strategy="ddp"), {"num_experts": 2}),
    ("tp", sw.ParallelPlan(tp=2), {"tied": False}),
    ("tp-tied", sw.ParallelPlan(tp=2), {}),
    ("cp", sw.ParallelPlan(cp=2), {}),
    ("pp", sw.ParallelPlan(pp=2), {"tied": False}),
    ("pp-tied-4", sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy(num_microbatches=4)), {}),
    ("zb-v", sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy("zb-v")), {"num_layers": 4}),
]
FAMILY_PLANS = [
    ("gpt2", sw.ParallelPlan()),
    ("gpt2", sw.ParallelPlan(tp=2)),
    ("gpt2", sw.ParallelPlan(pp=2)),
    ("llama", sw.ParallelPlan(tp=2)),  # the logits are divided by ids
    ("llama", sw.ParallelPlan(tp=2, tp_plan={"lm_head": "colwise_gather_output"})),
    ("llama", sw.ParallelPlan(pp=2)),
    ("llama", sw.ParallelPlan(cp=2)),
]
LARGE_PLANS = [
    ("tp", sw.ParallelPlan(tp=2)),
    ("pp", sw.ParallelPlan(pp=2, strategy="zero1")),
    ("tp", sw.ParallelPlan(tp=2, pp=2)),
    ("zero3", sw.ParallelPlan(strategy="hsdp", dp_replicate=2)),
]


def scored(continuations, expected, by_family):
    """On a rank: scores under every plan are those of one process."""
    rank = torch.distributed.get_rank()
    for name, plan, overrides in PLANS:
        model = sw.parallelize(build(**overrides), plan)
        same(sw.score(model, PROMPTS, continuations, batch_tokens=20), expected[name], TOLERANCE)
        if name in {"zero3", "ddp", "cp"}:  # each rank has rows of its own, of different numbers
            own = slice(3) if rank == 0 else slice(3, 4)
            same(sw.score(model, PROMPTS[own], continuations[own]), expected[name][own], TOLERANCE)
            none = slice(5) if rank == 0 else slice(0)
            same(sw.score(model, PROMPTS[none], continuations[none]), expected[name][none], TOLERANCE)
        else:
            with pytest.raises(RankDisagreement, match=r"sw\.score: ranks 0 and 1 hold parts of the same model"):
                sw.score(model, [[1 + rank]], [[1]])
        with pytest.raises(ConfigError, match="continuation 0: token 0 is 99"):
            sw.score(model, [[1]], [[99 * rank]])
        if plan.pp > 1:  # what is traced for one is not taken for the other
            assert sw.generate(model, PROMPTS[:2], max_new_tokens=2)
        same(sw.score(model, PROMPTS, continuations), expected[name], TOLERANCE)
    for name, plan in FAMILY_PLANS:
        model = sw.parallelize(build_family(name), plan)
        same(sw.score(model, PROMPTS, continuations), by_family[name], TOLERANCE)
    divided_positions = sw.parallelize(build(), sw.ParallelPlan(tp=2, sequence_parallel=True))
    with pytest.raises(StateError, match=r"sw\.score: sequence_parallel=True divides positions"):
        sw.score(divided_positions, PROMPTS, continuations)


@pytest.mark.preload("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")
def test_scores_of_two_ranks_are_those_of_one_process():
    continuations = with_greedy_row(build())
    expected = {name: plain(build(**overrides), continuations) for name, _, overrides in PLANS}
    by_family = {name: plain(build_family(name), continuations) for name in ("gpt2", "llama")}
    run_on_ranks(scored, 2, continuations, expected, by_family, timeout_s=120)


def scored_in_products(continuations, expected):
    """On a rank: ranks of one data-parallel coordinate share rows, the others have different ones."""
    overrides = {name: each for name, _, each in PLANS}
    for name, plan in LARGE_PLANS:
        model = sw.parallelize(build(**overrides[name]), plan)
        same(sw.score(model, PROMPTS, continuations, batch_tokens=20), expected[name], TOLERANCE)
        place = sw.data_parallel_rank(model)
        same(sw.score(model, PROMPTS[place:], continuations[place:]), expected[name][place:], TOLERANCE)


@pytest.mark.long
def test_scores_of_four_ranks_are_those_of_one_process():
    continuations = with_greedy_row(build())
    expected = {name: plain(build(**overrides), continuations) for name, _, overrides in PLANS}
    run_on_ranks(scored_in_products, 4, continuations, expected, timeout_s=120)
