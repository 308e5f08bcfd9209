"""torch's flight recorders in a run that hangs: ranks write them while their main threads wait; torch reads them."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.launch import flight_recorder, heartbeat
from shardwise.launch.world import World, init_process_group
from shardwise.testing import run_on_ranks
from tests.launch.test_join import free_port

GATHER, REDUCE = ("17", "dp_shard: gather"), ("18", "dp_shard: reduce")


def entry(number: int, group: tuple[str, str], sequence: int, what: tuple[str, int], state: str) -> dict[str, Any]:
    """One entry as torch 2.13 dumps it for NCCL."""
    (kind, numel), is_done = what, state == "completed"
    return {
        "record_id": number,
        "pg_id": 1,
        "process_group": list(group),
        "thread_name": "pt_main_thread",
        "thread_id": "140152156441472",
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"nccl:{kind}",
        "time_created_ns": 1795456102205572462,
        "input_sizes": [[numel]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[2 * numel]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 1795456102205572999 if is_done else 0,
        "retired": is_done,
        "timeout_ms": 1920000,
        "is_p2p": False,
    }


def write(folder: Path, rank: int, *entries: dict[str, Any]) -> None:
    """The file of a rank, as torch writes it."""
    groups = {name: {"name": name, "desc": desc, "ranks": "[0, 1]"} for name, desc in (GATHER, REDUCE)}
    content = {"version": "2.10", "nccl_comm_state": {}, "pg_config": groups, "pg_status": {}, "entries": list(entries)}
    flight_recorder.path_of(folder, rank).write_bytes(pickle.dumps(content))


def test_the_message_names_a_command_that_finds_the_rank_that_is_behind(tmp_path: Path) -> None:
    both = [
        entry(0, GATHER, 1, ("all_gather", 8), "completed"),
        entry(1, REDUCE, 1, ("reduce_scatter", 16), "completed"),
    ]
    write(tmp_path, 0, *both, entry(2, GATHER, 2, ("all_gather", 1 << 20), "scheduled"))
    write(tmp_path, 1, *both)
    (tmp_path / "heartbeat-0.json").touch()
    (line,) = flight_recorder.summary(tmp_path, range(2))
    assert line == f"  torch's flight recorders, compared by: torchfrtrace {tmp_path} --prefix flight-rank-"
    words = line.partition("torchfrtrace ")[2].split()
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", *words]
    read = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    assert "Not all ranks joining collective, sequence number: 2" in read.stderr
    assert "missing ranks: {1}" in read.stderr
    (line,) = flight_recorder.summary(tmp_path, range(3))
    assert line.endswith("--prefix flight-rank- --allow-incomplete-ranks")
    flight_recorder.clear(tmp_path)
    assert flight_recorder.summary(tmp_path, range(2)) == []


def hang_in_a_sum(folder: str) -> list[int]:
    """Rank 1 comes late to a sum of torch's own; both are asked meanwhile."""
    directory, rank = Path(folder), dist.get_rank()
    heartbeat.begin(directory, rank)
    sizes: list[int] = []

    def ask() -> None:
        time.sleep(0.3)
        flight_recorder.request(directory)
        paths = [flight_recorder.path_of(directory, r) for r in range(2)]
        deadline = time.monotonic() + 10
        while not all(path.exists() for path in paths) and time.monotonic() < deadline:
            time.sleep(0.05)
        sizes.extend(path.stat().st_size for path in paths)
        (directory / "asked").touch()

    if rank == 0:
        threading.Thread(target=ask, daemon=True).start()
    else:
        while not (directory / "asked").exists():
            time.sleep(0.05)
    dist.all_reduce(torch.ones(6))
    heartbeat.end()
    return sizes


def test_ranks_answer_while_their_main_thread_waits_and_have_nothing_to_say_on_a_cpu(tmp_path: Path) -> None:
    sizes, _ = run_on_ranks(hang_in_a_sum, 2, str(tmp_path), timeout_s=40)
    assert sizes == [0, 0]
    assert flight_recorder.summary(tmp_path, range(2)) == []


def record_over_nccl(folder: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    init_process_group(World(0, 1, 0, 1, 1, "127.0.0.1", free_port(), "variables"), device, timeout_s=60)
    dist.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize()
    flight_recorder.write(Path(folder), 0)


@pytest.mark.gpu
def test_a_world_of_one_over_nccl_records(tmp_path: Path) -> None:
    run_on_ranks(record_over_nccl, 1, str(tmp_path), process_group=False, timeout_s=90)
    (found,) = pickle.loads(flight_recorder.path_of(tmp_path, 0).read_bytes())["entries"]
    assert (found["profiling_name"], found["input_sizes"]) == ("nccl:all_reduce", [[4]])
