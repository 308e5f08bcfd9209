"""Two groups of two ranks: what sums, state, checkpoints and refusals make of the second axis."""

from __future__ import annotations

import math
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comm import stall
from shardwise.comm.gloo import GlooComm
from shardwise.spec.errors import MeshError, PlanError, RankDisagreement, StateError
from shardwise.testing import forget_notices, probe, report_stalls_after, run_on_ranks
from tests.common.oracle import Block, Chain, Wanders, adamw, compare, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks, refusal
from tests.engine.test_disagreement import Skips, skip_at_the_ends, skip_from_step_two_on
from tests.engine.test_fully_shard import bottom_up

TWO_BY_TWO = {"dp_replicate": 2}


def hsdp(model: nn.Module, **options: object) -> nn.Module:
    return sw.parallelize(model, sw.ParallelPlan(strategy="hsdp", **TWO_BY_TWO, **options))


# -- sums


class Picks(Chain):
    """Ranks use different parameters of one unit: of one group only, of one rank only, of none."""

    def __init__(self) -> None:
        super().__init__(PickBlock)

    def forward(self, x, used=()):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, used)
        return self.head(x)


class PickBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterDict({name: nn.Parameter(torch.ones(8)) for name in ("group", "rank", "none")})

    def forward(self, x, used=()):
        x = super().forward(x)
        for name in used:
            x = x * self.gains[name]
        return x


def pick(model, rank, step):
    """The second group uses one parameter, its first rank another, and in the first step nobody any."""
    used = ["group"] * (rank >= 2) + ["rank"] * (rank == 2)
    return model(sample(rank, step), used if step else ()).square().mean()


def pick_by_microbatch(model, rank, step):
    """Used in the first microbatch and not in the last, and by other ranks in other microbatches."""
    for micro in range(3):
        used = ["group"] * (micro == 0 and rank >= 2) + ["rank"] * (micro == 1 and rank == 2)
        loss = model(sample(rank, 10 * step + micro), used).square().mean()
        loss.backward()
        yield loss


def add_to_gradients(model, rank, step):
    """Repeated backwards: the sum goes on over the groups while .grad holds that of the backward before."""
    for micro in range(3):
        loss = plain_loss(model, rank, 10 * step + micro)
        loss.backward()
        yield loss


@on_ranks(4, timeout_s=120)
def test_ranks_may_use_different_parameters_and_units_on_either_axis():
    compare_each(Picks, pick, ("hsdp", "ddp"), steps=3, **TWO_BY_TWO)
    compare(Picks, pick_by_microbatch, "hsdp", **TWO_BY_TWO)
    compare(Chain, add_to_gradients, "hsdp", **TWO_BY_TWO)
    for script in (skip_from_step_two_on, skip_at_the_ends):
        compare(Skips, script, "hsdp", **TWO_BY_TWO)
    compare(Skips, skip_from_step_two_on, "zero3", reshard_after_forward=2)


def picked_loss(model, rank, window, micro):
    used = ["group"] * (micro == 0 and rank >= 2) + ["rank"] * (micro == 1 and rank == 2)
    return model(sample(rank, 10 * window + micro), used).square().mean()


def add(total, more):
    for name, grad in more.items():
        total[name] = total[name] + grad if name in total else grad


