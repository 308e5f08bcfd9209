"""Devices that wait for each other for ever, as over NCCL, with a transport on CPU whose handles are never done."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from shardwise.comm import stall
from shardwise.launch.elastic import launch
from shardwise.spec.errors import CommTimeout, RankDisagreement
from shardwise.testing import run_on_ranks
from tests.launch.stuck_body import Stuck, hasten
from tests.launch.test_elastic import ROOT, notes

LIMIT_S = 25.0


def issue_until_told(comm):
    """The host goes on, as nothing holds it up, until it is told."""
    start = time.monotonic()
    while time.monotonic() - start < LIMIT_S:
        comm.gather_unit("later")
        time.sleep(0.05)
    return "never told"


def differ():
    hasten()
    comm = Stuck(limit_s=300.0, num_done=3)
    for index in range(3):
        comm.gather_unit(f"blocks.{index}")
    comm.gather_unit("blocks.3" if comm.rank == 0 else "blocks.4")
    with pytest.raises(RankDisagreement) as caught:
        issue_until_told(comm)
    return str(caught.value)


def test_ranks_that_issued_different_collectives_are_told_so_with_both_units():
    texts = set(run_on_ranks(differ, 2, timeout_s=60))
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("ranks issued different collectives at #3 of dp_shard/0/gather:\n")
    assert "\n  rank 0: all_gather of unit 'blocks.3' (4 elements)" in text
    assert "\n  rank 1: all_gather of unit 'blocks.4' (4 elements)" in text


def silent():
    hasten()
    comm = Stuck(limit_s=2.0, num_done=1)
    comm.gather_unit("blocks.0")
    if comm.rank == 1:
        time.sleep(6.0)  # loads data, perhaps
    with pytest.raises(CommTimeout) as caught:
        issue_until_told(comm)
    return str(caught.value)


def test_a_rank_that_is_silent_is_named_with_its_last_collective_when_the_time_is_up():
    texts = set(run_on_ranks(silent, 2, timeout_s=60))
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith(
        "dp_shard/0/gather #1 all_gather(later, 4 elements): the device has waited for its peers for"
    )
    assert "\n  rank 1: not in a collective; last issued dp_shard/0/gather #0 all_gather(blocks.0, 4 elements)" in text


def slow():
    """Both issue the same; the devices do it late, but get on."""
    hasten()
    comm = Stuck(limit_s=2.0)
    for _ in range(12):
        comm.gather_unit("blocks.0")
    for _ in range(12):
        time.sleep(0.7)
        comm.num_done += 1
    found = stall.StallWatch.of(dist.group.WORLD)
    was_overdue = found._store.check(["ask"])
    comm.gather_unit("blocks.1")
    dist.barrier()
    return found.verdict is None, was_overdue


def test_a_device_that_is_slow_but_gets_on_is_left_alone():
    assert run_on_ranks(slow, 2, timeout_s=60) == [(True, True)] * 2


@pytest.mark.parametrize(("what", "code"), [("differ", 83), ("silent", 82)])
def test_a_host_that_waits_for_the_device_ends_with_the_exit_code(tmp_path, capfd, monkeypatch, what, code):
    monkeypatch.chdir(ROOT)
    assert launch("tests.launch.stuck_body", [what], 2, log_dir=tmp_path / "logs") == code
    assert "blocks.1" in capfd.readouterr().err  # whichever rank was first: the other one is ended
    found = next(iter(notes(tmp_path).values()))
    assert found["code"] == code
    log = (tmp_path / "logs" / f"rank-{found['rank']}.log").read_text()
    assert "The main thread waits for the device (most recent call last):" in log
    assert "stuck_body.py" in log
    assert found["reason"] in log
