"""Ranks that take different paths through the units."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.comm import stall
from shardwise.spec.errors import RankDisagreement
from shardwise.spec.order import AgreedOrder
from shardwise.testing import probe, report_stalls_after, run_on_ranks
from tests.common.oracle import Block, Chain, Wanders, compare, compare_each, plain_loss, sample, seeded
from tests.common.ranks import on_ranks, refusal


class Skips(Chain):
    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index not in left_out:
                x = block(x)
        return self.head(x)


class SkipsTwice(Chain):
    """0 1 2 3 4 3 2 1 0, but for some: a unit that follows itself, as 4 was left out, is not done with."""

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index in (0, 1, 2, 3, 4, 3, 2, 1, 0):
            if index not in left_out:
                x = self.blocks[index](x)
        return self.head(x)


def skip_from_step_two_on(model, rank, step):
    """In the first step all ranks run all units; later each leaves out others."""
    left_out = () if step == 0 else ((rank + step) % 5, (2 * rank + step) % 5)
    return model(sample(rank, step), left_out).square().mean()


def skip_at_the_ends(model, rank, step):
    """Rank 0 leaves out the first and the last unit, which are the first and last to be gathered."""
    left_out = (0, 4) if step > 0 and rank == 0 else ()
    return model(sample(rank, step), left_out).square().mean()


def skip_the_turn(model, rank, step):
    left_out = (4 - step % 2, 4 - step % 3) if step > 0 and rank == 0 else ()
    return model(sample(rank, step), left_out).square().mean()


def skip_all(model, rank, step):
    left_out = (0, 1, 2, 3, 4) if step in (1, 3) and rank == 1 else ()
    return model(sample(rank, step), left_out).square().mean()


def skip_and_evaluate(model, rank, step):
    """All ranks evaluate; then they train along different paths."""
    with torch.no_grad():
        value = model(sample(rank, step, salt=1))
    loss = skip_from_step_two_on(model, rank, step)
    loss.backward()
    yield value, loss


class Partial(Chain):
    """Runs its last blocks without grad on request: backward never reaches them."""

    def forward(self, x: Tensor, num_trained: int = 5) -> Tensor:
        h = self.stem(x)
        for index, block in enumerate(self.blocks):
            with torch.set_grad_enabled(index < num_trained):
                y = block(h)
            h = h + y
        return h if num_trained < 5 else self.head(h)


def train_fewer(model, rank, step):
    """From the second step on backward reaches fewer units on rank 0 than on the others."""
    return model(sample(rank, step), 5 - step if rank == 0 else 5).square().mean()


def train_fewer_first(model, rank, step):
    """The last unit has no backward in the first steps, on any rank."""
    return model(sample(rank, step), 3 if step < 2 else 5).square().mean()


@on_ranks(2, 3, timeout_s=120)
def test_from_the_second_step_on_a_rank_may_skip_whole_units():
    for script in (skip_from_step_two_on, skip_at_the_ends, skip_all, skip_and_evaluate):
        compare_each(Skips, script)
    for script in (skip_from_step_two_on, skip_the_turn):
        compare_each(SkipsTwice, script)
    compare_each(Partial, train_fewer)
    compare_each(Partial, train_fewer_first)


class Branching(nn.Module):
    """The input decides which of three chains runs, alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(8, 8)
        self.ways = nn.ModuleDict({key: nn.ModuleList(Block() for _ in range(3)) for key in "abc"})
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, ways: str) -> Tensor:
        x = self.stem(x)
        for way in ways:
            for block in self.ways[way]:
                x = block(x)
        return self.head(x)


def wander(model, rank, step):
    """In every step, the first one included, rank 1 runs two blocks in the other order."""
    return model(sample(rank, step), (0, 2, 1, 3, 4) if rank == 1 else (0, 1, 2, 3, 4)).square().mean()


BY_BLOCK = sw.wrap_by_class({Block})


def alternate(model, rank, step):
    return model(sample(rank, step), "ab"[step % 2]).square().mean()


def every_rank_its_own(model, rank, step):
    """First all ranks see every way; then each takes another."""
    ways = "abc" if step == 0 else "abc"[(rank + step) % 3]
    return model(sample(rank, step), ways).square().mean()


