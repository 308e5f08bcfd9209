"""Generation on several ranks gives the tokens of one process: exactly where no sum is split, and under tensor
parallelism as long as no choice is nearer than 1e-5."""

from __future__ import annotations

import functools
import inspect
from collections import Counter

import pytest
import torch

import shardwise as sw
from shardwise.generation.continuous import ContinuousBatcher
from shardwise.generation.sample import RngStreams, Sampling
from shardwise.models.transformer import KeyValueCache
from shardwise.parallel.context.apply import CACHE_NAMES
from shardwise.spec.errors import ConfigError, RankDisagreement, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.ranks import refusal

VOCAB, SEQ, LAYERS, NEW = 31, 24, 3, 9
PROMPTS = [[5, 3, 8], [1], [9, 9, 2, 30, 7, 4, 4], [12, 0]]
SAMPLED = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "seed": 4}
#: Nearer than this, choices may differ under tensor parallelism, where sums are split.
LEAST_MARGIN = 1e-5


def build(**overrides):
    torch.manual_seed(3)
    sizes = {"num_layers": LAYERS, "hidden": 24, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ}
    model = sw.models.gpt("gpt-tiny", **(sizes | overrides))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)  # far from uniform: the context matters
    return model


def one_process(sampling, seed=0, **overrides):
    """The tokens of each prompt by itself, and the smallest margin of all choices.

    The margin of a greedy choice is that of the two largest logits; of a draw its distance from the edges of the token
    that was drawn, and of what top_k and top_p keep from what they do not.
    """
    model, rows, margins = build(**overrides).eval(), [], []
    draws = RngStreams(seed, range(len(PROMPTS)))
    caches = [KeyValueCache(SEQ) for _ in PROMPTS]
    inputs = [torch.tensor([prompt]) for prompt in PROMPTS]
    rows = [[] for _ in PROMPTS]
    for _ in range(NEW):
        with torch.no_grad():
            logits = torch.cat([model(new, cache=cache)[:, -1] for new, cache in zip(inputs, caches, strict=True)])
        numbers = draws.next()
        chosen = sampling.choose(logits, numbers)
        if sampling.temperature == 0:
            best = logits.topk(2, dim=-1).values
            margins.append((best[:, 0] - best[:, 1]).min().item())
        else:
            p = sampling.probabilities(logits)
            edges = p.cumsum(dim=-1)
            margins.append((edges - numbers[:, None] * edges[:, -1:]).abs().min().item())
            plain = (logits.double() / sampling.temperature).softmax(dim=-1)
            for row in range(len(PROMPTS)):
                kept = p[row] > 0
                if not kept.all():
                    margins.append((plain[row][kept].min() - plain[row][~kept].max()).item())
            ordered = plain.sort(dim=-1, descending=True).values[:, : sampling.top_k]
            totals = (ordered / ordered.sum(dim=-1, keepdim=True)).cumsum(dim=-1)
            margins.append((totals - sampling.top_p).abs().min().item())
        for row, token in enumerate(chosen.tolist()):
            rows[row].append(token)
        inputs = list(chosen[:, None, None].unbind(0))
    return rows, min(margins)


def generated(plans, results):
    """On a rank: the tokens under every plan, greedy and drawn, are those of one process."""
    for name, plan, overrides in plans:
        model = sw.parallelize(build(**overrides), plan)
        for options, expected in results[name]:
            assert sw.generate(model, PROMPTS, max_new_tokens=NEW, **options) == expected, (name, options)
        model.train()  # generation leaves a model that trains
        tokens = torch.tensor([PROMPTS[2]])
        tokens = tokens.expand(plan.pipeline_policy.microbatches(plan.pp) if plan.pp > 1 else 1, -1)
        sw.train_step(model, (tokens, tokens))
        trained = sw.generate(model, PROMPTS, max_new_tokens=2)
        assert [row[:2] for row in results[name][0][1]] == trained  # no optimizer step: the same weights


def results_of(plans, least_margin):
    results = {}
    for name, _, overrides in plans:
        found = []
        for options in ({}, SAMPLED):
            sampling = Sampling(*(options.get(key, default) for key, default in DEFAULTS.items()))
            rows, margin = one_process(sampling, options.get("seed", 0), **overrides)
            assert margin > least_margin, (name, options, margin)
            found.append((options, rows))
        results[name] = found
    return results


