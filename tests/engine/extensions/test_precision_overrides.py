"""Precision by part of the model: units, modules inside of units, batch norm, buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.testing import checks, run_on_ranks
from tests.common import casts, models
from tests.common.casts import STEPS
from tests.common.oracle import descend, some_presets
from tests.common.ranks import on_ranks, refusal

BF16, FP32 = torch.bfloat16, torch.float32

#: The head in fp32, norms in fp32 within two blocks, one of which is in fp16 and reduced in bf16; the rest is in bf16.
POLICY = sw.PrecisionPolicy(
    overrides={
        "lm_head": sw.PrecisionPolicy(param_dtype="fp32"),
        "final_norm": {"param_dtype": "fp32"},
        "blocks.1.*_norm": sw.PrecisionPolicy(param_dtype="fp32", output_dtype="bf16"),
        "blocks.3": sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="bf16"),
        "blocks.3.*_norm": sw.PrecisionPolicy(param_dtype="fp32", reduce_dtype="bf16", output_dtype="fp16"),
    }
)


def train_every_preset() -> dict[str, casts.Numbers]:
    plans = {preset: sw.ParallelPlan(strategy=preset, mp_policy=POLICY) for preset in some_presets()}
    with checks():
        return {preset: casts.train(lambda: models.build("gpt"), plan) for preset, plan in plans.items()}


def dtypes_of(name: str) -> tuple[torch.dtype, torch.dtype]:
    """Compute and reduce dtype of a parameter, written out."""
    compute = torch.float16 if name.startswith("blocks.3.") else BF16
    if name.startswith(("lm_head", "final_norm")) or ("norm" in name and name.startswith(("blocks.1.", "blocks.3."))):
        compute = FP32
    return compute, BF16 if name.startswith("blocks.3.") else FP32


def build_low() -> nn.Module:
    """The model with its parameters and inputs cast as the policy says."""
    low = models.build("gpt")
    for name, parameter in low.named_parameters():
        parameter.data = parameter.data.to(dtypes_of(name)[0])
    inputs = {f"blocks.{index}": BF16 for index in range(models.NUM_BLOCKS)}
    inputs |= {"blocks.3": torch.float16, "lm_head": FP32, "final_norm": FP32}
    outputs = {}
    for index, dtype in ((1, BF16), (3, torch.float16)):
        for norm in ("attention_norm", "mlp_norm"):
            inputs[f"blocks.{index}.{norm}"] = FP32
            outputs[f"blocks.{index}.{norm}"] = dtype
    for name, dtype in inputs.items():
        low.get_submodule(name).register_forward_pre_hook(
            lambda _m, args, to=dtype: tuple(arg.to(to) if arg.is_floating_point() else arg for arg in args)
        )
    for name, dtype in outputs.items():
        low.get_submodule(name).register_forward_hook(lambda _m, _a, out, to=dtype: out.to(to))
    return low


@pytest.mark.parametrize("world", [1, 3])
def test_parts_with_a_policy_of_their_own_equal_one_process_with_the_same_casts(world: int) -> None:
    expected = casts.one_process(
        models.build("gpt"), build_low(), world, send=lambda name, grad: grad.to(dtypes_of(name)[1])
    )
    for rank, by_preset in enumerate(run_on_ranks(train_every_preset, world)):
        for preset, got in by_preset.items():
            got.check(expected[rank], preset)


def test_a_file_writes_the_same_policy() -> None:
    plan = sw.ParallelPlan(mp_policy={"overrides": {"lm_head": {"param_dtype": "float32"}}})
    assert plan.precision == sw.PrecisionPolicy(overrides={"lm_head": sw.PrecisionPolicy(param_dtype="fp32")})


def refuse(overrides: dict[str, object], name: str) -> str:
    policy = sw.PrecisionPolicy(overrides=overrides)
    return refusal(sw.PlanError, sw.parallelize, models.build(name), sw.ParallelPlan(mp_policy=policy))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"head": {}}, "mp_policy overrides 'head', but no module of GPT has such a name"),
        ({"blocks.*": {}, "blocks.2": {}}, "mp_policy overrides 'blocks.2' twice"),
        ({"lm_head": {"param_dtype": "fp32"}}, "do not agree about a parameter that is tied: 'token_embedding'"),
    ],
)
def test_overrides_that_fit_nothing_or_clash_are_refused(overrides: dict[str, object], message: str) -> None:
    assert message in run_on_ranks(refuse, 1, overrides, "tied")[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"a": {"overrides": {"b": {}}}}, "'a' has overrides of its own"),
        ({"a": {"parameter_dtype": "fp32"}}, r"overrides\['a'\] has no field parameter_dtype"),
        ({"a": 32}, r"overrides\['a'\]=32: expected a PrecisionPolicy"),
    ],
)
def test_overrides_that_are_none_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(sw.PlanError, match=message):
        sw.PrecisionPolicy(overrides=overrides)


@on_ranks(1)
def test_fully_shard_takes_one_policy() -> None:
    assert "Call fully_shard on the modules that differ first" in refusal(
        sw.PlanError, sw.fully_shard, nn.Linear(2, 2), mp_policy=POLICY
    )


# -- batch norm and buffers


class Convolutional(nn.Module):
    """Two convolutions with batch norm, and a buffer that would lose its digits in bf16, as rotary embeddings have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)
        )
        self.head = nn.Linear(4, 3)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(4) / 4))

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean(dim=(2, 3)) * self.frequencies.to(x.dtype))


