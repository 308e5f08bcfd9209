"""Parameters that come into a model, or beside it, after sw.parallelize(): never trained on each rank alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks
from tests.common.oracle import Block, Chain, descend, sample
from tests.common.ranks import on_ranks

STRATEGIES = ("ddp", "zero3")


class WithAdapter(nn.Module):
    """A layer and what an adapter adds to it, as peft makes it: it takes the layer's place."""

    def __init__(self, base: nn.Module, size: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(size, 2, bias=False)
        self.up = nn.Linear(2, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def parallelized(strategy):
    torch.manual_seed(0)
    return sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))


def backward(model):
    model(sample(dist.get_rank(), 0)).square().mean().backward()


def add_adapter(model):
    place = next(name for name, child in model.named_modules() if isinstance(child, Block))
    block = model.get_submodule(place)
    layer = next(name for name, child in block.named_children() if isinstance(child, nn.Linear))
    inner = block.get_submodule(layer)
    torch.manual_seed(dist.get_rank())
    setattr(block, layer, WithAdapter(inner, inner.in_features))
    return f"{place}.{layer}.down.weight"


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_an_adapter_added_after_parallelize_is_refused_in_the_first_forward(strategy):
    model = parallelized(strategy)
    name = add_adapter(model)
    with pytest.raises(StateError, match=rf"'{name}' of shape .* was added after sw.parallelize\(\)"):
        backward(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_an_adapter_added_between_steps_is_refused_by_its_optimizers_first_step(strategy):
    model = parallelized(strategy)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    name = add_adapter(model)
    model.requires_grad_(False)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(key in {name, name.replace(".down.", ".up.")})
    added = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in added]
    optimizers = [torch.optim.AdamW(added), optimizer]
    optimizer.add_param_group({"params": added})
    for p in added:
        p.grad = torch.full_like(p, float(dist.get_rank()))
    for each in optimizers:
        with pytest.raises(StateError, match=rf"'{name}' of shape .* was added after sw.parallelize\(\)"):
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(before, added, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_a_module_in_the_place_of_another_is_refused_in_the_first_forward(strategy):
    """Its parameters have the names of those before, which sw.save would write in place of them."""
    for is_trained in (True, False):
        model = parallelized(strategy)
        model.head = nn.Linear(8, 3).requires_grad_(is_trained)
        with pytest.raises(StateError, match=r"'head.weight' was replaced or removed after sw.parallelize\(\)"):
            backward(model)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(1, 2)
def test_a_module_that_is_replaced_between_steps_is_refused_in_its_first_step(strategy):
    model = parallelized(strategy)
    backward(model)
    model.head = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = (model(sample(dist.get_rank(), step)).square().mean() for step in range(1))
    with pytest.raises(StateError, match=r"'head.weight' was replaced or removed after sw.parallelize\(\)"):
        descend(optimizer, losses)


def head_beside(is_synchronised):
    model = parallelized("zero3")
    torch.manual_seed(1)
    head = nn.Linear(model(sample(0, 0)).shape[-1], 3)
    if is_synchronised:
        head = DistributedDataParallel(head)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    descend(optimizer, (head(model(sample(dist.get_rank(), step))).square().mean() for step in range(3)))
    return [p.detach().clone() for p in head.parameters()]


def refused_head_beside():
    with pytest.raises(StateError, match="their gradients differ from rank to rank"):
        head_beside(False)


def test_a_head_beside_the_model_is_refused_unless_its_gradients_are_the_same_everywhere():
    run_on_ranks(refused_head_beside, 2)
    first, second = run_on_ranks(head_beside, 2, True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_ranks(2)
def test_what_is_frozen_or_of_another_model_passes():
    model = parallelized("zero3")
    model.extra = nn.Linear(2, 2).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(model)
    optimizer.step()
    ignored = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)  # of nothing that is parallelized
    ignored.param_groups[0]["params"][0].grad = torch.full((3,), float(dist.get_rank()))
    ignored.step()


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@on_ranks(2)
def test_ddp_around_shards_is_refused():
    model = parallelized("zero3")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StateError, match=r"DistributedDataParallel around Chain, which is parallelized"):
        DistributedDataParallel(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    even = sw.parallelize(nn.Linear(64, 8, bias=False))
    wrapped = DistributedDataParallel(Wrapper(even))
    with pytest.raises(StateError, match=r"DistributedDataParallel around Linear, which is parallelized"):
        wrapped(torch.ones(2, 64))


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
@on_ranks(2)
def test_torchs_fsdp_around_a_parallelized_model_is_refused(strategy):
    model = parallelized(strategy)
    # Prodigy would take the gradients for FSDP1's shards, and sum its statistics over the ranks.
    assert not any(hasattr(p, "_fsdp_flattened") for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    cpu, mesh = torch.device("cpu"), init_device_mesh("cpu", (2,))
    policy = ModuleWrapPolicy({nn.Linear})
    for wrap in (
        lambda: FullyShardedDataParallel(model, device_id=cpu),
        lambda: FullyShardedDataParallel(model, device_id=cpu, use_orig_params=True),
        lambda: FullyShardedDataParallel(model, device_id=cpu, auto_wrap_policy=policy),
        lambda: FullyShardedDataParallel(Wrapper(model), device_id=cpu),
        lambda: FullyShardedDataParallel(model.blocks[0], device_id=cpu),
        lambda: fully_shard(model, mesh=mesh),
        lambda: fully_shard(model.blocks[0], mesh=mesh),
        lambda: fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh),
        lambda: fully_shard(Wrapper(model), mesh=mesh),
        lambda: replicate(model, mesh=mesh),
    ):
        with pytest.raises(StateError, match=r"torch's FSDP around Chain, which is parallelized"):
            wrap()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(sample(dist.get_rank(), 0)).square().mean().backward()
    plain = fully_shard(nn.Linear(2, 2), mesh=mesh)
    plain(torch.ones(1, 2)).sum().backward()


@on_ranks(2)
def test_ddp_that_leaves_the_parallelized_part_out_passes():
    """A part of a model under torch's DDP, which leaves the parallelized part out."""
    model = Wrapper(parallelized("zero3"))
    model.head = nn.Linear(2, 2)
    names = [name for name, _ in model.named_parameters() if name.startswith("inner.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped(sample(dist.get_rank(), 0)).square().mean().backward()
