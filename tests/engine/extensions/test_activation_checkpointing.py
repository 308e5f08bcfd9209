"""Activation checkpointing in the plan: the numbers and the collectives are those without it, bit by bit."""

from __future__ import annotations

import importlib.util
import inspect
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

import shardwise as sw
from shardwise.engine.extensions import selective
from shardwise.parallel.context.apply import CACHE_NAMES
from shardwise.testing import compare_each_with_one_process, probe, run_on_ranks
from tests.common.oracle import Block, Chain, compare, compare_each, plain_loss, presets, sample
from tests.common.ranks import on_ranks

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed (the extra `hf`)")

#: Every way to say what is recomputed.
WAYS = (
    "full",
    "selective",
    sw.RecomputePolicy(every=2),
    sw.RecomputePolicy(save="aten.gelu"),
    sw.RecomputePolicy(modules={"by_name": ["blocks.*"]}, every=3, save=["attention", "aten.mm.default"]),
    sw.wrap_by_class(nn.Linear),
    sw.wrap_by_name("blocks.*.up", "head"),
)


class Dropping(Block):
    """Draws random numbers; counts its forwards."""

    num_forwards = 0

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        Dropping.num_forwards += 1
        y = F.dropout(super().forward(x), 0.2, training=self.training)
        return y if scale is None else y * scale


class ByKeyword(Chain):
    """Hands a tensor that needs a gradient to its blocks by keyword."""

    def __init__(self) -> None:
        super().__init__(Dropping)
        self.scale = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=self.scale * 1.0)
        return self.head(x)


@on_ranks(1, 2, 3)
def test_every_policy_gives_the_numbers_of_no_recomputation_dropout_included():
    for way in WAYS:
        compare_each(ByKeyword, plain_loss, steps=3, activation_checkpointing=way)


@on_ranks(1)
def test_what_is_named_is_computed_twice_in_training_and_once_without_gradients() -> None:
    """Forwards of five blocks: in a step that trains, in a forward in eval mode, in one without grad."""
    counts = {}
    for way in WAYS:
        model = Chain(Dropping)
        sw.parallelize(model, sw.ParallelPlan(activation_checkpointing=way))
        found = []
        for trains in (True, False):
            for has_grad in (True, False) if not trains else (True,):
                Dropping.num_forwards = 0
                with torch.set_grad_enabled(has_grad):
                    loss = model.train(trains)(sample(0, 0)).square().mean()
                if trains:
                    loss.backward()
                found.append(Dropping.num_forwards)
        counts[str(way)] = tuple(found)
    assert list(counts.values()) == [(10, 5, 5), (10, 5, 5), (8, 5, 5), (10, 5, 5), (7, 5, 5), (5, 5, 5), (5, 5, 5)]


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def statistics(way: str) -> list[Tensor]:
    model = sw.parallelize(Chain(Normed), sw.ParallelPlan(activation_checkpointing=way))
    for step in range(3):
        (model(sample(0, step)) * model(sample(0, step, salt=1))).mean().backward()
    return [buffer.clone() for buffer in model.buffers()]


@on_ranks(1)
def test_batch_norms_count_a_batch_once() -> None:
    plain, *others = (statistics(way) for way in ("none", "full", "selective"))
    same = all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))
    assert (same, [int(buffer) for buffer in plain if buffer.dim() == 0]) == (True, [6] * 5)


# -- collectives


