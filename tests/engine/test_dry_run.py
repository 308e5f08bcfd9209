"""A dry run says what a real run sends and holds, event by event and byte by byte."""

from __future__ import annotations

import cProfile
import functools
import json
import pstats
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import distributed, nn

import shardwise as sw
from shardwise.cli import main
from shardwise.spec.errors import MeshError
from shardwise.testing import StorageCount, probe, run_on_ranks
from tests.common import models
from tests.common.oracle import PRESETS, descend

NAMES = ("gpt", "tied", "frozen")
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp", "hybrid_shard_grad_op")
BF16 = sw.PrecisionPolicy(param_dtype="bf16")


def plan_of(preset: str, policy: sw.PrecisionPolicy | None = None) -> sw.ParallelPlan:
    return sw.ParallelPlan(strategy=preset, mp_policy=policy)


#: What is allocated and freed in a step.
IN_A_STEP = ("gathered", "gradients", "reduce")


def as_rows(events: list) -> list[tuple]:
    return [(event.kind, event.axis, event.unit, event.dtype, event.sent_bytes) for event in events]


def real_step(name: str, plan: sw.ParallelPlan, num_microbatches: int = 1) -> tuple[list, dict[str, int]]:
    """The events of the third step, and the closed form's bytes: the most of each category."""
    model = sw.parallelize(models.build(name), plan)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        with sw.record_collectives(model) as events:
            for index in range(num_microbatches):
                with sw.gradient_sync(model, index == num_microbatches - 1):
                    model(*models.batch(step, index, distributed.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return as_rows(events), probe(model).predicted_bytes()


def every_real_step() -> dict:
    found = {(name, preset, None): real_step(name, plan_of(preset)) for name in NAMES for preset in PRESETS}
    return found | {("gpt", "zero3", "bf16"): real_step("gpt", plan_of("zero3", BF16))}


def check_bytes(dry: sw.DryRun, most: dict[str, int], case: object) -> None:
    """What a dry run holds beside activations. A category may not be at its most at the peak of all together."""
    found = {name: size for name, size in dry.bytes_by_category.items() if name not in {"activations", "buffers"}}
    assert found.keys() == most.keys()
    for category, size in found.items():
        assert 0 <= size <= most[category] if category in IN_A_STEP else size == most[category], (case, category)


def check_dry(name: str, plan: sw.ParallelPlan, world: int, rank: int, *, real: tuple, count: int = 1) -> None:
    """A dry run has the events and the bytes of a real step."""
    events, measured = real
    dry = sw.dry_run(
        lambda: models.build(name),
        plan,
        world_size=world,
        rank=rank,
        batch=models.batch(0, 0, rank),
        backend="gloo",
        num_microbatches=count,
    )
    assert as_rows(dry.events) == events, (name, plan, rank)
    assert dry.bytes_by_category["activations"] > 0
    check_bytes(dry, measured, (name, plan, rank))
    assert dry.peak_bytes == sum(dry.bytes_by_category.values())


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.long) for world in (3, 4))])
def test_events_and_bytes_are_those_of_a_real_run(world):
    ranks = run_on_ranks(every_real_step, world, timeout_s=150)
    for place, (name, preset, policy) in enumerate(ranks[0]):
        for rank in range(world) if name == "gpt" else (place % world,):
            plan = plan_of(preset, BF16 if policy else None)
            check_dry(name, plan, world, rank, real=ranks[rank][name, preset, policy])


#: Plans on two axes and with inner groups, of one microbatch; plans of three.
GROUPED = (
    sw.ParallelPlan(strategy="hsdp", dp_replicate=2),
    sw.ParallelPlan(strategy="hsdp", dp_replicate=2, mp_policy=BF16),
    sw.ParallelPlan(strategy="zero1", dp_replicate=2),
    sw.ParallelPlan(strategy="zero3", reshard_after_forward=2),
)
ACCUMULATED = (
    sw.ParallelPlan(strategy="zero3", accumulation="unsharded"),
    sw.ParallelPlan(strategy="ddp", accumulation="sharded"),
    sw.ParallelPlan(strategy="zero1"),
    sw.ParallelPlan(strategy="zero2", dp_replicate=2, accumulation="defer_replicate", mp_policy=BF16),
    sw.ParallelPlan(strategy="zero3", dp_replicate=2, gradient_buffers=3),
)


