"""Collectives over Gloo against their naive results, their bytes, and what is said when a peer is not there."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from shardwise.comm import gloo
from shardwise.comm.axes import open_comms
from shardwise.comm.base import Handle
from shardwise.comm.control import all_reduce_max, gather_json, scatter_json
from shardwise.comm.gloo import GlooComm
from shardwise.comm.record import RecordComm
from shardwise.spec.errors import CommError, CommTimeout, RankDisagreement
from shardwise.testing import RankFailure, report_stalls_after, run_on_ranks
from tests.common.ranks import on_ranks

#: Elements that are added at once in these tests, and those of one slice: nothing, one, odd, two chunks and a bit.
CHUNK_NUMEL = 1 << 12
SLICES = (0, 1, 7, 2 * CHUNK_NUMEL + 5)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)


def open_comm(group: distributed.ProcessGroup | None = None) -> GlooComm:
    gloo.CHUNK_NUMEL = CHUNK_NUMEL
    comm = open_comms(torch.device("cpu"), group=group)[0]
    assert isinstance(comm, GlooComm)
    return comm


def content(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What rank ``rank`` contributes; every rank can make everyone's."""
    generator = torch.Generator().manual_seed(1000 * rank + numel % 97)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 10, (numel,), generator=generator).to(dtype)


def naive_sum(numel: int, dtype: torch.dtype, size: int, divisor: int = 1) -> Tensor:
    """The ranks' contributions added in rank order, then truly divided."""
    total = content(0, numel, dtype)
    for rank in range(1, size):
        total = total + content(rank, numel, dtype)
    return total / divisor if divisor != 1 else total


def assert_same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


# -- results


def check_all_gather():
    comm = open_comm()
    for numel, dtype in itertools.product(SLICES, DTYPES):
        buffer = torch.full((comm.size * numel,), 99, dtype=dtype)
        buffer[comm.rank * numel : (comm.rank + 1) * numel] = content(comm.rank, numel, dtype)
        comm.all_gather(buffer, unit="u").wait()
        assert_same_bits(buffer, torch.cat([content(rank, numel, dtype) for rank in range(comm.size)]))


def check_reduce_scatter():
    comm = open_comm()
    for numel, dtype in itertools.product(SLICES, DTYPES):
        own = slice(comm.rank * numel, (comm.rank + 1) * numel)
        for divisor in (1, 3, comm.size) if dtype.is_floating_point else (1,):
            expected = naive_sum(comm.size * numel, dtype, comm.size, divisor)[own]
            for is_in_place in (False, True):
                buffer = content(comm.rank, comm.size * numel, dtype)
                out = buffer[own] if is_in_place else torch.full((numel,), 99, dtype=dtype)
                comm.reduce_scatter(buffer, out, unit="u", divisor=divisor).wait()
                assert_same_bits(out, expected)


def check_all_reduce():
    comm = open_comm()
    sizes = {*SLICES, comm.size - 1, comm.size + 1, 3 * comm.size}
    for numel, dtype in itertools.product(sorted(sizes), DTYPES):
        for divisor in (1, 3, comm.size) if dtype.is_floating_point else (1,):
            buffer = content(comm.rank, numel, dtype)
            comm.all_reduce(buffer, unit="u", divisor=divisor).wait()
            assert_same_bits(buffer, naive_sum(numel, dtype, comm.size, divisor))


def check_all_to_all():
    comm = open_comm()
    for numel, dtype, is_even in itertools.product(SLICES, DTYPES, (True, False)):
        sizes = [numel if is_even else numel + rank for rank in range(comm.size)]
        bounds = [0, *itertools.accumulate(sizes)]
        own = slice(bounds[comm.rank], bounds[comm.rank + 1])
        out = torch.full((comm.size * sizes[comm.rank],), 99, dtype=dtype)
        with comm.record() as events:
            comm.all_to_all(
                content(comm.rank, bounds[-1], dtype), out, unit="u", bounds=None if is_even else bounds
            ).wait()
        assert events[0].sent_bytes == (bounds[-1] - sizes[comm.rank]) * dtype.itemsize
        for peer, slot in enumerate(out.view(comm.size, -1)):
            if peer != comm.rank:
                assert_same_bits(slot, content(peer, bounds[-1], dtype)[own])


