"""What one traced step says, beside the arithmetic of the same model, and beside what autograd really holds."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.cost.hardware import find_gpu
from shardwise.cost.kernels import product_seconds
from shardwise.cost.software import PYTORCH
from shardwise.cost.unit import Product, UnitWork
from shardwise.cost.work import model_work
from shardwise.measure.storage import StorageCount
from shardwise.parallel.pipeline.batch import forward_loss
from shardwise.planner import Cluster, Workload, estimate
from shardwise.planner.explain import why
from shardwise.planner.memory import memory_on
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.shape import FAMILIES

PLAIN = sw.ParallelPlan(strategy="ddp")


def workload(**changes: Any) -> Workload:
    return Workload(**{"seq_len": 32, "global_batch": 2, "micro_batch": 2, **changes})


def flops(units: tuple[UnitWork, ...]) -> float:
    return sum(unit.count * unit.flops for unit in units)


def in_blocks(units: tuple[UnitWork, ...], field: str) -> float:
    return sum(unit.count * getattr(unit, field) for unit in units if unit.name.startswith("block"))


def traced(family: str) -> tuple[sw.TracedModel, sw.ModelShape]:
    pytest.importorskip("transformers")
    from tests.common.shapes import example_batch, on_meta, small_config

    model, config = on_meta(small_config(family))
    return sw.trace_model(model, example_batch(family)), sw.ModelShape.from_config(config)


#: By how much the bytes that arithmetic says are kept may differ from those that autograd keeps; else 1 in 1,000. T5's
#: first blocks compute the table of positions, which the next ones get; mixtures keep indices in several dtypes; at 64
#: wide such things count.
NEARLY = {
    "t5": 0.03,
    "bert": 0.05,
    "glm4": 0.01,
    "gemma": 0.005,
    "gemma2": 0.015,
    "gemma3_text": 0.005,
} | dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"), 0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_of_a_real_model_says_what_arithmetic_says(family: str) -> None:
    found, shape = traced(family)
    assert found.num_parameters == shape.num_parameters
    counted, computed = (model_work(each, PLAIN, workload()) for each in (found, shape))
    assert flops(counted) == flops(computed)
    within = NEARLY.get(family, 1e-3)
    for field in ("saved_bytes", "selective_bytes"):
        assert in_blocks(computed, field) == pytest.approx(in_blocks(counted, field), rel=within), field
    for field in ("forward_bytes", "backward_bytes", "num_kernels"):
        assert in_blocks(computed, field) == pytest.approx(in_blocks(counted, field), rel=0.3), field


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.1}, {"tied": False, "bias": False}], ids=str)
def test_a_trace_of_our_gpt_says_what_arithmetic_says(precision: str, changes: dict[str, Any]) -> None:
    model = sw.models.gpt("gpt-tiny", device="meta", **changes)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    found, shape = sw.trace_model(model, (tokens, tokens)), sw.ModelShape.from_config(model.config)
    counted, computed = (model_work(each, PLAIN, workload(precision=precision)) for each in (found, shape))
    assert [(unit.name, unit.count, unit.num_parameters, unit.flops) for unit in counted] == [
        (unit.name, unit.count, unit.num_parameters, unit.flops) for unit in computed
    ]
    block, arithmetic = counted[1], computed[1]
    for field in ("saved_bytes", "selective_bytes", "forward_bytes", "backward_bytes"):
        assert getattr(arithmetic, field) == pytest.approx(getattr(block, field), rel=0.02), field
    assert block.num_kernels == arithmetic.num_kernels


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_are_what_autograd_holds_between_forward_and_backward(dtype: torch.dtype) -> None:
    from shardwise.measure.meta import FusedAttention

    model = sw.models.gpt("gpt-tiny", device="meta", dropout=0.1)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    found = sw.trace_model(model, (tokens, tokens))
    saved = sum(unit.count * unit.saved_bytes for unit in (found.wide if dtype is torch.float32 else found.narrow))
    model = model.to(dtype)
    count = StorageCount("meta")
    with torch.device("meta"), count, FusedAttention(is_cuda=True):
        for tensor in [*model.parameters(), *model.buffers(), batch := tokens.to("meta")]:
            count.see(tensor)
        gc.collect()
        before = count.live_bytes
        loss = forward_loss(model, (batch, batch))
        live = count.live_bytes - before - loss.untyped_storage().nbytes()
    count.forget()
    assert saved == pytest.approx(live, rel=2e-3)


def test_recomputed_blocks_keep_their_inputs_and_autograd_agrees() -> None:
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    plain = sw.trace_model(sw.models.gpt("gpt-tiny", device="meta"), (tokens, tokens)).narrow[1]
    recomputed = sw.models.gpt("gpt-tiny", device="meta", activation_checkpointing=True)
    checked = sw.trace_model(recomputed, (tokens, tokens)).narrow
    assert plain.kept_bytes("full") == plain.input_bytes == plain.stream_bytes == 2 * 2 * 32 * 64
    assert plain.kept_bytes("full") < plain.kept_bytes("selective") < plain.kept_bytes("none")
    assert (
        sum(unit.count * unit.saved_bytes for unit in checked[1:-1]) == 0
    )  # what checkpoint keeps is the unit's input


def test_the_module_is_afterwards_what_it_was() -> None:
    model = sw.models.gpt("gpt-nano", dropout=0.1).eval()
    before = {name: (id(p), p.device.type, p.grad) for name, p in model.named_parameters()}
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    sw.trace_model(model, (tokens, tokens))
    assert {name: (id(p), p.device.type, p.grad) for name, p in model.named_parameters()} == before
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.isfinite(model(tokens, tokens))


class Pictures(nn.Module):
    """Convolutions, which have no units and no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, groups=4)
        self.out = nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.out(self.second(torch.relu(self.first(images))).mean((2, 3)))


