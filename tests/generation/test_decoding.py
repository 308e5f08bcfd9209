"""Generation in one process: with the cache as without, whatever is beside a row, draws by seed, errors."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.generation.sample import RngStreams, Sampling
from shardwise.models.transformer import KeyValueCache
from shardwise.spec.errors import ConfigError, StateError

VOCAB, SEQ = 31, 24
PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 30, 7, 4, 4]]


def build(**overrides):
    torch.manual_seed(3)
    sizes = {"num_layers": 2, "hidden": 24, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ}
    model = sw.models.gpt("gpt-tiny", **(sizes | overrides)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)  # far from uniform: the context matters
    return model


def greedy_without_cache(model, prompt, count):
    """The new tokens, and how far the largest logit was above the second at each."""
    tokens, margins = list(prompt), []
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            best = model(torch.tensor([tokens]))[0, -1].topk(2)
            margins.append((best.values[0] - best.values[1]).item())
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :], margins


@pytest.mark.parametrize("overrides", [{}, {"num_experts": 3}, {"dropout": 0.3, "tied": False}])
def test_a_batch_of_unequal_prompts_with_the_cache_equals_each_prompt_alone_without(overrides):
    model = build(**overrides)
    expected = [greedy_without_cache(model, prompt, 9) for prompt in PROMPTS]
    assert min(margin for _, margins in expected for margin in margins) > 1e-9  # else ties decide
    assert len({tuple(tokens) for tokens, _ in expected}) == len(PROMPTS)
    model.train()
    assert sw.generate(model, PROMPTS, max_new_tokens=9) == [tokens for tokens, _ in expected]
    assert all(module.training for module in model.modules())


def test_logits_with_the_cache_are_those_without_whatever_pieces_the_tokens_come_in():
    model = build()
    tokens = torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
        for pieces in ([10], [1] * 10, [4, 1, 5], [1, 9]):
            cache, at = KeyValueCache(10), 0
            for size in pieces:
                got = model(tokens[:, at : at + size], cache=cache)
                at += size
                torch.testing.assert_close(got[:, 0], expected[:, at - 1], rtol=1e-12, atol=1e-12)
    assert cache.num_bytes == 2 * 2 * 2 * 10 * 24 * 8  # keys and values, layers, rows, tokens, hidden, float64
    with pytest.raises(StateError, match="cache for 10 tokens holds 10: 1 more do not fit"):
        model(tokens[:, :1], cache=cache)


def test_a_draw_depends_on_the_seed_and_the_row_alone():
    model = build()
    drawn = sw.generate(model, PROMPTS, max_new_tokens=8, temperature=2.0, seed=5)
    assert drawn == sw.generate(model, PROMPTS, max_new_tokens=8, temperature=2.0, seed=5)
    assert drawn != sw.generate(model, PROMPTS, max_new_tokens=8, temperature=2.0, seed=6)
    assert drawn[:2] == sw.generate(model, PROMPTS[:2], max_new_tokens=8, temperature=2.0, seed=5)
    same = sw.generate(model, [PROMPTS[0], PROMPTS[0]], max_new_tokens=8, temperature=2.0, seed=5)
    assert same[0] == drawn[0]
    assert same[0] != same[1]
    torch.manual_seed(1)
    first = sw.generate(model, PROMPTS, max_new_tokens=8, temperature=2.0)
    torch.manual_seed(1)
    assert first == sw.generate(model, PROMPTS, max_new_tokens=8, temperature=2.0)
    assert first != sw.generate(model, PROMPTS, max_new_tokens=8, temperature=2.0)


def test_rows_end_with_eos_and_the_stream_ends_with_the_last_row():
    model = build()
    plain = sw.generate(model, PROMPTS, max_new_tokens=9)
    ends = {row[3] for row in plain[:1]} | {plain[1][5], plain[2][6]}

    def cut(row):
        stop = next(place for place, token in enumerate(row) if token in ends)
        return row[: stop + 1]

    expected = [cut(row) for row in plain]
    assert sw.generate(model, PROMPTS, max_new_tokens=9, eos=sorted(ends)) == expected
    columns = list(sw.generate_stream(model, PROMPTS, max_new_tokens=9, eos=sorted(ends)))
    assert len(columns) == max(map(len, expected)) < 9
    assert [[column[row] for column in columns if column[row] is not None] for row in range(3)] == expected


def test_the_distribution_is_that_of_temperature_top_k_and_top_p():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    p = (logits / 0.5).double().softmax(dim=-1)
    torch.testing.assert_close(Sampling(0.5).probabilities(logits), p)
    two = Sampling(0.5, top_k=2).probabilities(logits)
    assert (two > 0).tolist() == [[False, True, True, False], [True, True, False, False]]  # of equal ones the first
    torch.testing.assert_close(two[0, 1:3] / two[0].sum(), p[0, 1:3] / p[0, 1:3].sum())
    assert (Sampling(1.0, top_p=0.6).probabilities(logits) > 0).sum(dim=-1).tolist() == [1, 3]
    assert (Sampling(1.0, top_k=2, top_p=0.6).probabilities(logits) > 0).sum(dim=-1).tolist() == [1, 2]
    edge = torch.tensor([1 - 2.0**-53, 0.0], dtype=torch.float64)
    assert Sampling(1.0, top_k=1).choose(logits, edge).tolist() == [1, 0]
    assert Sampling(1.0).choose(logits, edge).tolist() == [3, 0]
    assert Sampling(5e-324).choose(logits, edge).tolist() == [1, 0]  # the smallest number divides by nothing infinite
    assert Sampling(1.0).choose(logits * float("nan"), edge).max() < 4


def test_draws_have_the_frequencies_of_the_distribution():
    logits = torch.tensor([0.3, 1.7, -1.0, 0.9]).repeat(20_000, 1)
    chosen = Sampling(1.3, top_k=3).choose(logits, RngStreams(11, range(20_000)).next())
    expected = Sampling(1.3, top_k=3).probabilities(logits[:1])[0]
    found = torch.bincount(chosen, minlength=4).double() / 20_000
    assert found[2] == 0
    torch.testing.assert_close(found, expected / expected.sum(), atol=0.015, rtol=0)  # four standard deviations


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1] * 25], {}, "prompt 0 has 25 tokens, and there are 24 positions"),
        ([[1] * 20], {"max_new_tokens": 6}, "take 25 positions, and there are 24.*5 or less"),
        ([[1], [2, 31]], {}, "prompt 1: token 1 is 31, the model knows 0 to 30"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([], {}, "no prompts"),
        (["ab"], {}, "prompt 0 is 'ab', expected a list of token ids"),
        (torch.zeros(3), {}, "shape \\(3,\\)"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens=0"),
        ([[1]], {"eos": 31}, "eos: token 0 is 31"),
        ([[1]], {"temperature": -1.0}, "temperature=-1"),
        ([[1]], {"top_k": 3}, "top_k=3 has no meaning at temperature=0"),
        ([[1]], {"temperature": 1.0, "top_k": 0}, "top_k=0"),
        ([[1]], {"temperature": 1.0, "top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts, options, message):
    with pytest.raises(ConfigError, match="(?s)" + message):
        sw.generate(build(), prompts, **({"max_new_tokens": 2} | options))


def test_a_prompt_may_fill_every_position():
    assert len(sw.generate(build(), [[1] * SEQ], max_new_tokens=1)[0]) == 1


def test_other_models_are_refused():
    with pytest.raises(StateError, match="not a Linear"):
        sw.generate(torch.nn.Linear(2, 2), [[1]], max_new_tokens=1)


@pytest.mark.parametrize("numel", [1, VOCAB * 3])
def test_logits_are_normalised_some_at_a_time_when_tokens_are_scored(monkeypatch, numel):
    model, continuations = build(), [[4, 1], [7, 7, 7], [6]]
    expected = sw.score(model, PROMPTS, continuations)
    at_once, normalise = [], torch.Tensor.log_softmax
    monkeypatch.setattr("shardwise.generation.score._NORMALISED_NUMEL", numel)
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda t, **by: at_once.append(len(t)) or normalise(t, **by))
    assert sw.score(model, PROMPTS, continuations) == expected
    assert at_once == ([1] * 6 if numel == 1 else [3, 3])