DEFAULTS = {"temperature": 0.0, "top_k": None, "top_p": None}
ONE_PROCESS_PLANS = [
    ("zero3", sw.ParallelPlan(), {}),
    ("zero2", sw.ParallelPlan(strategy="zero2"), {}),
    ("ddp", sw.ParallelPlan(strategy="ddp"), {"num_experts": 2}),
]
TENSOR_PLANS = [
    ("tp", sw.ParallelPlan(tp=2), {"tied": False}),
    ("tp-tied", sw.ParallelPlan(tp=2), {"num_experts": 2}),
]
PIPELINE_PLANS = [
    ("pp", sw.ParallelPlan(pp=2), {"tied": False}),
    ("pp-tied-4", sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy(num_microbatches=4)), {"num_experts": 2}),
    ("pp-1", sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy(num_microbatches=1)), {}),
    ("zb-v", sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy("zb-v")), {"num_layers": 4, "tied": False}),
    ("interleaved", sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy("interleaved-1f1b")), {"num_layers": 4}),
]


def test_tokens_of_two_ranks_are_those_of_one_process():
    plans = ONE_PROCESS_PLANS + TENSOR_PLANS + PIPELINE_PLANS
    run_on_ranks(generated, 2, plans, results_of(plans, LEAST_MARGIN), timeout_s=120)


@pytest.mark.long
@pytest.mark.parametrize("world", [3, 4])
def test_tokens_of_more_ranks_are_those_of_one_process(world):
    plans = [*ONE_PROCESS_PLANS]
    if world == 4:
        plans += [
            ("tp4", sw.ParallelPlan(tp=4), {}),
            ("dp2-tp2", sw.ParallelPlan(tp=2), {}),
            ("pp4", sw.ParallelPlan(pp=4), {"num_layers": 4, "tied": False}),
            ("dp2-pp2", sw.ParallelPlan(pp=2, strategy="zero1"), {}),
            ("tp2-pp2", sw.ParallelPlan(pp=2, tp=2), {}),
            ("hsdp", sw.ParallelPlan(strategy="hsdp", dp_replicate=2), {}),
        ]
    run_on_ranks(generated, world, plans, results_of(plans, LEAST_MARGIN), timeout_s=200)


def in_step(expected):
    """On a rank: prompts of one's own, with rows that end early; what must not differ; what is sent."""
    rank = torch.distributed.get_rank()
    model = sw.parallelize(build(), sw.ParallelPlan())
    own = [0, 1, 2] if rank == 0 else [3]
    ends = sorted({expected[3][1], expected[0][6]})
    got = sw.generate(model, [PROMPTS[row] for row in own], max_new_tokens=NEW, eos=ends)
    for row, tokens in zip(own, got, strict=True):
        stop = next((place for place, token in enumerate(expected[row]) if token in ends), NEW)
        assert tokens == expected[row][: stop + 1]
    assert len(sw.generate(model, PROMPTS, max_new_tokens=3, temperature=1.0)[0]) == 3
    columns = sw.generate_stream(model, PROMPTS, max_new_tokens=NEW)
    assert [next(columns), next(columns)] == [[row[place] for row in expected] for place in (0, 1)]
    columns.close()
    torch.manual_seed(rank)  # without a seed the first rank's is taken
    drawn = sw.generate(model, PROMPTS, max_new_tokens=NEW, temperature=3.0)
    told = [None, None]
    torch.distributed.all_gather_object(told, drawn)
    assert told[0] == told[1]
    with pytest.raises(RankDisagreement, match="rank 0 has max_new_tokens=2 and no eos, rank 1 has max_new_tokens=3"):
        sw.generate(model, PROMPTS, max_new_tokens=2 + rank)
    with pytest.raises(ConfigError, match="rank 1: prompt 0: token 0 is 99" if rank == 0 else "token 0 is 99"):
        sw.generate(model, [[99 * rank]], max_new_tokens=2)
    model = sw.parallelize(build(), sw.ParallelPlan(tp=2))
    with pytest.raises(RankDisagreement, match="ranks 0 and 1 hold parts of the same model"):
        sw.generate(model, [[rank]], max_new_tokens=2)
    with sw.record_collectives(model) as events:
        sw.generate(model, PROMPTS, max_new_tokens=4)
    divided_positions = sw.parallelize(build(), sw.ParallelPlan(tp=2, sequence_parallel=True))
    with pytest.raises(StateError, match="sequence_parallel=True divides positions"):
        sw.generate(divided_positions, PROMPTS, max_new_tokens=2)
    columns = sw.generate_stream(model, PROMPTS, max_new_tokens=2)
    next(columns)
    for shard in probe(model).shards:  # this rank has all of its part: it computes with that, and copies nothing
        assert shard.whole.untyped_storage().data_ptr() == shard.parameter.untyped_storage().data_ptr()
    assert len(list(columns)) == 1
    kinds = Counter((event.axis, event.kind) for event in events if event.axis == "tp")
    assert kinds == {("tp", "all_reduce"): 4 * (1 + 2 * LAYERS), ("tp", "all_gather"): 4}