def check_all_to_all_of_any_sizes():
    """Each rank cuts as it likes: rank ``r`` sends ``(3r + 2s) % 5`` elements to rank ``s``, and to some nothing."""
    comm = open_comm()

    def size(source: int, target: int) -> int:
        return (3 * source + 2 * target) % 5

    def bounds_of(sizes: list[int]) -> list[int]:
        return [0, *itertools.accumulate(sizes)]

    ranks = range(comm.size)
    for dtype in DTYPES:
        bounds, out_bounds = (
            [f(rank) for rank in ranks] for f in (partial(size, comm.rank), lambda s: size(s, comm.rank))
        )
        bounds, out_bounds = bounds_of(bounds), bounds_of(out_bounds)
        out = torch.full((out_bounds[-1],), 99, dtype=dtype)
        with comm.record() as events:
            handle = comm.all_to_all(
                content(comm.rank, bounds[-1], dtype), out, unit="u", bounds=bounds, out_bounds=out_bounds
            )
            handle.wait()
        assert events[0].sent_bytes == (bounds[-1] - size(comm.rank, comm.rank)) * dtype.itemsize
        for peer in ranks:
            if peer != comm.rank:
                theirs = bounds_of([size(peer, rank) for rank in ranks])
                sent = content(peer, theirs[-1], dtype)[theirs[comm.rank] : theirs[comm.rank + 1]]
                assert_same_bits(out[out_bounds[peer] : out_bounds[peer + 1]], sent)


def check_broadcasts():
    comm = open_comm()
    for numel, dtype, root in itertools.product(SLICES, DTYPES, {0, comm.size - 1}):
        buffer = content(comm.rank, numel, dtype)
        comm.broadcast(buffer, root=root, unit="u").wait()
        assert_same_bits(buffer, content(root, numel, dtype))


def check_json_from_and_to_rank_0():
    comm = open_comm()
    values = [{"rank": rank, "text": "x" * 100 * rank} for rank in range(comm.size)]
    with comm.record() as events:
        assert gather_json(comm, values[comm.rank]) == (values if comm.rank == 0 else [])
        assert scatter_json(comm, values if comm.rank == 0 else []) == values[comm.rank]
    lengths = [len(json.dumps(value, separators=(",", ":"))) for value in values]
    sent = [event.sent_bytes for event in events if event.kind == "send"]
    assert sorted(sent) == sorted([*[8] * (comm.size - 1), *lengths[1:]] if comm.rank == 0 else [8, lengths[comm.rank]])


def uneven_bounds(size: int) -> list[int]:
    """Slices of many sizes, the first and the third empty."""
    return [0, *itertools.accumulate([0, 5, 0, 130, 64, 1, 2000, 7][:size])]


def check_uneven():
    comm = open_comm()
    bounds = uneven_bounds(comm.size)
    numel, own = bounds[-1], slice(bounds[comm.rank], bounds[comm.rank + 1])
    for dtype in DTYPES:
        pieces = [content(rank, stop - start, dtype) for rank, (start, stop) in enumerate(itertools.pairwise(bounds))]
        everything = torch.cat(pieces)
        buffer = torch.full((numel,), 99, dtype=dtype)
        buffer[own] = pieces[comm.rank]
        comm.all_gather(buffer, unit="u", bounds=bounds).wait()
        assert_same_bits(buffer, everything)
        for divisor, is_in_place in itertools.product((1, 3) if dtype.is_floating_point else (1,), (False, True)):
            buffer = content(comm.rank, numel, dtype)
            out = buffer[own] if is_in_place else torch.full((own.stop - own.start,), 99, dtype=dtype)
            comm.reduce_scatter(buffer, out, unit="u", divisor=divisor, bounds=bounds).wait()
            assert_same_bits(out, naive_sum(numel, dtype, comm.size, divisor)[own])