class Counting(Block):
    """Its output depends on running statistics, which it replaces, writes, and writes where torch does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("hidden", torch.zeros(()))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.largest = 0.5 * self.largest + y.abs().max()
            self.mean.lerp_(y.mean(), 0.5)
            self.hidden.data.add_(y.mean())
            self.num_calls += 1
        return y * torch.tanh(self.largest.detach() + self.mean.clone() + self.hidden.clone() + self.num_calls.float())


def two_microbatches(model: nn.Module, rank: int, step: int) -> None:
    loss = sum(plain_loss(model, rank, 10 * step + microbatch) for microbatch in range(2))
    loss.backward()


def counted(way: str) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    model = sw.parallelize(Chain(Counting), strategy="zero3", activation_checkpointing=way)
    for step in range(2):
        two_microbatches(model, 0, step)
    return [p.grad.clone() for p in model.parameters()], [buffer.clone() for buffer in model.buffers()]


@on_ranks(1)
def test_statistics_of_any_module_are_those_of_one_run_and_the_second_run_sees_what_the_first_saw() -> None:
    once = counted("none")
    for way in ("full", "selective"):
        for mine, theirs in zip(counted(way), once, strict=True):
            assert len(mine) == len(theirs)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), way


class Late(Block):
    """Buffers that come and go, that training alone writes, that are large, and that are its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("num_calls", torch.zeros(5000))
        self.register_buffer("many", torch.ones(2**20 + 1))
        self.register_buffer("scale", torch.full((), 2.0))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.mean = y.mean() if self.mean is None else 0.5 * self.mean + y.mean()
            self.many.mul_(1.5)
            if self.training:
                self.num_calls += 1
            if not hasattr(self, "extra"):
                self.register_buffer("extra", torch.zeros(()))
            self.extra += 1
        y = y * torch.tanh(self.mean.detach() + self.num_calls[0].clone() + self.many[0].clone() + self.extra.clone())
        if hasattr(self, "scale"):
            y = y * self.scale
            del self.scale
        self.last = y + self.last.mean().detach()
        return self.last


def late(way: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model = sw.parallelize(Chain(Late), strategy="zero3", activation_checkpointing=way)
    for step in range(3):
        model.train(step > 0)
        two_microbatches(model, 0, step)
    loss = plain_loss(model, 0, 4)
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], {name: b.detach().clone() for name, b in model.named_buffers()}


@on_ranks(1)
def test_a_second_run_finds_whatever_buffers_the_first_found_as_often_as_it_is_run() -> None:
    (gradients, buffers), (same_gradients, same_buffers) = late("none"), late("full")
    assert all(torch.equal(a, b) for a, b in zip(gradients, same_gradients, strict=True))
    assert {name: torch.equal(b, same_buffers[name]) for name, b in buffers.items()} == dict.fromkeys(buffers, True)
    assert buffers.keys() == same_buffers.keys()


def trace_of(model: nn.Module, *, steps: int = 2) -> tuple[list[tuple[str, str, int, str]], bool]:
    """What the last of some steps sent, and whether that was the prediction."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(steps):
        with sw.record_collectives(model) as events:
            model(sample(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    trace = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]
    return trace, trace == [tuple(event) for event in probe(model).predicted_collectives()]


@on_ranks(2, 3)
def test_recomputation_never_gathers_twice():
    for strategy in presets():
        plain = trace_of(sw.parallelize(Chain(Dropping), sw.ParallelPlan(strategy=strategy)))
        assert plain[1]
        for way in WAYS:
            plan = sw.ParallelPlan(strategy=strategy, activation_checkpointing=way)
            assert trace_of(sw.parallelize(Chain(Dropping), plan)) == plain, (strategy, way)


class Holder:
    """An object that travels through the layers, as a batch of PyTorch Geometric does in its GraphGym."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Changing(Block):
    """Reads a list that its model changes after the call, takes an item of a dict, and writes to an object."""

    def forward(self, features: list[Tensor], skipped: dict[str, list[Tensor]], holder: Holder) -> Tensor:
        x = super().forward(sum(features, skipped["stem"].pop())) * holder.x
        holder.x = holder.x + x.detach().mean()
        return x


class KeepsLists(Chain):
    """Gives its blocks what they and it change: DenseNet's list of features, a U-Net's skipped activations."""

    def __init__(self) -> None:
        super().__init__(Changing)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        features, skipped, holder = [stem], {"stem": [stem * n for n in range(len(self.blocks))]}, Holder(stem)
        for index, block in enumerate(self.blocks):
            made = block(features, skipped=skipped, holder=holder)
            features[0] = features[0] + made  # of the same shape: nothing else would notice
            if index % 2:
                features.append(made)
        return self.head(features[-1] + holder.x)


