"""``sw.fully_shard([a, b])``: several modules as one unit, as FSDP2's users write it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import adamw, compare
from tests.common.ranks import on_ranks, refusal


class Decoder(nn.Module):
    """Named and called as in torchtitan."""

    def __init__(self, *, is_tied: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tok_embeddings = nn.Embedding(11, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(5))
        self.norm = nn.LayerNorm(16)
        self.output = nn.Linear(16, 11, bias=False)
        if is_tied:
            self.output.weight = self.tok_embeddings.weight
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return self.output(self.norm(x))


def tied():
    return Decoder(is_tied=True)


def recomputed():
    return Decoder(recomputes=True)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(tokens).float().square().mean()


def apply_fsdp(model, **options):
    """torchtitan's recipe: the embedding, each layer, the last two together, the rest."""
    sw.fully_shard(model.tok_embeddings, **options)
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    last = [model.norm, model.output]
    assert sw.fully_shard(last, **{"reshard_after_forward": False} | options) is last
    return sw.fully_shard(model, **options)


def apply_fsdp_to_tied(model, **options):
    """torchtitan's recipe where the output layer has the embedding's weight."""
    for layer in model.layers:
        sw.fully_shard(layer, **options)
    sw.fully_shard([model.tok_embeddings, model.norm, model.output], **options)
    return sw.fully_shard(model, **options)


def with_units_inside(model):
    """Units inside of those in the list, modules inside of others in the list, and lists inside of a list."""
    sw.fully_shard(model.layers[3][0])
    sw.fully_shard([model.layers[3], model.layers[3][1], model.norm])
    sw.fully_shard([model.layers[0], model.layers[0], model.layers[1]])
    return sw.fully_shard(model)


@on_ranks(1, 2, 3)
def test_a_list_of_modules_is_one_unit():
    ours = compare(Decoder, loss, parallelize=apply_fsdp)
    assert [unit.name for unit in ours.probe.units] == [
        "root",
        "tok_embeddings",
        *(f"layers.{i}" for i in range(5)),
        "norm-output",
    ]
    for flag in (True, False):
        compare(Decoder, loss, parallelize=lambda model, flag=flag: apply_fsdp(model, reshard_after_forward=flag))
    compare(recomputed, loss, parallelize=apply_fsdp)
    compare(recomputed, loss, parallelize=lambda model: apply_fsdp(model, reshard_after_forward=True))
    ours = compare(Decoder, loss, parallelize=with_units_inside)
    above = {unit.name: unit.parent for unit in ours.probe.units[1:]}
    assert above == {"layers.3-norm": "root", "layers.3.0": "layers.3-norm", "layers.0-1": "root"}
    state = sw.full_state_dict(ours.model)
    assert not dist.get_rank() or not state
    if dist.get_rank() == 0:
        assert all(torch.equal(state[name], value) for name, value in ours.plain.state_dict().items())


@on_ranks(1, 2, 3)
def test_modules_of_a_list_may_share_a_parameter():
    ours = compare(tied, loss, parallelize=apply_fsdp_to_tied)
    assert [shard.name for shard in ours.probe.shards if shard.unit == "tok_embeddings-output"] == [
        "tok_embeddings.weight",
        "norm.weight",
        "norm.bias",
    ]
    compare(tied, loss, parallelize=lambda model: apply_fsdp_to_tied(model, reshard_after_forward=False))


def one_exchange():
    """Number of gathers and reductions of the unit in a step."""
    model = apply_fsdp(Decoder())
    loss(model, dist.get_rank(), 0).backward()
    with sw.record_collectives(model) as events:
        loss(model, dist.get_rank(), 1).backward()
    found = [event.kind for event in events if event.unit == "norm-output"]
    precise = apply_fsdp(Decoder(), mp_policy=sw.PrecisionPolicy(param_dtype="bf16", output_dtype="fp32"))
    value = loss(precise, dist.get_rank(), 0)
    value.backward()
    assert value.dtype is torch.float32
    assert precise.output.weight.grad is None or precise.output.weight.grad.dtype is torch.float32
    return found


def test_a_list_of_modules_is_gathered_and_reduced_as_one():
    assert sorted(run_on_ranks(one_exchange, 2)[0]) == ["all_gather", "reduce_scatter"]


@on_ranks(2)
def test_what_cannot_be_one_unit_is_refused():
    texts = {}

    def attempt(name, call, kind=StateError):
        texts[name] = refusal(kind, call)

    attempt("empty", lambda: sw.fully_shard([]), PlanError)
    attempt("compiled", lambda: sw.fully_shard(torch.compile(nn.Linear(4, 4), backend="eager")), PlanError)
    compiled = nn.Linear(4, 4)
    compiled.compile(backend="eager")
    attempt("compiled in place", lambda: sw.fully_shard([nn.Linear(4, 4), compiled]), PlanError)
    model = Decoder()
    sw.fully_shard([model.norm, model.output])
    attempt("twice", lambda: sw.fully_shard([model.output, model.layers[0]]))
    attempt("rootless", lambda: model.norm(torch.ones(2, 16)))
    attempt("apart", lambda: sw.fully_shard(nn.Sequential(model.norm)))
    attempt("switch", lambda: model.norm.set_requires_gradient_sync(False))
    apply_to = sw.fully_shard(model)
    optimizer = adamw(apply_to.parameters())
    loss(apply_to, dist.get_rank(), 0).backward()
    optimizer.step()
    pairs = zip(probe(model.norm).shards, probe(model).shards, strict=True)
    assert all(one.parameter is other.parameter for one, other in pairs)  # one engine
    assert texts["empty"].startswith("fully_shard([]): expected a module, or a list of at least one.")
    assert texts["compiled"].startswith("fully_shard got a OptimizedModule that torch.compile() has made or changed")
    assert "sw.ParallelPlan(compile=True)" in texts["compiled in place"]
    assert texts["twice"].startswith("Linear is a unit already.")
    assert "sw.fully_shard made one unit of these modules, but no module around them is" in texts["rootless"]
    assert "but not all of them are below this Sequential" in texts["apart"]
    assert "the units of a model are reduced together" in texts["switch"]
