"""The two debug transports show what they are for; every plain transport keeps what it moves alive.

The tests of tensor, pipeline, context and expert parallelism and of generation run on both as well: those marked
``transports`` always, all of them with ``pytest --every-case`` (``tests/conftest.py``).
"""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.comm.staged import StagedComm
from shardwise.parallel.tensor.linear import ColumnPlan, column_linear
from shardwise.spec.errors import CommError, ConfigError
from shardwise.testing import RankFailure, run_on_ranks, transports
from tests.common import models
from tests.common.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.fixture
def transport(request, monkeypatch):
    monkeypatch.setenv(transports.TRANSPORT, request.param)


def on(name):
    return pytest.mark.parametrize("transport", [name], indirect=True)


# -- in order


def receive_then_send():
    comm, _ = open_comms(CPU)
    other = 1 - comm.rank
    receiving = comm.receive(torch.empty(3), source=other, unit="u")
    comm.send(torch.ones(3), to=other, unit="u").wait()
    receiving.wait()


@on("in-order")
@pytest.mark.usefixtures("transport")
def test_in_order_ranks_that_both_receive_first_wait_for_each_other_and_are_told_where():
    with pytest.raises(RankFailure, match=r"no end after 6 s") as caught:
        run_on_ranks(receive_then_send, 2, timeout_s=6)
    assert "rank 0] last collective: waiting in dp_shard/0/gather/1>0 #0 message(u, 3 elements)" in str(caught.value)


def test_on_the_plain_transport_they_do_not():
    run_on_ranks(receive_then_send, 2)


def exchange():
    comm, _ = open_comms(CPU)
    size, rank = comm.size, comm.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    found = [torch.empty(3) for _ in range(3)]
    with comm.record() as events:
        comm.exchange([(torch.full((3,), float(rank)), after, "u")], [(found[0], before, "u")]).wait()
        sends = [(torch.full((3,), 10.0 + rank), after, "v"), (torch.full((3,), 20.0 + rank), before, "w")]
        handle = comm.exchange(sends, [(found[1], before, "v"), (found[2], after, "w")])
        handle.wait_received()
        assert [each.unique().item() for each in found] == [before, 10.0 + before, 20.0 + after]
        handle.wait()
    return [(event.kind, event.unit, event.sent_bytes) for event in events]


