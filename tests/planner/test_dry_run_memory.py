"""What the planner computes from a model's shape is what the engine's dry run allocates: one predictor, within 2%."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.cost.workload import Workload
from shardwise.planner.memory import memory_on, num_microbatches

MODEL = {"num_layers": 6, "hidden": 256, "num_heads": 4, "vocab_size": 2048, "seq_len": 256, "tied": False}
FEW_WORDS = {**MODEL, "vocab_size": 64}
SHORT = {**MODEL, "vocab_size": 8192, "seq_len": 64}
WORLD = 8
NARROW = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")
LAYERS = {"strategy": "zero3", "auto_wrap_policy": {"by_class": ["Block", "Linear"]}}

#: Model, plan, samples of a microbatch, microbatches, dtype.
CASES = [
    (MODEL, {"strategy": "ddp"}, 1, 1, "bf16"),
    ({**SHORT, "tied": True}, {"strategy": "zero3"}, 1, 1, "fp32"),
    ({**SHORT, "tied": True}, {"strategy": "zero3", "offload_activations": True}, 1, 1, "bf16"),
    (SHORT, {"strategy": "zero3", "activation_checkpointing": "full"}, 1, 1, "fp32"),
    (MODEL, {"strategy": "zero1"}, 1, 2, "bf16"),
    (MODEL, {"strategy": "zero1", "mp_policy": NARROW}, 1, 1, "bf16"),
    (MODEL, {"strategy": "ddp", "mp_policy": NARROW}, 1, 2, "bf16"),
    (MODEL, {"strategy": "zero2"}, 1, 1, "fp32"),
    (MODEL, {"strategy": "shard_grad_op"}, 1, 1, "bf16"),
    (MODEL, {"strategy": "hsdp", "dp_shard": 4}, 1, 1, "bf16"),
    (FEW_WORDS, {"strategy": "hsdp", "dp_shard": 4, "activation_checkpointing": "full"}, 1, 2, "fp32"),
    (FEW_WORDS, {"strategy": "hsdp", "dp_shard": 4, "accumulation": "defer_replicate"}, 1, 2, "bf16"),
    (FEW_WORDS, {"strategy": "zero1", "accumulation": "sharded"}, 1, 2, "bf16"),
    (FEW_WORDS, {"strategy": "zero3"}, 4, 1, "bf16"),
    ({**FEW_WORDS, "dropout": 0.1}, {"strategy": "zero3"}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "activation_checkpointing": "full"}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "activation_checkpointing": "selective"}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "activation_checkpointing": "full", "offload_activations": True}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "offload_activations": True}, 8, 1, "bf16"),
    (FEW_WORDS, {"strategy": "ddp", "offload_activations": {"every": 2}}, 8, 1, "bf16"),
    (MODEL, {"strategy": "zero3", "offload_policy": "cpu"}, 1, 1, "bf16"),
    (MODEL, {"strategy": "zero3", "offload_policy": {"ratio": 0.5}}, 1, 1, "bf16"),
    (MODEL, {"strategy": "zero3", "quantized_gather": "int8"}, 1, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "quantized_reduce": "int8"}, 4, 1, "bf16"),
    (MODEL, {"strategy": "zero3", "reshard_after_forward": 2}, 1, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero2", "merge_units": 8_000_000, "activation_checkpointing": "full"}, 1, 1, "fp32"),
    (MODEL, LAYERS, 1, 1, "bf16"),
    (FEW_WORDS, LAYERS, 1, 1, "bf16"),
    (FEW_WORDS, {**LAYERS, "activation_checkpointing": "full"}, 4, 1, "bf16"),
    (FEW_WORDS, {**LAYERS, "accumulation": "unsharded"}, 1, 2, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "tp": 2, "sequence_parallel": True}, 4, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero3", "cp": 2}, 4, 1, "bf16"),
    (MODEL, {"strategy": "zero1", "offload_policy": "cpu"}, 1, 1, "bf16"),
    (MODEL, {"strategy": "ddp", "offload_policy": {"ratio": 0.5}}, 1, 1, "bf16"),
    (FEW_WORDS, {"strategy": "zero1", "pp": 2, "pipeline": "1f1b"}, 4, 4, "bf16"),
    (
        {**FEW_WORDS, "num_layers": 12},
        {"strategy": "zero1", "pp": 2, "pipeline": "1f1b", "activation_checkpointing": "full"},
        *(1, 4, "bf16"),
    ),
    (
        {**FEW_WORDS, "num_layers": 8},
        {"strategy": "zero1", "pp": 2, "pipeline": "gpipe", "activation_checkpointing": "full"},
        *(1, 4, "bf16"),
    ),
    (
        {**FEW_WORDS, "num_layers": 8},
        {"strategy": "zero1", "pp": 2, "pipeline": "gpipe", "offload_activations": True},
        *(4, 4, "bf16"),
    ),
    ({**MODEL, "vocab_size": 4096}, {"strategy": "zero1", "pp": 2, "pipeline": "gpipe"}, 2, 4, "bf16"),
    ({**FEW_WORDS, "num_layers": 8}, {"strategy": "zero3", "pp": 2, "pipeline": "interleaved-1f1b"}, 4, 4, "bf16"),
    ({**FEW_WORDS, "num_layers": 4}, {"strategy": "zero1", "pp": 2, "pipeline": "zb-h1"}, 4, 2, "bf16"),
    ({**FEW_WORDS, "num_layers": 8}, {"strategy": "zero1", "pp": 2, "pipeline": "zb-v"}, 4, 2, "bf16"),
    (
        {**FEW_WORDS, "num_layers": 4},
        {"strategy": "zero3", "pp": 2, "pipeline": "zb-h1", "activation_checkpointing": "full"},
        *(4, 4, "bf16"),
    ),
    (
        {**FEW_WORDS, "num_layers": 4},
        {"strategy": "zero1", "pp": 2, "pipeline": "zb-v", "activation_checkpointing": "full"},
        *(4, 4, "bf16"),
    ),
    (
        {**FEW_WORDS, "num_layers": 4, "num_experts": 4},
        {"strategy": "zero1", "pp": 2, "pipeline": "zb-h1", "activation_checkpointing": "full"},
        *(2, 4, "bf16"),
    ),
    (
        {**FEW_WORDS, "num_layers": 8, "hidden": 512, "seq_len": 128},
        {"strategy": "zero1", "pp": 2, "pipeline": "zb-h1", "activation_checkpointing": "full"},
        *(1, 2, "fp32"),
    ),
    (
        {**FEW_WORDS, "num_layers": 4, "hidden": 128, "seq_len": 512, "dropout": 0.1},
        {"strategy": "zero1", "pp": 4, "pipeline": "zb-h1", "activation_checkpointing": "full"},
        *(4, 1, "fp32"),
    ),
    (FEW_WORDS, {"strategy": "zero3", "cp": 4, "activation_checkpointing": "selective"}, 4, 1, "bf16"),
    # Attention that draws random numbers is not kept.
    ({**FEW_WORDS, "dropout": 0.1}, {"strategy": "zero3", "activation_checkpointing": "selective"}, 4, 1, "bf16"),
    # The first and the last stage exchange the gradient of their common weight.
    (
        {**SHORT, "tied": True, "vocab_size": 65536},
        {"strategy": "zero1", "pp": 2, "pipeline": "1f1b", "activation_checkpointing": "full"},
        *(1, 2, "fp32"),
    ),
    ({**FEW_WORDS, "num_experts": 4}, {"strategy": "zero3", "ep": 2}, 2, 1, "bf16"),
    ({**FEW_WORDS, "num_experts": 8}, {"strategy": "zero3", "ep": 8}, 2, 2, "bf16"),
]


@pytest.mark.cases(4)
@pytest.mark.parametrize(("overrides", "options", "micro", "count", "dtype"), CASES)
def test_the_peak_from_the_shape_is_that_of_the_dry_run(overrides, options, micro, count, dtype):
    config = sw.models.gpt("gpt-tiny", device="meta", **overrides).config
    options = {"mp_policy": None if dtype == "fp32" else sw.PrecisionPolicy(param_dtype=dtype), **options}
    if "pipeline" in options:
        options["pipeline"] = {"schedule": options["pipeline"], "num_microbatches": count}
    plan = sw.ParallelPlan(**options)
    tokens_BT = torch.empty(micro, config.seq_len, dtype=torch.int64, device="meta")
    workload = Workload(
        seq_len=config.seq_len,
        global_batch=micro * count * plan.mesh(WORLD).data_parallel_size,
        micro_batch=micro,
        precision=dtype,
        recompute=options.get("activation_checkpointing", "none"),
    )
    shape = sw.ModelShape.from_config(config)
    check_peak(lambda: sw.models.gpt(config), shape, plan, workload, (tokens_BT, tokens_BT))


def check_peak(
    build: Callable[[], nn.Module],
    shape: sw.ModelShape,
    plan: sw.ParallelPlan,
    workload: Workload,
    batch: Any,
    **options: Any,
) -> None:
    """The predicted peak is that of the fullest stage, of forward and backward; a dry run does not watch the update.

    The last rank of ``cp`` attends with all of its queries to the keys of every other.
    """
    mesh = plan.mesh(WORLD)
    resolved = dataclasses.replace(plan, dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard)
    peaks = [
        sw.dry_run(
            build,
            plan,
            world_size=WORLD,
            rank=stage * WORLD // plan.pp + plan.cp - 1,
            batch=batch,
            backend="nccl",
            num_microbatches=num_microbatches(resolved, workload),
            **options,
        ).peak_bytes
        for stage in range(plan.pp)
    ]
    found = memory_on("cuda", shape, resolved, workload)
    predicted = max(sum(held.values()) for moment, held in found.timeline if moment != "optimizer")
    assert predicted == pytest.approx(max(peaks), rel=0.02), found.by_category


HF = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MIXTURE = {"head_dim": 32, "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
SHARED = {**MIXTURE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 256,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
ALL = {"activation_checkpointing": "full"}
SPLIT = {"strategy": "zero1", "pp": 2, "pipeline": {"schedule": "zb-h1", "num_microbatches": 4}}
PIPELINE = {"strategy": "zero1", "pp": 2, "pipeline": {"schedule": "1f1b", "num_microbatches": 4}}


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("llama", {}, {**ALL, "tp": 4, "offload_activations": True}),  # the peak is at the backward of an eager norm
        ("olmoe", MIXTURE, {**ALL, "tp": 2}),  # ranks gather the heads, which a norm reads together
        ("mixtral", MIXTURE, ALL),  # outputs of experts are weighted in fp32
        ("qwen3_moe", {**MIXTURE, "moe_intermediate_size": 256}, ALL),
        ("mixtral", {**MIXTURE, "num_hidden_layers": 8}, PIPELINE),
        ("mixtral", MIXTURE, {"mp_policy": None}),
        ("llama", {}, {"mp_policy": None}),  # no kernel shares keys in fp32: scores are saved, and have gradients
        ("llama", {}, {**ALL, "mp_policy": None}),
        ("llama", {}, {"mp_policy": None, "cp": 2}),
        ("qwen2_moe", SHARED, {"tp": 2}),  # tp does not divide the shared expert
        ("gpt_oss", {**MIXTURE, "sliding_window": 64}, {}),  # scores outside of the window are saved
        ("gpt_oss", MIXTURE, {"tp": 2}),  # tp divides nothing in blocks
        ("deepseek_v3", LATENT, {}),
        ("mistral", {"sliding_window": 64}, {}),  # a mask for each layer, and keys and values for every head
        ("phi3", {"sliding_window": 64}, {}),
        ("gemma2", {"vocab_size": 8192, "head_dim": 32}, {}),  # the head's logits are capped too
        ("gemma2", {"head_dim": 32}, {"activation_checkpointing": "selective"}),  # scores are computed again
        ("gpt_oss", {**MIXTURE, "sliding_window": 64, "num_hidden_layers": 8}, {**PIPELINE, **ALL}),  # masks are kept
    ],
)
def test_the_peak_of_a_model_of_transformers_is_that_of_the_dry_run(family, sizes, options):
    config = transformers.CONFIG_MAPPING[family](**{**HF, **sizes})
    tokens = torch.empty(4, 512, dtype=torch.int64, device="meta")
    plan = sw.ParallelPlan(**{"strategy": "zero3", "mp_policy": sw.PrecisionPolicy(param_dtype="bf16"), **options})
    workload = Workload(
        seq_len=512,
        global_batch=4 * plan.mesh(WORLD).data_parallel_size * options.get("pipeline", {}).get("num_microbatches", 1),
        micro_batch=4,
        recompute=options.get("activation_checkpointing", "none"),
        precision="fp32" if plan.mp_policy is None else "bf16",
    )
    shape = sw.ModelShape.from_config(config.to_dict())
    build = lambda: transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))  # noqa: E731
    check_peak(build, shape, plan, workload, {"input_ids": tokens, "labels": tokens})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_peak_with_an_average_of_the_weights_is_that_of_the_dry_run(optimizer):
    config = sw.models.gpt("gpt-tiny", device="meta", **{**FEW_WORDS, "seq_len": 16}).config
    tokens_BT = torch.empty(1, 16, dtype=torch.int64, device="meta")
    workload = Workload(seq_len=16, global_batch=WORLD, precision="fp32", optimizer=optimizer, has_average=True)
    check_peak(
        lambda: sw.models.gpt(config),
        sw.ModelShape.from_config(config),
        sw.ParallelPlan(strategy="ddp"),
        workload,
        (tokens_BT, tokens_BT),
        optimizer=optimizer,
        has_average=True,
    )


VIT = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "hidden_dropout_prob": 0.1}
T5 = {"d_model": 256, "d_kv": 64, "num_heads": 4, "d_ff": 512, "num_layers": 4, "vocab_size": 64, "use_cache": False}


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("is_image", [True, False])
def test_the_peak_of_images_and_of_an_encoder_with_a_decoder_is_that_of_the_dry_run(is_image, recompute):
    tokens = torch.empty(8, 256, dtype=torch.int64, device="meta")
    if is_image:
        kind, config = transformers.ViTForImageClassification, transformers.ViTConfig(**VIT)
        batch = {"pixel_values": torch.empty(8, 3, 224, 224, device="meta"), "labels": tokens[:, 0]}
    else:
        kind = transformers.T5ForConditionalGeneration
        config = transformers.T5Config(**T5, pad_token_id=0, decoder_start_token_id=0)
        batch = {"input_ids": tokens, "labels": tokens[:, :128].contiguous()}
    policy = sw.PrecisionPolicy(param_dtype="bf16")
    plan = sw.ParallelPlan(strategy="zero3", mp_policy=policy, activation_checkpointing=recompute)
    workload = Workload(
        seq_len=1 if is_image else 256,
        decoder_seq_len=None if is_image else 128,
        global_batch=8 * WORLD,
        micro_batch=8,
        recompute=recompute,
    )
    shape = sw.ModelShape.from_config(config.to_dict())
    check_peak(lambda: kind(copy.deepcopy(config)), shape, plan, workload, batch)


class Adapted(nn.Module):
    """A frozen linear layer beside a low-rank adapter."""

    def __init__(self, inner: nn.Linear, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, rank, bias=False, device="meta")
        self.up = nn.Linear(rank, inner.out_features, bias=False, device="meta")

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.inner(x_BTD) + self.up(self.down(x_BTD))


def adapted(model: nn.Module, part: str = "") -> nn.Module:
    """A model in bf16 that trains only adapters of rank 8, at linear layers of blocks with ``part`` in their names."""
    model = model.requires_grad_(requires_grad=False).to(torch.bfloat16)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    for name in linear:
        if part in name:
            model.set_submodule(name, Adapted(model.get_submodule(name), 8))
    return model


@pytest.mark.parametrize(
    ("overrides", "strategy", "form", "recompute"),
    [
        (FEW_WORDS, "zero3", "none", "none"),
        (FEW_WORDS, "zero3", "none", "selective"),
        (MODEL, "zero3", "int8", "none"),
        (FEW_WORDS, "zero1", "int8", "none"),
    ],
)
def test_the_peak_with_adapters_beside_frozen_layers_is_that_of_the_dry_run(overrides, strategy, form, recompute):
    config = sw.models.gpt("gpt-tiny", device="meta", **overrides).config
    policy = sw.PrecisionPolicy(param_dtype="bf16")
    plan = sw.ParallelPlan(
        strategy=strategy,
        dp_shard=WORLD,
        mp_policy=policy,
        quantize_frozen=form,
        activation_checkpointing=recompute,
    )
    tokens_BT = torch.empty(4, config.seq_len, dtype=torch.int64, device="meta")
    length, samples = config.seq_len, 4 * WORLD
    check_peak(
        lambda: adapted(sw.models.gpt(config, device="meta")),
        sw.ModelShape.from_config(config),
        plan,
        Workload(seq_len=length, global_batch=samples, micro_batch=4, lora_rank=8, recompute=recompute),
        (tokens_BT, tokens_BT),
    )


@pytest.mark.parametrize(
    ("family", "sizes", "options"),
    [
        ("qwen3_moe", {**MIXTURE, "moe_intermediate_size": 256}, {"strategy": "ddp"}),
        ("mixtral", MIXTURE, {"strategy": "ddp", "quantize_frozen": "int8"}),  # stacks are not quantized
        ("mixtral", MIXTURE, {"strategy": "zero3", "ep": 8}),  # whose ranks have all of their experts
        ("qwen2_moe", SHARED, {"strategy": "zero3"}),
        ("deepseek_v3", LATENT, {"strategy": "zero3"}),
        ("gpt_oss", {**MIXTURE, "num_attention_heads": 32, "vocab_size": 64}, {**SPLIT, **ALL}),  # gradients of scores
    ],
)
def test_a_frozen_mixture_with_adapters_of_attention_saves_no_inputs_of_other_layers(family, sizes, options):
    config = transformers.CONFIG_MAPPING[family](**{**HF, "vocab_size": 2048, **sizes})
    tokens = torch.empty(4, 512, dtype=torch.int64, device="meta")
    plan = sw.ParallelPlan(mp_policy=sw.PrecisionPolicy(param_dtype="bf16"), **options)
    samples = 4 * plan.mesh(WORLD).data_parallel_size * options.get("pipeline", {}).get("num_microbatches", 1)
    recompute = options.get("activation_checkpointing", "none")
    check_peak(
        lambda: adapted(transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config)), "self_attn"),
        sw.ModelShape.from_config(config.to_dict()),
        plan,
        Workload(seq_len=512, global_batch=samples, micro_batch=4, lora_rank=8, recompute=recompute),
        {"input_ids": tokens, "labels": tokens},
    )
