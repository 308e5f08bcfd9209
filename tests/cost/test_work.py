"""What a rank computes, sends and keeps, beside formulas of the literature and sums over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cost.unit import UnitWork
from shardwise.cost.work import model_work
from shardwise.cost.workload import Workload
from shardwise.spec.shape import FAMILIES, KNOWN
from shardwise.spec.shape.gpt import PRESETS, GPTConfig

NAMES = ["gpt2-xl", "llama-3-8b", "qwen3-30b-a3b", "mixtral-8x7b", "gemma-2-9b", "t5-3b", "bert-large", "opt-6.7b"]


def units(name: str | dict[str, Any], **changes: Any) -> tuple[UnitWork, ...]:
    plan = {key: changes.pop(key) for key in ("tp", "cp", "ep", "sequence_parallel") if key in changes}
    workload = Workload(**{"seq_len": 2048, "global_batch": 64, "micro_batch": 2, **changes})
    return model_work(sw.ModelShape.from_config(name), sw.ParallelPlan(**plan), workload)


def total(work: tuple[UnitWork, ...], field: str) -> float:
    return sum(unit.count * getattr(unit, field) for unit in work)


@pytest.mark.parametrize("name", [*KNOWN, *PRESETS])
def test_the_units_of_one_rank_have_all_parameters_and_all_are_trained(name: str) -> None:
    work = units(name)
    assert total(work, "num_parameters") == total(work, "num_trained") == sw.ModelShape.from_config(name).num_parameters


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-70b", "mistral-7b"])
def test_operations_of_a_gated_decoder_are_those_of_its_formula(name: str) -> None:
    """``L [2 (2h² + 2hkd) + 6hf + 4sh] + 2hV`` for each token."""
    config, s = KNOWN[name], 2048
    L, h, a, k, f, V = (
        config[field]
        for field in (
            "num_hidden_layers",
            "hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
        )
    )
    expected = L * (2 * (2 * h * h + 2 * h * k * h // a) + 6 * h * f + 4 * s * h) + 2 * h * V
    assert total(units(name), "flops") == 2 * s * expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}),
        ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 2}),
        ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_operations_are_those_that_torch_counts_in_the_model_of_transformers(family: str, changes: Any) -> None:
    pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    from tests.common.shapes import built, example_batch, small_config

    loops = {"attn_implementation": "eager", "experts_implementation": "eager"}  # made of products that torch counts
    model, config = built(small_config(family, **loops, **changes))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**example_batch(family))
    assert total(units(config, seq_len=32), "flops") == counter.get_total_flops()


@pytest.mark.parametrize("preset", ["gpt2-xl", "gpt-175b"])
@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (2, False), (4, False), (2, True), (8, True)])
def test_a_gpt_with_dropout_keeps_what_korthikanti_counts(preset: str, tp: int, sequence: bool) -> None:
    """Equations 1, 2 and 4 of arXiv 2205.05198, and what they leave out: statistics of norms and of attention.

    Their attention keeps queries, keys and values, and what is inside of the scores; one kernel keeps its output, too.
    With positions divided, our engine keeps the gathered inputs of the layers that Megatron gathers again.
    """
    base = PRESETS[preset]
    if base.num_heads % tp:
        pytest.skip("tp does not divide the heads")
    s, b, h, a = 2048, 2, base.hidden, base.num_heads
    config = GPTConfig(num_layers=2, hidden=h, num_heads=a, vocab_size=50000, seq_len=s, dropout=0.1)
    workload = Workload(seq_len=s, global_batch=64, micro_batch=b)
    plan = sw.ParallelPlan(tp=tp, sequence_parallel=sequence)
    block = model_work(sw.ModelShape.from_config(config), plan, workload)[1]
    around = 8 * s * b * h / (tp if sequence else 1)  # statistics of two norms, two numbers for each row
    statistics = around / h * 2 + 4 * s * b * a / tp
    whole = s * b * h * (10 / (tp if sequence else 1) + 24 / tp)
    assert block.saved_bytes - block.regathered_bytes == pytest.approx(whole + statistics, rel=1e-9)
    assert block.scores_bytes == 5 * a * s * s * b / tp
    assert block.kept_bytes("full") == 2 * s * b * h / (tp if sequence else 1)
    assert (block.regathered_bytes > 0) == (sequence and tp > 1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallel_ranks_divide_products_and_matrices_and_nothing_else(name: str, tp: int) -> None:
    whole, part = units(name), units(name, tp=tp)
    shape = sw.ModelShape.from_config(name)
    routers = sum(c * b.feed_forward.count for c, b in shape.stacks if hasattr(b.feed_forward, "count"))
    rows = 2 * 2048
    kv_copies = [max(1, tp // block.attention.kv_heads) for _, block in shape.stacks]
    if max(kv_copies) == 1 and not shape.head_dense:
        repeated = 2 * rows * shape.hidden * routers * (tp - 1) / tp
        assert total(part, "flops") == pytest.approx(total(whole, "flops") / tp + repeated, rel=1e-12)
    for mine, ours in zip(part, whole, strict=True):
        assert mine.num_parameters >= ours.num_parameters / tp - 1
        assert mine.stream_bytes == ours.stream_bytes
        assert {e.axis for e in mine.exchanges} <= {"tp"}
        assert not ours.exchanges
    block = part[1]
    assert sum(e.num_bytes for e in block.exchanges) == len(block.exchanges) * block.stream_bytes


def test_fewer_kv_heads_than_ranks_are_held_by_several() -> None:
    shape = sw.ModelShape.from_config("gemma-2b")  # one head of keys and values
    block = units("gemma-2b", tp=8)[1]
    attention = shape.stacks[0][1].attention
    widths = [product.columns for product in block.products[:2]]
    assert widths == [attention.q_width / 8, attention.head_dim]


def test_divided_positions_divide_what_is_between_the_layers_and_change_the_collectives() -> None:
    plain, divided = units("llama-3-8b", tp=8)[1], units("llama-3-8b", tp=8, sequence_parallel=True)[1]
    assert divided.stream_bytes == plain.stream_bytes / 8
    assert [e.kind for e in plain.exchanges] == ["all_reduce"] * 2
    assert [e.kind for e in divided.exchanges] == ["all_gather", "reduce_scatter"] * 2
    assert divided.flops == plain.flops
    assert divided.forward_bytes < plain.forward_bytes


@pytest.mark.parametrize("cp", [2, 8])
def test_context_parallel_ranks_divide_tokens_and_see_all_keys(cp: int) -> None:
    whole, part = units("llama-3-8b"), units("llama-3-8b", cp=cp)
    assert total(part, "flops") == pytest.approx(total(whole, "flops") / cp)
    assert part[1].attention[0].keys == 2048
    ring = [e for e in part[1].exchanges if e.kind == "ring"]
    assert [(e.axis, e.num_bytes) for e in ring] == [("cp", 2 * 2 * 2 * 2048 / cp * 8 * 128)]
    assert total(part, "num_parameters") == total(whole, "num_parameters")


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 8), (2, 4)])
def test_expert_parallel_ranks_divide_experts_and_exchange_tokens(tp: int, ep: int) -> None:
    whole, part = units("qwen3-30b-a3b")[1], units("qwen3-30b-a3b", tp=tp, ep=ep)[1]
    assert part.num_expert_parameters * tp * ep == whole.num_expert_parameters == 128 * 3 * 2048 * 768
    if tp == 1:
        assert part.flops == pytest.approx(whole.flops)
        assert part.num_parameters - part.num_expert_parameters == whole.num_parameters - whole.num_expert_parameters
    sent = [e for e in part.exchanges if e.axis == "ep"]
    assert [(e.kind, e.num_bytes) for e in sent] == [("all_to_all", 8 * part.stream_bytes)] * 2


def test_a_mixture_computes_what_its_tokens_meet() -> None:
    shape, work = sw.ModelShape.from_config("mixtral-8x7b"), units("mixtral-8x7b")
    products = sum(u.count * sum(p.flops for p in u.products) for u in work)
    norms = shape.num_layers * 2 * shape.hidden + shape.hidden
    met = shape.num_active_parameters - norms - shape.embedding
    assert products == 2 * 2 * 2048 * met


@pytest.mark.parametrize("name", ["llama-3-8b", "gpt2-xl", "qwen2.5-7b"])
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_all_that_is_trained(name: str, tp: int) -> None:
    if name == "gpt2-xl" and tp == 2:
        pytest.skip("25 heads")
    rank = 16
    whole, tuned = units(name, tp=tp), units(name, tp=tp, lora_rank=rank)
    for before, after in zip(whole, tuned, strict=True):
        own = [p for p in after.products if rank not in {p.inner, p.columns}]
        adapters = [p for p in after.products if rank in {p.inner, p.columns}]
        assert len(own) == len(before.products)
        assert len(adapters) == (2 * len(own) if after.name.startswith("block") else 0)
        assert sum(p.backward_flops for p in own) == sum(p.flops for p in own)
        assert all(p.backward_flops == 2 * p.flops for p in adapters)
        assert after.num_trained == sum(p.count * p.inner * p.columns for p in adapters)
        assert after.num_parameters == before.num_parameters + after.num_trained
        assert after.saved_bytes <= before.saved_bytes


def test_llamas_adapters_have_the_published_number_of_parameters() -> None:
    """peft's LoRA of rank 16 on all linear layers of Llama 3 8B's blocks prints 41,943,040 trainable parameters."""
    assert total(units("llama-3-8b", lora_rank=16), "num_trained") == 41_943_040


def test_an_encoder_and_its_decoder_have_lengths_of_their_own() -> None:
    work = units("t5-3b", seq_len=512, decoder_seq_len=114)
    encoder, decoder, head = work[1], work[-2], work[-1]
    assert [w.queries for w in encoder.attention] == [2 * 512]
    assert [(w.queries, w.keys) for w in decoder.attention] == [(2 * 114, 114), (2 * 114, 512)]
    assert [w.is_causal for w in decoder.attention] == [True, False]
    assert head.products[-1].rows == 2 * 114
    cross = decoder.products[3:6]
    assert [p.rows for p in cross] == [2 * 114, 2 * 512, 2 * 114]
    assert encoder.stream_bytes == 2 * 2 * 512 * 1024


def test_images_are_as_long_as_they_have_patches() -> None:
    work = units("vit-base", seq_len=5, micro_batch=3)
    assert work[0].products[0] == units("vit-base", seq_len=9, micro_batch=3)[0].products[0]
    assert (work[0].products[0].rows, work[0].products[0].inner) == (3 * 196, 768)
    assert work[1].attention[0].queries == 3 * 197
    assert work[-1].products[-1].rows == 3


def test_windows_bound_the_keys_and_only_of_their_layers() -> None:
    keys = [unit.attention[0].keys for unit in units("mistral-7b", seq_len=16384) if unit.attention]
    assert keys == [4096]
    assert [unit.attention[0].keys for unit in units("mistral-7b", seq_len=2048) if unit.attention] == [2048]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_falls_with_recomputation_and_grows_with_the_microbatch(name: str) -> None:
    small, large = units(name), units(name, micro_batch=4)
    for one, two in zip(small[1:-1], large[1:-1], strict=True):
        assert one.kept_bytes("full") < one.kept_bytes("selective") < one.kept_bytes("none")
        assert two.flops == 2 * one.flops
        assert one.kept_bytes("none") < two.kept_bytes("none") <= 2 * one.kept_bytes("none")


@pytest.mark.parametrize("name", NAMES)
def test_fp32_keeps_up_to_twice_as_much_and_fp8_as_much_as_bf16(name: str) -> None:
    bf16, fp32, fp8 = (total(units(name, precision=p)[1:-1], "saved_bytes") for p in ("bf16", "fp32", "fp8"))
    assert bf16 < fp32 <= 2 * bf16
    assert fp8 == bf16


def test_fused_tokens_are_sent_to_experts_and_back_in_one_pass_of_the_stream_and_one_of_each_copy() -> None:
    shape, workload = sw.ModelShape.from_config("qwen3-30b-a3b"), Workload(seq_len=1024, global_batch=1, compile=True)
    parts = {part.name: part for part in model_work(shape, sw.ParallelPlan(), workload)[1].parts}
    stream = 2 * 1024 * 2048
    for name in ("dispatch", "combine"):
        assert (parts[name].forward_bytes, parts[name].backward_bytes) == ((8 + 1) * stream, (8 + 1) * stream)


def test_latent_attention_has_narrow_products_and_keeps_keys_wider_than_values() -> None:
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 100}
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "q_lora_rank": 24}
    config |= {"kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    block = model_work(sw.ModelShape.from_config(config), sw.ParallelPlan(), Workload(seq_len=32, global_batch=1))[1]
    sizes = [(product.inner, product.columns) for product in block.products[:5]]
    assert sizes == [(64, 24), (24, 4 * 24), (64, 20 + 8), (20, 4 * (16 + 12)), (4 * 12, 64)]
    (attention,) = block.attention
    assert attention.flops == 2 * 32 * 32 * 4 * (24 + 12)
    (kept,) = [part.saved_bytes for part in block.parts if part.name == "attention"]
    assert kept == 2 * 32 * 4 * 2 * (24 + 12) + 4 * 32 * 4


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_block_moves_less_in_fewer_kernels_and_keeps_no_more(name: str) -> None:
    eager, compiled = total_of(units(name)), total_of(units(name, compile=True))
    assert all(after <= before for before, after in zip(eager, compiled, strict=True))
    if name in {"llama-3-8b", "qwen3-30b-a3b", "mixtral-8x7b"}:  # norms, rotations and gates in many kernels each
        assert compiled[0] < 0.7 * eager[0]


def total_of(work: tuple[UnitWork, ...]) -> list[float]:
    return [total(work[1:-1], field) for field in ("forward_bytes", "backward_bytes", "num_kernels", "saved_bytes")]
