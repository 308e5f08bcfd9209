"""What a message about a hang says from torch's flight recorders, and the recorders themselves."""

from __future__ import annotations

import json
import re
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


def dump(*entries: dict[str, Any]) -> str:
    return json.dumps(
        {
            "version": "2.10",
            "comm_lib_version": "2.29.3",
            "nccl_comm_state": {},
            "pg_config": {"17": {"name": "17", "desc": "dp_shard: gather", "ranks": "[0, 1]"}},
            "pg_status": {"1": {"last_enqueued_collective": "3", "last_started_collective": "-1"}},
            "entries": list(entries),
        }
    )


def test_the_collective_that_each_rank_is_in_and_the_rank_that_has_not_begun_it_are_named(tmp_path: Path) -> None:
    both = [
        entry(0, GATHER, 1, ("all_gather", 8), "completed"),
        entry(1, REDUCE, 1, ("reduce_scatter", 16), "completed"),
    ]
    late = [entry(2, GATHER, 2, ("all_gather", 1 << 20), "scheduled")]
    flight_recorder.path_of(tmp_path, 0).write_text(dump(*late, *both) + "\n" + dump() + "\n")
    flight_recorder.path_of(tmp_path, 1).write_text(dump(*both) + "\n")
    second = "nccl:all_gather #2 of dp_shard: gather (1048576 elements, BFloat16)"
    last = "last finished: nccl:reduce_scatter #1 of dp_shard: reduce (16 elements, BFloat16)"
    assert flight_recorder.summary(tmp_path, range(3)) == [
        "  torch's flight recorder:",
        f"    rank 0: in {second}; {last}",
        f"    rank 1: in no collective; {last}",
        f"    rank 1 has not begun {second}",
        f"    files: {tmp_path / 'flight-0.json'}, {tmp_path / 'flight-1.json'}",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "no JSON\n",
        "[]\n",
        "null\n",
        '{"entries": 3}\n',
        '{"entries": [{"record_id": 1}]}\n',
        '{"entries": [{}, 4]}\n',
        dump(entry(0, GATHER, 1, ("all_gather", 8), "scheduled") | {"input_sizes": "odd"}),
        dump(entry(0, GATHER, 1, ("all_gather", 8), "scheduled") | {"process_group": ["one"]}),
        "[" * 100_000,
    ],
)
def test_what_cannot_be_read_is_left_out(tmp_path: Path, text: str) -> None:
    flight_recorder.path_of(tmp_path, 0).write_text(text)
    assert flight_recorder.summary(tmp_path, range(2)) == []


def hang_in_a_sum(folder: str) -> list[str]:
    """Rank 1 comes late to a sum of torch's own; both are asked meanwhile."""
    directory, rank = Path(folder), dist.get_rank()
    heartbeat.begin(directory, rank)
    dist.all_reduce(torch.ones(4))
    lines: list[str] = []

    def ask() -> None:
        time.sleep(0.3)
        flight_recorder.request(directory)
        deadline = time.monotonic() + 10
        while not all(flight_recorder.path_of(directory, r).exists() for r in range(2)) and time.monotonic() < deadline:
            time.sleep(0.05)
        lines.extend(flight_recorder.summary(directory, range(2)))
        (directory / "asked").touch()

    if rank == 0:
        threading.Thread(target=ask, daemon=True).start()
    else:
        while not (directory / "asked").exists():
            time.sleep(0.05)
    dist.all_reduce(torch.ones(6))
    heartbeat.end()
    return lines


def test_ranks_write_their_recorders_while_their_main_thread_waits(tmp_path: Path) -> None:
    lines, _ = run_on_ranks(hang_in_a_sum, 2, str(tmp_path), timeout_s=40)
    found = [re.sub(r"#\d+", "#", line) for line in lines[1:4]]  # the harness has made some before
    last = "last finished: gloo:all_reduce # of default_pg (4 elements, Float)"
    assert found == [
        f"    rank 0: in gloo:all_reduce # of default_pg (6 elements, Float); {last}",
        f"    rank 1: in no collective; {last}",
        "    rank 1 has not begun gloo:all_reduce # of default_pg (6 elements, Float)",
    ]


def record_over_nccl(folder: str) -> list[str]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    init_process_group(World(0, 1, 0, 1, 1, "127.0.0.1", free_port(), "variables"), device, timeout_s=60)
    dist.all_reduce(torch.ones(4, device=device))
    torch.cuda.synchronize()
    flight_recorder.write(Path(folder), 0)
    return [
        f"{each.what} #{each.sequence} {each.size} {each.is_done}" for each in flight_recorder.read(Path(folder), 0)
    ]


@pytest.mark.gpu
def test_a_world_of_one_over_nccl_records(tmp_path: Path) -> None:
    (found,) = run_on_ranks(record_over_nccl, 1, str(tmp_path), process_group=False, timeout_s=90)
    assert found == ["nccl:all_reduce #1 4 elements, Float True"]
