"""Ranks that were started differently: what differs is named on all of them before training begins."""

from __future__ import annotations

import os

import pytest
import torch

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.launch.environment import program
from shardwise.testing import run_on_ranks
from shardwise.train.control import Control


def versions_differ() -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    with pytest.raises(sw.ConfigError) as config:
        Control(open_comms(torch.device("cpu"), "control")[0]).check_same({"train": {"seed": rank}}, "configuration")
    program()["torch"] += "+other" * rank
    with pytest.raises(sw.ConfigError) as versions:
        sw.parallelize(torch.nn.Linear(2, 2))
    return str(config.value), str(versions.value)


def test_what_differs_between_ranks_at_the_start_is_named():
    for config, versions in run_on_ranks(versions_differ, 2):
        assert "the ranks do not have the same configuration:\n  - train.seed: rank 0 has 0, rank 1 has 1\n" in config
        assert versions.startswith("the ranks run different programs: rank 0 has torch ")
        assert "+other.\n" in versions