def held(expected):
    """A stream that was left, but is still held, takes no gradients away; closed, it changes nothing."""
    losses = [left_stream(expected, is_held) for is_held in (False, True)]
    assert losses[0] == losses[1]


def left_stream(expected, is_held):
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(8).view(1, 8)
    model(tokens, tokens).backward()
    stream = sw.generate_stream(model, PROMPTS, max_new_tokens=4)
    assert next(stream) == [row[0] for row in expected]
    if is_held:
        again = functools.partial(sw.generate, model, PROMPTS, max_new_tokens=4)
        for call in (functools.partial(model, tokens, tokens), optimizer.step, again):
            with pytest.raises(StateError, match=r"sw\.generate is under way"):
                call()
        with torch.no_grad():
            assert model(tokens, tokens).item() > 0
    stream.close()
    optimizer.step()
    return model(tokens, tokens).item()


def test_training_is_refused_while_a_stream_is_neither_exhausted_nor_closed():
    expected, _ = one_process(Sampling())
    run_on_ranks(held, 1, expected, timeout_s=120)


def kept(expected):
    """On a rank: what stays gathered after forward, as the root, is gathered once; other units for each token."""
    model = sw.parallelize(build(), sw.ParallelPlan(reshard_after_forward=False))
    for strategy, times in (("kept", {1}), ("zero3", {1, 4})):
        if strategy == "zero3":
            model = sw.parallelize(build(), sw.ParallelPlan())
        with sw.record_collectives(model) as events:
            assert sw.generate(model, PROMPTS, max_new_tokens=4) == [row[:4] for row in expected]
        units = Counter(event.unit for event in events if event.kind == "all_gather")
        named = {unit: count for unit, count in units.items() if unit not in {"control", "tokens"}}
        assert set(named.values()) == times, (strategy, named)
        assert len(named) > 2
        assert named["root"] == 1
        assert not any(unit.shows_whole_parameters for unit in probe(model).units)


def test_what_stays_gathered_is_gathered_once():
    expected, margin = one_process(Sampling())
    assert margin > LEAST_MARGIN
    run_on_ranks(kept, 2, expected, timeout_s=120)


def over_stages(expected):
    """On a rank: over a pipeline rows end early, columns come as they are chosen, and taking them may stop anywhere."""
    ends = sorted({expected[3][1], expected[0][6]})
    cut = [next((row[: at + 1] for at, token in enumerate(row) if token in ends), row) for row in expected]
    assert len({len(row) for row in cut}) > 2
    for policy in (sw.PipelinePolicy(), sw.PipelinePolicy("zb-v", num_microbatches=3)):
        model = sw.parallelize(build(num_layers=4, tied=False), sw.ParallelPlan(pp=2, pipeline=policy))
        assert sw.generate(model, PROMPTS, max_new_tokens=NEW, eos=ends) == cut
        assert sw.generate(model, PROMPTS[2:3], max_new_tokens=1) == [expected[2][:1]]
        for count in (1, 3, NEW):
            columns = sw.generate_stream(model, PROMPTS, max_new_tokens=NEW)
            assert [next(columns) for _ in range(count)] == [[row[at] for row in expected] for at in range(count)]
            columns.close()  # what is under way on the stages is gone through, so that no message is left over
        with sw.record_collectives(model) as events:
            assert sw.generate(model, PROMPTS, max_new_tokens=3) == [row[:3] for row in expected]
        sent = Counter((event.kind, event.unit) for event in events if event.axis == "pp" and event.kind == "send")
        parts = policy.microbatches(2)
        if policy.virtual_stages == 1:
            first = {("send", "activation of stage 0"): 3 * parts}
            assert sent == (first if torch.distributed.get_rank() == 0 else {("send", "tokens"): 3 * parts})
        assert not [event for event in events if event.unit.startswith("shapes")]  # they were told before
    with pytest.raises(RankDisagreement, match="ranks 0 and 1 hold parts of the same model"):
        sw.generate(model, [[torch.distributed.get_rank()]], max_new_tokens=2)


@pytest.mark.transports
def test_over_a_pipeline_rows_end_early_and_taking_may_stop_anywhere():
    expected, margin = one_process(Sampling(), num_layers=4, tied=False)
    assert margin > LEAST_MARGIN
    run_on_ranks(over_stages, 2, expected, timeout_s=120)