def mean_by_hand(plain, window):
    """Each group adds its ranks, then the microbatches; then the groups are added; then one division."""
    total: dict[str, torch.Tensor] = {}
    for group in ((0, 1), (2, 3)):
        partial: dict[str, torch.Tensor] = {}
        for micro in range(3):
            for rank in group:
                picked_loss(plain, rank, window, micro).backward()  # repeated backwards add, in rank order
            add(partial, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
            plain.zero_grad()
        add(total, partial)
    return {name: grad / 4 for name, grad in total.items()}


def deferred(*, is_zeroed):
    """Two windows of three microbatches; the second finds its place free, or gradients there to be added to."""
    model, plain = hsdp(Picks(), accumulation="defer_replicate"), Picks()
    seen = probe(model)
    expected: dict[str, torch.Tensor] = {}
    for window in range(2):
        expected = {} if is_zeroed else expected
        add(expected, mean_by_hand(plain, window))
        for micro in range(3):
            with sw.gradient_sync(model, micro == 2):
                picked_loss(model, dist.get_rank(), window, micro).backward()
            assert seen.waiting == (tuple(unit.name for unit in seen.units) if micro != 2 else ())
        for shard in seen.shards:
            if shard.name not in expected:
                assert shard.grad is None, shard.name
            else:
                assert torch.equal(shard.grad, shard.part_of(expected[shard.name])), shard.name
        if is_zeroed:
            model.zero_grad()


@on_ranks(4)
def test_deferred_sums_wait_where_nothing_else_writes_also_beside_earlier_gradients():
    deferred(is_zeroed=True)
    deferred(is_zeroed=False)


def step_too_early():
    model = hsdp(Chain(), accumulation="defer_replicate")
    optimizer = adamw(model.parameters())
    with sw.gradient_sync(model, False):
        plain_loss(model, dist.get_rank(), 0).backward()
    for parameter in model.parameters():
        with pytest.raises(StateError, match="a gradient that is not there yet"):
            parameter.grad.sum()
    with pytest.raises(StateError, match="before the gradients of accumulated microbatches were reduced") as caught:
        optimizer.step()
    optimizer.zero_grad()  # drops what waits
    optimizer.step()
    plain_loss(model, dist.get_rank(), 1).backward()
    optimizer.step()
    return str(caught.value)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@on_ranks(4)
def test_a_backward_that_fails_drops_the_sums_that_waited():
    """A backward that fails takes the sums of the earlier microbatches with it, and says so."""
    model, rank = hsdp(Chain(), accumulation="defer_replicate"), dist.get_rank()
    with sw.gradient_sync(model, False):
        plain_loss(model, rank, 0).backward()
        loss = model(Fails.apply(sample(rank, 1).requires_grad_())).square().mean()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
    with pytest.raises(StateError, match="the sums of the earlier microbatches are lost"):
        plain_loss(model, rank, 2)
    model.zero_grad()
    plain_loss(model, rank, 3).backward()
    other = hsdp(Chain())
    plain_loss(other, rank, 3).backward()
    for ours, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert (ours.grad is None) == (expected.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, expected.grad)


def test_an_optimizer_step_before_the_last_microbatch_is_refused():
    texts = run_on_ranks(step_too_early, 4)
    assert len(set(texts)) == 1


def measure_norm():
    model, plain = hsdp(Chain()), Chain()
    for rank in range(4):
        plain_loss(plain, rank, 0).backward()
    for parameter in plain.parameters():
        parameter.grad /= 4
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    plain_loss(model, dist.get_rank(), 0).backward()
    with sw.record_collectives(model) as events:
        norm = sw.clip_grad_norm(model, 0.1)
    assert [(event.axis, event.unit) for event in events] == [("dp_shard", "grad_norm")]
    return norm.item(), expected.item(), sw.clip_grad_norm(model, math.inf).item()


def test_the_norm_counts_every_axis_once():
    """The pain of torchtitan#2318: a norm that is off by the size of an axis."""
    results = run_on_ranks(measure_norm, 4)
    assert len(set(results)) == 1
    norm, expected, after = results[0]
    assert norm == pytest.approx(expected, rel=1e-6)
    assert after == pytest.approx(0.1, rel=1e-4)


def look_at_the_sums_over_the_groups():
    """Where each all-reduce over the groups lies, and how many are under way when it is issued."""
    flying: list[tuple[int, int, str]] = []
    most, clashes = [0], []
    all_reduce = GlooComm.all_reduce

    def watched(comm, buffer, *, unit, divisor=1):
        handle = all_reduce(comm, buffer, unit=unit, divisor=divisor)
        if comm.axis != "dp_replicate":
            return handle
        first, last = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
        clashes.extend((unit, other) for start, stop, other in flying if start < last and first < stop)
        entry = (first, last, unit)
        flying.append(entry)
        most[0] = max(most[0], len(flying))
        wait = handle.wait

        class Landing(type(handle)):
            def wait(self):
                wait()
                if entry in flying:
                    flying.remove(entry)

        handle.__class__ = Landing
        return handle

    model = hsdp(Chain())
    optimizer = adamw(model.parameters())
    with mock.patch.object(GlooComm, "all_reduce", watched):
        for step in range(3):
            for micro in range(2):  # the second adds to gradients that are there
                plain_loss(model, dist.get_rank(), 2 * step + micro).backward()
                assert flying == []
            optimizer.step()
            optimizer.zero_grad()
    return most[0], clashes


def test_hybrid_shard_reuses_no_all_reduce_buffer_across_layers_in_flight():
    """The pain of pytorch#180900. Two layers' sums are under way at once, so that a shared buffer would show."""
    for most, clashes in run_on_ranks(look_at_the_sums_over_the_groups, 4):
        assert most == 2
        assert clashes == []


class Normed(Chain):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))