@on_ranks(2)
def test_a_recomputed_block_gets_the_lists_dicts_and_objects_that_its_call_got():
    for way in ("full", "selective"):
        compare_each(KeepsLists, plain_loss, ("ddp", "zero3"), activation_checkpointing=way)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.mix(x), dim=-1) * x


class Nested(nn.Module):
    """A block that is a unit, of an attention and a feed-forward that are units too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = Attention()
        self.mlp = Block()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + torch.tanh(self.mlp(self.attention(self.norm(x)))), 0.1, training=self.training)


class Stack(nn.Module):
    """A unit of six units of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(x)


class Deep(Chain):
    def __init__(self) -> None:
        super().__init__(Stack, 2)


NESTED = {
    "nested": (lambda: Chain(Nested), {Nested, Attention, Block}),
    "stack": (Deep, {Stack, Block}),
}


@on_ranks(2, 3)
def test_units_inside_a_recomputed_one_are_gathered_once_for_recomputation_and_backward() -> None:
    """The redundant gathers of pytorch#175406. Six of a kind come in the order of forward, so the order differs.

    By case, whether the trace is that without recomputation, in order.
    """
    found = {}
    for name, (build, classes) in NESTED.items():
        policy = sw.wrap_by_class(classes)
        plain = trace_of(sw.parallelize(build(), sw.ParallelPlan(auto_wrap_policy=policy)))
        plan = sw.ParallelPlan(auto_wrap_policy=policy, activation_checkpointing="full")
        trace, is_predicted = trace_of(sw.parallelize(build(), plan))
        assert sorted(trace) == sorted(plain[0]), name
        found[name] = trace == plain[0], is_predicted
        for strategy in presets():
            trained = compare(
                build, plain_loss, strategy, steps=3, auto_wrap_policy=policy, activation_checkpointing="full"
            )
            seen = trained.probe
            assert seen.held_bytes()["gathered"] <= seen.predicted_bytes()["gathered"], (name, strategy)
    assert found == {"nested": (True, True), "stack": (False, True)}


# -- what users suffer from


def wrap(model: nn.Module, is_reentrant: bool) -> nn.Module:
    impl = CheckpointImpl.REENTRANT if is_reentrant else CheckpointImpl.NO_REENTRANT

    def put(module: nn.Module) -> nn.Module:
        return checkpoint_wrapper(module, checkpoint_impl=impl)

    apply_activation_checkpointing(model, checkpoint_wrapper_fn=put, check_fn=lambda m: isinstance(m, Block))
    return model


@on_ranks(2)
def test_units_inside_torchs_checkpoint_wrapper_work_pytorch_82203():
    for strategy in presets():
        for is_reentrant in (False, True):
            plain = trace_of(
                sw.parallelize(
                    Chain(Dropping), sw.ParallelPlan(strategy=strategy, auto_wrap_policy=sw.wrap_by_class(Block))
                )
            )
            compare(
                lambda flag=is_reentrant: wrap(Chain(Dropping), flag),
                plain_loss,
                strategy,
                steps=3,
                auto_wrap_policy=sw.wrap_by_class(Block),
            )
            model = wrap(Chain(Dropping), is_reentrant)
            plan = sw.ParallelPlan(strategy=strategy, auto_wrap_policy=sw.wrap_by_class(Block))
            trace = [
                (kind, unit.removesuffix("._checkpoint_wrapped_module"), sent, axis)
                for kind, unit, sent, axis in trace_of(sw.parallelize(model, plan))[0]
            ]
            assert trace == plain[0], (strategy, is_reentrant)