def real_steps(plans: tuple[sw.ParallelPlan, ...], num_microbatches: int) -> list:
    return [real_step("gpt", plan, num_microbatches) for plan in plans]


@pytest.mark.parametrize(("world", "plans", "count"), [(4, GROUPED, 1), (2, ACCUMULATED, 3)], ids=["grouped", "added"])
def test_two_axes_inner_groups_and_microbatches_run_dry_as_they_run(world, plans, count):
    for rank, results in enumerate(run_on_ranks(real_steps, world, plans, count)):
        for plan, real in zip(plans, results, strict=True):
            check_dry("gpt", plan, world, rank, real=real, count=count)


@pytest.mark.parametrize(("offload", "category"), [("none", "average"), ("cpu", "host")])
def test_an_average_takes_a_shard_in_single_precision(offload, category):
    def measured(*, has_average: bool) -> dict[str, int]:
        plan = sw.ParallelPlan(strategy="zero3", offload_policy=offload)
        return sw.dry_run(build_wide, plan, world_size=4, has_average=has_average).bytes_by_category

    without, found = measured(has_average=False), measured(has_average=True)
    count = sum(parameter.numel() for parameter in build_wide().parameters())
    assert found.pop(category) - without.pop(category, 0) == pytest.approx(count, rel=0.02)  # 4 bytes, 4 ranks
    assert {name: n for name, n in found.items() if n} == {name: n for name, n in without.items() if n}


def test_a_group_of_hybrid_sharding_is_a_machine_by_default():
    def build():
        return models.build("gpt")

    dry = sw.dry_run(
        build,
        sw.ParallelPlan(strategy="hsdp"),
        world_size=64,
        rank=9,
        batch=models.batch(0, 0, 0),
        backend="nccl",
        ranks_per_machine=8,
    )
    assert set(dry.traffic) == {"all_gather", "reduce_scatter", "all_reduce on dp_replicate"}
    with pytest.raises(MeshError, match="how many of the 64 ranks share one is not known"):
        sw.dry_run(build, sw.ParallelPlan(strategy="hsdp"), world_size=64, batch=models.batch(0, 0, 0))


# -- activations


def build_wide() -> nn.Module:
    return sw.models.gpt("gpt-tiny", num_layers=4, hidden=128, num_heads=4, vocab_size=512, seq_len=128)


def wide_batch(seq_len: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    tokens_BT = torch.zeros(2, seq_len, dtype=torch.int64)
    return tokens_BT, tokens_BT.clone()


def measured_peaks(plans: list[sw.ParallelPlan], seq_len: int) -> list[int]:
    return [measured_peak(plan, build_wide, lambda model: model(*wide_batch(seq_len))) for plan in plans]


def measured_peak(
    plan: sw.ParallelPlan, build: Callable[[], nn.Module], loss: Callable[[nn.Module], torch.Tensor]
) -> int:
    """The most bytes of tensors in the third step, found from outside."""
    count = StorageCount("cpu")
    count.see_all_objects()
    others = count.live_bytes
    count.forget()
    model = sw.parallelize(build(), plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    descend(optimizer, (loss(model) for _ in range(2)))
    with StorageCount("cpu") as count:
        count.see_all_objects()
        loss(model).backward()
        optimizer.step()
    count.forget()
    return count.peak_bytes - others


@pytest.mark.parametrize(("world", "seq_len"), [(1, 128), (2, 128), (2, 4), (4, 128)])
def test_the_peak_is_that_of_a_real_run(world, seq_len):
    """With 128 tokens activations are a large part; with four, gradients that wait for their unit are the peak."""
    plans = [sw.ParallelPlan(strategy=preset) for preset in PRESETS]
    dry = [sw.dry_run(build_wide, p, world_size=world, batch=wide_batch(seq_len), backend="gloo") for p in plans]
    for measured in run_on_ranks(measured_peaks, world, plans, seq_len):
        for preset, run, peak in zip(PRESETS, dry, measured, strict=True):
            assert run.peak_bytes == pytest.approx(peak, rel=0.02), preset
    if seq_len == 128:
        assert all(run.bytes_by_category["activations"] > run.peak_bytes / 5 for run in dry)


def build_table() -> nn.Module:
    return nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 4))


def peaks_of_table(plans: list[sw.ParallelPlan]) -> list[int]:
    ids = torch.arange(8)
    return [measured_peak(plan, build_table, lambda model: model(ids).sum()) for plan in plans]