def check_large():
    comm = open_comm()
    numel = 1_000_000 // comm.size * comm.size
    buffer = content(comm.rank, numel, torch.float32)
    gathered = torch.zeros(numel)
    own = slice(comm.rank * numel // comm.size, (comm.rank + 1) * numel // comm.size)
    comm.reduce_scatter(buffer, gathered[own], unit="u", divisor=comm.size).wait()
    comm.all_gather(gathered, unit="u").wait()
    whole = content(comm.rank, numel, torch.float32)
    comm.all_reduce(whole, unit="u", divisor=comm.size).wait()
    expected = naive_sum(numel, torch.float32, comm.size, comm.size)
    assert_same_bits(gathered, expected)
    assert_same_bits(whole, expected)


def check_results():
    check_all_gather()
    check_reduce_scatter()
    check_all_reduce()
    check_all_to_all()
    check_all_to_all_of_any_sizes()
    check_broadcasts()
    check_json_from_and_to_rank_0()
    check_uneven()
    check_large()
    open_comm().barrier()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_collective_gives_the_naive_result_bit_for_bit(world):
    run_on_ranks(check_results, world)


def thirds():
    comm = open_comm()
    buffer = torch.arange(1.0, 3 * 64 + 1)
    out = torch.empty(64)
    comm.reduce_scatter(buffer, out, unit="u", divisor=3).wait()
    summed = buffer.view(3, 64)[comm.rank] * 0 + torch.arange(1.0, 3 * 64 + 1).view(3, 64)[comm.rank] * 3
    return out, summed


def test_a_divisor_divides_and_is_no_reciprocal():
    x = torch.arange(1.0, 193)
    assert not torch.equal(x * (1 / 3), x / 3)
    for out, summed in run_on_ranks(thirds, 3):
        assert torch.equal(out, summed / 3)


def order_of_sums():
    comm = open_comm()
    values = [1e8, 1.0, -1e8, 1.0]
    buffer = torch.full((comm.size,), values[comm.rank])
    comm.all_reduce(buffer, unit="u").wait()
    return buffer.tolist()


def test_sums_run_in_rank_order_on_every_rank():
    # In single precision ((1e8 + 1) - 1e8) + 1 is 1: the first 1 is lost. In other orders both are, or none.
    assert run_on_ranks(order_of_sums, 4) == [[1.0] * 4] * 4


@on_ranks(3)
def test_minus_zero_is_the_identity_of_the_sums():
    """Missing gradients travel as -0.0."""
    comm = open_comm()
    buffer = torch.full((comm.size,), -0.0)
    comm.all_reduce(buffer, unit="u", divisor=comm.size).wait()
    assert torch.signbit(buffer).tolist() == [True] * 3


# -- handles


def keep_many_in_flight():
    """Of every collective several at once; ranks wait in different orders where all messages are under way."""
    comm = open_comm()
    size, rank, numel = comm.size, comm.rank, 1000
    handles: list[Handle] = []
    gathers, scatters = [], []
    for index in range(6):
        buffer = torch.zeros(size * numel)
        buffer.view(size, numel)[rank] = 10 * index + rank
        gathers.append(buffer)
        handles.append(comm.all_gather(buffer, unit="same"))
        source = torch.full((size * numel,), float(10 * index + rank))
        out = torch.zeros(numel)
        scatters.append(out)
        handles.append(comm.reduce_scatter(source, out, unit="same"))
    for handle in handles[::-1] if rank % 2 else handles:
        handle.wait()
        handle.wait()  # again is allowed
    for index in range(6):
        assert gathers[index].view(size, numel).mean(1).tolist() == [10 * index + peer for peer in range(size)]
        assert scatters[index].unique().tolist() == [sum(10 * index + peer for peer in range(size))]


def wait_for_all_reduces_from_last_to_first():
    comm = open_comm()
    buffers = [torch.full((100,), float(index + comm.rank)) for index in range(5)]
    handles = [comm.all_reduce(buffer, unit="same") for buffer in buffers]
    handles[2].start_next_phase()
    for handle in reversed(handles):
        handle.wait()
    for index, buffer in enumerate(buffers):
        assert buffer.unique().tolist() == [sum(index + rank for rank in range(comm.size))]


def use_two_comms_in_other_orders():
    """Gathers and reductions have an order each: one may overtake the other."""
    gather, reduce = open_comms(torch.device("cpu"))
    x, y = torch.zeros(gather.size), torch.full((8,), float(gather.rank))
    x[gather.rank] = gather.rank
    calls = [lambda: gather.all_gather(x, unit="a"), lambda: reduce.all_reduce(y, unit="b")]
    handles = [call() for call in (calls if gather.rank else calls[::-1])]
    for handle in handles if gather.rank else handles[::-1]:
        handle.wait()
    assert x.tolist() == list(range(gather.size))
    assert y.tolist() == [sum(range(gather.size))] * 8


def use_handles():
    keep_many_in_flight()
    wait_for_all_reduces_from_last_to_first()
    use_two_comms_in_other_orders()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_several_collectives_can_be_under_way_and_waited_for_in_any_order(world):
    run_on_ranks(use_handles, world)


def exchange_in_halves():
    """Two groups of two ranks, at the same time; a Comm's ranks are those of its group."""
    halves = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    comm = open_comm(halves[distributed.get_rank() % 2])
    buffer = torch.zeros(2)
    buffer[comm.rank] = distributed.get_rank()
    comm.all_gather(buffer, unit="u").wait()
    comm.all_reduce(total := buffer.clone(), unit="u").wait()
    return comm.rank, comm.size, buffer.tolist(), total.tolist()


def test_a_comm_over_part_of_the_world_counts_its_own_ranks():
    assert run_on_ranks(exchange_in_halves, 4) == [
        (0, 2, [0.0, 2.0], [0.0, 4.0]),
        (0, 2, [1.0, 3.0], [2.0, 6.0]),
        (1, 2, [0.0, 2.0], [0.0, 4.0]),
        (1, 2, [1.0, 3.0], [2.0, 6.0]),
    ]


# -- bytes


def run_each(comm, numel):
    """One of each collective on buffers of ``numel`` elements a slice; returns (kind, bytes)."""
    size = comm.size
    whole, part = torch.zeros(size * numel), torch.zeros(numel)
    with comm.record() as events:
        for handle in (
            comm.all_gather(whole, unit="u"),
            comm.reduce_scatter(whole, part, unit="u"),
            comm.all_reduce(whole, unit="u"),
            comm.all_reduce(torch.zeros(size * numel + 1), unit="u"),
            comm.broadcast(part, root=0, unit="u"),
        ):
            handle.wait()
        comm.barrier()
    assert {(event.axis, event.unit) for event in events} == {("dp_shard", "u"), ("dp_shard", "barrier")}
    return [(event.kind, event.dtype, event.sent_bytes) for event in events]


def count_bytes():
    comm = open_comm()
    recorder = RecordComm("dp_shard", rank=comm.rank, size=comm.size)
    sizes = (0, 1, 1000)
    return [(run_each(comm, numel), run_each(recorder, numel)) for numel in sizes]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_bytes_are_the_minimum_and_the_recorder_counts_the_same(world):
    n = world
    for rank, counts in enumerate(run_on_ranks(count_bytes, world)):
        for numel, (sent, recorded) in zip((0, 1, 1000), counts, strict=True):
            slice_bytes, is_root = 4 * numel, rank == 0
            # An all-reduce of one element more: the last rank's slice has it.
            odd = 2 * (n - 1) * slice_bytes + 4 * ((n - 1) if rank == n - 1 else 1)
            assert sent == [
                ("all_gather", "fp32", (n - 1) * slice_bytes),
                ("reduce_scatter", "fp32", (n - 1) * slice_bytes),
                ("all_reduce", "fp32", 2 * (n - 1) * slice_bytes),
                ("all_reduce", "fp32", odd if n > 1 else 0),
                ("broadcast", "fp32", (n - 1) * slice_bytes if is_root else 0),
                ("all_reduce", "int64", 8 * ((n - 1) if rank == n - 1 else 1) if n > 1 else 0),
            ]
            assert recorded == sent


class Wire:
    """A process group that counts the bytes that it is given to send."""

    def __init__(self, group):
        self._group, self.num_bytes = group, 0

    def send(self, tensors, target, tag):
        self.num_bytes += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, target, tag)

    def recv(self, tensors, source, tag):
        return self._group.recv(tensors, source, tag)