def images(step: int) -> Tensor:
    return torch.randn(3, 4, 5, 5, generator=torch.Generator().manual_seed(step))


def train_convolutional(preset: str, buffer_dtype: str | None) -> tuple[dict[str, Tensor], dict[str, torch.dtype]]:
    """Every rank has the same images, so that statistics are the same on all of them."""
    policy = sw.PrecisionPolicy(buffer_dtype=buffer_dtype)
    model = Convolutional()
    sw.parallelize(
        model, sw.ParallelPlan(strategy=preset, auto_wrap_policy=sw.wrap_by_name("stages.*"), mp_policy=policy)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    descend(optimizer, (model(images(step)).float().square().mean() for step in range(STEPS)))
    dtypes = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return sw.full_state_dict(model), dtypes


def train_plain_convolutional() -> dict[str, Tensor]:
    master, low = Convolutional(), Convolutional()
    for module in low.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.to(BF16)
    optimizer = torch.optim.SGD(master.parameters(), lr=0.1)
    for step in range(STEPS):
        with torch.no_grad():
            for target, source in zip(low.parameters(), master.parameters(), strict=True):
                target.copy_(source)
        low(images(step).to(BF16)).float().square().mean().backward()
        for target, source in zip(master.parameters(), low.parameters(), strict=True):
            target.grad = source.grad.float()
        optimizer.step()
        low.zero_grad()
    return master.state_dict() | dict(low.named_buffers())


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_torchtitan_674_batch_norm_stays_fp32_and_buffers_follow_their_own_policy(preset: str) -> None:
    expected = train_plain_convolutional()
    ((state, dtypes),) = run_on_ranks(train_convolutional, 1, preset, None)
    assert set(dtypes.values()) == {FP32, torch.int64}
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name
    assert not torch.equal(state["stages.1.1.running_mean"], Convolutional().state_dict()["stages.1.1.running_mean"])
    ((_, dtypes),) = run_on_ranks(train_convolutional, 1, preset, "bf16")
    assert [name for name, dtype in dtypes.items() if dtype is BF16] == ["frequencies"]


def save_and_load_cast_buffers(path: str, pp: int) -> tuple[dict[str, torch.dtype], list[bool]]:
    """Dtypes of buffers in the state dict (rank 0's), and whether loading brings the values back."""
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled(), Scaled(), Scaled())
    policy = sw.PrecisionPolicy(param_dtype=None, reduce_dtype=None, buffer_dtype="bf16")
    sw.parallelize(model, sw.ParallelPlan(pp=pp, mp_policy=policy))
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
    assert {buffer.dtype for buffer in buffers.values()} == {BF16}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    state = sw.full_state_dict(model)
    sw.save(path, model)
    same = []
    for load in (lambda: sw.load(path, model), lambda: sw.load_full_state_dict(model, state)):
        for buffer in buffers.values():
            buffer.zero_()
        load()
        same += [torch.equal(dict(model.named_buffers())[name], value) for name, value in before.items()]
    return {name: value.dtype for name, value in state.items() if name.endswith("factor")}, same


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("factor", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor.to(x.dtype)


@pytest.mark.parametrize("pp", [1, 2])
def test_state_dicts_and_checkpoints_hold_buffers_in_the_dtype_that_they_had(pp: int, tmp_path) -> None:
    ranks = run_on_ranks(save_and_load_cast_buffers, 2, str(tmp_path / "saved"), pp)
    assert ranks[0][0] == {f"{index}.factor": FP32 for index in range(4)}
    assert all(all(same) and len(same) >= 4 for _, same in ranks)
    found = {name: extent.dtype for name, extent in open_checkpoint(tmp_path / "saved").tensors.items()}
    assert {dtype for name, dtype in found.items() if name.startswith("buffer/")} == {"fp32"}