def divided(expected, drawn):
    """On a rank: data-parallel ranks share the rows of one batch, also fewer than there are ranks."""
    rank = torch.distributed.get_rank()
    ends = sorted({expected[3][1], expected[0][6]})
    cut = [next((row[: at + 1] for at, token in enumerate(row) if token in ends), row) for row in expected]
    plans = [
        (sw.ParallelPlan(), 1),
        (sw.ParallelPlan(strategy="ddp", pp=2), 2),
        (sw.ParallelPlan(pp=2, reshard_after_forward=True), 2),
        (sw.ParallelPlan(tp=2), 2),
        (sw.ParallelPlan(tp=2, pp=2), 4),
    ]
    for plan, group in plans:
        model = sw.parallelize(build(num_layers=4, tied=False), plan)
        seen = []
        hook = model.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0].shape[0]))
        assert sw.generate(model, PROMPTS, max_new_tokens=NEW, eos=ends) == cut, plan
        rows = len(PROMPTS) * group // 4
        assert max(seen) == max(1, rows // plan.pp), plan  # each rank computes its share only
        hook.remove()
        assert sw.generate(model, PROMPTS[2:], max_new_tokens=NEW) == expected[2:], plan
        assert sw.generate(model, PROMPTS[2:3], max_new_tokens=NEW) == expected[2:3], plan
        assert sw.generate(model, PROMPTS, max_new_tokens=NEW, **SAMPLED) == drawn, plan
        if group < 4:  # each data-parallel rank has prompts of its own, of which another has fewer
            place = sw.data_parallel_rank(model)
            own = [place] if place else [1, 2, 3]
            got = sw.generate(model, [PROMPTS[row] for row in own], max_new_tokens=NEW, eos=ends)
            assert got == [cut[row] for row in own], (plan, rank)


@pytest.mark.slow
def test_ranks_share_the_rows_of_one_batch():
    expected, margin = one_process(Sampling(), num_layers=4, tied=False)
    drawn, drawn_margin = one_process(Sampling(1.5, 20, 0.95), 4, num_layers=4, tied=False)
    assert min(margin, drawn_margin) > LEAST_MARGIN
    run_on_ranks(divided, 4, expected, drawn, timeout_s=200)


def test_ranks_with_prompts_of_their_own_go_in_step_and_disagreements_are_told():
    expected, margin = one_process(Sampling())
    assert margin > LEAST_MARGIN
    run_on_ranks(in_step, 2, expected, timeout_s=120)


def build_family(name):
    from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    if name == "gpt_neo":
        config = GPTNeoConfig(vocab_size=VOCAB, max_position_embeddings=SEQ, hidden_size=24, num_layers=2, num_heads=4,
                              attention_types=[[["global", "local"], 1]], window_size=4, initializer_range=0.3,
                              bos_token_id=1, eos_token_id=1)  # fmt: skip
        return GPTNeoForCausalLM(config).eval()
    if name == "qwen3_next":  # under pp a stage without attention, and one with nothing else
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2,
                 "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
                 "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
                 "linear_value_head_dim": 8}  # fmt: skip
        config = Qwen3NextConfig(vocab_size=VOCAB, max_position_embeddings=SEQ, hidden_size=24, num_hidden_layers=2,
                                 layer_types=["linear_attention", "full_attention"], initializer_range=0.3,
                                 eos_token_id=1, **sizes)  # fmt: skip
        return Qwen3NextForCausalLM(config).eval()
    if name == "gpt2":
        config = GPT2Config(vocab_size=VOCAB, n_positions=SEQ, n_embd=24, n_layer=2, n_head=4, initializer_range=0.3,
                            bos_token_id=1, eos_token_id=1)  # fmt: skip
        return GPT2LMHeadModel(config).eval()
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def own_generate(model, prompt):
    """The library's own greedy tokens, and the smallest margin."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    best = torch.cat(out.logits).topk(2, dim=-1).values
    return out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


def generated_by_families(expected):
    for name, rows in expected.items():
        for plan in (sw.ParallelPlan(), sw.ParallelPlan(tp=2), sw.ParallelPlan(pp=2)):
            if plan.tp > 1 and name in {"gpt_neo", "qwen3_next"}:  # without styles
                continue
            model = sw.parallelize(build_family(name), plan)
            assert sw.generate(model, PROMPTS, max_new_tokens=NEW) == rows, (name, plan.tp, plan.pp)


@pytest.mark.preload("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2")
def test_causal_models_of_transformers_say_what_their_own_generate_says():
    expected = {}
    for name in ("gpt2", "llama", "gpt_neo", "qwen3_next"):
        found = [own_generate(build_family(name), prompt) for prompt in PROMPTS]
        assert min(margin for _, margin in found) > LEAST_MARGIN
        expected[name] = [tokens for tokens, _ in found]
    run_on_ranks(generated_by_families, 2, expected, timeout_s=120)


def test_a_mixture_that_is_trained_with_a_loss_of_its_routers_continues_rows_of_unequal_length():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(3)
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ, initializer_range=0.3, num_local_experts=3,
        output_router_logits=True,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    found = sw.generate(model, PROMPTS, max_new_tokens=NEW)
    model.config.output_router_logits = False  # transformers' own cannot do it with them before 5.23
    assert found == [own_generate(model, prompt)[0] for prompt in PROMPTS]


def test_a_model_of_pictures_and_text_continues_text():
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    llama = build_family("llama").config
    vision = CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=llama, vision_config=vision)).eval()
    assert sw.generate(model, PROMPTS, max_new_tokens=NEW) == [own_generate(model, prompt)[0] for prompt in PROMPTS]


def test_prompts_of_unequal_length_are_refused_where_padding_would_shift_their_positions():
    from transformers import BartConfig, BartForCausalLM

    torch.manual_seed(3)
    config = BartConfig(
        vocab_size=VOCAB, d_model=24, decoder_ffn_dim=48, decoder_layers=2, decoder_attention_heads=4,
        max_position_embeddings=SEQ, init_std=0.3, forced_eos_token_id=None,
    )  # fmt: skip
    model = BartForCausalLM(config).eval()
    text = refusal(sw.ConfigError, sw.generate, model, PROMPTS, max_new_tokens=NEW)
    assert text.endswith("positions of a BartForCausalLM.\n  Pass prompts of one length in each call.")
    each = [sw.generate(model, [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS]
    assert each == [own_generate(model, prompt)[0] for prompt in PROMPTS]
    assert "padding would shift their positions" in refusal(sw.StateError, ContinuousBatcher, model)


def test_models_that_count_padding_although_they_take_positions_are_refused_too():
    from transformers import GitConfig, GitForCausalLM

    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = GitConfig(
        vision_config=vision, vocab_size=VOCAB, hidden_size=24, intermediate_size=48,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=SEQ,
    )  # fmt: skip
    model = GitForCausalLM(config).eval()
    text = refusal(sw.ConfigError, sw.generate, model, PROMPTS, max_new_tokens=NEW)
    assert text.endswith("positions of a GitForCausalLM.\n  Pass prompts of one length in each call.")


def test_models_whose_cache_is_a_class_of_their_own_are_refused():
    from transformers import CpmAntConfig, CpmAntForCausalLM

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "dim_head": 8, "dim_ff": 8, "num_hidden_layers": 1}
    model = CpmAntForCausalLM(CpmAntConfig(vocab_size=VOCAB, **sizes)).eval()
    text = refusal(sw.StateError, sw.generate, model, PROMPTS, max_new_tokens=NEW)
    assert text.startswith("sw.generate takes decoders with a cache of keys and values, not a CpmAntForCausalLM.")


def test_models_without_any_attention_are_refused_whose_tokens_transformers_cannot_count_either():
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = Lfm2ForCausalLM(
        Lfm2Config(vocab_size=VOCAB, num_hidden_layers=2, layer_types=["conv", "conv"], eos_token_id=1, **sizes)
    ).eval()
    with pytest.raises(ValueError, match="can only be called on Attention layers"):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW)
    text = refusal(sw.StateError, sw.generate, model, PROMPTS, max_new_tokens=NEW)
    assert "this Lfm2ForCausalLM has 2 layers without it" in text
    assert model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, use_cache=False).numel()  # as it advises


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_the_cache_is_passed_under_the_name_that_the_model_s_forward_has(name):
    model = build_family("llama").eval()
    expected = sw.generate(model, PROMPTS[:2], max_new_tokens=3)
    parameters = inspect.signature(type(model).forward).parameters
    own = next(each for each in CACHE_NAMES if each in parameters)

    def forward(self, **given):
        return type(self).__base__.forward(self, **{own if key == name else key: value for key, value in given.items()})

    forward.__signature__ = inspect.Signature(
        [each.replace(name=name) if each.name == own else each for each in parameters.values()]
    )
    model.__class__ = type("Renamed", (type(model),), {"forward": forward})
    assert sw.generate(model, PROMPTS[:2], max_new_tokens=3) == expected
