"""Buffers that training changes: what is sent, when, and what the ranks then hold."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import Chain, plain_loss, presets, sample
from tests.common.ranks import on_ranks
from tests.engine.test_memory import Storages, everything_alive, train

MODES = ("auto", "broadcast", "mean", "none")


class Watching(nn.Module):
    """Writes buffers of several dtypes in forward, and computes with one of them; others never change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.zeros(8, dtype=torch.bool))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3, -math.inf, 1e30]))
        self.register_buffer("passing", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.seen |= x[0] > 1
                self.passing.add_(1 + x.mean(0))
        return x + self.linear(self.norm(x) - self.mean)


def build(num_blocks=3):
    return Chain(Watching, num_blocks)


SAVED = [name for name, _ in build().named_buffers() if "passing" not in name]
PASSING = [name for name, _ in build().named_buffers() if "passing" in name]


def expected_sync(states: list[dict[str, Tensor]], mode: str) -> None:
    """What a sync does to the buffers of all ranks, written plainly."""
    if mode == "none":
        return
    for name in states[0] if mode != "auto" else SAVED:
        root = states[0][name].clone()
        if mode == "mean" and root.is_floating_point():
            gaps = [torch.where(each[name] == root, torch.zeros_like(root), each[name] - root) for each in states]
            total = gaps[0]
            for gap in gaps[1:]:
                total = total + gap
            root = root + total / len(states)
        for each in states:
            each[name].data.copy_(root)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(pytest.param(2, marks=pytest.mark.long), 3)
def test_every_mode_gives_what_it_says(mode):
    rank, world = dist.get_rank(), dist.get_world_size()
    for strategy in presets():
        copies = [build() for _ in range(world)]
        model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, sync_buffers=mode))
        for step in range(3):
            if step:
                expected_sync([dict(each.named_buffers()) for each in copies], mode)
            losses = [plain_loss(each, r, step).detach() for r, each in enumerate(copies)]
            loss = plain_loss(model, rank, step)
            loss.backward()
            assert torch.equal(loss.detach(), losses[rank]), f"{mode}, {strategy}, step {step}"
            mine, theirs = dict(model.named_buffers()), dict(copies[rank].named_buffers())
            for name, buffer in theirs.items():
                assert torch.equal(mine[name], buffer), f"{mode}, {strategy}: {name}"
        expected_sync([dict(each.named_buffers()) for each in copies], mode)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(sample(0, 9)), copies[rank].eval()(sample(0, 9)))


@on_ranks(3)
def test_constants_do_not_drift_under_mean():
    """What is equal on all ranks stays so, to the last bit, also where the ranks are no power of two."""
    model = sw.parallelize(build(), sw.ParallelPlan(sync_buffers="mean"))
    before = model.blocks[0].constant.clone()
    for step in range(4):
        plain_loss(model, dist.get_rank(), step).backward()
    assert torch.equal(model.blocks[0].constant, before)


# -- when


def train_on(model, x):
    model(x).square().mean().backward()


def events_of(model, call, x):
    with sw.record_collectives(model) as events:
        call(x) if call is model else call(model, x)
    return [(event.kind, event.unit, event.sent_bytes) for event in events]


def record(mode, accumulation):
    """Events of two steps of two microbatches, and those of an evaluation before and after."""
    rank = dist.get_rank()
    found = {}
    for strategy in ("ddp", "zero3"):
        plan = sw.ParallelPlan(strategy=strategy, sync_buffers=mode, accumulation=accumulation)
        model = sw.parallelize(build(), plan)
        seen = probe(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for step in range(3):
            for microbatch in range(2):
                with sw.gradient_sync(model, microbatch == 1):
                    is_first = microbatch == 0
                    is_synchronising = not is_first or accumulation == "sharded"
                    options = {"is_synchronising": is_synchronising, "is_first_of_window": is_first}
                    predicted = [tuple(c[:3]) for c in seen.predicted_collectives(**options)]
                    events = events_of(model, train_on, sample(rank, step))
                    if step:
                        assert events == predicted, f"{strategy}, step {step}, microbatch {microbatch}"
                    steps.append([event for event in events if event[1] == "buffers"])
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            evaluations = [events_of(model, model, sample(rank, 0)) for _ in range(3)]
        model.train()
        evaluations.append(events_of(model, train_on, sample(rank, 0)))  # nothing has trained since the last sync
        found[strategy] = steps, [[e for e in events if e[1] == "buffers"] for events in evaluations]
    return found


#: One block saves 8 + 8 + 8 + 4 floats, one int64 and 8 bools.
NUM_FLOATS, NUM_PASSING, NUM_INTS, NUM_BOOLS = 3 * 28, 3 * 8, 3, 3 * 8


@pytest.mark.parametrize("accumulation", ["sharded", "unsharded"])
def test_buffers_are_sent_once_a_step_in_one_message_per_dtype_and_before_the_next_evaluation(accumulation):
    for mode, floats in (("auto", NUM_FLOATS), ("mean", NUM_FLOATS + NUM_PASSING)):
        for rank, found in enumerate(run_on_ranks(record, 2, mode, accumulation)):
            sent = [
                ("broadcast", "buffers", num_bytes * (rank == 0)) for num_bytes in (4 * floats, 8 * NUM_INTS, NUM_BOOLS)
            ]
            if mode == "mean":
                sent.insert(1, ("all_reduce", "buffers", 4 * floats))  # half is sent, the other half's sum spread
            sent = sorted(sent)
            for steps, evaluations in found.values():
                assert [sorted(events) for events in steps] == [[], [], sent, [], sent, []]
                assert [sorted(events) for events in evaluations] == [sent, [], [], []]


def recompute_statistics():
    """What ``torch.optim.swa_utils.update_bn`` does: forwards in training mode, without grad; then an evaluation."""
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp"))
    with torch.no_grad():
        for step in range(3):
            model(sample(dist.get_rank(), step))
        model.eval()
        evaluations = [events_of(model, model, sample(0, 0)) for _ in range(2)]
    return [bool(events) for events in evaluations], {n: b.clone() for n, b in model.named_buffers() if n in SAVED}


def test_a_forward_in_training_mode_changes_buffers_without_grad_too():
    (sent, ours), (_, theirs) = run_on_ranks(recompute_statistics, 2)
    assert sent == [True, False]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def none_to_send():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="ddp"))
    plain_loss(model, 0, 0).backward()
    quiet = sw.parallelize(build(), sw.ParallelPlan(strategy="ddp", sync_buffers="none"))
    plain_loss(quiet, 0, 0).backward()
    syncing = [sw.parallelize(build(), sw.ParallelPlan(sync_buffers=mode)) for mode in ("auto", "broadcast", "mean")]
    summaries = [sw.summary(each).buffers for each in (model, quiet, *syncing)]
    with torch.no_grad():
        return [*events_of(model, model, sample(0, 0)), *events_of(quiet, quiet, sample(0, 0))], summaries