class ChangesInPlace(nn.Module):
    """Adds to what its products return, in place: behind reshapes that are views to autograd, that are none, and none.

    T5's attention does so (``scores += position_bias``), of many versions of transformers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x_BTC = x.unflatten(0, (2, -1))
        scores = self.first(x_BTC) @ x_BTC.transpose(1, 2)
        scores += x_BTC.mean(-1, keepdim=True)
        weights = torch.relu_(scores.softmax(-1) @ self.second(x_BTC))
        flat = self.second(x)
        flat.mul_(2)
        return x + weights.flatten(0, 1) + torch.tanh(flat)


@on_ranks(2)
def test_what_a_block_changes_in_place_behind_its_products_is_changed_once():
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(sample(rank, step, 4, 8)).square().mean()

    compare_each(lambda: Chain(ChangesInPlace), loss, ("ddp", "zero3"), activation_checkpointing="selective")


@on_ranks(1)
def test_what_is_changed_in_place_in_a_distributed_tensor_is_changed_once():
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(sample(0, 0, 8, 8), mesh, [Shard(0)]))

    def run(x: Tensor) -> Tensor:
        whole = DTensor.from_local(torch.sin(x).unflatten(0, (2, -1)), mesh, [Replicate()])
        return torch.tanh(F.linear(whole, weight).mul_(2)).full_tensor()

    grads = []
    for context_fn in (noop_context_fn, selective.contexts(["matmul"])):
        x = sample(0, 1, 8, 8).requires_grad_()
        checkpoint(run, x, use_reentrant=False, context_fn=context_fn).square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


class CountScores(TorchDispatchMode):
    """Counts the products of queries and keys of :func:`attend_plainly`; one of its backward has the same shape."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.bmm.default and (args[0].size(-1), args[1].size(-1)) == (4, 32)
        return func(*args, **(kwargs or {}))


def attend_plainly(x_BTC: Tensor) -> Tensor:
    """Attention without a fused kernel."""
    return (torch.tanh(x_BTC) @ torch.sin(x_BTC).transpose(1, 2)).softmax(-1) @ torch.cos(x_BTC)


@pytest.mark.parametrize(("save", "count"), [(["matmul"], 3), (["matmul", "aten.bmm"], 2), (["aten.bmm"], 2)])
def test_scores_of_attention_are_not_kept_unless_the_operator_is_named(save, count):
    grads = []
    for context_fn in (noop_context_fn, selective.contexts(save)):
        x = sample(0, 1, 2, 32, 4).requires_grad_()
        with CountScores() as seen:
            loss = checkpoint(attend_plainly, x, use_reentrant=False, context_fn=context_fn).square().sum()
            (grad,) = torch.autograd.grad(loss, x)
        grads.append(grad)
    assert seen.count == count
    assert torch.equal(*grads)


class SumOverRanks(torch.autograd.Function):
    """Megatron's way out of a row-parallel layer: what the layer gave is summed up in place."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class RowParallel(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(SumOverRanks.apply(self.up(x))))


@on_ranks(2)
def test_a_collective_that_writes_what_a_product_gave_is_not_applied_twice():
    found = {}
    for way in ("none", "selective"):
        torch.manual_seed(0)
        model = sw.parallelize(Chain(RowParallel), sw.ParallelPlan(strategy="ddp", activation_checkpointing=way))
        model(sample(dist.get_rank(), 0)).square().mean().backward()
        found[way] = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(map(torch.equal, *found.values()))


class DrawsTwice(Block):
    """A drop-out, as attention has it, and behind it other random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(super().forward(x), 0.2)
        return torch.tanh(dropped) * torch.rand_like(dropped)


@on_ranks(2)
def test_an_operator_that_draws_is_computed_again_so_that_the_next_draws_the_same():
    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(sample(rank, step)).square().mean()

    way = sw.RecomputePolicy(save=["aten.native_dropout", "matmul"])
    compare_each(lambda: Chain(DrawsTwice), loss, ("zero3",), activation_checkpointing=way)


