"""Faults as users plant them in their own layers, each found at its module, and models that are right, found right."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.cli import main
from shardwise.testing import Location, NoDifference, probe, run_on_ranks
from shardwise.testing.kind import of_tensors
from shardwise.testing.sketch import distance, parts, sketch
from shardwise.testing.tap import Point, Tap

HEADS, WIDTH, VOCAB, LENGTH = 4, 16, 24, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = (each(x_BTC).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.out(self.arrange(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    def arrange(self, y_BHTD: Tensor) -> Tensor:
        return y_BHTD.transpose(1, 2).flatten(2)


class Normalize(nn.Module):
    def forward(self, x_BTF: Tensor) -> Tensor:
        return x_BTF


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.down = nn.Linear(WIDTH, 32), Normalize(), nn.Linear(32, WIDTH)
        nn.init.normal_(self.down.bias)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(F.gelu(self.middle(self.up(x_BTC))))


class Mixture(nn.Module):
    """Two small experts, of which each token chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x_BTC: Tensor) -> Tensor:
        weight_BTE = self.router(x_BTC).softmax(-1)
        chosen_BT = self.choose(weight_BTE)
        every = torch.stack([expert(x_BTC) for expert in self.experts], -1)
        return (every * (F.one_hot(chosen_BT, 2) * weight_BTE).unsqueeze(-2)).sum(-1)

    def choose(self, weight_BTE: Tensor) -> Tensor:
        return weight_BTE.argmax(-1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), FeedForward()
        self.mixture = Mixture()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        y_BTC = self.norm(x_BTC) * self.scale
        return x_BTC + self.mlp(y_BTC) + self.mixture(y_BTC)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return self.head(x_BTC)


def build() -> nn.Module:
    torch.manual_seed(3)
    return Net()


def build_gpt(**sizes: Any) -> nn.Module:
    torch.manual_seed(3)
    defaults = {"num_layers": 2, "hidden": 16, "num_heads": 4, "vocab_size": VOCAB, "seq_len": LENGTH, "dropout": 0.0}
    return sw.models.gpt("gpt-tiny", **(defaults | sizes))


def next_token_loss(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def batch() -> Tensor:
    return torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(5))


TP = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.attention": "divide:num_heads",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}
PLANS = {
    "dp": sw.ParallelPlan(),
    "tp": sw.ParallelPlan(tp=2, tp_plan=TP),
    "tp ddp": sw.ParallelPlan(tp=2, tp_plan=TP, strategy="ddp"),
    "pp": sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy(num_microbatches=4)),
    "cp": sw.ParallelPlan(cp=2),
    "sequence": sw.ParallelPlan(tp=2, sequence_parallel=True),
    "plain tp": sw.ParallelPlan(tp=2),
    "not packed": sw.ParallelPlan(tp=2, tp_plan={"blocks.*.attention.qkv": "colwise"}),
}

# -- layers as users write them


def tp_rank() -> int:
    return distributed.get_rank() % 2


def tp_group(*, other: bool = False) -> Any:
    """The ranks of tp of this rank; with ``other`` those of dp. All ranks make all groups."""
    if distributed.get_world_size() == 2:
        return None
    tp = [distributed.new_group([first, first + 1]) for first in (0, 2)]
    dp = [distributed.new_group([first, first + 2]) for first in (0, 1)]
    rank = distributed.get_rank()
    return dp[rank % 2] if other else tp[rank // 2]


def summed(x: Tensor, group: Any = None) -> Tensor:
    total = x.detach().clone()
    distributed.all_reduce(total, group=group)
    return total


class Sum(torch.autograd.Function):
    """The sum over ranks; the gradient of a sum's terms is the sum's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, times: int) -> Tensor:
        for _ in range(times):
            x = summed(x, group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


class Backward(torch.autograd.Function):
    """Changes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor | None]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        return ctx.change(grad), None