def scale_and_sync():
    """One rank's inf is everybody's, and batch norm's statistics are rank 0's."""
    rank = dist.get_rank()
    model = hsdp(Normed())
    optimizer = adamw(model.parameters())
    scaler = sw.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    found = []
    for step, factor in enumerate((math.inf if rank == 3 else 1.0, 1.0)):
        loss = plain_loss(model, rank, step) * factor
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(scaler.has_found_inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)))
    model.eval()
    with torch.no_grad():
        model(sample(rank, 5))
    own = torch.cat([buffer.double().flatten() for buffer in model.buffers()])
    return found, own


def test_one_ranks_inf_skips_the_step_of_every_group_and_buffers_are_rank_0s():
    results = run_on_ranks(scale_and_sync, 4)
    for found, buffers in results:
        assert found == [True, True, False, False]
        assert torch.equal(buffers, results[0][1])
    assert results[0][1].abs().sum() > 0


def prove():
    batches = [(torch.stack([sample(rank, step) for rank in range(4)]).flatten(0, 1),) for step in range(2)]
    plans = {
        "hsdp": sw.ParallelPlan(strategy="hsdp", dp_replicate=2),
        "zero2": sw.ParallelPlan(strategy="zero2", dp_replicate=2),
        "zero3": sw.ParallelPlan(),
        "inner": sw.ParallelPlan(reshard_after_forward=2),
    }
    return sw.parity(Chain, batches, lambda output, _: output.square().mean(), plans)


def test_parity_adds_as_the_plan_groups_the_ranks():
    report = run_on_ranks(prove, 4)[1]
    assert [row.plan for row in report.rows] == ["hsdp", "zero2", "zero3", "inner"]
    assert report.is_bitwise, str(report)


# -- disagreement


def diverge(odd_rank):
    report_stalls_after(0.6)
    rank = dist.get_rank()
    model, path = hsdp(Wanders()), (0, 1, 2, 3, 4)
    for step in range(2):
        model(sample(rank, step), path).square().mean().backward()
    with pytest.raises(RankDisagreement) as caught:  # no rank has ever run a block twice
        model(sample(rank, 2), (*path, 1) if rank == odd_rank else path).square().mean().backward()
    return str(caught.value)


@pytest.mark.parametrize("odd_rank", [1, 2])
def test_a_rank_that_takes_another_path_is_told_to_all_groups(odd_rank):
    texts = run_on_ranks(diverge, 4, odd_rank)
    for text in texts:
        assert f"  rank {odd_rank}: message of unit 'order " in text  # the odd one asks its peers
        assert f"  rank {odd_rank ^ 1}: all_gather of unit 'blocks." in text
        assert "The ranks took different paths through the model." in text


