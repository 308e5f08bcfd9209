"""Calls of other libraries that would compute with shards: refused in words that say what to call instead."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.spec.errors import StateError
from tests.common.oracle import Chain, sample
from tests.common.ranks import on_ranks

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed (the extra `hf`)"
)


def parallelized(model: nn.Module | None = None, **fields: object) -> nn.Module:
    torch.manual_seed(0)
    return sw.parallelize(model or Chain(), sw.ParallelPlan(**fields))


@pytest.mark.parametrize("how", ["model", "in place", "function", "unit"])
@on_ranks(2)
def test_torch_compile_around_a_parallelized_model_is_refused(how):
    model = parallelized()
    called = model
    if how == "model":
        called = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    elif how == "function":
        called = torch.compile(lambda x: model(x).square(), backend="eager")
    else:
        unit = next(name for name, child in model.named_modules() if "_shardwise" in child.__dict__ and name)
        model.get_submodule(unit).compile(backend="eager")
    for _ in range(2):
        with pytest.raises(StateError, match=r"inside torch.compile\(\).*\n.*ParallelPlan\(compile=True\)"):
            called(sample(dist.get_rank(), 0))


@on_ranks(2)
def test_hooks_on_the_gradients_of_parameters_are_refused():
    for strategy in ("ddp", "zero1", "zero3"):
        model = parallelized(strategy=strategy)
        weight = model.blocks[1].up.weight
        for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            with pytest.raises(StateError, match=r"gradient of 'blocks.1.up.weight', .* would never run"):
                register(lambda gradient: gradient)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sw.optimizer_in_backward(model, optimizer)  # as the message advises
        before = weight.detach().clone()
        model(sample(dist.get_rank(), 0)).square().mean().backward()
        assert not torch.equal(weight, before) or 0 in weight.shape
    units = Chain()
    for unit in (*units.blocks, units):  # each call makes new engines, which have hooks of their own on the parameters
        sw.fully_shard(unit)
    units(sample(dist.get_rank(), 0)).square().mean().backward()
    with pytest.raises(StateError, match="would never run"):
        units.blocks[1].up.weight.register_hook(print)


@needs_transformers
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(2)
def test_resizing_embeddings_of_a_parallelized_model_is_refused(strategy):
    import transformers

    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32)
    model = parallelized(transformers.GPT2LMHeadModel(config), strategy=strategy)
    for call in (model.resize_token_embeddings, model.transformer.resize_token_embeddings):
        with pytest.raises(StateError, match=r"before sw\.parallelize\(\).*sw\.full_parameters\(model\)"):
            call(48)
    tokens = torch.arange(16).view(2, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()


class Adapted(nn.Module):
    """A layer with an adapter that can be merged into it, as peft's models have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))

    def merge_and_unload(self, *, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            return self.inner.weight + scale * self.up.weight @ self.down.weight


@on_ranks(2)
def test_adapters_are_merged_where_parameters_are_whole_only():
    torch.manual_seed(0)
    plain = Adapted()
    model = parallelized(copy.deepcopy(plain))
    with pytest.raises(StateError, match=r"merge_and_unload\(\) of Adapted.*\n.*sw\.full_parameters\(model\)"):
        model.merge_and_unload()
    with sw.full_parameters(model):
        assert torch.equal(model.merge_and_unload(scale=2.0), plain.merge_and_unload(scale=2.0))