def test_convolutions_are_counted_as_products() -> None:
    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, batch[1])

    model = Pictures()
    images, labels = torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.int64)
    found = sw.trace_model(_Pair(model), (images, labels), loss)
    first = 2 * 4 * 16 * 16 * 27 * 8
    second = 2 * 4 * 7 * 7 * (2 * 9) * 16
    assert flops(found.wide) == first + second + 2 * 4 * 16 * 5
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    assert found.seq_len == 0


class _Pair(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
        return self.model(images)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.relu(self.a(x)))


def _stem(blocks: int) -> nn.Module:
    """Convolutions before the first unit, at the full size of the images; without blocks all of the model."""
    stem = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=4), nn.ReLU())
    ends = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(*stem, *(_Residual() for _ in range(blocks)), *ends)


class _CrossEntropy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device))


def _wide_head() -> nn.Module:
    """Layers below a head whose logits are most of the memory."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8192), _CrossEntropy())


def _layers() -> nn.Module:
    """Layers one after another, of which none is a unit."""
    return nn.Sequential(*(each for _ in range(8) for each in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 1))


def _wide_layers() -> nn.Module:
    """Blocks inside which tensors are eight times as large as between them."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 256, dropout=0.0, batch_first=True) for _ in range(8)))


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4000, 64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: len(x)]