@on_ranks(2, 3, 4)
def test_events_have_the_bytes_that_gloo_is_given_to_send():
    """By collective, the bytes of its event and those that Gloo was given."""
    comm = open_comm()
    comm.group = wire = Wire(comm.group)
    size, rank, found = comm.size, comm.rank, []
    bounds, after, before = uneven_bounds(size), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    whole, part, odd = torch.zeros(bounds[-1]), torch.zeros(bounds[rank + 1] - bounds[rank]), torch.zeros(7 * size + 1)
    for issue in (
        lambda: comm.all_gather(torch.zeros(5 * size), unit="u"),
        lambda: comm.all_gather(whole, unit="u", bounds=bounds),
        lambda: comm.reduce_scatter(whole, part, unit="u", bounds=bounds),
        lambda: comm.all_reduce(odd, unit="u", divisor=3),
        lambda: comm.all_reduce(odd, unit="u", out=torch.zeros_like(odd)),
        lambda: comm.all_to_all(torch.zeros(5 * size), torch.zeros(5 * size), unit="u"),
        lambda: comm.all_to_all(whole, torch.zeros(size * part.numel()), unit="u", bounds=bounds),
        lambda: comm.broadcast(odd, root=0, unit="u"),
        lambda: comm.exchange([(odd, after, "u")], [(torch.zeros_like(odd), before, "u")]),
    ):
        sent_before = wire.num_bytes
        with comm.record() as events:
            issue().wait()
        found.append((events[0].kind, events[0].sent_bytes, wire.num_bytes - sent_before))
    assert len(found) == 9
    for kind, counted, given in found:
        assert counted == given, kind


