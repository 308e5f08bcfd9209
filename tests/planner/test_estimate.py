import dataclasses

import pytest

from shardwise.cost import hardware
from shardwise.planner import Cluster, Workload, estimate
from shardwise.planner.explain import BANDS, regime, title, why
from shardwise.planner.planned import fastest_of
from shardwise.spec.errors import MeshError, PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import ModelShape
from shardwise.spec.shape.gpt import gpt_config

SHAPE = ModelShape.from_config("llama-3.2-1b")
CLUSTER = Cluster(gpu="A100-80GB-SXM", num_gpus=8)
WORK = Workload(seq_len=2048, global_batch=16)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("none", "none"), ("full", "full"), ("selective", "selective"), ({"every": 3}, 6), ({"every": 1}, "full")],
)
def test_recomputation_may_be_said_by_the_plan(policy: object, expected: object) -> None:
    said = estimate(SHAPE, ParallelPlan(activation_checkpointing=policy), CLUSTER, WORK)  # pyrefly: ignore
    assert said.workload.recompute == expected
    again = estimate(SHAPE, ParallelPlan(), CLUSTER, dataclasses.replace(WORK, recompute=expected))
    assert said.memory.device_bytes == again.memory.device_bytes


def test_the_plan_gets_every_degree() -> None:
    made = estimate(SHAPE, ParallelPlan(strategy="hsdp", tp=2), dataclasses.replace(CLUSTER, num_gpus=16), WORK)
    assert (made.plan.dp_replicate, made.plan.dp_shard) == (2, 4)


def test_a_batch_that_the_ranks_do_not_divide_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(PlanError, match=r"global_batch=20 is not a multiple .* = 16.\n  Set global_batch=16 or 32"):
        estimate(SHAPE, ParallelPlan(), CLUSTER, dataclasses.replace(WORK, global_batch=20, micro_batch=2))


def test_microbatches_of_a_pipeline_must_be_those_of_the_batch() -> None:
    plan = ParallelPlan(pp=2, pipeline=PipelinePolicy("1f1b", num_microbatches=8))
    with pytest.raises(PlanError, match="num_microbatches=8, but the batch makes 4"):
        estimate(SHAPE, plan, CLUSTER, WORK)


def test_degrees_that_do_not_make_the_world_are_refused() -> None:
    with pytest.raises(MeshError):
        estimate(SHAPE, ParallelPlan(tp=3), CLUSTER, WORK)


def test_the_reason_says_what_is_too_much_in_gib() -> None:
    small = dataclasses.replace(CLUSTER, gpu="V100-16GB-SXM2")
    made = estimate(SHAPE, ParallelPlan(strategy="ddp"), small, dataclasses.replace(WORK, precision="fp16"))
    assert not made.fits
    assert made.reason.startswith("needs ")
    assert "of a device's 15.8 GiB: optimizer " in made.reason


def test_a_plan_that_is_a_little_too_large_is_said_to_be_within_the_band(monkeypatch: pytest.MonkeyPatch) -> None:
    made = estimate(SHAPE, ParallelPlan(strategy="ddp"), CLUSTER, WORK)
    for share, verdict in ((1.1, "fits"), (1.02, "tight"), (0.96, "may"), (0.8, "no")):
        small = dataclasses.replace(CLUSTER.device, memory_bytes=int(share * made.memory.device_bytes))
        monkeypatch.setattr(hardware, "_named", lambda _name, small=small: [small])
        assert (made.fits, made.is_tight) == (verdict in {"fits", "tight"}, verdict == "tight")
        assert ("within 7%, by which predicted peaks may be wrong" in made.reason) == (verdict == "may")


def test_a_network_that_was_not_given_is_named_with_the_time_at_half_of_it() -> None:
    asked = dataclasses.replace(CLUSTER, num_gpus=32)
    made, half, given = (
        estimate(SHAPE, ParallelPlan(strategy="zero3"), each, dataclasses.replace(WORK, global_batch=32))
        for each in (asked, *(dataclasses.replace(asked, inter_gbits_per_s_per_node=gbits) for gbits in (800, 1600)))
    )
    (sentence,) = [text for text in why(made) if "--network" in text]
    assert "1,600 Gbit/s a node are assumed" in sentence
    assert sentence.endswith(f"a step takes {1000 * half.step_time_s:.3g} ms.")
    assert half.step_time_s > made.step_time_s == given.step_time_s
    assert not any("--network" in text for text in why(given))
    assert not any("--network" in text for text in why(estimate(SHAPE, ParallelPlan(), CLUSTER, WORK)))


@pytest.mark.parametrize(
    ("name", "gpu", "num_gpus", "more", "kind"),
    [
        ("llama-3-8b", "H100-80GB-SXM", 8, {}, "dense, one node"),
        ("llama-3-8b", "H100-80GB-SXM", 16, {}, "dense, many nodes"),
        ("llama-3-8b", "H100-80GB-SXM", 8, {"seq_len": 32768}, "long context"),
        ("llama-3-8b", "H100-80GB-SXM", 8, {"seq_len": 512}, "little work per GPU"),
        ("llama-3-8b", "H100-80GB-SXM", 8, {"lora_rank": 8}, "LoRA"),
        ("mixtral-8x7b", "H100-80GB-SXM", 8, {}, "mixtures of experts"),
        ("llama-3-8b", "RTX4090", 8, {}, "cards without links"),
        ("llama-3-8b", "H100-80GB-SXM", 8, {"seq_len": 1}, "samples that are not sequences"),
    ],
)
def test_the_band_is_that_of_the_runs_own_kind(name: str, gpu: str, num_gpus: int, more: dict[str, int], kind: str):
    work = dataclasses.replace(WORK, seq_len=4096)
    made = estimate(
        ModelShape.from_config(name),
        ParallelPlan(),
        Cluster(gpu=gpu, num_gpus=num_gpus),
        dataclasses.replace(work, **more),
    )
    assert regime(made.shape, made.plan, made.cluster, made.workload) == kind
    (sentence,) = [text for text in why(made) if f"this kind ({kind})" in text]
    assert (f"8 of 10 took within {BANDS[kind]:.0%}" in sentence) if kind in BANDS else ("Too few runs" in sentence)


