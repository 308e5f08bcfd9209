"""What of the Comm for NCCL can be seen without a GPU: torch's calls are replaced by ones that do nothing."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.comm import nccl, stall
from shardwise.comm.base import Done
from shardwise.comm.nccl import NcclComm, Sum, choose_sum
from shardwise.comm.stall import Ledger
from shardwise.spec.errors import RankDisagreement

NUMEL = 4


@pytest.fixture
def comm() -> Iterator[NcclComm]:
    calls = ("all_gather_single", "all_gather", "reduce_scatter_single", "reduce_scatter", "all_reduce", "all_to_all")
    calls += ("broadcast", "send", "recv")
    silent: dict[str, Any] = dict.fromkeys(calls, lambda *_args, **_kwargs: None)
    silent |= {"P2POp": lambda *_args, **_kwargs: None, "batch_isend_irecv": lambda _group: []}
    names = ("isend", "irecv", "ReduceOp")
    dist = SimpleNamespace(**silent, **{name: getattr(torch.distributed, name) for name in names})
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    with mock.patch.object(nccl.torch, "cuda"):
        yield NcclComm(group, "tp", torch.device("cuda", 0), calls=dist)


def new() -> torch.Tensor:
    return torch.zeros(NUMEL)


COLLECTIVES = {
    "all_gather": lambda comm, a, _: comm.all_gather(a, unit="u"),
    "uneven all_gather": lambda comm, a, _: comm.all_gather(a, unit="u", bounds=(0, 1, NUMEL)),
    "reduce_scatter": lambda comm, a, b: comm.reduce_scatter(a, b[:2], unit="u", divisor=3),
    "all_reduce": lambda comm, a, _: comm.all_reduce(a, unit="u", divisor=2),
    "all_reduce into another": lambda comm, a, b: comm.all_reduce(a, unit="u", out=b),
    "all_to_all": lambda comm, a, b: comm.all_to_all(a, b, unit="u"),
    "broadcast": lambda comm, a, _: comm.broadcast(a, root=1, unit="u"),
    "send": lambda comm, a, _: comm.send(a, to=1, unit="u"),
    "receive": lambda comm, a, _: comm.receive(a, source=1, unit="u"),
    "exchange": lambda comm, a, b: comm.exchange([(a, 1, "u")], [(b, 1, "u")]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_handle_keeps_what_it_moves_alive_until_it_has_been_waited_for(comm, name):
    buffers = [new(), new()]
    memory = [weakref.ref(buffer.untyped_storage()) for buffer in buffers]
    without = [weakref.ref(buffer.untyped_storage()) for buffer in (new(), new())]
    handle = COLLECTIVES[name](comm, *buffers)
    num_moved = 2 if "b" in COLLECTIVES[name].__code__.co_varnames else 1
    del buffers
    assert all(storage() is None for storage in without)  # what nobody keeps is gone at once
    assert [storage() is not None for storage in memory] == [True, num_moved == 2]
    handle.wait()
    assert all(storage() is None for storage in memory)


def test_a_sum_over_the_groups_is_issued_behind_the_sum_inside_them_at_once(comm):
    calls = []
    inside = comm.reduce_scatter(new(), new()[:2], unit="u")

    def then():
        calls.append("issued")
        return comm.all_reduce(new(), unit="u")

    handle = comm.chain(inside, then, lambda: calls.append("arrived"))
    assert calls == ["issued"]
    assert handle.start_next_phase()  # it still counts as two phases: buffers are given back when the first has arrived
    assert calls == ["issued", "arrived"]
    assert not handle.start_next_phase()
    handle.wait()
    assert calls == ["issued", "arrived"]


def test_behind_what_is_added_up_by_the_compute_stream_it_is_issued_when_that_is_done(comm):
    calls = []
    handle = comm.chain(Done(), lambda: (calls.append("issued"), Done())[1], lambda: calls.append("arrived"))
    assert not calls
    handle.wait()
    assert calls == ["arrived", "issued"]


@pytest.mark.parametrize(
    ("divisor", "size", "dtype", "way"),
    [
        (1, 4, torch.float32, Sum.PLAIN),
        (4, 4, torch.float32, Sum.AVERAGE),
        (8, 4, torch.float32, Sum.SCALED),
        (0.5, 4, torch.float64, Sum.SCALED),
        (3, 3, torch.float32, Sum.PLAIN),
        (6, 2, torch.float32, Sum.PLAIN),
        (4, 4, torch.bfloat16, Sum.AVERAGE),
        (8, 4, torch.bfloat16, Sum.PLAIN),
        (4, 4, torch.float16, Sum.PLAIN),
        (2, 2, torch.int64, Sum.PLAIN),
    ],
)
def test_sums_are_divided_on_the_way_where_that_is_exact(divisor, size, dtype, way):
    assert choose_sum(divisor, size, dtype) is way


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("divisor", [2, 4, 3, 6])
def test_terms_divided_before_the_sum_give_the_bits_of_a_divided_sum_for_powers_of_two_only(divisor, dtype):
    terms = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = terms[0] * (1 / divisor)
    total = terms[0].clone()
    for term in terms[1:]:
        before += term * (1 / divisor)
        total += term
    is_exact = choose_sum(divisor, divisor, dtype) is not Sum.PLAIN
    assert torch.equal(before, total / divisor) is is_exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [257, 1030, 2049])
def test_a_sum_over_more_ranks_than_its_dtype_can_count_is_divided_by_their_number(comm, size, dtype):
    term = torch.arange(1, 9).to(dtype)
    total = (term.double() * size).to(dtype)
    mean = torch.empty_like(total)
    comm._divide(total, mean, size)
    assert torch.equal(mean, (total.double() / size).to(dtype))
    comm._divide(total, total, size)
    assert torch.equal(mean, total)


def test_what_ranks_compare_is_the_same_on_both_ends_of_a_message_and_where_parts_differ(comm):
    """Rank 0 of two: messages are numbered by their way, and collectives by the elements of the whole."""
    comm.send(new(), to=1, unit="u")
    comm.receive(new(), source=1, unit="u")
    comm.exchange([(new(), 1, "v")], [(new(), 1, "v")])
    comm.all_to_all(new(), new(), unit="x", bounds=(0, 1, NUMEL), out_bounds=(0, 3, NUMEL))
    rows = [(each.channel, each.sequence, each.kind, each.unit, each.numel) for each in list(stall.history)[-5:]]
    assert rows == [
        ("tp/0>1", 0, "message", "u", NUMEL),
        ("tp/1>0", 0, "message", "u", NUMEL),
        ("tp/0>1", 1, "message", "v", NUMEL),
        ("tp/1>0", 1, "message", "v", NUMEL),
        ("tp", 0, "all_to_all", "x", 0),
    ]


def test_the_ledger_asks_the_device_and_raises_what_the_watch_has_found(comm):
    watch = mock.Mock()
    comm._ledger = Ledger([1], watch)
    first, second = (comm.all_reduce(new(), unit=unit) for unit in "ab")
    first._recorded.query.return_value = second._recorded.query.return_value = False
    first._recorded = mock.Mock(query=lambda: True)
    assert comm._ledger.oldest(0.0) is None  # both are newer
    assert comm._ledger.oldest(math.inf).unit == "b"
    watch.check.side_effect = RankDisagreement("ranks issued different collectives")
    with pytest.raises(RankDisagreement):
        comm.all_gather(new(), unit="c")
    assert stall.history[-1].unit == "b"


def test_a_collective_whose_call_does_not_return_is_seen_by_the_watch(comm):
    """NCCL connects ranks in the first call of a kind: the host waits there for a peer that does not come."""
    comm._ledger, seen = Ledger([1], mock.Mock()), []
    comm._gather = lambda *_args, **_kwargs: seen.append(comm._ledger.oldest(math.inf))
    comm.all_gather(new(), unit="a")
    assert [issued.unit for issued in seen] == ["a"]
    assert comm._ledger.oldest(math.inf) is None  # the device of this test has done everything