def count_uneven_bytes():
    """Bytes of each collective over slices of other sizes: sent, and by the recorder."""
    found = []
    comm = open_comm()
    bounds = uneven_bounds(comm.size)
    for each in (comm, RecordComm("dp_shard", rank=comm.rank, size=comm.size)):
        whole, part = torch.zeros(bounds[-1]), torch.zeros(bounds[comm.rank + 1] - bounds[comm.rank])
        with each.record() as events:
            for handle in (
                each.all_gather(whole, unit="u", bounds=bounds),
                each.reduce_scatter(whole, part, unit="u", bounds=bounds),
            ):
                handle.wait()
        found.append([(event.kind, event.sent_bytes) for event in events])
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_unequal_slices_send_what_each_peer_needs_and_empty_ones_nothing(world):
    bounds = uneven_bounds(world)
    for rank, (sent, recorded) in enumerate(run_on_ranks(count_uneven_bytes, world)):
        own, numel = bounds[rank + 1] - bounds[rank], bounds[-1]
        assert sent == [
            ("all_gather", 4 * (world - 1) * own),
            ("reduce_scatter", 4 * (numel - own)),
        ]
        assert recorded == sent


def uneven_scratch():
    """Receive buffers over slices of other sizes: the largest is kept and serves them all."""
    apart, within = open_comm(), open_comm()
    for numel in (12, 1200, 600, 12):
        apart.reduce_scatter(torch.zeros(numel), torch.zeros(numel // apart.size), unit="u").wait()
        buffer = torch.zeros(numel)
        own = buffer.view(within.size, -1)[within.rank]
        within.reduce_scatter(buffer, own, unit="u").wait()
    return [[buffer.numel() for buffer in comm._scratch.free] for comm in (apart, within)]


@pytest.mark.parametrize(("world", "expected"), [(2, [[], [600]]), (3, [[400], [800]])])
def test_one_receive_buffer_serves_sums_of_every_size(world, expected):
    """A sum that goes elsewhere than over the own slice receives one peer's there."""
    assert run_on_ranks(uneven_scratch, world) == [expected] * world


@on_ranks(3)
def test_receive_buffers_are_reused():
    """The receive buffers of sums that follow one another are the same."""
    comm = open_comm()
    addresses = set()
    for _ in range(4):
        buffer = torch.zeros(1000 * comm.size)
        own = buffer.view(comm.size, -1)[comm.rank]
        comm.reduce_scatter(buffer, own, unit="u").wait()
        addresses.add(tuple(buffer.data_ptr() for buffer in comm._scratch.free))
    assert len(addresses) == 1


# -- peers that are dead, elsewhere, or of another opinion


def lose_a_peer(folder):
    comm = open_comm()
    buffer = torch.zeros(1_000_000 * comm.size)
    comm.all_gather(buffer, unit="first").wait()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommError) as caught:
        comm.all_gather(buffer, unit="blocks.7").wait()
    (Path(folder) / f"rank-{comm.rank}").write_text(f"{type(caught.value).__name__}: {caught.value}")


@pytest.mark.parametrize("world", [2, 3])
def test_a_dead_peer_ends_the_collective_with_its_name(world, tmp_path):
    with pytest.raises(RankFailure, match="rank 1 failed first: killed by SIGKILL"):
        run_on_ranks(lose_a_peer, world, str(tmp_path))
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert len(texts) == world - 1
    for text in texts:
        assert text.startswith("CommError: dp_shard/0/gather #")
        assert "all_gather(blocks.7, " in text
        assert "A peer has left or its connection broke" in text


def shorten_watch():
    report_stalls_after(0.4, idle_interval_s=0.2)


def stay_away():
    shorten_watch()
    group = distributed.new_group(timeout=dt.timedelta(seconds=2))
    comm = open_comm(group)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(3.5)
        return ""
    with pytest.raises(CommTimeout) as caught:
        comm.all_reduce(torch.zeros(10), unit="blocks.7").wait()
    return str(caught.value)


@pytest.mark.parametrize("world", [2, 3])
def test_a_peer_that_does_not_come_is_a_timeout_that_says_where_everyone_is(world):
    texts = run_on_ranks(stay_away, world)
    for rank in (rank for rank in range(world) if rank != 1):
        assert "dp_shard/0/gather #1 all_reduce(blocks.7, 10 elements): no answer within the process" in texts[rank]
        assert f"\n  rank {rank}: waiting in dp_shard/0/gather #1 all_reduce(blocks.7, 10 elements) for" in texts[rank]
        assert "\n  rank 1: not in a collective; last issued dp_shard/0/gather #0 all_reduce(barrier" in texts[rank]


def take_other_units(gather, reduce, *, is_odd):
    gather.all_gather(torch.zeros(10 * gather.size), unit="blocks.1" if is_odd else "blocks.2").wait()


def take_other_units_of_many_elements(gather, reduce, *, is_odd):
    gather.all_gather(torch.zeros(1_000_000 * gather.size), unit="blocks.1" if is_odd else "blocks.2").wait()


def take_other_kinds(gather, reduce, *, is_odd):
    buffer = torch.zeros(10 * gather.size)
    (gather.all_reduce if is_odd else gather.all_gather)(buffer, unit="blocks.1").wait()


def take_other_sizes(gather, reduce, *, is_odd):
    gather.all_gather(torch.zeros((20 if is_odd else 10) * gather.size), unit="blocks.1").wait()


def take_other_dtypes(gather, reduce, *, is_odd):
    """Messages of as many bytes: without a word of it the one rank's numbers would be the other's bits."""
    dtype = torch.int32 if is_odd else torch.float32
    gather.all_gather(torch.zeros(10 * gather.size, dtype=dtype), unit="blocks.1").wait()


def leave_one_out(gather, reduce, *, is_odd):
    for unit in ("blocks.2",) if is_odd else ("blocks.1", "blocks.2"):
        gather.all_gather(torch.zeros(10 * gather.size), unit=unit).wait()


def come_late(gather, reduce, *, is_odd):
    """The odd rank computes for a while, and then comes with something else."""
    if is_odd:
        time.sleep(1.5)
    take_other_units(gather, reduce, is_odd=is_odd)


def wait_for_each_other(gather, reduce, *, is_odd):
    """Each waits for something that the other has not begun; the sequences of both Comms agree so far."""
    buffer = torch.zeros(10 * gather.size)
    if is_odd:
        reduce.all_reduce(buffer, unit="blocks.1").wait()
    else:
        gather.all_gather(buffer, unit="blocks.2").wait()


def disagree(act):
    shorten_watch()
    gather, reduce = open_comms(torch.device("cpu"))
    for _ in range(3):
        gather.all_gather(torch.zeros(10 * gather.size), unit="before").wait()
    start = time.monotonic()
    with pytest.raises(RankDisagreement) as caught:
        act(gather, reduce, is_odd=gather.rank == gather.size - 1)
    with pytest.raises(CommError):  # and it stays so: a dummy is never taken for data
        gather.all_gather(torch.zeros(gather.size), unit="after").wait()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("act", "named"),
    [
        (take_other_units, ["issued different", "all_gather of unit 'blocks.1' (", "all_gather of unit 'blocks.2' ("]),
        (take_other_units_of_many_elements, ["unit 'blocks.1' ({2} elements)", "unit 'blocks.2' ({2} elements)"]),
        (take_other_kinds, ["all_gather of unit 'blocks.1' (", "all_reduce of unit 'blocks.1' ("]),
        (take_other_sizes, ["unit 'blocks.1' ({0} elements)", "unit 'blocks.1' ({1} elements)"]),
        (take_other_dtypes, ["({0} elements) in int32, at test_gloo.py:", "({0} elements) in fp32, at test_gloo.py:"]),
        (leave_one_out, ["at #3 of dp_shard/0/gather", "unit 'blocks.1'", "unit 'blocks.2'"]),
        (come_late, ["at #3 of dp_shard/0/gather", "unit 'blocks.1'", "unit 'blocks.2'"]),
        (
            wait_for_each_other,
            ["wait for each other", "all_reduce of unit 'blocks.1'", "all_gather of unit 'blocks.2'"],
        ),
    ],
)
def test_ranks_that_issue_different_collectives_are_told_all_of_them(act, named, world):
    for text, seconds in run_on_ranks(disagree, world, act):
        assert seconds < 30  # far above the stall that is allowed here, far below a process group's time-out
        for words in named:
            assert words.format(10 * world, 20 * world, 1_000_000 * world) in text
        assert f"  rank {world - 1}: " in text
        assert "The ranks took different paths through the model." in text
        assert "sw.full_state_dict under `if rank == 0:`: every rank must make it." in text