@pytest.mark.parametrize(
    ("build", "shape", "recompute"),
    [
        (_layers, (512, 64), "none"),
        (lambda: nn.Sequential(_Table(), *_layers()), (512, 64), "none"),
        (_wide_head, (4096, 64), "none"),
        (lambda: _stem(0), (8, 3, 64, 64), "none"),
        (lambda: _stem(3), (8, 3, 64, 64), "none"),
        (lambda: _stem(3), (8, 3, 64, 64), "full"),
        (_wide_layers, (16, 64, 32), "none"),
    ],
)
def test_the_peak_of_a_model_that_is_not_all_blocks_is_that_of_a_dry_run(
    build: Callable[[], nn.Module], shape: tuple[int, ...], recompute: str
) -> None:
    batch, plan = torch.zeros(shape), sw.ParallelPlan(dp_shard=2, activation_checkpointing=recompute)
    how: dict[str, Any] = {"loss_fn": lambda output, _: output.square().mean(), "forward": lambda model, x: model(x)}
    found = sw.trace_model(build().to("meta"), batch, **how)
    each = {"micro_batch": len(batch), "global_batch": 2 * len(batch), "recompute": recompute}
    planned = memory_on("cpu", found, plan, Workload(seq_len=1, precision="fp32", **each))
    run = sw.dry_run(build, plan, world_size=2, batch=batch, backend="gloo", optimizer="adamw", **how)
    assert planned.allocated_bytes == pytest.approx(sum(run.bytes_by_category.values()), rel=0.03)


def test_buffers_that_a_plan_casts_are_counted_as_cast() -> None:
    def build() -> nn.Module:
        return nn.Sequential(_Table(), nn.Linear(64, 64), nn.BatchNorm1d(64))

    batch = torch.zeros(8, 64)
    how: dict[str, Any] = {"loss_fn": lambda output, _: output.float().mean(), "forward": lambda model, x: model(x)}
    for dtype, table in ((None, 4000 * 64 * 4), ("bf16", 4000 * 64 * 2)):
        plan = sw.ParallelPlan(dp_shard=2, mp_policy=sw.PrecisionPolicy(buffer_dtype=dtype))
        run = sw.dry_run(build, plan, world_size=2, batch=batch, **how)
        found = sw.trace_model(build(), batch, **how)
        planned = memory_on("cpu", found, plan, Workload(seq_len=1, micro_batch=8, global_batch=16))
        statistics = 2 * 64 * 4 + 8
        assert run.bytes_by_category["buffers"] == planned.by_category["buffers"] == table + statistics


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 64, "pad_token_id": 0}
T5 = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "vocab_size": 64, "decoder_start_token_id": 0}
DEBERTA = {**SIZES, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}


@pytest.mark.parametrize(
    ("family", "sizes", "recompute", "is_hidden"),
    [
        ("t5", T5, "none", True),  # every layer adds the mask to its bias
        ("t5", T5, "none", False),
        ("bert", SIZES, "selective", True),  # attention drops, and is computed again
        ("deberta-v2", DEBERTA, "selective", True),  # its scores are thin products, and computed again
    ],
)
def test_a_layer_of_a_padded_batch_keeps_the_bytes_of_a_dry_run(
    family: str, sizes: dict[str, Any], recompute: str, *, is_hidden: bool
) -> None:
    tokens = torch.ones(4, 256, dtype=torch.int64)
    mask = tokens.clone()
    mask[0, 200:] = not is_hidden
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
    plan = sw.ParallelPlan(dp_shard=8, mp_policy="bf16", activation_checkpointing=recompute)
    planned, run = [], []
    for layers in (4, 8):
        config = transformers.CONFIG_MAPPING[family](**sizes, num_hidden_layers=layers, num_layers=layers)
        kind = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForMaskedLM
        build = functools.partial(kind.from_config, config)
        job = Workload(seq_len=256, global_batch=32, micro_batch=4, recompute=recompute)
        planned.append(memory_on("cuda", sw.trace_model(build().to("meta"), batch), plan, job).allocated_bytes)
        run.append(sw.dry_run(build, plan, world_size=8, batch=batch, backend="nccl").peak_bytes)
    assert planned[1] - planned[0] == pytest.approx(run[1] - run[0], rel=0.01)


