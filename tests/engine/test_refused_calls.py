"""Calls of other libraries that would compute with shards: refused in words that say what to call instead."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import shardwise as sw
from shardwise.spec.errors import CommError, StateError
from tests.common.oracle import Chain, plain_loss, sample
from tests.common.ranks import on_ranks, refusal

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


class Normalizes(Chain):
    """Its forward keeps the rows of the head's weight at length one, as of prototypes or of a cosine classifier."""

    def __init__(self, how: str) -> None:
        super().__init__(num_blocks=2)
        self.how = how

    def forward(self, x):
        weight = self.head.weight
        if self.training:
            with torch.no_grad():
                rows = F.normalize(weight, dim=1)
                if self.how == "in place":
                    weight.copy_(rows)
                else:
                    weight.data = rows
        return super().forward(x)


def evaluate_and_step(model: nn.Module, ranks: Sequence[int]) -> None:
    model.eval()
    with torch.no_grad():
        model(sample(0, 0))
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for rank in ranks:
            (plain_loss(model, rank, step) / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("how", ["in place", "replaced"])
@on_ranks(2)
def test_a_forward_may_write_to_parameters_only_where_the_write_stays(how):
    torch.manual_seed(0)
    plain = Normalizes(how)
    evaluate_and_step(plain, range(2))
    for fields in (
        {"strategy": "ddp"},
        {"strategy": "zero2"},
        {"strategy": "zero3", "auto_wrap_policy": "none"},
        {"strategy": "shard_grad_op", "auto_wrap_policy": "none"},
        {"strategy": "ddp", "mp_policy": "bf16"},
    ):
        model = parallelized(Normalizes(how), **fields)
        if how != "replaced" and fields in ({"strategy": "ddp"}, {"strategy": "zero2"}):
            evaluate_and_step(model, [dist.get_rank()])
            state = sw.full_state_dict(model)
            assert all(torch.equal(value, plain.state_dict()[name]) for name, value in state.items())
            continue
        message = refusal(StateError, evaluate_and_step, model, [dist.get_rank()])
        assert message.startswith("forward has written to parameter 'head.weight'")
        assert "sw.full_parameters(model, writeback=True)" in message
        assert message.endswith("neither does flatten_parameters() of an RNN on a GPU: leave it out.")


class Raises(Chain):
    """Its first forward writes to a parameter and is left by an exception."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(num_blocks=2)
        self.error: type[BaseException] | None = error

    def forward(self, x):
        if self.error is not None:
            with torch.no_grad():
                self.head.weight.mul_(2)
            error, self.error = self.error, None
            raise error("of the user")
        return super().forward(x)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
@on_ranks(2)
def test_an_exception_in_a_forward_that_has_written_to_parameters_is_the_only_one(error):
    model = parallelized(Raises(error), auto_wrap_policy="none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of what a hook raises when forward has raised
        with pytest.raises(error, match="of the user"):
            model(sample(0, 0))
    plain_loss(model, 0, 0).backward()


@on_ranks(2)
def test_a_write_on_one_rank_is_told_to_the_others_which_then_go_on():
    model = parallelized(Normalizes("in place"), auto_wrap_policy="none")
    model.train(dist.get_rank() == 0)
    error, text = (
        (StateError, "forward has written") if model.training else (CommError, "rank 0 along dp_shard has left")
    )
    assert refusal(error, plain_loss, model, 0, 0).startswith(text)
    model.eval()
    plain_loss(model, 0, 0).backward()


@on_ranks(2)
def test_a_module_that_is_pruned_or_parametrized_too_late_is_refused_with_when():
    """The advice was that for a loss with a parameter."""
    for late in (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.ln_structured(layer, "weight", 0.5, 2, 0),
        lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=0.5),
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
    ):
        torch.manual_seed(0)
        model = sw.parallelize(nn.Sequential(nn.Linear(4, 4)))
        text = refusal(StateError, late, model[0])
        assert "\n  Prune or parametrize the module before sw.parallelize(). This rank's" in text
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)  # as it says
    sw.parallelize(model)(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(2)
def test_a_model_may_be_parallelized_and_run_in_inference_mode(strategy):
    torch.manual_seed(0)
    plain = Chain(num_blocks=2)
    with torch.inference_mode():
        model = parallelized(copy.deepcopy(plain), strategy=strategy)
        assert torch.equal(model(sample(0, 0)), plain(sample(0, 0)))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(2)
def test_embeddings_that_limit_their_norms_are_refused(strategy):
    for table in (nn.Embedding(5, 8, max_norm=1.0), nn.EmbeddingBag(5, 8, max_norm=1.0)):
        message = refusal(StateError, sw.parallelize, nn.Sequential(table, nn.Linear(8, 8)), strategy=strategy)
        assert message.startswith("'0' has max_norm=1.0: its forward writes to the rows that it looks up")
        assert refusal(StateError, sw.fully_shard, table).startswith("'' has max_norm=1.0")


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@on_ranks(2)
def test_embeddings_that_divide_by_how_often_an_id_is_in_the_batch_are_refused(strategy):
    for table in (nn.Embedding(5, 8, scale_grad_by_freq=True), nn.EmbeddingBag(5, 8, scale_grad_by_freq=True)):
        message = refusal(StateError, sw.parallelize, nn.Sequential(table, nn.Linear(8, 8)), strategy=strategy)
        assert message.startswith("'0' has scale_grad_by_freq=True: its gradient is divided by how often")
        assert refusal(StateError, sw.fully_shard, table).startswith("'' has scale_grad_by_freq=True")


@on_ranks(1)
def test_an_embedding_that_limits_its_norms_trains_alone():
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(5, 8, max_norm=1.0), nn.Linear(8, 8))

    states = []
    for model in (build(), sw.parallelize(build(), strategy="zero3")):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            model(torch.tensor([0, 3, 3])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(model.state_dict() if not states else sw.full_state_dict(model))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


@on_ranks(2)
def test_parameters_without_a_shape_are_refused_until_a_forward_has_given_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(4))
    message = refusal(StateError, sw.parallelize, model)
    assert message.startswith("parameter '1.weight' of Sequential has no shape before the first forward")
    with torch.no_grad():
        model(torch.ones(2, 8))  # as it advises
    sw.parallelize(model)(torch.ones(2, 8)).sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_modules_of_torch_jit_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(StateError, match=r"^'1' was compiled by torch.jit, which computes with parameters of its own"):
        sw.parallelize(model)