def test_a_ring_of_waits_over_several_groups_is_a_disagreement():
    """Each waits for the next one on another axis; no two of them wait for each other."""

    def status(channel, sequence, peers):
        row = [channel, sequence, "all_gather", f"unit {channel}", 64, "fp32"]
        newest = {channel: sequence}
        record = {"last": "", "line": None, "waits_for": row, "issued": [row], "newest": newest}
        return record | {"peers": peers, "messages": []}

    ring = {
        0: status("dp_shard@0", 5, [1]),
        1: status("dp_replicate@1", 3, [3]),
        3: status("dp_shard@2", 7, [2]),
        2: status("dp_replicate@0", 2, [0]),
    }
    text = stall._find_deadlock(ring)
    assert text is not None
    assert [line.split(":")[0] for line in text.splitlines()[1:]] == ["  rank 0", "  rank 1", "  rank 2", "  rank 3"]
    late = {**ring, 2: {**ring[2], "newest": {**ring[2]["newest"], "dp_shard@2": 7}}}
    assert stall._find_deadlock(late) is None
    # Ranks of different groups lack each other's collectives by right.
    assert stall._find_deadlock({0: status("dp_shard@0", 5, [1]), 2: status("dp_shard@2", 5, [3])}) is None


# -- meeting


def differ_across_groups():
    rank = dist.get_rank()
    model = Chain()
    with torch.no_grad():
        model.blocks[2].up.weight.add_(float(rank == 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hsdp(model)
    found = sw.full_state_dict(model)
    plain = Chain().state_dict()
    assert rank or all(torch.equal(found[name], value) for name, value in plain.items())
    for shard in probe(model).shards:
        assert torch.equal(shard.values, shard.part_of(plain[shard.name]))
    odd = Chain()
    with torch.no_grad():
        odd.blocks[2].up.weight.add_(float(rank == 2))
    with pytest.raises(StateError, match=r"different values for 'blocks\.2'"):
        hsdp(odd, sync="error")
    meta = Chain() if rank == 0 else Chain().to("meta")
    hsdp(meta, sync="rank0")
    for shard in probe(meta).shards:
        assert torch.equal(shard.values, shard.part_of(plain[shard.name]))
    return [str(each.message) for each in caught]


def test_weights_are_compared_over_all_groups():
    texts = run_on_ranks(differ_across_groups, 4)
    assert "the ranks held different values for 'blocks.2'; rank 0's were sent" in texts[0][0]
    assert texts[1:] == [[], [], []]


def default_meshes():
    found = {}
    os.environ |= {"WORLD_SIZE": "4", "RANK": str(dist.get_rank()), "MASTER_ADDR": "node-0"}
    for local_size in ("2", "4", "1", "3"):
        os.environ |= {"LOCAL_WORLD_SIZE": local_size, "LOCAL_RANK": str(dist.get_rank() % int(local_size))}
        forget_notices()
        lines: list[str] = []
        with mock.patch("sys.stderr") as stderr:
            stderr.write = lines.append
            try:
                model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="hsdp"))
                found[local_size] = probe(model).axes, lines
            except MeshError as error:
                found[local_size] = str(error), lines
    return found


def test_without_dp_replicate_a_group_is_a_machine_and_the_mesh_is_said():
    results = run_on_ranks(default_meshes, 4)
    for rank, found in enumerate(results):
        for local_size, sizes in (("2", (2, 2)), ("4", (1, 4)), ("1", (4, 1))):
            assert tuple(found[local_size][0].values()) == sizes
        assert "shards inside a machine and replicates over machines" in found["3"][0]
        assert bool(found["2"][1]) == (rank == 0)
    assert results[0]["2"][1] == ["shardwise: hsdp: dp_replicate=2 x dp_shard=2\n"]
    assert "one machine: nothing is replicated; set dp_replicate for several groups" in results[0]["4"][1][0]


# -- fully_shard


