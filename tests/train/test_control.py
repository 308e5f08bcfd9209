"""What rank 0 does for all, and how its failure reaches them; what differs between ranks is named on all."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.launch.environment import code_versions
from shardwise.spec.errors import StorageError
from shardwise.testing import run_on_ranks
from shardwise.train.control import Control
from tests.checkpoint.threads import ThreadComm


def on_first(action) -> list[Exception | object]:
    barrier, board = threading.Barrier(2), {}

    def rank(number: int) -> Exception | object:
        try:
            return Control(ThreadComm(number, 2, barrier, board)).on_first(action)
        except Exception as error:  # noqa: BLE001  it is what is looked at
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(rank, range(2)))


def test_what_rank_0_finds_every_rank_gets() -> None:
    assert on_first(lambda: {"a": 1}) == [{"a": 1}, {"a": 1}]


def test_what_the_operating_system_refuses_is_an_io_error_on_every_rank(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "plan.json"))

    for error in on_first(full):
        assert isinstance(error, StorageError)
        assert error.exit_code == 74
        assert f"{tmp_path / 'plan.json'}: No space left on device" in str(error)


@pytest.mark.parametrize("error", [OSError("odd"), PermissionError(errno.EACCES, "Permission denied")])
def test_without_a_name_the_reason_is_there(error: OSError) -> None:
    def fail() -> None:
        raise error

    assert all("odd" in str(found) or "Permission denied" in str(found) for found in on_first(fail))


def versions_differ() -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    with pytest.raises(sw.ConfigError) as config:
        Control(open_comms(torch.device("cpu"), "control")[0]).check_same({"train": {"seed": rank}}, "configuration")
    code_versions()["torch"] += "+other" * rank
    with pytest.raises(sw.ConfigError) as versions:
        sw.parallelize(torch.nn.Linear(2, 2))
    return str(config.value), str(versions.value)


def test_what_differs_between_ranks_at_the_start_is_named():
    for config, versions in run_on_ranks(versions_differ, 2):
        assert "the ranks do not have the same configuration:\n  - train.seed: rank 0 has 0, rank 1 has 1\n" in config
        assert versions.startswith("the ranks run different programs: rank 0 has torch ")
        assert "+other.\n" in versions
