"""Which rank a run waits for, from heartbeats and from what the system says of the processes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.launch import heartbeat
from shardwise.launch.hang import COMPUTING, STOPPED, HangWatch, explain
from shardwise.launch.root_cause import signal_name

RANK = """
import os, signal, sys, time
from pathlib import Path
from shardwise.launch import heartbeat
folder, rank, what = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
heart = heartbeat.begin(folder, rank)
heart.set_collective_source(lambda: ("waiting in a gather", True) if what == "wait" else ("not in a collective", False))
heartbeat.enter("step", step=13, limit_s=0.4, saved_step=10)
if what == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
while True:
    if what != "spin":
        time.sleep(0.05)
"""


@pytest.mark.parametrize(("what", "state"), [("stop", STOPPED), ("spin", COMPUTING)])
def test_the_rank_is_named_that_the_others_wait_for(tmp_path: Path, what: str, state: str) -> None:
    kinds = ["wait", what]
    ranks = [subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(i), k]) for i, k in enumerate(kinds)]
    try:
        watch, late = HangWatch(tmp_path, range(2)), None
        deadline = time.monotonic() + 20
        while (late is None or heartbeat.read(tmp_path, 1) is None) and time.monotonic() < deadline:
            late = watch.overdue() or late
            time.sleep(0.1)
        assert late is not None
        hang = explain(tmp_path, range(2), late)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert (hang.beat.rank, hang.beat.pid, hang.beat.saved_step) == (1, ranks[1].pid, 10)
    first, second, third, *others = hang.text.splitlines()
    assert first == (
        f"rank 1 (pid {ranks[1].pid}) has made no progress for 0.4 s at step 13, in the phase 'step'; {state}"
    )
    assert second == "  rank 1 was last seen not in a collective"
    assert third == f"  rank 0 (pid {ranks[0].pid}): step 13, phase 'step', waiting in a gather"
    assert str(heartbeat.stacks_of(tmp_path, 0)) in others[0]
    assert "most recent call first" in heartbeat.stacks_of(tmp_path, 0).read_text()
    assert (heartbeat.stacks_of(tmp_path, 1).read_text() == "") == (what == "stop")


def test_a_rank_that_goes_on_is_not_overdue_and_time_in_which_nobody_looked_does_not_count(tmp_path: Path) -> None:
    try:
        heart = heartbeat.begin(tmp_path, 0)
        heartbeat.enter("step", step=1, limit_s=3.0)
        watch = HangWatch(tmp_path, [0])
        assert watch.overdue() is None
        watch._checked_at -= 3600  # the machine has slept for an hour
        assert watch.overdue() is None
        watch._checked_at -= 1.5
        heartbeat.record_progress()
        heart.write()
        assert watch.overdue() is None
        watch._checked_at -= 2
        assert watch.overdue() is None
        watch._checked_at -= 2
        assert watch.overdue() is not None
    finally:
        heartbeat.end()


def test_a_record_has_one_size_and_one_that_is_not_whole_is_no_record(tmp_path: Path) -> None:
    try:
        heart = heartbeat.begin(tmp_path, 2)
        heart.set_collective_source(lambda: ("x" * 5000, True))
        heartbeat.enter("evaluation", step=7, limit_s=60)
    finally:
        heartbeat.end()
    path = heartbeat.path_of(tmp_path, 2)
    beat = heartbeat.read(tmp_path, 2)
    assert beat is not None
    assert (beat.step, beat.phase, beat.is_waiting, path.stat().st_size) == (7, "evaluation", True, 1024)
    path.write_bytes(path.read_bytes()[:100])
    assert heartbeat.read(tmp_path, 2) is None


def test_a_request_for_stacks_that_comes_after_the_end_does_no_harm(tmp_path):
    code = "import os, sys; from pathlib import Path; from shardwise.launch import heartbeat as h\n"
    code += "h.begin(Path(sys.argv[1]), 0); h.end(); os.kill(os.getpid(), h.STACKS_SIGNAL); print('alive')"
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.stdout == "alive\n", ended
    assert signal_name(heartbeat.STACKS_SIGNAL) == f"signal {heartbeat.STACKS_SIGNAL}"


def test_ranks_that_all_wait_are_said_to_be_cut_off_from_each_other(tmp_path: Path) -> None:
    for rank in range(2):
        beat = heartbeat.Heartbeat(
            rank, pid=7, host=f"node{rank}", step=13, phase="step", limit_s=60.0, is_waiting=True
        )
        beat.collective, beat.time_s = "waiting in a gather", time.time()
        heartbeat.path_of(tmp_path, rank).write_text(json.dumps(dataclasses.asdict(beat)))
    late = heartbeat.read(tmp_path, 0)
    assert late is not None
    text = explain(tmp_path, range(2), late).text
    assert "\n  every rank waits for others, on 2 machines: see whether these reach each other" in text


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how much memory a process has held")
def test_the_memory_that_a_process_has_held_is_not_that_of_its_parent() -> None:
    ballast = bytearray(b"x" * (200 << 20))
    code = "from shardwise.launch.process import peak_rss_bytes; print(peak_rss_bytes())"
    peak = int(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
    assert 1 << 20 < peak < len(ballast)