def other_ways_from_the_first_step_on(model, rank, step):
    """Each rank takes another way in each step; way c comes last."""
    return model(sample(rank, step), ("ab", "ba", "b", "ac")[(rank + step) % 4]).square().mean()


def one_way_on_one_rank_alone(model, rank, step):
    """Nobody has taken way c when the last rank does in step 2, before the way that it knows."""
    is_alone = rank == dist.get_world_size() - 1
    return model(sample(rank, step), "ca" if step >= 2 and is_alone else "a").square().mean()


@on_ranks(2, 3, timeout_s=120)
def test_a_model_may_branch_by_its_input():
    compare_each(Branching, alternate, steps=6, auto_wrap_policy=BY_BLOCK)
    compare_each(Branching, every_rank_its_own, steps=5, auto_wrap_policy=BY_BLOCK)
    compare_each(Branching, other_ways_from_the_first_step_on, steps=4, auto_wrap_policy=BY_BLOCK)
    compare_each(Branching, one_way_on_one_rank_alone, steps=4, auto_wrap_policy=BY_BLOCK)
    compare_each(Wanders, wander, steps=3)


@on_ranks(2)
def test_gathers_of_units_that_did_not_run_are_counted():
    """A way gathers the root and three blocks in forward, and two or three of the blocks again in backward.

    By step: gathers of the step, and those of units that did not run.
    """
    model = sw.parallelize(Branching(), sw.ParallelPlan(auto_wrap_policy=BY_BLOCK))
    found = []
    for step in range(6):
        before = sw.summary(model).num_wrong_prefetches
        with sw.record_collectives(model) as events:
            alternate(model, dist.get_rank(), step).backward()
        model.zero_grad()
        gathers = [event for event in events if event.kind == "all_gather"]
        found.append((len(gathers), sw.summary(model).num_wrong_prefetches - before))
    text = str(sw.summary(model))
    # In the second step the three blocks of way a, which no rank runs, are gathered in forward, then those of way b.
    # From then on the other way's blocks are gathered for nothing, in forward and but for the last one in backward.
    assert found == [(6, 0), (9, 3), (12, 5), (12, 6), (12, 5), (12, 6)]
    assert "gathered, but not run on this rank: 25 times so far" in text


class Shuffled(Chain):
    """Runs its blocks in the order of the argument."""

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        x = self.stem(x)
        for index in order:
            x = self.blocks[index](x)
        return self.head(x)


def shuffle(model, rank, step):
    order = torch.randperm(8, generator=seeded(step)).tolist()
    return model(sample(rank, step), order).square().mean()


@on_ranks(2)
def test_an_order_that_always_changes_does_not_grow_for_ever():
    for strategy in ("zero2", "zero3"):
        with mock.patch.object(AgreedOrder, "keep", autospec=True, side_effect=AgreedOrder.keep) as keep:
            trained = compare(lambda: Shuffled(num_blocks=8), shuffle, strategy, steps=30)
        assert len({id(call.args[0]) for call in keep.call_args_list}) == 2  # the ranks have agreed on what to keep
        for way in ("forward", "backward"):
            order = trained.probe.agreed_orders[way]
            assert len(order) <= 2 * 17 + 8  # a block may be in the recorded path twice: expected, and run later


def diverge_later(stall_s):
    """In a later step rank 1 alone runs a unit once more than any rank ever did, and all units are in the order."""
    report_stalls_after(0.6)
    rank = dist.get_rank()
    model = sw.parallelize(Skips())
    for step in range(2):
        plain_loss(model, rank, step).backward()
    x = sample(rank, 0)
    if rank == 1:
        model.register_forward_pre_hook(lambda m, args: (m.blocks[2](m.blocks[2](args[0])),))
    start = time.monotonic()
    with pytest.raises(RankDisagreement) as caught:
        model(x).square().mean().backward()
    text, seconds = str(caught.value), time.monotonic() - start
    return text, seconds


#: Seconds: far above the stall that is allowed in these tests (a busy machine), far below a process group's time-out.
LIMIT_S = 20.0


