"""The harness itself: what it returns, what it says when a rank fails, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import distributed

from shardwise.testing import RankFailure, run_on_ranks


def describe(scale):
    x = torch.ones(3) * scale
    distributed.all_reduce(x)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    return distributed.get_rank(), x, [os.environ[name] for name in names], torch.get_num_threads(), os.getpid()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_in_rank_order(world_size):
    results = run_on_ranks(describe, world_size, 2.0)
    assert [result[0] for result in results] == list(range(world_size))
    for rank, result in enumerate(results):
        assert result[1].tolist() == [2.0 * world_size] * 3
        assert result[2] == [str(rank), str(world_size), str(rank), str(world_size), "1", "lo"]
        assert result[3] == 1
    assert not any(_is_alive(result[4]) for result in results)


def test_a_call_is_cheap():
    run_on_ranks(describe, 2, 1.0)  # starts the server
    assert min(run_on_ranks(processor_time, 2)[0] for _ in range(3)) < 0.2


def processor_time():
    """Seconds of processor time since this rank was forked: a busy machine does not change them."""
    return time.process_time()


def without_group():
    return distributed.is_initialized(), os.environ["RANK"]


def test_the_process_group_can_be_left_to_the_function():
    assert run_on_ranks(without_group, 2, process_group=False) == [(False, "0"), (False, "1")]


def debug_level():
    return distributed.get_debug_level()


def test_torchs_debug_level_is_that_of_the_callers_environment(monkeypatch):
    for level in ("DETAIL", "OFF", "DETAIL"):
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
        assert [each.name for each in run_on_ranks(debug_level, 2)] == [level, level]


def speak():
    print(f"rank {distributed.get_rank()} speaks")


def test_output_of_the_ranks_is_repeated(capsys):
    run_on_ranks(speak, 2)
    _, _, of_rank_1 = capsys.readouterr().out.partition("output of rank 1 of 2 (speak)\n")
    assert "\nrank 1 speaks" in f"\n{of_rank_1}"  # torch may have warned before


def fail_on_one(bad_rank):
    if distributed.get_rank() == bad_rank:
        print("last words")
        raise ValueError("a wrong number")
    distributed.barrier()


@pytest.mark.parametrize("bad_rank", [0, 2])
def test_an_exception_is_shown_once_with_its_traceback_and_the_victims_in_one_line(bad_rank):
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(fail_on_one, 3, bad_rank)
    message = str(caught.value)
    assert message.startswith(f"fail_on_one on 3 ranks: rank {bad_rank} failed first: ValueError: a wrong number\n")
    assert 'raise ValueError("a wrong number")' in message
    assert "last words" in message
    assert "/testing/ranks.py" not in message
    assert " by peer" not in message
    others = [rank for rank in range(3) if rank != bad_rank]
    assert f"ranks {others} then lost the connection to a peer." in message
    assert caught.value.rank == bad_rank
    assert " by peer" in caught.value.tracebacks[others[0]]
    assert not caught.value.timed_out


def return_on_one():
    distributed.barrier()
    if distributed.get_rank() == 1:
        time.sleep(0.3)  # the other one is through, too
        raise KeyError("gone")
    return 1


def test_ranks_that_returned_are_named():
    with pytest.raises(RankFailure, match=r"ranks \[0\] returned"):
        run_on_ranks(return_on_one, 2)


def wait_for_a_peer_that_never_comes(pid_file):
    Path(f"{pid_file}-{distributed.get_rank()}").write_text(str(os.getpid()))
    if distributed.get_rank() == 1:
        sleep_forever()
    distributed.barrier()


def sleep_forever():
    time.sleep(1000)


def test_a_hang_is_a_failure_that_shows_where_every_rank_stands(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(wait_for_a_peer_that_never_comes, 2, str(tmp_path / "pid"), timeout_s=2)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert "no end after 2 s" in message
    assert "[rank 0]   File" in message
    assert "in barrier" in message
    assert "in sleep_forever" in message
    assert message.count("last collective: ") == 2
    assert caught.value.timed_out
    assert sorted(caught.value.causes) == [0, 1]
    assert not any(_is_alive(int(path.read_text())) for path in tmp_path.iterdir())


def stay_behind():
    if distributed.get_rank() == 0:
        raise RuntimeError("first to go")
    sleep_forever()


def test_a_rank_that_does_not_notice_a_failure_is_ended_and_shown():
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(stay_behind, 2, timeout_s=60)
    assert time.monotonic() - start < 15
    assert caught.value.rank == 0
    assert "rank 1: did not come back" in str(caught.value)
    assert "in sleep_forever" in str(caught.value)


def die(how):
    if distributed.get_rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif how == "exit":
            os._exit(7)
        else:
            sys.exit(42)
    distributed.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", "killed by SIGKILL"),
        ("segv", "killed by SIGSEGV"),
        ("exit", "left with exit code 7 before it returned"),
        ("sys.exit", "SystemExit: 42"),
    ],
)
def test_a_rank_that_dies_is_the_cause(how, text):
    with pytest.raises(RankFailure, match=f"rank 1 failed first: {text}") as caught:
        run_on_ranks(die, 3, how)
    assert caught.value.rank == 1
    if how == "segv":
        assert "in die" in str(caught.value)


def start_a_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


def test_what_a_rank_started_is_gone_too():
    children = run_on_ranks(start_a_child, 2, process_group=False)
    assert _soon(lambda: not any(_is_alive(pid) for pid in children))


def warn():
    warnings.warn("of old age", DeprecationWarning, stacklevel=1)
    return distributed.get_rank()


def test_warnings_are_what_they_are_to_the_caller():
    with pytest.raises(RankFailure, match="DeprecationWarning: of old age"):
        run_on_ranks(warn, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "of old", DeprecationWarning)
        assert run_on_ranks(warn, 2) == [0, 1]


def unpicklable():
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_a_failure_of_that_rank():
    with pytest.raises(RankFailure, match="rank 0 failed first"):
        run_on_ranks(unpicklable, 1)


def test_the_private_directory_is_removed():
    def directories():
        return {path.name for path in Path(tempfile.gettempdir()).glob("shardwise-ranks-*")}

    before = directories()
    run_on_ranks(speak, 2)
    with pytest.raises(RankFailure):
        run_on_ranks(die, 2, "exit")
    mine = {name for name in directories() - before if (Path(tempfile.gettempdir()) / name).exists()}
    assert not mine or _soon(lambda: not mine & directories())  # others may run tests beside this one


def test_killing_the_caller_ends_the_ranks(tmp_path):
    code = (
        "from tests.testing.test_run_on_ranks import wait_for_a_peer_that_never_comes as body\n"
        "from shardwise.testing import run_on_ranks\n"
        f"run_on_ranks(body, 2, {str(tmp_path / 'pid')!r})\n"
    )
    root = Path(__file__).parents[2]
    environ = os.environ | {"TMPDIR": str(tmp_path)}  # nobody removes the directory of a caller that was killed
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environ)
    assert _soon(lambda: len([path for path in tmp_path.glob("pid-*") if path.read_text()]) == 2, 250)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    caller.kill()
    caller.wait()
    assert _soon(lambda: not any(_is_alive(pid) for pid in pids))


def _soon(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def _is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
