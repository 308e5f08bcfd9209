"""Frozen weights in int8 blocks and in 16 bit: parity, bytes, how far the loss is off, state dicts, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import checks, probe, run_on_ranks
from tests.common import casts, models
from tests.common.casts import DTYPES, PRESETS
from tests.common.oracle import descend
from tests.common.ranks import on_ranks, refusal

BLOCK = 128


def through_int8(weight: Tensor) -> Tensor:
    """The plainest way to write what int8 blocks do to a tensor."""
    order = sorted(range(weight.dim()), key=lambda dim: -weight.stride(dim))
    flat = weight.detach().permute(order).reshape(-1)
    read = []
    for block in flat.split(BLOCK):
        largest = block.float().abs().max()
        codes = torch.round(block.float() / largest * 127) if largest else torch.zeros_like(block.float())
        read.append((codes * (1 / 127) * largest).to(weight.dtype))
    whole = torch.cat(read).view([weight.shape[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(weight.dim())])


def through(weight: Tensor, form: str) -> Tensor:
    return through_int8(weight) if form == "int8" else weight.detach().bfloat16().to(weight.dtype)


def build(form: str = "none") -> nn.Module:
    """Two frozen blocks, low-rank adapters on frozen matrices in the others; the weights as read from ``form``."""
    model = models.build("frozen")
    if form != "none":
        for module in model.modules():
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                module.weight.data = through(module.weight, form)
    return model


def plan_of(preset: str, form: str, param_dtype: str) -> sw.ParallelPlan:
    policy = sw.PrecisionPolicy(param_dtype=param_dtype) if param_dtype != "fp32" else None
    return sw.ParallelPlan(strategy=preset, mp_policy=policy, quantize_frozen=form)


def train_all(presets: tuple[str, ...]) -> dict[tuple[str, ...], casts.Numbers]:
    with checks():
        return {(preset, *case): casts.train(build, plan_of(preset, *case)) for preset in presets for case in CASES}


def one_process(world: int, form: str, param_dtype: str) -> list[casts.Numbers]:
    low = build(form).to(DTYPES[param_dtype])
    return casts.one_process(build(form), low, world, send=lambda _name, grad: grad.float())


CASES = (("int8", "fp32"), ("int8", "bf16"), ("bf16", "fp32"), ("bf16", "bf16"))


@pytest.mark.parametrize(
    ("world", "presets"),
    [(2, PRESETS), (3, ("ddp", "zero3")), pytest.param(1, PRESETS, marks=pytest.mark.long)],
)
def test_every_preset_equals_one_process_that_has_the_weights_as_they_are_read(world: int, presets: tuple) -> None:
    expected = {case: one_process(world, *case) for case in CASES}
    for rank, results in enumerate(run_on_ranks(train_all, world, presets)):
        for (preset, *case), got in results.items():
            got.check(expected[tuple(case)][rank], (preset, case))


def test_the_reference_differs_from_the_weights_as_they_were() -> None:
    assert one_process(1, "int8", "fp32")[0].losses != one_process(1, "none", "fp32")[0].losses


# -- how far the loss is off


def fine_tune(form: str) -> list[float]:
    """Adapters on a frozen model that has been trained before: the losses."""
    model = pretrained()
    sw.parallelize(model, sw.ParallelPlan(quantize_frozen=form))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(40):
        loss = sw.train_step(model, models.batch(step % 4, 0, distributed.get_rank()))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pretrained() -> nn.Module:
    """Trained for a while on other data, then frozen, with adapters that begin at zero."""
    torch.manual_seed(5)
    model = sw.models.gpt("gpt-tiny", num_layers=3, hidden=64, num_heads=4, vocab_size=models.VOCAB, seq_len=models.SEQ)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    descend(optimizer, (model(*models.batch(100 + step % 4, 0, 0)) for step in range(30)))
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        for owner, name in ((block.attention, "qkv"), (block.attention, "out"), (block.mlp, "up"), (block.mlp, "down")):
            adapted = models.LowRank(getattr(owner, name))
            nn.init.zeros_(adapted.up)
            setattr(owner, name, adapted)
    return model


def fine_tune_both() -> dict[str, list[float]]:
    return {form: fine_tune(form) for form in ("none", "int8")}


def test_a_fine_tune_on_int8_weights_converges_as_on_whole_ones() -> None:
    """Bound: at no step is the loss off by more than 1% of where it began, and it falls by more than a quarter."""
    curves, _ = run_on_ranks(fine_tune_both, 2)
    plain, quantized = curves["none"], curves["int8"]
    assert plain != quantized
    assert max(abs(a - b) for a, b in zip(plain, quantized, strict=True)) < 0.01 * plain[0]
    assert plain[-1] < 0.75 * plain[0]
    assert quantized[-1] < 0.75 * quantized[0]


# -- what is quantized


class Mixed(nn.Module):
    """One frozen weight of every kind; ``linear``, ``transposed`` and ``turned`` are those that are quantized."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        torch.manual_seed(1)
        self.embedding = nn.Embedding(16, 16)
        self.tied = nn.Linear(16, 16, bias=False)
        self.tied.weight = self.embedding.weight
        self.convolution = nn.Conv1d(16, 16, 1)
        self.norm = nn.LayerNorm(16)
        self.linear = nn.Linear(16, 16)
        self.transposed = Conv1D(16, 16)
        self.turned = nn.Linear(16, 16)
        self.turned.weight = nn.Parameter(self.turned.weight.detach().t())
        self.requires_grad_(requires_grad=False)
        self.adapter = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.linear(self.embedding(tokens)) + self.transposed(self.embedding(tokens)))
        x = self.turned(x) + self.convolution(x.transpose(1, 2)).transpose(1, 2)
        return self.tied(self.adapter(x))


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@on_ranks(1)
def test_weights_of_linear_layers_are_quantized_and_nothing_else(preset: str) -> None:
    model = sw.parallelize(Mixed(), sw.ParallelPlan(strategy=preset, quantize_frozen="int8"))
    names = {shard.name for shard in probe(model).shards if shard.held_as}
    plain = Mixed()
    for name in ("linear", "transposed", "turned"):
        module = plain.get_submodule(name)
        module.weight.data = through_int8(module.weight)
    tokens = torch.arange(16).view(2, 8)
    expected, got = plain(tokens), model(tokens)
    assert torch.equal(expected, got)
    expected.square().sum().backward()
    got.square().sum().backward()
    state = sw.full_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    shown = str(sw.summary(model))
    assert names == {"linear.weight", "transposed.weight", "turned.weight"}
    assert "held as int8" in shown