def test_a_unit_that_one_rank_alone_runs_is_a_disagreement_that_all_ranks_report():
    """Rank 1's extra calls begin with block 2, and it is behind by that when rank 0 has come to its last block."""
    (known, known_s), (alone, alone_s) = run_on_ranks(diverge_later, 2, 0.6)
    assert max(known_s, alone_s) < LIMIT_S
    text, _, added = alone.rpartition("\n")
    assert text == known
    assert text.startswith("ranks wait for each other in different collectives:")
    assert "\n  rank 0: all_gather of unit 'blocks.4'" in text
    assert "\n  rank 1: message of unit 'order " in text
    assert "wrap the module that chooses among them as one unit (auto_wrap_policy)" in text
    assert added == "  This rank came to unit 'blocks.0', which the agreed order does not hold here."


def run_more_often_on_one_rank(model, rank, step):
    path = (2, 2, 0, 1, 2, 3, 4) if step > 1 and rank == 1 else (0, 1, 2, 3, 4)
    return model(sample(rank, step), path).square().mean()


@on_ranks(2)
def test_what_the_disagreement_advises_is_right():
    """The module that chooses among the units is one unit."""
    compare_each(Wanders, run_more_often_on_one_rank, auto_wrap_policy="none", steps=4)


@on_ranks(2)
def test_ranks_that_wait_for_each_other_are_told_so_at_this_and_every_further_collective():
    """Two models, called in another order by either rank: both wait for what the other has not begun."""
    report_stalls_after(0.6)
    rank = dist.get_rank()
    models = [sw.parallelize(Chain()), sw.parallelize(Chain())]
    for text in [refusal(RankDisagreement, model, sample(rank, 0)) for model in models[:: -1 if rank else 1]]:
        assert text.startswith("ranks wait for each other in different collectives:\n  rank 0: all_gather of unit")


@on_ranks(2)
def test_the_watch_ends_before_the_interpreter_does():
    """A thread inside the store at the interpreter's end aborts the process; ``end`` is registered with atexit."""
    dist.barrier()  # a rank that leaves while another connects to it fails that one
    found = stall.StallWatch.of(dist.group.WORLD)
    was_alive = found._thread.is_alive()
    found.end()
    assert (was_alive, found._thread.is_alive()) == (True, False)


class Branches(nn.Module):
    """Runs its layers in the order of the argument; those that are frozen are gathered, but have no gradients."""

    def __init__(self, is_frozen=False):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5)).requires_grad_(not is_frozen)

    def forward(self, x: Tensor, order) -> Tensor:
        if not self.layers[0].weight.requires_grad:
            with torch.no_grad():
                for index in order:
                    x = self.layers[index](x)
            return self.stem(x)
        x = self.stem(x)
        for index in order:
            x = self.layers[index](x)
        return x


def wander_alone():
    """Only rank 0's path changes, where nothing ties it to its peer's: each holds all parameters by itself."""
    rank, lengths = dist.get_rank(), []
    for is_frozen in (False, True):
        model = Branches(is_frozen)
        layers = sw.wrap_by_class({nn.Linear})
        plan = sw.ParallelPlan(
            strategy="hsdp", dp_replicate=2, dp_shard=1, auto_wrap_policy=layers, merge_units=False, sync_buffers="none"
        )
        seen = probe(sw.parallelize(model, plan))
        model(torch.ones(1, 8), range(5)).sum().backward()
        for step in range(60):
            order = torch.randperm(5, generator=seeded(step)).tolist() if rank == 0 else range(5)
            with torch.set_grad_enabled(is_frozen):
                loss = model(torch.ones(1, 8), order).sum()
            if is_frozen:
                loss.backward()
        lengths.append(len(seen.agreed_orders["forward" if is_frozen else "other"]))
        model(torch.ones(1, 8), range(5)).sum().backward()
    return lengths


def test_a_path_that_changes_on_one_rank_only_asks_nobody_who_does_not_gather_with_it():
    ours, theirs = run_on_ranks(wander_alone, 2, timeout_s=60)
    assert max(ours) <= 2 * 11 + 8
    assert ours[0] > len(range(5)) + 1  # it has changed
    assert theirs == [7, 7]