def test_attention_is_kept_where_it_drops_nothing():
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    x = torch.zeros(1, 1, 1, 1)
    draws = [selective.is_random(flash, (x, x, x, dropout_p, True), {}) for dropout_p in (0.0, 0.1)]
    draws += [selective.is_random(flash, (x, x, x), {}), selective.is_random(flash, (x, x, x), {"dropout_p": 0.1})]
    assert draws == [False, True, False, True]


def attend(x: Tensor, dropout_p: float) -> Tensor:
    """An operator of others: it draws, and has no tag that says so."""
    return x * (torch.rand_like(x) >= dropout_p)


def test_an_operator_of_others_that_drops_is_computed_again():
    # Not at the head of this module, which ranks import: torch looks for the operator's source in all modules.
    torch.library.custom_op("shardwise_tests::attend", attend, mutates_args=()).register_autograd(
        lambda ctx, grad: (grad * (ctx.saved_tensors[1] != 0), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output),
    )
    operator, x = torch.ops.shardwise_tests.attend.default, torch.ones(2)
    assert [selective.is_random(operator, (x, rate), {}) for rate in (0.0, 0.2)] == [False, True]


KINDS = ("gpt2", "llama", "t5")


def tiny(kind: str) -> nn.Module:
    """A transformers model with dropout, whose forward fills a key-value cache unless told otherwise."""
    import transformers

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "gpt2":
            config = transformers.GPT2Config(n_embd=16, n_layer=5, n_head=2, vocab_size=40, n_positions=32)
            return transformers.GPT2LMHeadModel(config)
        if kind == "t5":
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "vocab_size": 40, "num_layers": 5}
            return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 5, "vocab_size": 40}
        config = transformers.LlamaConfig(
            **sizes, num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.1, tie_word_embeddings=True
        )
        return transformers.LlamaForCausalLM(config)


def own_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))
    return model.train()(input_ids=tokens, labels=tokens).loss


@needs_transformers
@pytest.mark.preload(*(f"transformers.models.{kind}.modeling_{kind}" for kind in KINDS))
@on_ranks(2)
def test_transformers_blocks_are_recomputed_though_their_models_ask_for_a_cache():
    plans = {
        f"{strategy}, {way}": sw.ParallelPlan(strategy=strategy, activation_checkpointing=way)
        for way in ("full", "selective")
        for strategy in ("zero2", "zero3")
    }
    for kind in KINDS:
        assert tiny(kind).config.use_cache
        compare_each_with_one_process(
            lambda k=kind: tiny(k),
            own_loss,
            {f"{kind}, {name}": lambda model, p=plan: sw.parallelize(model, p) for name, plan in plans.items()},
            steps=3,
        )


@needs_transformers
@on_ranks(1)
def test_a_cache_that_holds_tokens_is_refused_not_dropped():
    import transformers

    model = sw.parallelize(tiny("llama"), sw.ParallelPlan(activation_checkpointing="full"))
    cache = transformers.DynamicCache(config=model.config)
    name = next(each for each in CACHE_NAMES if each in inspect.signature(model.forward).parameters)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with torch.no_grad():
        model(input_ids=tokens, **{name: cache})
    assert cache.get_seq_length() == 3
    with pytest.raises(sw.StateError, match="key-value cache that holds tokens"):
        model(input_ids=tokens, **{name: cache})


@needs_transformers
@on_ranks(2)
def test_gradient_checkpointing_enable_neither_crashes_nor_gathers_twice_accelerate_2178():
    tokens = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(dist.get_rank()))
    for is_reentrant in (None, False, True):

        def build(flag=is_reentrant):
            model = tiny("llama")
            options = {} if flag is None else {"gradient_checkpointing_kwargs": {"use_reentrant": flag}}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # transformers has begun to rename it
                model.gradient_checkpointing_enable(**options)
            return model

        compare_each(build, own_loss, ("zero2", "zero3"), steps=3)
        traces = []
        for make in (lambda: tiny("llama"), build):
            model = sw.parallelize(make(), sw.ParallelPlan()).train()
            for _ in range(2):
                with sw.record_collectives(model) as events:
                    model(input_ids=tokens, labels=tokens).loss.backward()
            traces.append([(event.kind, event.unit, event.sent_bytes) for event in events])
        assert traces[0] == traces[1], is_reentrant


