from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.launch.world import World, expand_nodelist, own_device, read_world
from shardwise.spec.errors import ConfigError, MeshError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "x",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "4242",
}
KUBEFLOW = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NODE_RANK": "1",
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
}


OWN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
TASK_0 = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
UNEVEN = SLURM | {"SLURM_NTASKS": "11", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NNODES": "3"}


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        ({}, World(0, 1, 0, 1, 1, "127.0.0.1", 0, "alone", 0)),
        ({"RANK": "", "MASTER_ADDR": "x"}, World()),
        (TORCHRUN, World(5, 8, 1, 4, 2, "node-a", 1234, "torchrun", 2)),
        (SLURM | TORCHRUN, World(5, 8, 1, 4, 2, "node-a", 1234, "torchrun", 2)),
        (  # uneven machines keep the number of agents
            TORCHRUN | {"WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "3", "RANK": "6", "LOCAL_RANK": "2"},
            World(6, 7, 2, 3, 2, "node-a", 1234, "torchrun", 2),
        ),
        (  # our own launcher
            OWN | {"SHARDWISE_RENDEZVOUS_DIR": "/tmp/x", "SHARDWISE_RESTART_COUNT": "3"},
            World(1, 2, 1, 2, 1, "127.0.0.1", 0, "launcher", 3),
        ),
        *(  # rank and size alone are local on loopback
            (
                {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address},
                World(1, 2, 1, 2, 1, address, 29500, "variables", 0),
            )
            for address in ("127.0.0.1", "localhost")
        ),
        (  # and one for each machine elsewhere
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            World(1, 2, 0, 1, 2, "a", 29500, "variables", 0),
        ),
        (SLURM, World(5, 8, 1, 4, 2, "gpu07", 15000 + 4242, "slurm", 0)),
        (TASK_0 | {"SLURM_STEP_ID": ""}, World()),  # a batch script is no rank
        (TASK_0 | {"SLURM_NTASKS": "1", "SLURM_PTY_PORT": "43349"}, World()),  # nor is a shell; a step of it has ranks
        (
            SLURM | {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "43349"},
            World(5, 8, 1, 4, 2, "gpu07", 15000 + 4242, "slurm", 0),
        ),
        (
            SLURM | {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "gpu07", "SLURM_LOCALID": "5"},
            World(5, 8, 5, 8, 1, "127.0.0.1", 15000 + 4242, "slurm", 0),
        ),
        (
            SLURM | {"SLURM_NTASKS": "7", "SLURM_TASKS_PER_NODE": "4,3"},
            World(5, 7, 1, 3, 2, "gpu07", 15000 + 4242, "slurm", 0),
        ),
        (
            UNEVEN | {"SLURM_JOB_NODELIST": "a[1-3]", "SLURM_NODEID": "2", "SLURM_PROCID": "9"},
            World(9, 11, 1, 3, 3, "a1", 15000 + 4242, "slurm", 0),
        ),
        (
            SLURM | {"MASTER_ADDR": "ib0", "MASTER_PORT": "77", "SLURM_RESTART_COUNT": "1"},
            World(5, 8, 1, 4, 2, "ib0", 77, "slurm", 1),
        ),
    ],
)
def test_the_world_that_variables_describe(variables, world):
    assert read_world(variables) == world


@pytest.mark.parametrize("given", [KUBEFLOW, KUBEFLOW | {"RANK": "", "WORLD_SIZE": ""}])
def test_in_a_pod_of_kubeflow_torchrun_starts_the_ranks(given):
    with pytest.raises(ConfigError, match=r"LOCAL_RANK is not: torchrun has .*\n  Let the .* `torchrun -m shardwise"):
        read_world(given)
    assert read_world(given | TORCHRUN) == read_world(TORCHRUN)


def test_steps_of_one_slurm_job_do_not_share_a_port():
    ports = [read_world(SLURM | {"SLURM_STEP_ID": str(step)}).master_port for step in range(100)]
    assert len(set(ports)) == 100
    assert all(15000 <= port < 32768 for port in ports)  # from there on the system gives ports away


