"""Other libraries' spellings of a plan and of a unit: the same training, said once."""

from __future__ import annotations

import contextlib
import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import shardwise as sw
from shardwise.spec.errors import PlanError
from shardwise.testing import forget_notices, probe, run_on_ranks
from tests.common.oracle import Block, Chain, descend, sample
from tests.common.ranks import on_ranks


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    descend(optimizer, (model(sample(dist.get_rank(), step)).square().mean() for step in range(2)))
    return sw.full_state_dict(model)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Chain()


def spell_plans():
    fsdp1 = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    spellings = {
        "ddp": [("ddp", {}), (None, {"strategy": "NO_SHARD"}), (fsdp.ShardingStrategy.NO_SHARD, {})],
        "zero3": [
            ("zero3", {"auto_wrap_policy": fsdp1}),
            (None, {"strategy": fsdp.ShardingStrategy.FULL_SHARD, "auto_wrap_policy": sw.wrap_by_class({Block})}),
        ],
    }
    for strategy, given in spellings.items():
        policy = sw.wrap_by_class({Block}) if strategy == "zero3" else "auto"
        expected = trained(sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, auto_wrap_policy=policy)))
        for plan, fields in given:
            model = sw.parallelize(build(), plan, **fields)
            assert probe(model).placements == sw.ParallelPlan(strategy=strategy).placements
            for name, tensor in trained(model).items():
                assert torch.equal(tensor, expected[name])
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        forget_notices()
        for _ in range(2):
            sw.parallelize(build(), strategy="zero3", auto_wrap_policy=fsdp1)
    for wrong, message in (
        (lambda: sw.parallelize(build(), sw.ParallelPlan(), strategy="ddp"), "got a plan and strategy beside it"),
        (lambda: sw.parallelize(build(), "zero3", strategy="ddp"), "got a plan and strategy beside it"),
        (lambda: sw.parallelize(build(), strateg="ddp"), "Did you mean 'strategy'"),
    ):
        with pytest.raises(PlanError, match=message):
            wrong()
    return said.getvalue()


def test_a_plan_may_be_a_name_or_fields_and_hold_objects_of_torchs_fsdp():
    said, _ = run_on_ranks(spell_plans, 2)
    assert said.count("torch's transformer_auto_wrap_policy is wrap_by_class({Block}) here") == 1
    assert said.count("the plan is sw.ParallelPlan(strategy='zero3', auto_wrap_policy=") == 1


@on_ranks(2)
def test_units_take_the_policies_of_fsdp2():
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for mp_policy in (policy, sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")):
        model = build()
        for child in model.modules():
            if isinstance(child, Block):
                sw.fully_shard(child, mp_policy=mp_policy, offload_policy=fsdp.OffloadPolicy())
        found.append(trained(sw.fully_shard(model, mp_policy=mp_policy)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# -- methods of FSDP2


class Coder(nn.Module):
    """Has methods that read parameters beside its forward, one of them one-dimensional."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)
        self.scale = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).tanh()

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T * self.scale


def coders() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Coder() for _ in range(5)))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))


def by_methods(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model[3].decode(model[1].encode(x)) + model(x)).square().mean()


@on_ranks(2)
def test_registered_methods_gather_their_unit():
    plain = coders()
    losses = [by_methods(plain, batch(rank)) for rank in range(dist.get_world_size())]
    for loss in losses:
        (loss / dist.get_world_size()).backward()
    model = coders()
    for child in model:
        sw.fully_shard(child)
    sw.fully_shard(model)
    for child in model:
        for name in ("encode", "decode"):
            sw.register_fsdp_forward_method(child, name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    for step in range(3):
        loss = by_methods(model, batch(dist.get_rank()))
        if step == 0:
            assert torch.equal(loss, losses[dist.get_rank()])
        loss.backward()
        if step == 0:
            optimizer.step()
            for name, tensor in sw.full_state_dict(model).items():
                assert torch.allclose(tensor, plain.state_dict()[name], rtol=1e-6, atol=1e-7)
        optimizer.zero_grad()
    with torch.no_grad():
        assert torch.allclose(model[2].encode(batch(0)), plain[2].encode(batch(0)), rtol=1e-5, atol=1e-6)
    for module, name, message in (
        (model[0], "encod", "there is no such method"),
        (nn.ModuleList([model[0]]), "append", "the module is not a unit, but holds parameters of one"),
    ):
        with pytest.raises(sw.StateError, match=message):
            sw.register_fsdp_forward_method(module, name)
    untouched = Coder()
    sw.register_fsdp_forward_method(untouched, "encode")
    assert "encode" not in vars(untouched)


@on_ranks(2)
def test_what_fsdp2_asks_to_be_told_is_taken():
    model, plain = (coders() for _ in range(2))
    for child in model:
        sw.fully_shard(child)
    sw.fully_shard(model)
    for index, child in enumerate(model[:-1]):
        child.set_modules_to_forward_prefetch([model[index + 1]])
        model[index + 1].set_modules_to_backward_prefetch([child])
    with pytest.raises(sw.StateError, match="got a Linear that is not a unit"):
        model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])
    with pytest.raises(sw.StateError, match=r"set_requires_all_reduce\(\) of unit '1'"):
        model[1].set_requires_all_reduce(False)
    for micro in range(3):
        is_last = micro == 2
        model.set_is_last_backward(is_last_backward=is_last)
        model.set_reshard_after_backward(reshard_after_backward=is_last, recurse=True)
        model.set_requires_gradient_sync(is_last, recurse=True)
        model.set_requires_all_reduce(True)
        model.set_requires_gradient_sync(is_last)
        model(batch(10 * micro + dist.get_rank())).square().mean().backward()
        for rank in range(2):
            (plain(batch(10 * micro + rank)).square().mean() / 2).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, 1.0), norm, rtol=1e-5)
    handle = model[2].unshard(async_op=True)
    handle.wait()
    assert model[2].weight.shape == (64, 64)
    model[2].reshard()


@on_ranks(4)
def test_the_all_reduce_over_replicas_waits_until_it_is_required():
    model, plain = (coders() for _ in range(2))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for child in model:
        sw.fully_shard(child, mesh=mesh)
    sw.fully_shard(model, mesh=mesh)
    for micro in range(2):
        with sw.record_collectives(model) as events:
            model.set_requires_all_reduce(micro == 1)
            model(batch(10 * micro + dist.get_rank())).square().mean().backward()
        across = [event for event in events if event.kind == "all_reduce" and event.axis == "dp_replicate"]
        assert bool(across) == (micro == 1)
        for rank in range(4):
            (plain(batch(10 * micro + rank)).square().mean() / 4).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert torch.allclose(sw.clip_grad_norm(model, 1.0), norm, rtol=1e-5)


# -- samplers


def read_by_model():
    found = []
    for plan in (sw.ParallelPlan(), sw.ParallelPlan(tp=2)):
        torch.manual_seed(0)
        model = sw.parallelize(sw.models.gpt("gpt-nano", num_layers=2), plan)
        found.append(list(sw.DistributedSampler(11, model=model)))
    found.append(list(sw.DistributedSampler(11)))
    return found


def test_the_sampler_takes_its_share_from_the_model():
    (first, whole, alone), (second, same, other) = run_on_ranks(read_by_model, 2)
    assert sorted(first + second) == list(range(11)) == sorted(whole)
    assert whole == same  # ranks of tp read the same samples
    assert (first, second) == (alone, other)