def mesh_2d(model):
    return bottom_up(model, mesh=dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def by_mesh():
    ours = compare(Chain, plain_loss, parallelize=mesh_2d)
    same = compare(Chain, plain_loss, "hsdp", **TWO_BY_TWO)
    assert sw.summary(ours.model).units == sw.summary(same.model).units
    assert sw.summary(ours.model).footprint == sw.summary(same.model).footprint
    assert "2 groups (dp_replicate) of 2 (dp_shard)" in str(sw.summary(ours.model))
    assert ours.probe.placements.is_hybrid
    inner = compare(Chain, plain_loss, parallelize=lambda model: bottom_up(model, reshard_after_forward=2))
    assert [unit.inner_size for unit in sw.summary(inner.model).units] == [2] * 6
    mixed = compare(Chain, plain_loss, parallelize=some_inner)
    assert [unit.inner_size for unit in sw.summary(mixed.model).units] == [None, None, 2, None, None, None]
    texts = {}

    def attempt(name, call, kind):
        texts[name] = refusal(kind, call)

    cube = dist.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    attempt("cube", lambda: sw.fully_shard(Chain(), mesh=cube), MeshError)
    named = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    attempt("named", lambda: sw.fully_shard(Chain(), mesh=named), MeshError)
    odd = dist.DeviceMesh("cpu", [[1, 0], [2, 3]])
    attempt("odd", lambda: sw.fully_shard(Chain(), mesh=odd), MeshError)
    model = Chain()
    sw.fully_shard(model.blocks[0])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    attempt("other", lambda: sw.fully_shard(model, mesh=mesh), MeshError)
    attempt("inner", lambda: sw.fully_shard(Chain(), mesh=mesh, reshard_after_forward=2), PlanError)
    return texts


def some_inner(model):
    for index, block in enumerate(model.blocks):
        sw.fully_shard(block, reshard_after_forward=2 if index == 1 else "auto")
    return sw.fully_shard(model)


def test_fully_shard_takes_a_mesh_of_replicate_and_shard():
    texts = run_on_ranks(by_mesh, 4)[3]
    assert "a DeviceMesh of shape [1, 2, 2] over ranks [0, 1, 2, 3] cannot be sharded over" in texts["cube"]
    assert "[1, 0, 2, 3]" in texts["odd"]
    assert "a DeviceMesh with the axes dp, tp: sw.fully_shard shards over data-parallel ranks only" in texts["named"]
    assert "Use sw.parallelize(model, sw.ParallelPlan(tp=...))" in texts["named"]
    assert (
        "the mesh is dp_replicate=2 x dp_shard=2, but units below lie on dp_replicate=1 x dp_shard=4" in texts["other"]
    )
    assert "must divide dp_shard=2" in texts["inner"]


# -- state


def _copy(model, rank):
    plain = Chain()
    with sw.full_parameters(model), torch.no_grad():
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    return plain


@on_ranks(4)
def test_state_reaches_every_group_and_the_loss_is_that_of_all_ranks():
    rank = dist.get_rank()
    plain = Chain()
    for strategy, options in (("hsdp", TWO_BY_TWO), ("zero2", TWO_BY_TWO), ("ddp", TWO_BY_TWO)):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, **options))
        state = sw.full_state_dict(model)
        assert bool(state) == (rank == 0)
        changed = {name: value + 1 for name, value in plain.state_dict().items()}
        sw.load_full_state_dict(model, changed if rank == 0 else {})
        for shard in probe(model).shards:
            assert torch.equal(shard.values, shard.part_of(changed[shard.name]))
        partly = {"stem.bias": torch.full((8,), 9.0)}
        sw.load_full_state_dict(model, partly if rank == 0 else {}, strict=False)
        for shard in probe(model).shards:
            assert torch.equal(shard.values, shard.part_of(partly.get(shard.name, changed[shard.name])))
        with sw.full_parameters(model, writeback=True):
            for parameter in model.parameters():
                parameter.data.mul_(2 if rank == 0 else 3)  # rank 0's are taken
        for shard in probe(model).shards:
            assert torch.equal(shard.values, shard.part_of(2 * partly.get(shard.name, changed[shard.name])))
        with sw.full_parameters(model, rank0_only=True):
            shapes = [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
            assert shapes or rank or strategy == "ddp"
        loss = sw.train_step(model, (sample(rank, 0),), lambda output, _: output.square().mean())
        mean = sum(plain_loss(_copy(model, rank), other, 0).double() for other in range(4)) / 4
        assert loss.item() == pytest.approx(mean.item(), rel=1e-6)