# -- with other parts of the plan


class Rotated(Chain):
    """What its blocks multiply with is a buffer in fp32, made outside of them."""

    def __init__(self) -> None:
        super().__init__(Dropping)
        self.register_buffer("angles", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, scale=self.angles)
        return self.head(x)


@on_ranks(2)
def test_casts_are_the_same_in_the_recomputation() -> None:
    """A table in fp32 that comes from outside is cast for the forward and for its repetition alike."""
    found = {}
    for way in ("none", "full", "selective", sw.wrap_by_name("blocks.*.up")):
        plan = sw.ParallelPlan(mp_policy=sw.PrecisionPolicy(param_dtype="bf16"), activation_checkpointing=way)
        model = sw.parallelize(Rotated(), plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        losses = []
        for step in range(3):
            loss = model(sample(dist.get_rank(), step)).float().square().mean()
            loss.backward()
            losses.append((loss.item(), sw.clip_grad_norm(model, 1.0).item()))
            optimizer.step()
            optimizer.zero_grad()
        found[str(way)] = losses
    first, *others = found.values()
    assert all(other == first for other in others), found


@on_ranks(1)
def test_names_classes_and_signatures_stay_and_the_summary_tells():
    plain = Chain(Dropping)
    names = [name for name, _ in plain.named_modules()], [name for name, _ in plain.named_parameters()]
    model = sw.parallelize(Chain(Dropping), sw.ParallelPlan(activation_checkpointing="full"))
    assert ([name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]) == names
    assert all(type(block) is Dropping for block in model.blocks)
    assert inspect.signature(model.blocks[0].forward) == inspect.signature(plain.blocks[0].forward)
    assert list(sw.full_state_dict(model)) == list(plain.state_dict())
    summary = sw.summary(model)
    assert summary.recomputed == tuple(f"blocks.{index}" for index in range(5))
    assert "recomputed in backward: blocks.0 blocks.1" in str(summary)


@on_ranks(1)
def test_a_deleted_model_leaves_its_memory_at_once() -> None:
    import gc
    import weakref

    model = sw.parallelize(Chain(Dropping), sw.ParallelPlan(activation_checkpointing="selective"))
    model(sample(0, 0)).sum().backward()
    watch = weakref.ref(model.blocks[0])
    gc.disable()
    del model
    assert watch() is None


def refuse():
    for way, fault in (
        ("full", "none below its root"),
        (sw.wrap_by_name("blocks.*", "blocks.*.up"), "names 'blocks.0' and, inside it, 'blocks.0.up'"),
        (sw.wrap_by_name("layers.*"), "matches no module"),
        (sw.RecomputePolicy(modules=sw.wrap_by_class(Block), save="aten.gellu"), "no operator 'aten.gellu'"),
    ):
        model = Chain()
        with pytest.raises(sw.PlanError, match=fault):
            sw.parallelize(model, sw.ParallelPlan(auto_wrap_policy="none", activation_checkpointing=way))
        assert "forward" not in model.blocks[0].__dict__
        assert not dist.is_initialized()
    flexible = Chain()
    flexible.config = types.SimpleNamespace(_attn_implementation="flex_attention")
    with pytest.raises(sw.PlanError, match="attends by flex_attention"):
        sw.parallelize(flexible, sw.ParallelPlan(activation_checkpointing="selective"))
    plan = sw.ParallelPlan(
        auto_wrap_policy=sw.wrap_by_class({Nested, Attention, Block}), activation_checkpointing="selective"
    )
    with pytest.raises(sw.PlanError, match=r"'blocks.0', which encloses the unit 'blocks.0.attention'"):
        sw.parallelize(Chain(Nested), plan)


def test_what_cannot_be_done_is_refused_before_anyone_is_met():
    run_on_ranks(refuse, 1, process_group=False)
