"""The per-unit building block: children first, the root last; and what FSDP2's users expect of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import Block, Chain, compare, compare_each, compare_local_sums, plain_loss, sample
from tests.common.ranks import on_ranks, refusal


def bottom_up(model, **options):
    for block in model.blocks:
        assert sw.fully_shard(block, **options) is block
    return sw.fully_shard(model, **options)


def grandchildren_too(model):
    for block in model.blocks:
        sw.fully_shard(block.up)
        sw.fully_shard(block)
    return sw.fully_shard(model)


def some_units(model):
    sw.fully_shard(model.blocks[1])
    sw.fully_shard(model.blocks[3], reshard_after_forward=False)
    return sw.fully_shard(model)


def names(trained):
    return [unit.name for unit in trained.probe.units]


def lines_but_buffers(model):
    """Of its summary: ``fully_shard`` keeps no buffers equal, as FSDP2 does not, and says so."""
    return [line for line in str(sw.summary(model)).splitlines() if not line.startswith("buffers:")]


@on_ranks(1, 2, 3)
def test_units_made_bottom_up_are_those_of_parallelize():
    same = compare(Chain, plain_loss)
    ours = compare(Chain, plain_loss, parallelize=bottom_up)
    assert names(ours) == names(same)
    for a, b in zip(sw.summary(same.model).units, sw.summary(ours.model).units, strict=True):
        assert a.reshards_after_forward == b.reshards_after_forward, a.name
    layouts = [
        [[group.layout for group in unit.groups] for unit in each.probe.unit_facts.values()] for each in (same, ours)
    ]
    assert layouts[0] == layouts[1]
    assert lines_but_buffers(ours.model) == lines_but_buffers(same.model)
    for flag in (True, False):
        compare(Chain, plain_loss, parallelize=lambda m, flag=flag: bottom_up(m, reshard_after_forward=flag))
    nested = compare(Chain, plain_loss, parallelize=grandchildren_too)
    assert len(nested.probe.units) == 11
    compare(Chain, plain_loss, parallelize=some_units)
    events = []
    for model in (same.model, ours.model):
        with sw.record_collectives(model) as seen:
            plain_loss(model, 0, 0).backward()
        events.append([(e.kind, e.unit, e.sent_bytes) for e in seen])
    assert events[0] == events[1]


@on_ranks(1, 2, 3)
def test_a_unit_can_be_unsharded_and_resharded_by_hand():
    model = bottom_up(Chain())
    plain = Chain()
    for module in (model, model.blocks[2]):
        for name in ("unshard", "reshard", "set_requires_gradient_sync"):
            assert callable(getattr(module, name))
    model.blocks[2].unshard()
    for ours, whole in zip(model.blocks[2].parameters(), plain.blocks[2].parameters(), strict=True):
        assert torch.equal(ours, whole)
    assert torch.equal(model.blocks[2].up(sample(0, 0)), plain.blocks[2].up(sample(0, 0)))
    model.blocks[2].reshard()
    if dist.get_world_size() == 1:  # the parameters are those of the plain model, also where a layer is called alone
        assert torch.equal(model.blocks[2].up(sample(0, 0)), plain.blocks[2].up(sample(0, 0)))
    else:
        with pytest.raises(StateError):
            model.blocks[2].up(sample(0, 0))
    shards = [p.shape.numel() for p in model.blocks[2].parameters()]
    assert sum(shards) < sum(p.numel() for p in plain.blocks[2].parameters()) or dist.get_world_size() == 1
    plain_loss(model, 0, 0).backward()
    with torch.no_grad():
        assert torch.equal(model(sample(0, 1)), plain(sample(0, 1)))
    # A unit that was unsharded by hand trains as well.
    model.zero_grad()
    model.blocks[1].unshard()
    plain_loss(model, dist.get_rank(), 1).backward()
    first = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    plain_loss(model, dist.get_rank(), 1).backward()
    second = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def switched(model, is_enabled):
    model.set_requires_gradient_sync(is_enabled)
    yield


@on_ranks(1, 2, 3)
def test_gradient_sync_can_be_switched_by_method():
    """With False nothing is sent until True, as with FSDP2.

    set_requires_gradient_sync before each microbatch, as FSDP2's users write it.
    """
    model = bottom_up(Chain())
    compare_local_sums(model, Chain, lambda is_enabled: switched(model, is_enabled), "fully_shard")
    text = refusal(StateError, model.blocks[1].set_requires_gradient_sync, False)
    assert text.startswith("set_requires_gradient_sync() of unit 'blocks.1': the units of a model are reduced toge")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.norm = nn.BatchNorm1d(4)
        for module in (self, self.inner):
            module.register_buffer("table", torch.full((2,), 1 / 3))

    def forward(self, x):
        return self.norm(self.inner(x))

    def generate(self, x, synced_gpus=False):
        return synced_gpus


def finishing():
    rank = dist.get_rank()
    model = sw.convert_sync_batchnorm(Normed())
    sw.fully_shard(model.inner, mp_policy=sw.PrecisionPolicy(param_dtype="fp32"))
    sw.fully_shard(model, mp_policy=sw.PrecisionPolicy(param_dtype="bf16", buffer_dtype="bf16", output_dtype="fp32"))
    model(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
    shared = [model.inner[1].running_mean.clone(), model.norm.running_mean.clone()]
    plain = Normed()
    sw.fully_shard(plain)
    plain(torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))).sum().backward()
    with torch.no_grad():
        plain(torch.zeros(2, 4))
    comms = {id(norm.comm) for norm in (model.norm, model.inner[1])}
    dtypes = model.table.dtype, model.inner.table.dtype
    with pytest.raises(PlanError, match=r"SyncBatchNorm is a torch.nn.SyncBatchNorm(.|\n)*before sw.fully_shard\(\)"):
        sw.fully_shard(nn.SyncBatchNorm(4))
    return shared, plain.norm.running_mean.clone(), len(comms), dtypes, model.generate(None)


def test_a_model_is_finished_as_by_parallelize_but_for_buffers():
    """Batch norm over all ranks is connected, generate() kept in step; buffers are each rank's own, as with FSDP2."""
    (ours, own, *_), (theirs, other, *_) = found = run_on_ranks(finishing, 2)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(own, other)
    for _, _, num_comms, dtypes, is_synced in found:
        assert num_comms == 1
        assert dtypes == (torch.bfloat16, torch.float32)  # the policy is the outer unit's
        assert is_synced