@pytest.mark.parametrize("form", ["int8", "bf16"])
@on_ranks(1)
def test_where_there_is_nothing_to_quantize_the_wish_is_refused(form: str) -> None:
    message = refusal(
        sw.PlanError, sw.parallelize, models.build("gpt").bfloat16(), sw.ParallelPlan(quantize_frozen=form)
    )
    assert f"quantize_frozen='{form}', but the model has no frozen weight of a linear layer" in message


class Large(nn.Module):
    """A frozen weight of the size from which gradients are collected as they come."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.frozen = nn.Linear(512, 512, bias=False).requires_grad_(requires_grad=False)
        self.trained = nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(self.frozen(x)).sum()


def train_large() -> list[tuple[str, str, float]]:
    found = []
    for preset in ("ddp", "zero3"):
        for form in ("none", "int8"):
            model = sw.parallelize(Large(), sw.ParallelPlan(strategy=preset, quantize_frozen=form))
            model(torch.ones(2, 512)).backward()
            found.append((preset, form, sw.clip_grad_norm(model, 1.0).item()))
    return found


def test_large_frozen_weights_train_like_small_ones() -> None:
    expected = {}
    for form in ("none", "int8"):
        plain = Large()
        plain.frozen.weight.data = through(plain.frozen.weight, form) if form != "none" else plain.frozen.weight
        plain(torch.ones(2, 512)).backward()
        squares = [p.grad.double().square().sum() for p in plain.parameters() if p.grad is not None]
        expected[form] = torch.stack(squares).sum().sqrt().float().item()
    for results in run_on_ranks(train_large, 2):
        for preset, form, norm in results:
            assert norm == expected[form], (preset, form)


# -- state dicts, checkpoints, whole parameters


def masters(model: nn.Module) -> dict[str, Tensor]:
    """The codes that this rank holds of every quantized weight, with where they begin."""
    return {
        f"{shard.name}@{shard.start}": shard.parameter.to_local().clone().view(-1)
        for shard in probe(model).shards
        if shard.held_as
    }


def other_seed() -> nn.Module:
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("form", ["int8", "bf16"])
@on_ranks(2)
def test_checkpoints_hold_what_is_read_and_give_the_same_codes_on_any_layout(tmp_path: str, form: str) -> None:
    """Under zero3, then ddp, then not quantized at all, and back."""
    plan = {name: sw.ParallelPlan(strategy=name, quantize_frozen=form) for name in ("zero3", "ddp")}
    first = sw.parallelize(build(), plan["zero3"])
    sw.save(f"{tmp_path}/first", first)
    state = sw.full_state_dict(first)
    other = build()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    second = sw.parallelize(other, plan["ddp"])
    sw.load(f"{tmp_path}/first", second)
    sw.save(f"{tmp_path}/second", second)
    third = sw.parallelize(build(), sw.ParallelPlan())
    sw.load(f"{tmp_path}/second", third)
    sw.save(f"{tmp_path}/third", third)
    fourth = sw.parallelize(other_seed(), plan["zero3"])
    sw.load(f"{tmp_path}/third", fourth)
    before = masters(first)
    assert before
    assert all(torch.equal(before[name], codes) for name, codes in masters(fourth).items())
    for model in (second, third, fourth):
        again = sw.full_state_dict(model)
        assert all(torch.equal(again[name], value) for name, value in state.items())
    fifth = sw.parallelize(other_seed(), plan["ddp"])
    sw.load_full_state_dict(fifth, state)
    again = sw.full_state_dict(fifth)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    inputs = models.batch(0, 0, distributed.get_rank())
    losses = {model(*inputs).item() for model in (first, second, third, fourth, fifth)}
    assert len(losses) == 1


def resume_on_three(folder: str) -> dict[str, Tensor]:
    model = sw.parallelize(other_seed(), sw.ParallelPlan(quantize_frozen="int8"))
    sw.load(f"{folder}/first", model)
    return masters(model) | sw.full_state_dict(model)


def save_on_two(folder: str) -> dict[str, Tensor]:
    model = sw.parallelize(build(), sw.ParallelPlan(quantize_frozen="int8"))
    sw.save(f"{folder}/first", model)
    return masters(model) | sw.full_state_dict(model)


def test_codes_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    two = run_on_ranks(save_on_two, 2, str(tmp_path))
    three = run_on_ranks(resume_on_three, 3, str(tmp_path))
    assert all(torch.equal(value, two[0][name]) for name, value in three[0].items() if "@" not in name)
    for ranks in (two, three):
        whole: dict[str, list[tuple[int, Tensor]]] = {}
        for of_rank in ranks:
            for key, codes in of_rank.items():
                if "@" in key and codes.numel():
                    name, start = key.split("@")
                    whole.setdefault(name, []).append((int(start), codes))
        ranks.append(
            {name: torch.cat([c for _, c in sorted(parts, key=lambda p: p[0])]) for name, parts in whole.items()}
        )
    assert two[-1].keys() == three[-1].keys()
    assert all(torch.equal(codes, three[-1][name]) for name, codes in two[-1].items())


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@on_ranks(2)
def test_full_parameters_shows_what_is_read_and_quantizes_what_is_written(preset: str) -> None:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=preset, quantize_frozen="int8"))
    expected = {name: parameter.detach() for name, parameter in build("int8").named_parameters()}
    inputs = models.batch(0, 0, 0)
    with torch.no_grad():
        before = model(*inputs)
    with sw.full_parameters(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        with torch.no_grad():
            assert torch.equal(model(*inputs), before)
    with sw.full_parameters(model, writeback=True), torch.no_grad():
        model.blocks[0].mlp.up.weight.mul_(2)
    assert model.blocks[0].mlp.up.weight.dtype is torch.int8
    state = sw.full_state_dict(model)
    if state:
        assert torch.equal(state["blocks.0.mlp.up.weight"], expected["blocks.0.mlp.up.weight"] * 2)