def test_without_buffers_nothing_is_sent_and_the_summary_says_what_auto_means():
    events, summaries = run_on_ranks(none_to_send, 2)[0]
    assert events == []
    assert summaries == [
        "not synchronised: none is saved with the model (auto)",
        "not synchronised",
        "18 that are saved with the model (auto); rank 0's are sent before the first forward after one in train mode",
        "21 in all; rank 0's are sent before the first forward after one in train mode",
        "21 in all; averaged over the ranks before the first forward after one in train mode",
    ]


# -- what else


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = build()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


@on_ranks(2)
def test_parity_covers_models_with_batch_norm():
    batches = [sample(0, step, 12, 8) for step in range(3)]
    plans = [sw.ParallelPlan(strategy=strategy) for strategy in ("ddp", "zero3")]
    plans.append(sw.ParallelPlan(sync_buffers="mean"))
    assert [(row.losses, row.is_bitwise) for row in sw.parity(Scalar, batches, None, plans).rows] == [
        (True, True),
        (True, True),
        (False, False),
    ]


@on_ranks(2)
def test_two_forwards_before_a_backward_work_with_batch_norm():
    """A sync between two forwards is no change by the user: with torch's DDP the backward raises here."""
    rank = dist.get_rank()
    for strategy in presets():
        for mode in MODES:
            model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, sync_buffers=mode))
            for step in range(2):
                first, second = plain_loss(model, rank, step), plain_loss(model, rank, step + 5)
                (first + second).backward()


@on_ranks(2)
def test_what_is_saved_is_the_mean(tmp_path):
    rank = dist.get_rank()
    for strategy in presets():
        model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, sync_buffers="mean"))
        plain_loss(model, rank, 0).backward()
        means = [torch.zeros(8) for _ in range(2)]
        dist.all_gather(means, model.blocks[1].mean)
        mean = means[0] + (means[0] * 0 + (means[1] - means[0])) / 2
        if strategy == "ddp":
            with sw.full_parameters(model):
                assert torch.equal(model.blocks[1].mean, mean)
        elif strategy == "zero1":
            other = sw.parallelize(build())
            sw.save(f"{tmp_path}/{strategy}", model)
            sw.load(f"{tmp_path}/{strategy}", other)
            assert torch.equal(other.blocks[1].mean, mean)
        else:
            state = sw.full_state_dict(model)
            assert rank or torch.equal(state["blocks.1.mean"], mean)
        assert not torch.equal(*means)


def replaced():
    """Buffers are looked up at each sync: a new tensor under the old name is the one that is sent."""
    rank = dist.get_rank()
    model = sw.parallelize(build())
    plain_loss(model, rank, 0).backward()
    model.blocks[2].mean = torch.full((8,), float(rank))
    plain_loss(model, rank, 1)
    return model.blocks[2].mean.abs().max().item()


def test_a_buffer_that_was_replaced_is_sent_as_well():
    assert max(run_on_ranks(replaced, 2)) < 0.5  # rank 1 had ones


class Many(nn.Module):
    """Enough buffers to weigh something."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("average", torch.zeros(3001))
        self.register_buffer("counts", torch.zeros(1000, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def held_bytes(mode):
    before = everything_alive()

    class Scalar(Chain):
        def forward(self, x):
            return super().forward(x).square().mean()

    model = sw.parallelize(Scalar(Many, 2), sw.ParallelPlan(strategy="zero3", sync_buffers=mode))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = (sample(dist.get_rank(), 0),)
    train(model, optimizer, inputs, 3)
    buffers = Storages().see(model.buffers())
    num_bytes = everything_alive().without(before, buffers, Storages().see(inputs)).num_bytes
    return num_bytes, sw.summary(model).footprint.total


def test_messages_are_in_the_footprint():
    world = 3
    totals = {mode: run_on_ranks(held_bytes, world, mode) for mode in ("none", "auto", "mean")}
    for rank in range(world):
        none, auto, mean = (totals[mode][rank] for mode in ("none", "auto", "mean"))
        floats = 2 * (3001 + 16)
        own = (rank + 1) * floats // world - rank * floats // world
        # Held between steps, and predicted: the rest of the footprint has memory only while it is in use.
        for which in (0, 1):
            assert auto[which] - none[which] == 4 * floats + 2 * 8 * 1001, (rank, which)
            assert mean[which] - auto[which] == 4 * floats + 4 * own * (world - 1), (rank, which)
