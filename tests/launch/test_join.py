"""Joining a world: which group is made, where it listens, and what is said when it cannot be made."""

from __future__ import annotations

import datetime as dt
import os
import socket
import sys

import pytest
from torch import distributed

from shardwise.launch import world as worlds
from shardwise.launch.world import (
    RENDEZVOUS_DIR,
    World,
    address_of,
    init_process_group,
    joined_world,
    read_world,
    shutdown,
)
from shardwise.spec.errors import CommError, ConfigError
from shardwise.testing import run_on_ranks
from tests.launch.test_elastic import LOOPBACK, listeners


def join(port):
    rank = int(os.environ["RANK"])
    os.environ.pop("GLOO_SOCKET_IFNAME")
    before = dict(os.environ)
    world = World(rank, 2, rank, 2, 1, "0.0.0.0", port, "variables")  # the address of one machine is not asked for
    init_process_group(world, timeout_s=30)
    found = listeners([os.getpid()])
    total = [None, None]
    distributed.all_gather_object(total, rank)
    init_process_group(world)  # again: nothing happens
    shutdown()
    changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
    return found, total, changed, distributed.is_initialized()


def test_a_world_of_one_machine_listens_on_loopback_and_leaves_the_environment_alone():
    for found, total, changed, is_initialized in run_on_ranks(join, 2, free_port(), process_group=False):
        assert found
        assert found <= LOOPBACK
        assert total == [0, 1]
        assert not changed
        assert not is_initialized


def alone():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    world = read_world()
    init_process_group(world)
    distributed.barrier()
    found = listeners([os.getpid()])
    result = distributed.get_world_size(), distributed.get_backend(), found
    shutdown()
    return result


def test_a_world_of_one_has_a_group_too():
    size, backend, found = run_on_ranks(alone, 1, process_group=False)[0]
    assert (size, backend) == (1, "gloo")
    assert found <= LOOPBACK


def with_a_group():
    before = distributed.group.WORLD
    init_process_group(read_world(os.environ | {"MASTER_ADDR": "127.0.0.1"}))
    same = distributed.group.WORLD is before
    shutdown()
    return same, distributed.is_initialized()


def test_a_group_that_exists_is_used_and_left_alone():
    assert run_on_ranks(with_a_group, 2) == [(True, True), (True, True)]


def runs_in_its_group():
    """As ``sw.Run`` around the loop of a model that ``sw.parallelize`` has joined the ranks for."""
    world = World()
    init_process_group(world)
    with joined_world(world):
        pass
    found = distributed.is_initialized()
    shutdown()
    with joined_world(world):
        pass
    return found, distributed.is_initialized()


def test_a_group_that_was_there_outlasts_a_run():
    assert run_on_ranks(runs_in_its_group, 1, process_group=False) == [(True, False)]


def refused(rank, num_nodes, address, port):
    """What rank 0 or 1 of two is told that cannot join; on each of several machines is one."""
    local, per_node = (rank, 2) if num_nodes == 1 else (0, 1)
    with pytest.raises(CommError) as caught:
        init_process_group(World(rank, 2, local, per_node, num_nodes, address, port, "variables"), timeout_s=1)
    return str(caught.value)


def test_a_port_in_use_is_named():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (message,) = run_on_ranks(refused, 1, 0, 1, "127.0.0.1", port, process_group=False)
    assert f"rank 0 cannot listen on 127.0.0.1:{port}: Address already in use" in message
    assert "MASTER_PORT" in message


def test_a_peer_that_does_not_come_is_an_error_in_time():
    (message,) = run_on_ranks(refused, 1, 1, 1, "127.0.0.1", free_port(), timeout_s=30, process_group=False)
    assert message.startswith("rank 1 of 2 could not join the others at 127.0.0.1:")
    assert "See whether every rank was started" in message


@pytest.mark.parametrize(
    ("address", "text"), [("192.0.2.1", "cannot listen on 192.0.2.1:29555"), ("a.invalid", "known")]
)
def test_rank_0_of_several_machines_listens_on_its_own_address_or_says_why_not(address, text):
    (message,) = run_on_ranks(refused, 1, 0, 2, address, 29555, process_group=False)
    assert text in message
    assert "MASTER_ADDR" in message


@pytest.mark.parametrize(
    ("source", "master", "error", "text"),
    [
        ("slurm", "127.0.1.1", ConfigError, "own name.* leads to loopback here .*\n  Set GLOO_SOCKET_IFNAME"),
        ("torchrun", "10.0.0.1", ConfigError, "own name.* leads to loopback here .*\n  Set GLOO_SOCKET_IFNAME"),
        ("torchrun", "127.0.1.1", CommError, "rank 1 of 2 did not come"),  # all ranks may be on this machine
    ],
)
def test_a_machine_that_others_cannot_reach_by_its_name_is_refused_at_once(monkeypatch, source, master, error, text):
    """As with Debian's /etc/hosts, which gives the machine's own name to 127.0.1.1."""

    def resolve(name, *_, **__):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (master if name == "node-a" else "127.0.1.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    world = World(0, 2, 0, 1, 2, "node-a", free_port(), source)
    with pytest.raises(error, match=text):
        init_process_group(world, timeout_s=1)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for an address")
def test_an_interface_has_an_address():
    assert address_of("lo") == "127.0.0.1"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_each_world_of_a_process_meets_in_a_file_of_its_own(tmp_path, monkeypatch):
    """A rank of the world before may still use its file: ranks of the next one waited for each other for ever."""
    monkeypatch.setenv(RENDEZVOUS_DIR, str(tmp_path))
    two, soon = World(size=2, local_size=2, source="launcher"), dt.timedelta(seconds=1)
    before, now = worlds._store(two, soon), worlds._store(two, soon)
    before.set("key", "of the world before")
    assert not now.check(["key"])