def test_frozen_weights_have_no_product_for_their_gradient_and_are_not_trained() -> None:
    model = sw.models.gpt("gpt-nano", device="meta")
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(requires_grad=False)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    frozen, trained = sw.trace_model(model, (tokens, tokens)).narrow[1:3]
    assert (frozen.count, frozen.num_trained) == (1, 0)
    assert (trained.count, trained.num_trained) == (4, trained.num_parameters)
    assert sum(p.backward_flops for p in frozen.products) == sum(p.flops for p in frozen.products)
    assert sum(p.backward_flops for p in trained.products) == 2 * sum(p.flops for p in trained.products)


def test_an_estimate_takes_a_trace_in_place_of_a_shape_and_scales_it_to_the_microbatch() -> None:
    model = sw.models.gpt("gpt-tiny", device="meta")
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    found, shape = sw.trace_model(model, (tokens, tokens)), sw.ModelShape.from_config(model.config)
    job = workload(micro_batch=6, global_batch=48)
    for counted, computed in zip(model_work(found, PLAIN, job), model_work(shape, PLAIN, job), strict=True):
        assert counted.flops == computed.flops
        if counted.name == "block0":
            assert computed.saved_bytes == pytest.approx(counted.saved_bytes, rel=1e-3)
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=8)
    made = estimate(found, sw.ParallelPlan(strategy="zero3"), cluster, job)
    assert made.memory.allocated_bytes > 0
    assert made.step_time_s > 0


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ({"tp": 2}, {}, ["GPT was traced whole", "tp=2", "Set tp=1", "sw.dry_run"]),
        ({"pp": 2}, {}, ["pp=2", "ModelShape"]),
        ({}, {"lora_rank": 8}, ["lora_rank=8", "with its adapters"]),
        ({}, {"seq_len": 64}, ["sequences of 32 tokens", "seq_len=64", "Set seq_len=32"]),
    ],
)
def test_what_a_trace_does_not_tell_is_refused(plan: dict[str, Any], changes: dict[str, Any], words: list[str]) -> None:
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    found = sw.trace_model(sw.models.gpt("gpt-tiny", device="meta"), (tokens, tokens))
    with pytest.raises(PlanError) as error:
        model_work(found, sw.ParallelPlan(**plan), workload(**changes))
    for word in words:
        assert word in str(error.value)


class Branching(nn.Linear):
    """Reads a value in its forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        output = super().forward(input).sum()
        return output if output > 0 else -output


def test_a_module_that_needs_values_and_a_batch_without_samples_are_refused() -> None:
    with pytest.raises(StateError, match=r"cannot run without values.*test_trace_model.py:\d+: .*\n.*read no tensor's"):
        sw.trace_model(Branching(4, 4), torch.zeros(2, 4))
    with pytest.raises(StateError, match="has no samples"):
        sw.trace_model(nn.Linear(4, 4), {})
    with pytest.raises(StateError, match="scalar loss was expected"):
        sw.trace_model(nn.Linear(4, 4), torch.zeros(2, 4))


def test_an_odd_width_of_a_traced_layer_is_named_with_the_time_of_the_next_multiple() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 50_257), nn.Linear(50_257, 1024))
    found = sw.trace_model(model, torch.empty(4096, 1024, device="meta"), lambda out, _: out.sum())
    work = workload(seq_len=1, global_batch=4096, micro_batch=4096)
    made = estimate(found, PLAIN, Cluster(gpu="H100-80GB-SXM", num_gpus=1), work)
    (text,) = (text for text in why(made) if "not a multiple of 64" in text)
    assert text.startswith("A layer's width of 50,257 is not a multiple of 64")
    width, padded = found.padded(64)
    assert width == 50_257
    assert sorted({size for unit in padded.narrow for p in unit.products for size in (p.inner, p.columns)}) == [
        1024,
        50_304,
    ]


def test_the_width_that_is_named_is_the_one_whose_padding_was_estimated() -> None:
    """A convolution's field follows from its channels, and classes cost little."""
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=1)

    def loss_and_names(model: nn.Module, batch: torch.Tensor) -> tuple[float, list[str]]:
        found = sw.trace_model(model, batch, lambda out, _: out.sum())
        work = workload(seq_len=1, global_batch=len(batch), micro_batch=len(batch))
        made = estimate(found, PLAIN, cluster, work)
        return made.step_time_s, [text for text in why(made) if "not a multiple of 64" in text]

    def wide(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(768, 2001), nn.Linear(2001, width), nn.Linear(width, 3000))

    with torch.device("meta"):
        image = torch.empty(256, 3, 224, 224)
        images = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1000))
        rows = torch.empty(1 << 14, 768)
        (_, no_images), (_, (text,)), (padded_s, _) = (
            loss_and_names(images, image),
            loss_and_names(wide(1001), rows),
            loss_and_names(wide(1024), rows),
        )
    assert no_images == []
    assert text.startswith("A layer's width of 1,001 is not a multiple of 64")
    assert f"with 1,024 a step would take {1e3 * padded_s:.3g} ms." in text
    assert "model.vocab_size" not in text