def test_the_peak_may_be_in_the_update():
    """AdamW has two temporary tensors for each parameter on a CPU, which is more than a model without layers saves."""
    plans = [sw.ParallelPlan(strategy=preset) for preset in ("ddp", "zero1")]
    batch = torch.arange(8)
    options = {"world_size": 2, "batch": batch, "forward": lambda model, ids: model(ids).sum()}
    dry, fused = ([sw.dry_run(build_table, p, backend=b, **options) for p in plans] for b in ("gloo", "nccl"))
    assert [run.peak_bytes for run in dry] == pytest.approx(run_on_ranks(peaks_of_table, 2, plans)[0], rel=1e-3)
    table = 20_000 * 16 * 4
    assert dry[0].bytes_by_category["activations"] == pytest.approx(2 * table, rel=0.01)
    assert fused[0].bytes_by_category["activations"] == pytest.approx(table, rel=0.01)  # the gradient that is collected


def build_llama(*, has_adapter: bool) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=500, num_hidden_layers=4, use_cache=False, **sizes)
    model = transformers.LlamaForCausalLM(config)
    if not has_adapter:
        return model
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))


def llama_batch(mask: str) -> dict[str, torch.Tensor]:
    ids = torch.ones(2, 96, dtype=torch.int64)
    masks = {"of ones": torch.ones_like(ids), "of padding": torch.ones_like(ids).index_fill(1, torch.arange(24), 0)}
    return {"input_ids": ids, "labels": ids} | ({} if mask == "none" else {"attention_mask": masks[mask]})


LLAMA = [(False, "none"), (True, "none"), (True, "of ones"), (False, "of padding")]