@on_ranks(2)
def test_what_cannot_be_a_unit_is_refused():
    texts = {}

    def attempt(name, call, kind):
        texts[name] = refusal(kind, call)

    model = bottom_up(Chain())
    attempt("twice", lambda: sw.fully_shard(model), StateError)
    tied = Chain(lambda: Block(8, 8))
    tied.head = nn.Linear(8, 8)
    tied.head.weight = tied.blocks[2].up.weight
    sw.fully_shard(tied.blocks[2])
    attempt("tied", lambda: sw.fully_shard(tied), StateError)
    assert texts["twice"].startswith("Chain is a unit already.")
    assert "'head.weight' is tied to one of unit 'blocks.2', which does not cover all its uses" in texts["tied"]


def meshes():
    """A process group or a DeviceMesh of some ranks only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    half = dist.new_group([0, 1])
    rest = dist.new_group(list(range(2, world)))
    mesh = dist.init_device_mesh("cpu", (world,))
    whole = bottom_up(Chain(), mesh=mesh)
    plain_loss(whole, rank, 0).backward()
    assert probe(whole).shard_group_size == world
    model = bottom_up(Chain(), mesh=half if rank < 2 else rest)
    size = probe(model).shard_group_size
    assert size == (2 if rank < 2 else world - 2)
    plain = Chain()
    total = None
    for other in range(2) if rank < 2 else range(2, world):
        plain.zero_grad()
        plain_loss(plain, other, 0).backward()
        grad = plain.blocks[0].up.weight.grad.clone()
        total = grad if total is None else total + grad
    plain_loss(model, rank, 0).backward()
    norm = sw.clip_grad_norm(model, 1e9)
    part = model.blocks[0].up.weight.grad
    part = None if part is None else getattr(part, "to_local", part.detach)().flatten()
    return rank, part, (total / size).flatten(), norm


def test_units_can_live_on_some_ranks_only():
    results = run_on_ranks(meshes, 3)
    for ranks in ([0, 1], [2]):
        got = torch.cat([results[r][1] for r in ranks if results[r][1] is not None])
        assert torch.equal(got, results[ranks[0]][2])
        assert len({float(results[r][3]) for r in ranks}) == 1


class ListLoss(nn.Module):
    """Not called as a whole: its children are units of their own, used one after the other by the caller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def children_called_by_hand(model, rank, step):
    """The root's forward is never called: its units are, each an outermost forward of its own."""
    x = sample(rank, step)
    for block in model.blocks:
        x = block(x)
    return model.head(x).square().mean()


@on_ranks(2)
def test_units_can_be_called_without_their_root():
    compare_each(ListLoss, children_called_by_hand, ("ddp", "zero1", "zero2", "shard_grad_op", "zero3"))