@pytest.mark.parametrize(
    ("world", "visible", "index"),
    [
        (World(3, 8, 3, 8, source="torchrun"), 8, 3),
        (World(3, 8, 3, 8, source="slurm"), 8, 3),
        (World(3, 8, 3, 8, source="slurm"), 1, 0),
        (World(source="slurm"), 8, 0),
    ],
)
def test_a_rank_takes_the_gpu_of_its_local_rank_or_the_only_one_that_its_task_sees(
    monkeypatch, capsys, world, visible, index
):
    chosen = see_gpus(monkeypatch, visible)
    own_device(world)
    assert [device.index for device in chosen] == [index]
    shown = "8 GPUs are visible, but Slurm has started 1 task here" in capsys.readouterr().err
    assert shown == (visible > world.local_size)


def test_a_rank_without_a_gpu_is_refused(monkeypatch):
    see_gpus(monkeypatch, 4)
    with pytest.raises(MeshError, match="8 ranks on this machine need 8 GPUs, but rank 5 sees 4"):
        own_device(World(5, 8, 5, 8, source="slurm"))


def see_gpus(monkeypatch, count):
    """Let torch see so many GPUs. Returns the list of those that are made the current one."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("variables", "error", "text"),
    [
        ({"RANK": "0"}, ConfigError, "RANK is set in the environment, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, ConfigError, "WORLD_SIZE is set in the environment, but RANK is not"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, ConfigError, "RANK='zero' in the environment is not a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, ConfigError, "RANK='-1'"),
        (
            {"RANK": "0", "WORLD_SIZE": "0"},
            ConfigError,
            "WORLD_SIZE='0' in the environment is not a whole number of at",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ConfigError, "MASTER_ADDR is not set"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, ConfigError, "MASTER_PORT=70000 in the environment is not a port"),
        (TORCHRUN | {"RANK": "8"}, MeshError, "rank 8 is not in a world of 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, MeshError, "local rank 4 is not among the 4 processes of this machine"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, MeshError, "9 processes on this machine are more than the 8"),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, MeshError, "one machine with 4 processes does not make a world of 8"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "far"},
            ConfigError,
            "LOCAL_WORLD_SIZE is not",
        ),
        (SLURM | {"SLURM_NTASKS": ""}, ConfigError, "SLURM_STEP_NUM_TASKS is not"),
        (SLURM | {"SLURM_NTASKS": "7"}, MeshError, "7 tasks on 2 nodes"),
        (SLURM | {"SLURM_NNODES": "3"}, MeshError, "3 nodes, but its node list 'gpu"),
        (SLURM | {"SLURM_JOB_NODELIST": ""}, ConfigError, "neither SLURM_JOB_NODELIST nor MASTER_ADDR"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "four"}, ConfigError, "not of the form"),
        (SLURM | {"SLURM_JOB_NODELIST": "gpu[07-08"}, ConfigError, "unbalanced brackets"),
    ],
)
def test_what_cannot_be_is_refused_with_the_variable_and_what_to_do(variables, error, text):
    with pytest.raises(error) as caught:
        read_world(variables)
    message = str(caught.value)
    assert text in message
    assert "\n  " in message  # the next action
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[008-010,12]", ["n008", "n009", "n010", "n12"]),
        ("n[01-02,7],gpu-[1-2]-ib", ["n01", "n02", "n7", "gpu-1-ib", "gpu-2-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a.example.org", ["a.example.org"]),
    ],
)
def test_node_lists(text, hosts):
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "a[", "a]", "a[1-", "a[]", "a[x]", "a[3-1]", "a[1-999999999]", "a[[1]]"])
def test_malformed_node_lists(text):
    with pytest.raises(ConfigError, match="node"):
        expand_nodelist(text)


@given(st.text(alphabet="ab12-,[]", max_size=20))
def test_any_node_list_gives_hosts_or_a_config_error(text):
    try:
        hosts = expand_nodelist(text)
    except ConfigError:
        return
    assert hosts
    assert all(hosts)
    assert not any(set(host) & set("[],") for host in hosts)