def row(down: nn.Linear, *, times: int = 1, scale: float = 1.0, early: bool = False, other: bool = False) -> None:
    """A layer that is cut by its inputs, with a sum over tp of the user's own."""
    group = tp_group(other=other)

    def forward(x: Tensor) -> Tensor:
        y = F.linear(x, down.weight, down.bias if early else None)
        y = Sum.apply(y, group, times) * scale
        return y if early or down.bias is None else y + down.bias

    down.forward = forward


def column(up: nn.Linear, backward: Callable[[Tensor], Tensor | None] = summed) -> None:
    """A layer that is cut by its outputs, whose backward the user wrote."""
    up.forward = lambda x: F.linear(Backward.apply(x, backward), up.weight, up.bias)


def wrap(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module returns."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def other_slice(model: Any) -> None:
    """A column-parallel layer whose ranks take each other's slice of its output."""
    up = model.blocks[1].mlp.up

    def forward(x: Tensor) -> Tensor:
        y = F.linear(Backward.apply(x, summed), up.weight, up.bias)
        halves = [torch.empty_like(y) for _ in range(2)]
        distributed.all_gather(halves, y.detach())
        return halves[1 - tp_rank()] + 0 * y

    up.forward = forward


def flip_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, WIDTH // HEADS)).flip(-2).flatten(-2)


def shift_rows(model: Any) -> None:
    embedding = model.embedding

    def forward(ids: Tensor) -> Tensor:
        local = ids - VOCAB // 2 * tp_rank() - tp_rank()  # one too far on the second rank
        is_own = (local >= 0) & (local < VOCAB // 2)
        rows = F.embedding(local.clamp(0, VOCAB // 2 - 1), embedding.weight) * is_own.unsqueeze(-1)
        return Sum.apply(rows, None, 1)

    embedding.forward = forward


def halve_gradient(layer: Any) -> None:
    layer.forward = lambda x: F.linear(x, Backward.apply(layer.weight, lambda grad: grad / 2))


def local_norm(model: Any) -> None:
    """RMS over the features of one rank."""
    model.blocks[0].mlp.middle.forward = lambda x: x * x.square().mean(-1, keepdim=True).rsqrt()


def drop_second(model: Any) -> None:
    """The second microbatch's gradient is lost on its way through a module."""
    seen: list[None] = []
    mlp = model.blocks[1].mlp if len(model.blocks[1].mlp._modules) else None
    if mlp is None:
        return
    forward = mlp.forward

    def change(x: Tensor) -> Tensor:
        seen.append(None)
        return forward(Backward.apply(x, torch.zeros_like) if len(seen) == 2 else x)

    mlp.forward = change


def in_bf16(model: Any) -> None:
    up = model.blocks[0].mlp.up
    up.forward = lambda x: F.linear(x.bfloat16(), up.weight.bfloat16(), up.bias.bfloat16()).float()


def no_ring(model: Any) -> None:
    """Each rank's positions attend to its own positions only, as if they were the first of the sequence."""
    attention = model.blocks[1].attention
    attention.__dict__["attend"] = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forget_norm(model: Any) -> None:
    norm = model.blocks[1].mlp_norm
    norm.forward = lambda x: nn.LayerNorm.forward(norm, x)


def wrap_arrange(attention: Any, change: Callable[[Tensor], Tensor]) -> None:
    arrange = attention.arrange
    attention.arrange = lambda y_BHTD: change(arrange(y_BHTD))


def other_choice(model: Any) -> None:
    if distributed.get_rank() == 1:
        model.blocks[1].mixture.choose = lambda weight_BTE: weight_BTE.argmin(-1)


def swapped_halves(model: Any) -> None:
    """Logits that are gathered in the wrong order of ranks."""
    wrap(model.head, lambda y: y.roll(VOCAB // 2, -1))


def scale_loss(model: Any) -> None:
    loss = model.loss
    if "forward" in dir(loss):
        wrap(loss, lambda y: Backward.apply(y, lambda grad: 4 * grad))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, where it is, and what is to be said of it."""

    plan: str
    plant: Callable[[Any], object]
    module: str
    kind: str
    axis: str
    tensor: str = ""
    text: str = ""
    gpt: bool = False


def on_mlp(which: int, name: str, plant: Callable[..., object], **how: Any) -> Callable[[Any], object]:
    return lambda model: plant(getattr(model.blocks[which].mlp, name), **how)


def in_two_halves(up: nn.Linear) -> None:
    """The same sum in another order."""

    def forward(x: Tensor) -> Tensor:
        early, late = (F.linear(x[..., part], up.weight[:, part]) for part in (slice(0, 8), slice(8, None)))
        return early + late + up.bias

    up.forward = forward


FAULTS: dict[str, Fault] = {
    "no all-reduce": Fault("tp", on_mlp(0, "down", row, times=0, early=True), "blocks.0.mlp.down", "missing sum", "tp"),
    "no all-reduce of attention": Fault(
        "tp", lambda m: row(m.blocks[0].attention.out, times=0), "blocks.0.attention.out", "missing sum", "tp", "output"
    ),
    "all-reduce twice": Fault(
        "tp ddp", lambda m: row(m.blocks[1].attention.out, times=2), "blocks.1.attention.out", "scaled", "tp"
    ),
    "divided by n": Fault(
        "tp", lambda m: row(m.blocks[1].attention.out, scale=0.5), "blocks.1.attention.out", "scaled", "tp", text="1/2"
    ),
    "bias on every rank": Fault("tp", on_mlp(1, "down", row, early=True), "blocks.1.mlp.down", "doubled sum", "tp"),
    "the other slice": Fault("tp", other_slice, "blocks.1.mlp.up", "shifted", "tp", "output"),
    "order of heads": Fault(
        "tp", lambda m: wrap(m.blocks[0].attention.q, flip_heads), "blocks.0.attention.q", "permuted", "tp"
    ),
    "order between layers": Fault(
        "tp ddp",
        lambda m: wrap_arrange(m.blocks[0].attention, flip_heads),
        "blocks.0.attention",
        "permuted",
        "tp",
        "input that it gives to 'blocks.0.attention.out'",
    ),
    "backward without the sum": Fault(
        "tp",
        on_mlp(1, "up", column, backward=lambda g: g),
        "blocks.1.mlp.up",
        "missing sum",
        "tp",
        "gradient of the input",
    ),
    "backward divides twice": Fault(
        "tp ddp", on_mlp(0, "up", column, backward=lambda g: summed(g) / 2), "blocks.0.mlp.up", "scaled", "tp"
    ),
    "backward sums the whole": Fault(
        "tp",
        lambda m: wrap(m.blocks[1].attention, lambda y: Backward.apply(y, summed)),
        "blocks.1.attention",
        "scaled",
        "tp",
    ),
    "gradient lost": Fault(
        "dp",
        lambda m: wrap(m.blocks[0].norm, lambda y: Backward.apply(y, lambda _: None)),
        "blocks.0.norm",
        "missing",
        "dp_shard",
    ),
    "local norm": Fault("tp", local_norm, "blocks.0.mlp.middle", "scaled", "tp", "output"),
    "shifted ids": Fault("tp", shift_rows, "embedding", "shifted", "tp"),
    "wrong order of a gather": Fault("tp", swapped_halves, "head", "permuted", "tp"),
    "another order of additions": Fault(
        "dp", on_mlp(1, "up", in_two_halves), "blocks.1.mlp.up", "rounding", "dp_shard", "output"
    ),
    "bf16 in one module": Fault("dp", in_bf16, "blocks.0.mlp.up", "rounding", "dp_shard", text="bf16"),
    "gradient of a weight divided twice": Fault(
        "dp", lambda m: halve_gradient(m.head), "head", "scaled", "dp_shard", "gradient of parameter 'weight'"
    ),
    "a buffer of one rank": Fault(
        "dp", lambda m: m.blocks[1].scale.mul_(1 + tp_rank()), "blocks.1", "scaled", "dp_shard", "'scale'"
    ),
    "routing of one rank": Fault("dp", other_choice, "blocks.1.mixture", "other", "dp_shard"),
    "loss times microbatches": Fault("pp", scale_loss, "loss", "scaled", "pp", text="microbatches", gpt=True),
    "a microbatch lost": Fault("pp", drop_second, "blocks.1.mlp", "missing", "pp", gpt=True),
    "no ring": Fault("cp", no_ring, "blocks.1.attention", "other", "cp", gpt=True),
    "norm's gradient not summed": Fault(
        "sequence", forget_norm, "blocks.1.mlp_norm", "missing sum", "tp", "gradient of parameter", gpt=True
    ),
}


def wrong_rows(model: Any) -> None:
    """A cut weight whose rows were loaded in another order."""
    (weight,) = (shard for shard in probe(model).shards if shard.name == "blocks.1.mlp.up.weight")
    weight.values.copy_(weight.values.view(-1, WIDTH).roll(1, 0).flatten())


def first_positions(model: Any) -> None:
    """Every rank of cp takes its positions for the first of the sequence."""
    embedding = model.position_embedding
    embedding.forward = lambda positions: F.embedding(torch.arange(len(positions)), embedding.weight)


def other_scale(model: Any) -> None:
    """Scores divided by the root of another width: what attention computes between its layers."""
    attention = model.blocks[0].attention
    scaled = functools.partial(F.scaled_dot_product_attention, scale=0.7)

    def forward(x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (attention.num_heads, -1)) for layer in (attention.q, attention.k, attention.v))
        return attention.out(attention.arrange(scaled(*(each.transpose(1, 2) for each in heads), is_causal=True)))

    attention.forward = forward


FAULTS |= {
    "a fused layer cut as one": Fault(
        "not packed", lambda _: None, "blocks.0.attention", "other", "tp", "input that it gives to", gpt=True
    ),
    "rows of a weight": Fault("tp ddp", wrong_rows, "blocks.1.mlp.up", "permuted", "tp", "'weight' before the step"),
    "first positions": Fault("cp", first_positions, "position_embedding", "shifted", "cp", "output", gpt=True),
    "no gradient of values": Fault(
        "dp",
        lambda m: wrap(m.blocks[0].attention.v, Tensor.detach),
        "blocks.0.attention.v",
        "missing",
        "dp_shard",
        "gradient of the input",
    ),
    "other scale of scores": Fault(
        "tp", other_scale, "blocks.0.attention", "other", "tp", "input that it gives to 'blocks.0.attention.out'"
    ),
    "one rank's output": Fault(
        "dp", lambda m: wrap(m, lambda y: y * (1 + 0.01 * tp_rank())), "", "scaled", "dp_shard", "output", "1.01 times"
    ),
}

#: Needs two axes.
OTHER_GROUP = Fault(
    "tp",
    lambda m: row(m.blocks[0].attention.out, other=True),
    "blocks.0.attention.out",
    "missing sum",
    "tp",
    "output",
    "summed over dp_shard, whose ranks have other samples, and not over tp",
)


def compared(fault: Fault, **how: Any) -> Any:
    def planted(model: nn.Module, plan: sw.ParallelPlan) -> nn.Module:
        model = sw.parallelize(model, plan)
        with torch.no_grad():
            fault.plant(model)
        return model

    data = [(batch(), batch().roll(-1, 1))] if fault.gpt else [batch()]
    made, loss = (build_gpt, None) if fault.gpt else (build, next_token_loss)
    (row,) = sw.parity(made, data, loss, {fault.plan: PLANS[fault.plan]}, parallelize=planted, **how).rows
    return row


def check(name: str, fault: Fault, found: Any) -> None:
    assert isinstance(found, Location), f"{name}: {found}"
    assert (found.module, found.kind, found.axis) == (fault.module, fault.kind, fault.axis), f"{name}: {found}"
    assert found.tensor.startswith(fault.tensor), f"{name}: {found}"
    assert fault.text in found.text, f"{name}: {found}"
    assert found.difference > 0, f"{name}: {found}"


def find_faults(names: list[str]) -> dict[str, Any]:
    return {name: compared(FAULTS[name]) for name in names}


def test_every_fault_is_found_at_its_module():
    first, second = run_on_ranks(find_faults, 2, list(FAULTS), timeout_s=250)
    assert {name: str(row.location) for name, row in first.items()} == {
        name: str(row.location) for name, row in second.items()
    }
    for name, row in first.items():
        assert not row.holds, name
        check(name, FAULTS[name], row.location)
    # The comparison of copies over tp ends these runs, which are located all the same.
    stopped = [name for name, row in first.items() if row.stopped]
    assert stopped == [
        "no all-reduce",
        "no all-reduce of attention",
        "backward without the sum",
        "norm's gradient not summed",
    ]
    assert first[stopped[0]].verdict.startswith("stopped: all 2 ranks of a tensor-parallel group hold")
    assert str(first["all-reduce twice"].location) == (
        "first difference: 'blocks.1.attention.out', output (step 0, microbatch 0)\n"
        "  scaled over tp: 2 times that of one process, and 2 is the size of tp: summed once too often\n"
        "  on ranks 0, 1: 0.835 at the most, where one process has up to 0.835\n"
        "  164 tensors before it are right"
    )
    assert first["a microbatch lost"].location.microbatch == 1
    assert first["routing of one rank"].location.ranks == (1,)


def right(*plans: str, **sizes: Any) -> dict[str, Any]:
    """Plans of a model without a fault."""
    tokens = batch()
    data = [(tokens, tokens.roll(-1, 1))] * 2
    return {
        name: sw.parity(lambda: build_gpt(**sizes), data, None, {name: PLANS[name]}, locate=True).rows[0]
        for name in plans
    }


def find_nothing() -> dict[str, Any]:
    return (
        right("dp", "plain tp", "pp", "cp", "sequence")
        | {f"tied {name}": row for name, row in right("pp", tied=True).items()}
        | {f"recomputes {name}": row for name, row in right("plain tp", activation_checkpointing=True).items()}
        | {"own layers": compared(dataclasses.replace(OTHER_GROUP, plant=own_layers), locate=True)}
    )


def own_layers(model: Any) -> None:
    """Layers with collectives of the user's, as they should be."""
    group = tp_group()
    for block in model.blocks:
        row(block.attention.out)
        row(block.mlp.down)
        column(block.mlp.up, functools.partial(summed, group=group))
        own_sum(block.mlp)


def own_sum(mlp: Any) -> None:
    """The sum over tp is made by the caller of the layer that gives its terms."""
    group, down = tp_group(), mlp.down
    down.forward = lambda x: F.linear(x, down.weight)
    mlp.forward = lambda x: Sum.apply(down(F.gelu(mlp.middle(mlp.up(x)))), group, 1) + down.bias


def test_no_module_is_accused_where_none_is_wrong():
    for found in run_on_ranks(find_nothing, 2, timeout_s=250):
        for name, row in found.items():
            assert row.holds, f"{name}: {row}"
            assert isinstance(row.location, NoDifference), f"{name}: {row.location}"
            assert row.location.num_right > 200


def find_on_four() -> dict[str, Any]:
    tokens = batch()
    data = [(tokens, tokens.roll(-1, 1))]
    plans = {
        "pp x tp": (sw.ParallelPlan(pp=2, tp=2), {}),
        "cp x tp": (sw.ParallelPlan(cp=2, tp=2, sequence_parallel=True), {}),
        "ep x tp": (sw.ParallelPlan(ep=2, tp=2), {"num_experts": 4}),
        "hsdp": (sw.ParallelPlan(strategy="hsdp", dp_replicate=2), {}),
        "pp x dp": (sw.ParallelPlan(pp=2), {"tied": True}),
    }
    found = {
        name: sw.parity(lambda sizes=sizes: build_gpt(**sizes), data, None, {name: plan}, locate=True).rows[0]
        for name, (plan, sizes) in plans.items()
    }
    return {
        "tp x dp": compared(dataclasses.replace(OTHER_GROUP, plant=own_layers), locate=True),
        "other group": compared(OTHER_GROUP),
        **found,
    }


def test_several_axes():
    for found in run_on_ranks(find_on_four, 4, timeout_s=250):
        check("other group", OTHER_GROUP, found.pop("other group").location)
        for name, row in found.items():
            assert row.holds, f"{name}: {row}"
            assert isinstance(row.location, NoDifference), f"{name}: {row.location}"
            assert row.location.num_right > 400
        # Experts get tokens of other ranks; all else is compared.
        assert set(found["ep x tp"].location.unseen) == {
            f"blocks.{block}.mlp.experts.{expert}{layer}"
            for block in range(2)
            for expert in range(4)
            for layer in ("", ".up", ".down")
        }


def replicas() -> Any:
    plans = {name: sw.ParallelPlan(strategy=name) for name in ("data_parallel", "zero3")}
    return sw.parity(build, [batch()], next_token_loss, plans, locate=True).rows


def test_replicas_in_one_process_are_compared_at_the_ends_only():
    threaded, sharded = run_on_ranks(replicas, 1)[0]
    assert threaded.location is None
    assert isinstance(sharded.location, NoDifference)
    assert sharded.location.unseen == ()


# -- the command


def run_command(port: int) -> tuple[int, str]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    settings = ("parallel.tp=2", "model.num_layers=1", "model.hidden=16", "data.source=random", "data.seq_len=8")
    arguments = [word for setting in settings for word in ("--set", setting)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(["parity", "--strategies", "zero3", "--steps", "2", "--locate", *arguments])
    return code, out.getvalue()


def test_the_command_locates():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    (code, text), other = run_on_ranks(run_command, 2, port, process_group=False)
    assert (code, other) == (0, (0, ""))
    assert re.search(r"\nzero3: no module differs: \d{3} tensors of 2 steps are right\n$", text), text


# -- models of others


def families() -> dict[str, Callable[[], nn.Module]]:
    import transformers as hf

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = sizes | {"num_attention_heads": HEADS}
    llama = heads | {"num_key_value_heads": 2, "max_position_embeddings": 16}
    off = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 16} | off
    no_dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    t5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": HEADS}
    return {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama)),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)),
        "Mixtral": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**llama, num_local_experts=4)),
        "BERT": lambda: hf.BertForMaskedLM(hf.BertConfig(**heads, **no_dropout)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**t5, dropout_rate=0, decoder_start_token_id=0)),
    }