def test_convolutions_in_fp32_use_tf32_where_the_gpu_has_it() -> None:
    def speed(gpu: str) -> float:
        """How many times as fast as a matrix product of the same sizes."""
        one, other = (Product(1 << 16, 576, 4096, is_convolution=is_one) for is_one in (True, False))
        fast, slow = (sum(product_seconds(each, find_gpu(gpu), PYTORCH, "fp32")) for each in (one, other))
        return slow / fast

    assert speed("A100-80GB-SXM") == pytest.approx(156 / 19.5, rel=0.02)
    assert speed("V100-32GB-SXM2") == speed("MI300X") == 1


def test_a_convolution_s_field_is_not_aligned_as_the_rows_of_a_matrix() -> None:
    h100 = find_gpu("H100-80GB-SXM")
    field, matrix = (Product(1 << 16, 147, 4096, is_convolution=is_one) for is_one in (True, False))
    slow, slower = (sum(product_seconds(each, h100, PYTORCH, "bf16")) for each in (field, matrix))
    assert slower / slow == pytest.approx(0.5 / 0.17, rel=0.01)


@pytest.mark.parametrize("way", ["traced", "dry", "deferred"])
def test_no_cache_keeps_tensors_without_values(way: str) -> None:
    positions = functools.lru_cache(torch.arange)
    tables = functools.cache(lambda count: (torch.arange(count).flip(0),))

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("order", positions(4), persistent=False)
            self.signs: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.signs is None:
                self.signs = torch.ones(4)
            return ((self.layer(x) * self.signs)[:, positions(4)][:, tables(4)[0]][:, self.order]).square().mean()

    model, x = Remembers().eval(), torch.ones(2, 4)
    positions.cache_clear()
    if way == "traced":
        sw.trace_model(model, x)
        assert not model.training
    elif way == "dry":
        with pytest.raises(StateError, match="cpu is not on the expected device meta"):
            sw.dry_run(Remembers, world_size=2, batch=x)
    else:
        sw.deferred_init(Remembers)
    assert positions(4).tolist() == [0, 1, 2, 3]
    assert tables(4)[0].tolist() == [3, 2, 1, 0]
    assert model(x).item() == pytest.approx(model.layer(x).square().mean().item())


class SwitchesOff(nn.Linear):
    """Computes a part in full precision, under the device type of its input, as tables of positions are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device_type=x.device.type, enabled=False):
            return super().forward(x.cos())


def test_a_model_that_switches_autocast_off_is_traced_and_one_that_switches_it_on_is_refused() -> None:
    trace = functools.partial(sw.trace_model, example_batch=torch.ones(2, 4), loss_fn=lambda output, _: output.sum())
    assert trace(SwitchesOff(4, 4)).num_parameters == 20

    class SwitchesOn(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(x.device.type, torch.bfloat16):
                return super().forward(x)

    with pytest.raises(StateError, match="SwitchesOn cannot run without values"):
        trace(SwitchesOn(4, 4))
