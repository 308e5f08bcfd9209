"""Process groups that Comms are opened over: by their members alone, found by name, and shared by all models.

NCCL's communicators are made of Gloo here: who calls, under which name the members meet and what is kept is the same.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import shardwise as sw
from shardwise.comm import axes as opening
from shardwise.comm import nccl
from shardwise.comm.axes import communicator, timeout_s_of
from shardwise.comm.control import all_gather_json
from shardwise.comm.gloo import GlooComm
from shardwise.comm.stall import StallWatch
from shardwise.spec.errors import CommError, RankDisagreement
from shardwise.spec.mesh import Mesh
from shardwise.testing import RankFailure, run_on_ranks
from tests.common.oracle import Chain, plain_loss, sample
from tests.common.ranks import on_ranks

CPU = torch.device("cpu")


def part_before_whole():
    """Two ranks of three shard a model among themselves; then all three train one together."""
    rank = dist.get_rank()
    half = dist.new_group([0, 1])
    if rank < 2:
        part = sw.fully_shard(Chain(), mesh=half)
        plain_loss(part, rank, 0).backward()
    whole = sw.parallelize(Chain())
    plain_loss(whole, rank, 0).backward()
    return float(sw.clip_grad_norm(whole, 1e9))


def test_a_model_on_part_of_the_world_does_not_hold_up_a_later_one_on_all_of_it():
    assert len(set(run_on_ranks(part_before_whole, 3, timeout_s=40))) == 1


def open_bound():
    """The default group has been bound to a device, as ``init_process_group(device_id=...)`` does."""
    rank, world = dist.get_rank(), dist.group.WORLD
    world.bound_device_id = torch.device("cuda:0")
    over = functools.partial(communicator, world, axis="dp_shard", device=CPU, backend="gloo")
    with mock.patch.object(c10d, "_get_split_source") as split:
        found = [over([0, 1], purpose="gather"), over([0, 1], purpose="reduce")] if rank < 2 else []
        found.append(over([0, 1, 2], purpose="gather"))
    again = over([0, 1, 2], purpose="gather")
    values = []
    for group in found:
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=group)
        values.append(value.item())
    facts = split.called, world.bound_device_id == torch.device("cuda:0"), again is found[-1]
    limits = {timeout_s_of(group, CPU) - timeout_s_of(world, CPU) for group in found}
    world.bound_device_id = None
    return values, facts, limits


def test_members_open_a_communicator_alone_also_where_the_world_is_bound_to_a_device():
    results = run_on_ranks(open_bound, 3, timeout_s=40)
    assert [values for values, _, _ in results] == [[1.0, 1.0, 3.0], [1.0, 1.0, 3.0], [3.0]]
    for _, facts, limits in results:
        assert facts == (False, True, True)
        assert limits == {60.0}


def alone():
    """The other members never come."""
    store = dist.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    failing = mock.patch.object(c10d, "_new_process_group_helper", side_effect=RuntimeError("wait timeout"))
    timeout = mock.patch("shardwise.comm.axes.timeout_s_of", return_value=7.0)
    try:
        with failing, timeout:
            communicator(dist.group.WORLD, [0, 1], "dp_shard", "gather", CPU, backend="gloo")
    except CommError as error:
        return str(error)
    return "opened"


def test_members_that_do_not_come_are_named():
    (text,) = run_on_ranks(alone, 1, process_group=False)
    assert text.startswith("ranks [0, 1] did not all connect for dp_shard/gather within 7 s: wait timeout\n")


def batch():
    return torch.cat([sample(rank, 0) for rank in range(2)])


def loss_fn(output, batch):
    del batch
    return output.square().mean()


def without_stream(comm):
    comm._stream = None
    return comm


OVER_GLOO = opening.Transport("gloo")


@on_ranks(2)
def test_the_number_of_communicators_does_not_grow_with_the_number_of_models():
    """Groups alive after each call of ``sw.parity``, where every Comm is opened as over NCCL."""
    made = []

    def over_gloo(group, axis, device, *, channel, ledger, host, **_):
        made.append(channel)
        return without_stream(GlooComm(group, axis, channel=host.channel))

    plans = {name: sw.ParallelPlan(strategy=name) for name in ("ddp", "zero2", "zero3")}
    found = []
    with (
        mock.patch.object(opening, "_is_moved_by_nccl", return_value=True),
        mock.patch.object(opening, "transport", OVER_GLOO),
        mock.patch.object(nccl, "NcclComm", over_gloo),
    ):
        for _ in range(3):
            report = sw.parity(Chain, [batch()], loss_fn, plans)
            assert report.holds
            found.append(len(c10d._world.pg_map))
    assert found == [3, 3, 3]  # the world, gathers, reductions
    assert len(made) > 12


class OfModule:
    """A module, some of whose names are replaced."""

    def __init__(self, module, **names):
        self.__dict__ |= names
        self._module = module

    def __getattr__(self, name):
        return getattr(self._module, name)


def all_gather_single(out, own, group):
    dist.all_gather(list(out.view(group.size(), -1)), own.clone(), group=group)


def reduce_scatter_single(out, buffer, op, group):
    del op
    total = buffer.clone()
    dist.all_reduce(total, group=group)
    out.copy_(total.chunk(group.size())[group.rank()])


@contextlib.contextmanager
def as_on_nccl(*, is_done=True):
    """Open every Comm as over NCCL. Gloo moves what is sent, and only its order tells it apart, as NCCL does."""
    cuda = mock.MagicMock()
    cuda.Stream().record_event().query.return_value = is_done
    moving = OfModule(dist, all_gather_single=all_gather_single, reduce_scatter_single=reduce_scatter_single)
    with (
        mock.patch.object(opening, "_is_moved_by_nccl", return_value=True),
        mock.patch.object(opening, "transport", opening.Transport("gloo", moving)),
        mock.patch.object(nccl, "torch", OfModule(torch, cuda=cuda)),
        mock.patch.object(nccl, "choose_sum", return_value=nccl.Sum.PLAIN),
    ):
        yield cuda


def step_two(order):
    """Losses and weights of the first two of three models, which are stepped in ``order``."""
    torch.manual_seed(0)
    models = [sw.parallelize(Chain()) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    losses = []
    for index in map(int, order):
        loss = plain_loss(models[index], dist.get_rank(), index)
        loss.backward()
        optimizers[index].step()
        optimizers[index].zero_grad()
        losses.append(loss.item())
    return losses, [[value.tolist() for value in sw.full_state_dict(model).values()] for model in models]


def step_two_on_nccl():
    over_gloo = step_two("0110")
    with as_on_nccl() as cuda:
        assert step_two("0110") == over_gloo
        assert cuda.Stream.call_count == 1 + 2  # for gathers and for reductions, of three models
        with pytest.raises(RankDisagreement) as caught:
            step_two(["01201", "01210"][dist.get_rank()])  # first passes are negotiated: they differ later
    return str(caught.value)


def test_ranks_that_step_two_models_in_opposite_orders_disagree_instead_of_swapping_their_weights():
    first, second = run_on_ranks(step_two_on_nccl, 2)
    a, b = (f"all_gather of unit root of dp_shard/{number}/gather" for number in (6, 7))
    assert f"Rank 0 is about to issue {a}, rank 1 {b}.\n" in first
    assert f"Rank 1 is about to issue {b}, rank 0 {a}.\n" in second
    assert first.endswith("Run the models' forwards, backwards and steps in the same order on all ranks.")


def issue(orders):
    """The device is never done: each host goes on until it is told."""
    silent = SimpleNamespace(all_gather_single=lambda *_, **__: None, reduce_scatter_single=len)
    with as_on_nccl(is_done=False), mock.patch.object(opening, "transport", opening.Transport("gloo", silent)):
        comms = [opening.open_comms(CPU)[0] for _ in range(2)]
        order = orders[dist.get_rank()]
        for index in itertools.chain(order, itertools.repeat(order[-1])):
            comms[int(index)].all_gather(torch.zeros(6), unit="u")
            time.sleep(0.05)


OPPOSITE = "models share a communicator along dp_shard, and ranks use it in different orders"
ANOTHER = "ranks issued different collectives at #1 of dp_shard/gather:"


@pytest.mark.parametrize(("orders", "told"), [(("0", "10", "01"), OPPOSITE), (("10", "1"), ANOTHER)])
def test_all_ranks_are_told(orders, told):
    """Rank 1 of three differs, which ranks 1 and 2 see; rank 1 of two stays with its model, and its device waits."""
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(issue, len(orders), orders, timeout_s=30)
    assert not caught.value.timed_out
    assert all(told in caught.value.tracebacks[rank] for rank in range(len(orders)))


def control_without_gloo():
    """Ranks 0 and 2 of three open Comms over a group that says that it has NCCL alone."""
    hosts, rank = [], dist.get_rank()

    def over_gloo(group, axis, device, *, channel, ledger, host, **_):
        hosts.append((host, ledger.peers))
        return without_stream(GlooComm(group, axis, channel=channel))

    with (
        mock.patch.object(opening, "_is_moved_by_nccl", return_value=True),
        mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"),
        mock.patch.object(nccl, "NcclComm", over_gloo),
        mock.patch.object(opening, "transport", OVER_GLOO),
    ):
        if rank == 1:
            return None
        opening.MeshRanks(Mesh(dp_shard=2), ranks=[0, 2]).open(CPU)
        opening.MeshRanks(Mesh(dp_shard=2), ranks=[0, 2]).open(CPU)
    host, peers = hosts[0]
    assert all(each.group is host.group is not dist.group.WORLD for each, _ in hosts)
    assert host.watch is StallWatch.of(host.group)
    assert timeout_s_of(host.group, CPU) == timeout_s_of(dist.group.WORLD, CPU)
    return all_gather_json(host, f"rank {rank}"), list(peers), host.rank


def test_control_messages_go_over_gloo_also_where_the_group_has_nccl_alone():
    found = run_on_ranks(control_without_gloo, 3, timeout_s=40)
    said = ["rank 0", "rank 2"]
    assert found == [(said, [1], 0), None, (said, [0], 1)]