def find_nothing_in(name: str) -> dict[str, Any]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return families()[name]()

    plans = {
        "dp": sw.ParallelPlan(),
        "tp": sw.ParallelPlan(tp=2),
        "pp": sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy(num_microbatches=2)),
        **({"cp": sw.ParallelPlan(cp=2)} if name in {"Llama", "GPT-2"} else {}),
        **({"ep": sw.ParallelPlan(ep=2)} if name == "Mixtral" else {}),
        "recomputes": sw.ParallelPlan(activation_checkpointing="full"),
    }
    tokens = {"input_ids": batch(), "labels": batch()}
    return {row.plan: row for row in sw.parity(make, [tokens, tokens], None, plans, locate=True).rows}


@pytest.mark.long
@pytest.mark.preload("transformers")
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mixtral", "BERT", "T5"])
def test_no_module_of_transformers_is_accused(name: str):
    for found in run_on_ranks(find_nothing_in, 2, name, timeout_s=250):
        for plan, row in found.items():
            assert row.holds, f"{plan}: {row}"
            assert isinstance(row.location, NoDifference), f"{plan}: {row.location}"


# -- sketches, parts and kinds, without ranks


@pytest.mark.parametrize("numel", [1, 5, 4096, 4097, 3 * 4096 + 7, 300 * 4096])
def test_a_sketch_is_linear_and_tells_how_far_tensors_are_apart(numel: int):
    left, right = torch.randn(2, numel, generator=torch.Generator().manual_seed(numel))
    total = sketch(left + right)
    torch.testing.assert_close(sketch(left) + sketch(right), total, rtol=1e-4, atol=1e-4 * numel**0.5)
    assert torch.equal(sketch(left), sketch(left.clone()))
    assert distance(sketch(left), sketch(right)) == pytest.approx((left - right).norm().item(), rel=0.6)
    one_wrong = left.clone()
    one_wrong[numel // 2] += 1
    assert distance(sketch(left), sketch(one_wrong)) == pytest.approx(1, rel=0.8)


@pytest.mark.parametrize(
    ("whole", "own", "at", "expected"),
    [
        ((2, 8), (2, 8), {"tp": (2, 1)}, {"": None}),
        (
            (2, 8),
            (2, 4),
            {"tp": (2, 1)},
            {"dim 1 by tp": [4, 5, 6, 7], "dim 1 by tp of each of 2 blocks": [2, 3, 6, 7]},
        ),
        ((9,), (4,), {"tp": (2, 0)}, {"dim 0 by tp, unevenly": [0, 1, 2, 3]}),
        ((2, 8), (2, 4), {"cp": (2, 0)}, {"dim 1 by cp": [0, 1, 6, 7]}),
        ((1, 16), (1, 4), {"cp": (2, 0), "tp": (2, 1)}, {"dim 1 by cp and tp": [12, 13, 14, 15]}),
        ((8,), (4,), {"tp": (4, 1)}, {"dim 0 by tp, in copies": [0, 1, 2, 3]}),
        ((2, 8), (8, 2), {"tp": (2, 1)}, {}),
        ((2, 8), (16,), {"tp": (2, 1)}, {"": None}),
        ((2, 8), (8,), {"tp": (2, 1)}, {}),
        ((6,), (4,), {"cp": (2, 0)}, {}),  # padded
    ],
)
def test_parts_by_shape(whole, own, at, expected):
    found = {each.label: [places.tolist() for _, places in each.places] for each in parts(whole, own, at)}
    for label, places in expected.items():
        assert found[label] == ([] if places is None else [places])
    assert bool(found) == bool(expected)


def tensors() -> tuple[Tensor, Tensor]:
    whole = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return whole, whole[:, :4]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda whole, _part: whole[:, 1:5], "shifted", "4 of 4 slices of dim 1 are those 1 further"),
        (lambda whole, _part: whole[:, [4, 1, 2, 3]], "shifted", "1 of 4 slices of dim 1 are those 4 further"),
        (lambda _whole, part: part[:, [1, 0, 3, 2]], "permuted", "at other places: 1, 0, 3, 2"),
        (lambda _whole, part: part.flip(0), "permuted", "4 of 4 slices of dim 0"),
        (lambda _whole, part: part.float().bfloat16(), "rounding", "rounded to bf16"),
        (lambda _whole, part: part * (1 + 1e-7), "rounding", "1.0e-07 of the norm"),
        (lambda _whole, part: part * torch.tensor([[1.5], [2], [1], [1]]), "scaled", "2 of 4 rows are scaled"),
        (lambda _whole, part: part * torch.tensor([[1.0], [0], [1], [1]]), "missing", "1 of 4 rows are zero"),
        (lambda _whole, part: part + torch.tensor([2.0, 1, 0, 4]), "doubled sum", "bias is in it 3 times"),
        (lambda _whole, part: part * 0, "missing", "zero"),
        (lambda _whole, part: part / 0, "not finite", ""),
        (lambda _whole, part: part.exp(), "other", "no pattern"),
        (lambda _whole, part: part, "other", "equal in a second run of the step"),
    ],
)
def test_kinds(change, kind, text):
    whole, part = tensors()
    found = of_tensors(change(whole, part), part, whole, [("bias", torch.tensor([1, 0.5, 0, 2]))])
    assert (found.name, text in found.text) == (kind, True), found


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (lambda rows: rows * torch.tensor([[1.0], [0], [1], [1]]), "missing", "1 of 4 rows are zero"),
        (lambda rows: rows * (1 + 2e-6), "rounding", "2.0e-06 of the norm"),
        (lambda rows: rows.exp(), "other", "no pattern"),
    ],
)
def test_kinds_of_what_is_looked_up_in_a_table(change, kind, text):
    table, _ = tensors()
    rows = table[[2, 0, 3, 3]]
    found = of_tensors(change(rows), rows, rows, [("weight", table)])
    assert (found.name, text in found.text) == (kind, True), found