@pytest.mark.parametrize("transport", ["", "in-order", "early-free"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_messages_of_an_exchange_do_not_wait_for_each_other_on_any_transport():
    for events in run_on_ranks(exchange, 3):
        assert events[:2] == [("send", "u", 12), ("receive", "u", 0)]
        assert events[2:] == [("send", "v", 12), ("send", "w", 12), ("receive", "v", 0), ("receive", "w", 0)]


def tied_over_stages():
    torch.manual_seed(0)
    model = sw.parallelize(models.build("tied"), sw.ParallelPlan(pp=2))
    sw.train_step(model, models.batch(0, 0, 0), num_microbatches=1)


def one_by_one(comm, sends, receives):
    """As tied weights were exchanged once."""
    handles = [comm.receive(buffer, source=source, unit=unit) for buffer, source, unit in receives]
    handles += [comm.send(buffer, to=to, unit=unit) for buffer, to, unit in sends]
    for handle in handles:
        handle.wait()
    return mock.Mock()


def tied_one_by_one():
    with mock.patch.object(transports.InOrder, "exchange", one_by_one):
        tied_over_stages()


@on("in-order")
@pytest.mark.usefixtures("transport")
def test_in_order_tied_weights_over_stages_train_and_would_not_if_all_received_first():
    run_on_ranks(tied_over_stages, 2)
    with pytest.raises(RankFailure, match=r"message\(copies of "):
        run_on_ranks(tied_one_by_one, 2, timeout_s=12)


# -- early free


def backward_of_a_column(holds):
    """The input's gradient of a column-parallel layer, which is added up while the weight's is computed."""
    comm, _ = open_comms(CPU)
    torch.manual_seed(0)
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(8, 6)
    own = weight.chunk(comm.size)[comm.rank].clone().requires_grad_()
    with mock.patch.object(transports.EarlyFree, "holds", holds):
        column_linear(x, own, None, ColumnPlan(comm, "layer", is_transposed=False)).sum().backward()
    assert torch.equal(own.grad, x.detach().sum(0).expand(4, 6))
    return x.grad, weight.sum(0).expand(4, 6)


@on("early-free")
@pytest.mark.usefixtures("transport")
def test_what_a_handle_does_not_hold_is_not_a_number_for_the_peer():
    for grad, expected in run_on_ranks(backward_of_a_column, 2, True):
        torch.testing.assert_close(grad, expected)
    for grad, _ in run_on_ranks(backward_of_a_column, 2, False):
        assert grad.isnan().all()


@on("early-free")
@pytest.mark.usefixtures("transport")
@on_ranks(2)
def test_what_is_written_before_the_wait_is_what_is_sent():
    comm, _ = open_comms(CPU)
    total = torch.ones(4)
    handle = comm.all_reduce(total, unit="u")
    assert total.tolist() == [1] * 4  # nothing is there before the wait
    total[0] = 5
    handle.wait()
    whole = torch.full((2,), 7)
    handle = comm.broadcast(whole, root=0, unit="u")
    with mock.patch.object(transports.EarlyFree, "holds", False):
        lost = comm.all_reduce(torch.ones(4), unit="lost")
    handle.wait()
    with pytest.raises(CommError, match=r"all_reduce\(lost\) on dp_shard: the memory of its result was freed before"):
        lost.wait()
    assert total.tolist() == [10.0, 2.0, 2.0, 2.0]


# -- a handle keeps what it moves alive


def kept(wrap):
    """The storages that a handle alone keeps alive, and whether the wait lets go of them."""
    comm = wrap(open_comms(CPU)[0])
    assert comm.size == 2
    other = 1 - comm.rank
    is_root = comm.rank == 0

    def seen(issue):
        buffers = torch.ones(8), torch.zeros(8)
        memory = [weakref.ref(buffer.untyped_storage()) for buffer in buffers]
        handle = issue(*buffers)
        del buffers
        before = tuple(storage() is not None for storage in memory)
        dist.barrier()
        handle.wait()
        assert not any(storage() is not None for storage in memory)
        return before

    return {
        "all_gather": seen(lambda a, _: comm.all_gather(a, unit="u")),
        "reduce_scatter": seen(lambda a, b: comm.reduce_scatter(a, b[:4], unit="u")),
        "all_reduce": seen(lambda a, _: comm.all_reduce(a, unit="u")),
        "all_reduce out": seen(lambda a, b: comm.all_reduce(a, out=b, unit="u")),
        "all_to_all": seen(lambda a, b: comm.all_to_all(a, b, unit="u")),
        "broadcast": seen(lambda a, _: comm.broadcast(a, root=0, unit="u")),
        "exchange": seen(lambda a, b: comm.exchange([(a, other, "u")], [(b, other, "u")])),
        "message": seen(lambda a, _: comm.send(a, to=1, unit="u") if is_root else comm.receive(a, source=0, unit="u")),
    }


def plain(comm):
    return comm


def staged(comm):
    return StagedComm(comm, CPU)


MOVED = {"all_gather": 1, "all_reduce": 1, "broadcast": 1, "message": 1}


@pytest.mark.parametrize("transport", ["", "in-order", "early-free"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_a_handle_keeps_what_it_moves_alive_until_it_has_been_waited_for():
    for rank, found in enumerate(run_on_ranks(kept, 2, plain)):
        for kind, (reads, writes) in found.items():
            assert reads, (rank, kind)
            assert writes >= (MOVED.get(kind, 2) == 2), (rank, kind)


def test_what_is_staged_is_a_copy_and_its_result_is_kept():
    for rank, found in enumerate(run_on_ranks(kept, 2, staged)):
        for kind in ("reduce_scatter", "all_reduce out", "all_to_all", "exchange"):
            assert found[kind] == (False, True), (rank, kind)
        assert found["all_gather"][0]
        assert found["all_reduce"][0]


def test_another_name_is_refused(monkeypatch):
    monkeypatch.setenv(transports.TRANSPORT, "slow")
    with pytest.raises(RankFailure, match=r"SHARDWISE_TRANSPORT='slow' is not a transport"):
        run_on_ranks(open_comms, 1, CPU)
    with pytest.raises(ConfigError):
        transports.debugged(mock.Mock(), "slow")