def peaks_of_llama() -> list[int]:
    found = []
    for has_adapter, mask in LLAMA:
        batch = llama_batch(mask)
        build = functools.partial(build_llama, has_adapter=has_adapter)
        found.append(measured_peak(sw.ParallelPlan(), build, lambda model, batch=batch: model(**batch).loss))
    return found


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers
@pytest.mark.preload("transformers.models.llama.modeling_llama", "peft")
def test_a_model_of_transformers_runs_without_values_as_it_is_called_and_with_adapters():
    """It asks whether sequences are packed, and whether the mask hides tokens: then scores take other memory."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    dry = [
        sw.dry_run(
            functools.partial(build_llama, has_adapter=has_adapter),
            sw.ParallelPlan(),
            world_size=2,
            batch=llama_batch(mask),
            forward=lambda model, batch: model(**batch),
            optimizer=lambda parameters: torch.optim.AdamW([p for p in parameters if p.requires_grad]),
            backend="gloo",
        ).peak_bytes
        for has_adapter, mask in LLAMA
    ]
    for measured in run_on_ranks(peaks_of_llama, 2, timeout_s=120):
        assert measured == pytest.approx(dry, rel=0.02)


def test_a_model_of_transformers_that_looks_for_padding_runs_without_values():
    """GPT-2 with a padding token reads the first and last ids if it gets no mask: nothing was predicted."""
    transformers = pytest.importorskip("transformers")
    ids = torch.ones(2, 16, dtype=torch.int64)
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}

    def build(pad: int | None) -> nn.Module:
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, pad_token_id=pad)
        return transformers.GPT2LMHeadModel(config)

    peaks = [
        sw.dry_run(functools.partial(build, pad), world_size=2, batch={"input_ids": ids, "labels": ids}).peak_bytes
        for pad in (None, 0)
    ]
    assert peaks[0] == peaks[1]


def test_a_category_is_what_it_has_at_the_peak_and_no_more_than_the_most_of_it():
    plan = sw.ParallelPlan()
    at_peak = sw.dry_run(build_wide, plan, world_size=2, batch=wide_batch(), backend="nccl").bytes_by_category
    most = dict(run_on_ranks(most_by_category, 2)[0])
    assert (at_peak["parameters"], at_peak["optimizer"]) == (most["parameters"], most["optimizer"])
    for category in ("gradients", "gathered", "reduce"):
        assert 0 <= at_peak[category] <= most[category]
    assert at_peak["gathered"] > 0


def most_by_category() -> dict[str, int]:
    return probe(sw.parallelize(build_wide())).predicted_bytes()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_on_gpus_more_small_units_travel_together_the_more_ranks_there_are():
    def num_gathers(backend: str, world_size: int) -> int:
        def build() -> nn.Module:
            return nn.Sequential(*(Pair() for _ in range(32)))

        plan = sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class(Pair))
        batch = torch.zeros(1, 512)
        dry = sw.dry_run(build, plan, world_size=world_size, batch=batch, loss_fn=_summed, backend=backend)
        return sum(event.kind == "all_gather" for event in dry.events)

    # Forward gathers each unit, and backward all but the last again.
    assert num_gathers("gloo", 8) == num_gathers("nccl", 2) == 32 + 31
    assert num_gathers("nccl", 4) == 16 + 15
    assert num_gathers("nccl", 64) == 8 + 7


def _summed(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output.sum()


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize(("is_cuda", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_attention_saves_no_matrix_of_scores(mask, is_cuda, dtype):
    from shardwise.measure.meta import FusedAttention

    q, k, v = (torch.empty(2, 4, 256, 16, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    kinds = {"bool": torch.bool, "float": dtype}
    attn_mask = torch.empty(2, 1, 256, 256, dtype=kinds[mask], device="meta") if mask else None
    saved = []
    with FusedAttention(is_cuda=is_cuda):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        output.sum().backward()
    assert q.grad.shape == q.shape
    masks = 2 * 256 * 256 if mask else 0
    assert sum(t.numel() for t in saved) <= 4 * q.numel() + 2 * 4 * 256 + 2 * masks * 4 + 8
    if mask is None:
        assert all(t.numel() <= q.numel() for t in saved)


@pytest.mark.parametrize(("is_cuda", "num_scores"), [(True, 0), (False, 2 * 4 * 256 * 256)])
def test_attention_with_values_narrower_than_keys_saves_scores_on_a_cpu_only(is_cuda, num_scores):
    from shardwise.measure.meta import FusedAttention

    q, k, v = (
        torch.empty(2, 4, 256, width, dtype=torch.bfloat16, device="meta", requires_grad=True) for width in (24, 24, 16)
    )
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t)
    with FusedAttention(is_cuda=is_cuda), hooks:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert max(t.numel() for t in saved) == max(q.numel(), num_scores)


@pytest.mark.parametrize(
    ("is_cuda", "dtype", "mask"),
    [
        (False, torch.float32, None),
        (False, torch.float32, "float"),
        (False, torch.bfloat16, "float"),
        (True, torch.bfloat16, None),  # flash attention takes no mask, the memory-efficient kernel no grouped queries
    ],
)
def test_grouped_queries_save_neither_scores_nor_repeated_keys(is_cuda, dtype, mask):
    from shardwise.measure.meta import FusedAttention

    def saved_bytes(device):
        heads = {"q": 8, "k": 2, "v": 2}
        q, k, v = (torch.empty(1, n, 256, 16, dtype=dtype, device=device, requires_grad=True) for n in heads.values())
        attn_mask = torch.zeros(1, 1, 256, 256, dtype=dtype, device=device) if mask else None
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)
        output.sum().backward()
        assert (q.grad.shape, k.grad.shape, v.grad.shape) == (q.shape, k.shape, v.shape)
        return sum(t.numel() * t.itemsize for t in saved)

    with FusedAttention(is_cuda=is_cuda):
        found = saved_bytes("meta")
    if is_cuda:
        assert found < 2 * (2 * 8 + 2 * 2) * 256 * 16 + 4 * 8 * 256 + 100
    else:
        assert found == saved_bytes("cpu")  # what the real kernel saves


@pytest.mark.parametrize("masked", [False, True])
def test_torchs_multihead_attention_saves_on_meta_what_it_saves_on_the_device(masked):
    from shardwise.measure.meta import FusedAttention

    def saved_bytes(device):
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device)
        x = torch.zeros(2, 128, 32, device=device, requires_grad=True)
        hidden = torch.zeros(2, 128, dtype=torch.bool, device=device) if masked else None
        saved = {}
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.setdefault(id(t.untyped_storage()), t), t)[1], lambda t: t
        )
        with hooks:
            layer(x, src_key_padding_mask=hidden).sum().backward()
        return sum(
            t.untyped_storage().nbytes() for t in {t.untyped_storage()._cdata: t for t in saved.values()}.values()
        )

    with FusedAttention(is_cuda=False):
        found = saved_bytes("meta")
    assert found == saved_bytes("cpu")
    with FusedAttention(is_cuda=True):
        assert saved_bytes("meta") < 1.1 * found


# -- any model, any world


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)))

    def forward(self, x):
        return self.body(x).pow(2).mean()


def test_the_model_is_as_large_as_the_real_one_and_nothing_is_allocated():
    dry = sw.dry_run(Lookup, sw.ParallelPlan(dp_shard=64), world_size=64, rank=63, batch=torch.zeros(3, 8))
    assert dry.num_parameters == 5 * 72
    assert (dry.rank, dry.world_size) == (63, 64)
    assert [event.unit for event in dry.events if event.kind == "reduce_scatter"]


def test_a_model_that_was_built_on_the_cpu_keeps_its_ties():
    tied = sw.models.gpt("gpt-nano", device="cpu", tied=True)
    count = sum(parameter.numel() for parameter in tied.parameters())
    dry = sw.dry_run(lambda: sw.models.gpt("gpt-nano", device="cpu", tied=True), world_size=2)
    assert dry.num_parameters == count


class Reads(Lookup):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 2}, sw.PlanError, "got no batch for a Lookup"),
        ({"world_size": 0, "batch": torch.zeros(1, 8)}, sw.MeshError, "the world has 0 ranks"),
        ({"world_size": 2, "rank": 2, "batch": torch.zeros(1, 8)}, sw.MeshError, "rank 2 is outside the world of 2"),
        ({"world_size": 2, "batch": torch.zeros(1, 8), "optimizer": "adamv"}, sw.PlanError, "optimizer='adamv'"),
        ({"world_size": 2, "batch": torch.zeros(1, 8), "backend": "mpi"}, sw.PlanError, "backend='mpi'"),
        ({"world_size": 2, "batch": torch.zeros(1, 8), "num_microbatches": 0}, sw.PlanError, "num_microbatches=0"),
        (
            {"world_size": 1, "batch": torch.zeros(1, 8), "plan": sw.ParallelPlan(strategy="data_parallel")},
            sw.PlanError,
            "strategy='data_parallel' runs replicas on the devices of one process",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        sw.dry_run(Lookup, **arguments)


def test_a_model_that_reads_values_is_refused_by_name():
    with pytest.raises(sw.StateError, match="Reads cannot run without values"):
        sw.dry_run(Reads, world_size=2, batch=torch.zeros(1, 8))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 8, 8))

    def forward(self, x):
        ends = torch.tensor([2, 4], dtype=torch.int32, device=x.device)
        return torch._grouped_mm(x.to(self.weight.dtype), self.weight, offs=ends).square().mean()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_grouped_products_of_experts_run_without_values_in_every_dtype(dtype):
    plan = sw.ParallelPlan(strategy="zero3", mp_policy=sw.PrecisionPolicy(dtype))
    run = sw.dry_run(Experts, plan, world_size=2, batch=torch.zeros(4, 8))
    assert {event.kind for event in run.events} >= {"all_gather", "reduce_scatter"}


# -- the verb

RUN = """
name: small
model: {preset: gpt-nano}
data: {source: random, seq_len: 16, max_bytes: 4096}
parallel: {strategy: zero3, accumulation: unsharded}
optimizer: {name: sgd, lr: 0.1, momentum: 0}
train: {steps: 2, micro_batch_size: 2, gradient_accumulation_steps: 3, ema_decay: 0.9}
"""


def test_a_configuration_runs_dry_with_its_optimizer_its_microbatches_and_its_average(tmp_path, capsys):
    """No more data is needed than there is: this one has none to speak of for 1,024 ranks."""
    config, report = tmp_path / "run.yaml", tmp_path / "out" / "dry.json"
    config.write_text(RUN)
    arguments = ["dry-run", str(config), "--world-size", "1024", "--json", str(report)]

    def found(*more: str) -> dict:
        assert main([*arguments, *more]) == 0, capsys.readouterr().err
        return json.loads(report.read_text())[0]

    three = found()
    assert three["bytes_by_category"]["optimizer"] == 0  # no momentum, no state
    assert three["bytes_by_category"]["average"] > 0
    one = found("--set", "train.gradient_accumulation_steps=1", "--set", "train.ema_decay=null")
    assert "average" not in one["bytes_by_category"]
    assert three["bytes_by_category"]["reduce"] > 2 * one["bytes_by_category"]["reduce"]
    gathers = [row["traffic"]["all_gather"][0] for row in (one, three)]
    assert gathers[1] == 3 * gathers[0]
    assert three["traffic"]["reduce_scatter"] == one["traffic"]["reduce_scatter"]
    momentum = found("--set", "optimizer.momentum=0.9")["bytes_by_category"]
    assert momentum["optimizer"] > 0
    assert found("--optimizer", "adamw")["bytes_by_category"]["optimizer"] > momentum["optimizer"]


def test_a_folder_s_loss_is_computed_as_the_configuration_says(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=4096, **sizes).save_pretrained(tmp_path / "model")
    config, report = tmp_path / "run.yaml", tmp_path / "dry.json"
    config.write_text(
        f"model: {{hf: {tmp_path / 'model'}}}\ndata: {{source: random, seq_len: 128}}\ntrain: {{micro_batch_size: 1}}\n"
    )

    def activations(*more: str) -> int:
        arguments = ["dry-run", str(config), "--world-size", "2", "--json", str(report)]
        assert main([*arguments, *more]) == 0, capsys.readouterr().err
        return json.loads(report.read_text())[0]["bytes_by_category"]["activations"]

    whole = activations()
    assert activations("--set", "train.chunked_cross_entropy=true") < whole / 2  # no full logits
    assert activations("--micro-batch", "2") > 1.5 * whole


def test_the_bubble_of_a_pipeline_is_given_as_a_part_of_the_step(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {preset: gpt-nano, num_layers: 4}\ndata: {source: random}\n"
        "parallel: {pp: 2}\ntrain: {micro_batch_size: 1, gradient_accumulation_steps: 3}\n"
    )
    assert main(["dry-run", str(config), "--world-size", "2"]) == 0
    assert "pipeline bubble 25.0% of the step" in capsys.readouterr().out  # (p - 1) / (m + p - 1)


def test_sgd_by_name_has_no_momentum(capsys):
    assert main(["dry-run", "gpt-nano", "--world-size", "2", "--strategies", "ddp", "--optimizer", "sgd"]) == 0
    _, header, row = capsys.readouterr().out.splitlines()[:3]
    assert re.split(r"\s{2,}", row)[header.split().index("optimizer")] == "0 B"


def test_a_folder_in_16_bit_has_masters_in_fp32(tmp_path, capsys):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, dtype="bfloat16", **sizes).save_pretrained(tmp_path)
    report = tmp_path / "dry.json"

    def found(*more):
        arguments = ["dry-run", str(tmp_path), "--world-size", "2", "--strategies", "zero3", "--json", str(report)]
        assert main([*arguments, "--seq", "16", *more]) == 0, capsys.readouterr().err
        return json.loads(report.read_text())[0]

    whole = found()
    masters = whole["bytes_by_category"]["parameters"]
    assert masters == pytest.approx(4 * whole["num_parameters"] / 2, rel=0.1)
    assert whole["bytes_by_category"]["optimizer"] == pytest.approx(2 * masters, rel=0.01)
    wide = found("--precision", "fp32")
    assert wide["bytes_by_category"]["parameters"] == pytest.approx(masters, rel=0.05)  # but for padding
    assert wide["traffic"]["all_gather"][1] > 1.9 * whole["traffic"]["all_gather"][1]  # computed in bf16 by default


@pytest.mark.parametrize("option", ["--world-size", "--gpus-per-node", "--micro-batch", "--seq"])
def test_numbers_below_one_are_refused(option, capsys):
    assert main(["dry-run", "gpt-nano", "--world-size", "2", option, "0"]) == 78
    assert f"{option} 0: expected at least 1" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_told_before_anything_is_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    # The model does not exist: had anything been looked at before the file, the code would be another.
    assert main(["dry-run", "no-such-model", "--world-size", "2", "--json", str(tmp_path / "file" / "a.json")]) == 74
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_shows_that_no_order_of_the_ranks_can_deadlock(capsys):
    assert main(["dry-run", "gpt-nano", "--world-size", "4", "--strategies", "zero3,ddp", "--check-order"]) == 0
    printed, flags = capsys.readouterr().out, re.MULTILINE
    assert re.search(
        r"^zero3: no deadlock: \d\d+ collectives and messages of 4 ranks follow one order$", printed, re.MULTILINE
    )
    assert re.search(r"^ddp: no deadlock: \d+ collectives and messages of 4 ranks", printed, flags)


def test_without_a_choice_every_preset_that_fits_the_world_is_run(capsys):
    assert main(["dry-run", "gpt-nano", "--world-size", "12", "--gpus-per-node", "4"]) == 0
    assert [row.split()[0] for row in capsys.readouterr().out.splitlines()[2 : 2 + len(STRATEGIES)]] == [*STRATEGIES]
    assert main(["dry-run", "gpt-nano", "--world-size", "3", "--gpus-per-node", "2"]) == 0
    assert "hsdp is left out: strategy 'hsdp' shards inside a machine" in capsys.readouterr().out


# -- large models

#: Calls of functions for a block, in a dry run of one preset: 76,000 and 33,000 where written; 130,000 and more where
#: every shape is computed anew. kB of memory for all presets of one model together.
MOST_CALLS, MOST_KB = 90_000, 4 * 2**20
LARGE = {"gpt-175b": (128, 175e9, 96), "gpt-1t": (1024, 1008e9, 128)}  # ranks, parameters, blocks
MEASURED = """
import resource, sys
from shardwise.cli import main
code = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(code)
"""


def num_calls(strategy: str, num_layers: int) -> int:
    """Calls of functions, of Python and of C, in a dry run."""
    profile = cProfile.Profile()
    build = functools.partial(sw.models.gpt, "gpt-tiny", num_layers=num_layers)
    profile.runcall(sw.dry_run, build, plan_of(strategy), world_size=8)
    return pstats.Stats(profile).total_calls


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_twice_the_blocks_take_twice_the_calls(strategy):
    num_calls(strategy, 1)  # what is made once
    few, more, most = (num_calls(strategy, num_layers) for num_layers in (4, 8, 16))
    assert most - more < 1.02 * 2 * (more - few)
    assert most - more < 8 * MOST_CALLS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategies"),
    [("gpt-175b", ("zero3",)), *(pytest.param(name, STRATEGIES, marks=pytest.mark.long) for name in LARGE)],
)
def test_large_models_run_dry_in_little_memory(tmp_path, name, strategies):
    world, count, layers = LARGE[name]
    report = tmp_path / "dry.json"
    command = [sys.executable, "-c", MEASURED, "dry-run", name, "--world-size", str(world)]
    command += ["--strategies", ",".join(strategies), "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < MOST_KB
    rows = json.loads(report.read_text())
    assert [row["strategy"] for row in rows] == [*strategies]
    for row in rows:
        assert row["num_parameters"] == pytest.approx(count, rel=0.01)
        assert (row["rank"], row["world_size"]) == (0, world)
        reduced = "all_reduce" if row["strategy"] == "ddp" else "reduce_scatter"
        assert row["traffic"][reduced][0] == layers + 1
        if row["strategy"] == "zero3":
            # every block gathered twice but the last, which backward needs first; the root once
            assert row["traffic"]["all_gather"][0] == 2 * layers - 1 + 1
        if row["strategy"] in {"hsdp", "hybrid_shard_grad_op"}:
            assert row["traffic"]["all_reduce on dp_replicate"][0] == layers + 1


#: The memory of an A100 with 40 GB that torch can use, in bytes.
A100 = 39.4 * 2**30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "tokens", "units", "peak_gb"),
    [
        ("gpt-175b", 20, 512, "Block", 20.1),
        pytest.param("gpt-1t", 4, 2048, "Linear", 39.4, marks=pytest.mark.long),
    ],
)
def test_the_published_configurations_of_fsdp_fit_with_activations_on_the_host(name, rows, tokens, units, peak_gb):
    """128 A100, SGD, 16-bit weights in host memory (pytorch.org, Introducing PyTorch Fully Sharded Data Parallel)."""
    batch = (torch.empty(rows, tokens, dtype=torch.int64), torch.empty(rows, tokens, dtype=torch.int64))
    plan = sw.ParallelPlan(
        auto_wrap_policy=sw.wrap_by_class(units),
        activation_checkpointing=sw.wrap_by_class("Block"),
        offload_policy="cpu",
        offload_activations=True,
    )
    run = sw.dry_run(
        lambda: sw.models.gpt(name).bfloat16(), plan, world_size=128, batch=batch, optimizer="sgd", backend="nccl"
    )
    assert run.peak_bytes / 1e9 == pytest.approx(peak_gb, abs=0.1)
    assert run.peak_bytes < A100
    config = sw.models.PRESETS[name]
    num_inputs = config.num_layers + (units == "Linear")  # the head is a unit then
    weights = 2 * 2 * run.num_parameters / 128  # and gradients
    inputs = 2 * rows * tokens * config.hidden * num_inputs
    assert run.bytes_by_category["host"] == pytest.approx(weights + inputs, rel=0.001)