def test_a_vector_is_no_row_of_a_table():
    table, _ = tensors()
    assert of_tensors(table[0].exp(), table[0], table[0], [("weight", table)]).name == "other"


def test_hooks_leave_nothing_behind_and_change_nothing():
    model, other = build(), build()
    seen: list[Point] = []
    tap = Tap(model, lambda point, _tensor: seen.append(point))
    next_token_loss(model(batch()), batch()).backward()
    count = len(seen)
    tap.remove()
    next_token_loss(model(batch()), batch())
    next_token_loss(other(batch()), batch()).backward()
    assert len(seen) == count
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    # The residual connection's gradient also arrives at a norm's input, but is not its own.
    assert Point("blocks.0.norm", "gradient of the input", 0, "0") in seen
    assert tap.callers["blocks.0.norm", 0] == ("blocks.0", 0)
    q, v = (Point(f"blocks.0.attention.{name}", "gradient of the input", 0, "0") for name in "qv")
    assert tap.siblings[v] == q


class GivesMore(nn.Linear):
    """Gives its weight out beside its value, and what it got; gets it again, and does nothing with it."""

    def forward(self, x: Tensor, _weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(super().forward(x)), self.weight, x


class UsesMore(nn.Module):
    """Its batch norm keeps running statistics of each rank's samples; nothing depends on its last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(GivesMore(6, 6) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        more = x.new_zeros(())
        for layer in self.layers:
            x, weight, given = layer(x)
            more = more + weight.sin().mean() + given.cos().mean()
            x, _, _ = layer(x, weight)
        return self.norm(x), more + 0 * self.last(torch.cat([x, x], 1)).sum()


def gives_more() -> bool:
    batches = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    plan = sw.ParallelPlan(auto_wrap_policy=sw.wrap_by_class({GivesMore}), merge_units=False)

    def parallelize(model: UsesMore, plan: sw.ParallelPlan) -> nn.Module:
        in_two_halves(model.last)  # some bits are others; at the ends all are the same
        return sw.parallelize(model, plan)

    def loss(output: tuple[Tensor, Tensor], _batch: Tensor) -> Tensor:
        return output[0].square().mean() + output[1]

    (row,) = sw.parity(UsesMore, batches, loss, {"plan": plan}, locate=True, parallelize=parallelize).rows
    return row.is_bitwise and not isinstance(row.location, Location)


def test_what_a_module_gives_out_and_others_use_too_is_no_difference():
    assert run_on_ranks(gives_more, 2, timeout_s=60) == [True, True]