def test_what_a_rank_has_issued_is_known_however_long_ago_it_was():
    def status(waits_for, newest, peers=(), elsewhere=None):
        many = [["dp_shard", place, "all_gather", "u", 1, "fp32"] for place in range(64)]
        return {
            "elsewhere": elsewhere,
            "line": None,
            "waits_for": waits_for,
            "issued": many,
            "newest": newest,
            "peers": peers,
        }

    wanted = ["dp", 3, "all_reduce", "order", 8, "fp32"]
    behind, there = ({"dp_shard": 400, "dp": newest} for newest in (2, 3))
    waiting = status(wanted, {"dp_shard": 9, "dp": 3}, [1])
    for newest in (behind, {"dp_shard": 400}):
        statuses = {0: waiting, 1: status(None, newest, elsewhere="barrier")}
        text = stall._find_absence(statuses, statuses)
        assert text is not None
        assert text.startswith("rank 1 waits in torch.distributed's barrier, while rank 0 waits for it in all_reduce")
    statuses = {0: waiting, 1: status(None, there, elsewhere="barrier")}
    assert stall._find_absence(statuses, statuses) is None


@on_ranks(1)
def test_after_a_stall_has_passed_nobody_publishes_any_more() -> None:
    """Whether this rank publishes where it is: when a peer asks, a look later, and when the peer asks anew."""
    seen = stall.StallWatch.of(dist.group.WORLD)
    seen._stop.set()
    seen._thread.join()
    found = []
    for request in ("1 2.5", None, "1 3.0"):
        seen._store.set("rank-0", "nothing")
        if request is not None:
            seen._store.set("ask", request)
        seen._publish_if_requested()
        found.append(seen._store.get("rank-0") != b"nothing")
    assert found == [True, False, True]


class CountingStore:
    """A store that counts requests."""

    def __init__(self):
        self.values, self.num_requests = {}, 0

    def set(self, key, value):
        self.num_requests += 1
        self.values[key] = value.encode()

    def get(self, key):
        self.num_requests += 1
        return self.values[key]

    def check(self, keys):
        self.num_requests += 1
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, value):
        self.num_requests += 1
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = value.encode()
        return self.values[key]


class Place:
    """A process group of ``size``, as one rank's watch sees it."""

    def __init__(self, rank, size, store):
        self.rank, self.size, self.get_group_store = (lambda: rank), (lambda: size), lambda: store
        self.sent = []

    def send(self, tensors, to, _tag):
        self.sent.append(to)


def test_stalled_ranks_make_requests_in_proportion_to_their_number():
    """64 ranks wait, each for the next one; then the last one turns out to have issued something else."""
    size, store = 64, CountingStore()
    places = [Place(rank, size, store) for rank in range(size)]
    ours, theirs = (stall.Stamp("dp_shard", 0, "all_gather", unit, 8, torch.float32) for unit in ("a", "b"))
    with (
        mock.patch.object(stall.dist, "PrefixStore", lambda _, store: store),
        mock.patch.object(stall.threading.Thread, "start"),
        mock.patch.object(stall.atexit, "register"),
    ):
        watches = [stall.StallWatch(place) for place in places]
    for rank, watch in enumerate(watches):
        messages = [("receive", (rank + 1) % size, 5, 32)]
        watch._waiting = mock.Mock(stamp=ours, messages=messages), time.monotonic() - 60
    counts = []
    for turn in range(5):
        before = store.num_requests
        for rank, watch in enumerate(watches):
            issued = theirs if rank == size - 1 and turn > 1 else ours
            with mock.patch.multiple(stall, history=[issued], newest={"dp_shard": 0}):
                watch._check_waits()
        counts.append(store.num_requests - before)
        assert all(watch.verdict is None for watch in watches) or turn > 1
    assert max(counts) <= 12 * size  # 128 for each of them if each compared
    for rank, watch in enumerate(watches):
        assert isinstance(watch.verdict, RankDisagreement)
        assert "different collectives at #0 of dp_shard" in str(watch.verdict)
        assert places[rank].sent == ([(rank - 1) % size] if rank == size - 1 else [])  # others have issued it, too
    assert [watch._may_compare(time.monotonic()) for watch in watches[:2]] == [True, False]
    with mock.patch.object(stall, "INTERVAL_S", 0.0):
        assert watches[1]._may_compare(time.monotonic())  # the first one says no more that it compares