@on_ranks(3)
def test_slow_ranks_do_not_disagree():
    """A rank that is only slow is no disagreement, whatever the watch looks at meanwhile."""
    shorten_watch()
    gather, reduce = open_comms(torch.device("cpu"))
    buffer = torch.zeros(gather.size)
    for round_ in range(3):
        if gather.rank == round_ % gather.size:
            time.sleep(1.2)
        gather.all_gather(buffer, unit=f"blocks.{round_}").wait()
        if gather.rank == (round_ + 1) % gather.size:
            time.sleep(1.2)
        reduce.all_reduce(buffer, unit=f"blocks.{round_}").wait()


def ask_for_the_highest() -> tuple[list[int], int]:
    comm = open_comm()
    with comm.record() as events:
        found = all_reduce_max(comm, [comm.rank % 4, -comm.rank])
    return found, sum(event.kind == "send" for event in events)


@pytest.mark.parametrize(("size", "highest", "num_messages"), [(1, 0, 0), (2, 1, 1), (3, 2, 2), (5, 3, 3)])
def test_the_highest_of_all_ranks_takes_as_many_messages_as_the_logarithm_of_their_number(size, highest, num_messages):
    """Each rank sends one message a round; 64 ranks are six rounds."""
    assert run_on_ranks(ask_for_the_highest, size) == [([highest, 0], num_messages)] * size