def test_a_title_has_the_groups_of_replicas_and_the_degrees_above_one() -> None:
    cluster, shape = Cluster(gpu="A100-80GB-SXM", num_gpus=16), ModelShape.from_config("gpt2")
    plans = [ParallelPlan(strategy="hsdp", dp_replicate=2), ParallelPlan(strategy="hsdp", dp_replicate=4, tp=2)]
    assert [title(estimate(shape, plan, cluster, WORK)) for plan in plans] == ["hsdp 2x8", "hsdp 4x2 tp2"]


def test_the_fastest_plan_is_one_of_those_that_fit_as_well_as_the_first() -> None:
    shape, cluster = ModelShape.from_config("llama-3-8b"), Cluster(gpu="A100-80GB-SXM", num_gpus=8)
    plans = [ParallelPlan(activation_checkpointing="full"), ParallelPlan(strategy="ddp"), ParallelPlan()]
    work = dataclasses.replace(WORK, global_batch=32, micro_batch=4)
    roomy, large, tight = (estimate(shape, plan, cluster, work) for plan in plans)
    assert [(each.fits, each.is_tight) for each in (roomy, large, tight)] == [
        (True, False),
        (False, False),
        (True, True),
    ]
    assert fastest_of([roomy, large, tight]) is roomy
    assert fastest_of([tight, roomy, large]) is tight
    assert fastest_of([large, tight, roomy]) is large


def test_a_plan_whose_units_are_layers_says_so_and_gathers_and_reduces_a_layer_at_a_time() -> None:
    shape, cluster = ModelShape.from_config("gpt-175b"), Cluster(gpu="A100-80GB-SXM", num_gpus=128)
    workload = Workload(seq_len=2048, global_batch=256, micro_batch=2)
    plans = [
        ParallelPlan(mp_policy="bf16", activation_checkpointing="full", auto_wrap_policy=policy)
        for policy in ("auto", {"by_class": ["Block", "Linear"]})
    ]
    by_block, by_layer = (estimate(shape, plan, cluster, workload) for plan in plans)
    assert [title(made) for made in (by_block, by_layer)] == ["zero3", "zero3 by-layer"]
    h = shape.hidden
    less = (12 * h * h + 13 * h) - 4 * h * h  # parameters of a block, and of one of its two largest layers
    moments = [
        next(held for name, held in made.memory.timeline if name == "backward of block 94")
        for made in (by_block, by_layer)
    ]
    for category, num_bytes in (("gathered", 2 * 2), ("reduce", 4)):  # two units in 16 bit, one in 32
        assert moments[0][category] - moments[1][category] == pytest.approx(num_bytes * less, rel=1e-4)


def test_an_odd_vocabulary_is_named_with_the_time_of_the_next_multiple() -> None:
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=1)

    def said(vocab: int, precision: str = "bf16") -> tuple[float, list[str]]:
        workload = Workload(seq_len=1024, global_batch=32, micro_batch=32, precision=precision)
        shape = ModelShape.from_config(gpt_config("gpt2-medium", vocab_size=vocab))
        made = estimate(shape, ParallelPlan(strategy="zero3"), cluster, workload)
        return made.step_time_s, [text for text in why(made) if "not a multiple of 64" in text]

    (_, (text,)), (padded_s, nothing) = said(50_257), said(50_304)
    assert text.startswith("A vocabulary of 50,257 is not a multiple of 64")
    assert f"with 50,304 a step would take {1e3 * padded_s:.0f} ms" in text
    assert "Set model.vocab_size of a preset; of a model of transformers call" in text
    assert "resize_token_embeddings(pad_to_multiple_of=64), and save it." in text
    assert nothing == []
    assert said(50_272)[1] == []  # a multiple of 32 costs less than is worth a sentence
    assert said(50_257, "fp32")[1] == []


def test_a_faster_network_is_advised_only_where_the_waiting_is_on_it() -> None:
    def advice(name: str, plan: ParallelPlan, network: float | None) -> list[str]:
        cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=16, inter_gbits_per_s_per_node=network)
        made = estimate(ModelShape.from_config(name), plan, cluster, Workload(seq_len=2048, global_batch=128))
        return [text for text in why(made) if "with twice that" in text]

    assert len(advice("llama-3.2-1b", ParallelPlan(strategy="zero3"), 100)) == 1
    inside_a_node = ParallelPlan(strategy="zero3", ep=8)
    assert advice("qwen3-30b-a3b", inside_a_node, 3200) == []


def test_an_update_of_adamw_holds_nothing_besides_its_states() -> None:
    """As the fused one of ``train``: six blocks of Llama-3-8B, recomputed (bench/results/2026-11-27-gpu-3.md)."""
    sizes = {"layers": 6, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "seq_len": 4096}
    shape = ModelShape.decoder(**sizes, gated=True, tied=False)
    work = Workload(seq_len=4096, global_batch=2, micro_batch=2, recompute="full")
    made = estimate(shape, ParallelPlan(), Cluster(gpu="H100-80GB-SXM", num_gpus=1), work)
    assert made.memory.allocated_bytes == pytest.approx(26.87e9, rel=0.01)