@on_ranks(2)
def test_two_models_may_meet_in_one_loss():
    """A generator and a critic, each parallelized, with losses through both."""
    rank = dist.get_rank()
    for strategies in (("zero3", "zero3"), ("zero3", "ddp"), ("zero1", "shard_grad_op")):
        pair = [sw.parallelize(Chain(), sw.ParallelPlan(strategy=s)) for s in strategies]
        copies = [[Chain(), Chain()] for _ in range(2)]
        for step in range(3):
            losses = []
            for models, data in ((pair, [rank]), *((c, [r]) for r, c in enumerate(copies))):
                x = sample(data[0], step)
                hidden = models[0](x)
                loss = (models[1](torch.nn.functional.pad(hidden, (0, 5))) - hidden).square().mean()
                loss.backward()
                losses.append(loss.detach())
            assert torch.equal(losses[0], losses[1 + rank])
            for which in range(2):
                total = {n: p.grad for n, p in copies[0][which].named_parameters()}
                other = {n: p.grad for n, p in copies[1][which].named_parameters()}
                mean = {n: ((total[n] + other[n]) / 2).flatten() for n in total}
                for name, parameter in pair[which].named_parameters():
                    if parameter.grad is None:
                        continue
                    mine = parameter.grad.flatten()
                    whole = mean[name]
                    assert torch.equal(mine, whole[: mine.numel()]) or torch.equal(mine, whole[-mine.numel() :]), name
            for models in (pair, *copies):
                for each in models:
                    each.zero_grad()


@on_ranks(1)
def test_a_world_of_one_sends_nothing_and_holds_everything():
    model = sw.parallelize(Chain())
    optimizer = torch.optim.AdamW(model.parameters())
    with sw.record_collectives(model) as events:
        plain_loss(model, 0, 0).backward()
        optimizer.step()
    assert all(event.sent_bytes == 0 for event in events)
    assert [p.shape.numel() for p in model.parameters()] == [p.numel() for p in Chain().parameters()]


# -- what PyTorch tests of its own FSDP2, on CPU


def unit_then_root(model, rank, step):
    """A unit alone forward and backward, then the whole model; then the other way round."""
    x = sample(rank, step)
    first = model.blocks[step % 5](x).square().mean()
    first.backward()
    yield first
    whole = plain_loss(model, rank, step)
    whole.backward()
    yield whole
    whole = plain_loss(model, rank, step + 20)
    last = model.blocks[4](x).sin().sum()
    (whole + last).backward()
    yield whole, last


@on_ranks(1, 2, 3)
def test_a_unit_may_run_alone_before_after_and_beside_its_root():
    compare_each(Chain, unit_then_root, ("ddp", "zero1", "zero2", "shard_grad_op", "zero3"))


@on_ranks(2)
def test_modules_hold_shards_between_calls_and_whole_parameters_inside():
    """Between the calls the modules hold the shards, whatever is gathered; the user's objects stay the same."""
    for strategy in ("ddp", "zero1", "zero2", "shard_grad_op", "zero3"):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        before = [id(p) for p in model.parameters()]
        sizes = [p.shape for p in model.parameters()]
        inside = []
        handles = [
            model.blocks[1].up.register_forward_hook(lambda m, _i, _o, seen=inside: seen.append(m.weight.shape)),
            model.head.register_forward_hook(lambda m, _i, _o, seen=inside: seen.append(m.weight.shape)),
        ]
        for step in range(2):
            loss = plain_loss(model, 0, step)
            assert [id(p) for p in model.parameters()] == before
            loss.backward()
            assert [id(p) for p in model.parameters()] == before
            assert [p.shape for p in model.parameters()] == sizes
            with torch.no_grad():
                model(sample(0, step))
            assert [id(p) for p in model.parameters()] == before
        assert set(inside) == {(13, 8), (3, 8)}
        for handle in handles:
            handle.remove()


class TiedRecomputed(Chain):
    """Tied embedding and head around recomputed blocks, two of which share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.head.weight = self.stem.weight
        self.blocks[3].down.weight = self.blocks[0].down.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@on_ranks(1, 2, 3)
def test_tied_weights_and_recomputation_go_together():
    compare_each(TiedRecomputed, plain_loss, ("ddp", "zero1", "zero2", "shard_grad_op", "zero3"))


@on_ranks(2)
def test_parameters_are_gathered_again_in_backward_only_where_they_were_released():
    for flag in (True, False):
        trained = compare(Chain, plain_loss, "zero3", reshard_after_forward=flag)
        gathers = []
        with sw.record_collectives(trained.model) as events:
            plain_loss(trained.model, 0, 0).backward()
        gathers = [event.unit for event in events if event.kind == "all_gather"]
        again = [unit for unit in set(gathers) if gathers.count(unit) == 2]
        assert len(again) == (5 if flag else 0), gathers  # the last unit to run is kept
    with pytest.raises(PlanError, match="reshard_after_forward=True has no meaning for strategy 'zero2'"):
        sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero2", reshard_after_forward=True))


@on_ranks(2)
def test_a_unit_that_owns_no_elements_can_be_told_to_offload():
    def build():
        torch.manual_seed(2)
        model = nn.Sequential(*(Block() for _ in range(3)))
        model.empty = nn.Parameter(torch.zeros(0))
        return model

    def shard(model):
        for block in model:
            sw.fully_shard(block, offload_policy="cpu")
        return sw.fully_shard(model, offload_policy="cpu")

    compare(build, plain_loss, parallelize=shard)
