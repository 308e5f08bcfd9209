"""The launcher: exit codes, restarts, signals, what listens, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.launch.elastic import launch
from shardwise.spec.errors import ConfigError

ROOT = Path(__file__).parents[2]
BODY = "tests.launch.elastic_body"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(tmp_path, *args, **options):
    return launch(BODY, [str(tmp_path), *args], 2, log_dir=tmp_path / "logs", **options)


def pids(tmp_path, attempt=0):
    return [int(path.read_text()) for path in sorted(tmp_path.glob(f"pid-{attempt}-*"))]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def notes(tmp_path):
    return {path.name: json.loads(path.read_text()) for path in (tmp_path / "logs").glob("exit-*.json")}


def test_success_gives_0_and_a_log_for_every_rank(tmp_path, capfd):
    environ, handlers = dict(os.environ), [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert run(tmp_path, "finish") == 0
    for rank in (0, 1):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} of 2, attempt 0, launcher\nNCCL on lo, Gloo on lo\n" in log
        assert notes(tmp_path)[f"exit-{rank}.json"]["code"] == 0
    shown = capfd.readouterr()
    assert "rank 0 of 2" in shown.out
    assert "rank 1 of 2" not in shown.out + shown.err
    assert dict(os.environ) == environ
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


@pytest.mark.parametrize(
    ("code", "given"),
    [(65, 65), pytest.param(42, 1, marks=pytest.mark.long), pytest.param(83, 83, marks=pytest.mark.long)],
)
def test_a_worker_s_own_code_comes_through_where_it_has_a_meaning(tmp_path, capfd, code, given):
    assert run(tmp_path, "exit", str(code)) == given
    shown = capfd.readouterr().err
    assert re.search(
        rf"shardwise: rank 1 \(pid \d+\) left with exit code {code} at step 13 while others were tr", shown
    )
    assert notes(tmp_path)["exit-1.json"]["code"] == code
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_the_reason_that_a_worker_noted_is_shown_with_its_step(tmp_path, capfd):
    assert run(tmp_path, "note", "80") == 80
    shown = capfd.readouterr().err
    assert re.search(r"shardwise: rank 1 \(pid \d+\) at step 12: the loss is not a number\n", shown)
    assert f"  log: {tmp_path / 'logs' / 'rank-1.log'}" in shown


def test_an_exception_gives_1_its_traceback_is_in_the_log_and_the_victim_is_not_the_cause(tmp_path, capfd):
    assert run(tmp_path, "raise") == 1
    shown = capfd.readouterr()
    victims = "\n  ranks [0] ended in consequence\n"
    assert f"(pid {pids(tmp_path)[1]}) at step 13: ValueError: a wrong number{victims}" in shown.err
    assert "Traceback" not in shown.out + shown.err
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "Traceback" in log
    assert "in act" in log
    assert "runpy" not in log


def test_a_killed_rank_gives_128_plus_the_signal(tmp_path, capfd):
    assert run(tmp_path, "kill") == 128 + signal.SIGKILL
    killed = (
        f"shardwise: rank 1 (pid {pids(tmp_path)[1]}) killed by SIGKILL at step 13 (often: out of memory; the process"
    )
    shown = capfd.readouterr().err
    assert killed in shown
    assert re.search(r"^  most memory held: rank 0 [\d.]+ [MG]B, rank 1 [\d.]+ [MG]B$", shown, re.MULTILINE)
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_killed_rank_is_started_again_with_one_restart(tmp_path, capfd):
    assert run(tmp_path, "kill-once", max_restarts=3) == 0
    shown = capfd.readouterr()
    assert shown.err.count("shardwise: restart ") == 1
    assert "shardwise: restart 1/3\n" in shown.err
    assert f"shardwise: finished after 1 restart: rank 1 (pid {pids(tmp_path)[1]}) killed by" in shown.err
    assert "rank 0 of 2, attempt 1, launcher" in shown.out
    assert len(pids(tmp_path, 1)) == 2
    assert not pids(tmp_path, 2)


def test_a_frozen_rank_is_named_and_killed_and_all_are_started_again(tmp_path, capfd):
    assert run(tmp_path, "stop-once", max_restarts=1) == 0
    shown, logs = capfd.readouterr().err, tmp_path / "logs"
    frozen = pids(tmp_path)[1]
    assert f"rank 1 (pid {frozen}) has made no progress for 4 s at step 13, in the phase 'step'; stopped" in shown
    assert f"  stacks: {logs / 'stack-0.txt'}\n  no stack of rank 1: " in shown
    assert "elastic_body.py" in (logs / "stack-0.txt").read_text()
    assert "shardwise: restart 1/1\n" in shown
    assert not is_alive(frozen)


def test_exhausted_restarts_give_81(tmp_path):
    assert run(tmp_path, "kill", max_restarts=1) == 81
    assert len(pids(tmp_path, 1)) == 2
    assert not pids(tmp_path, 2)


def test_what_a_new_start_cannot_help_is_not_started_again(tmp_path):
    assert run(tmp_path, "exit", "78", max_restarts=3) == 78
    assert not pids(tmp_path, 1)


@pytest.mark.parametrize(("nproc", "max_restarts"), [(0, 0), (-1, 0), (1, -1)])
def test_impossible_numbers_start_nothing(tmp_path, nproc, max_restarts):
    with pytest.raises(ConfigError, match="expected"):
        launch(BODY, [str(tmp_path)], nproc, max_restarts=max_restarts, log_dir=tmp_path / "logs")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def launcher(tmp_path):
    """Start a launcher as a process of its own; its workers run when the function returns."""
    started = []

    def start(what):
        code = (
            "import sys\n"
            "from shardwise.launch.elastic import launch\n"
            f"sys.exit(launch({BODY!r}, [{str(tmp_path)!r}, {what!r}], 2, log_dir={str(tmp_path / 'logs')!r}))\n"
        )
        with (tmp_path / "launcher.log").open("w") as log:
            environ = os.environ | {"TMPDIR": str(tmp_path)}  # nobody removes the directory of a killed launcher
            process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=log, stderr=log, env=environ)
        started.append(process)
        assert soon(lambda: len(pids(tmp_path)) == 2, 60), (tmp_path / "launcher.log").read_text()
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_sigkill_of_the_launcher_leaves_no_worker(tmp_path, launcher):
    process = launcher("wait")
    assert all(is_alive(pid) for pid in pids(tmp_path))
    process.kill()
    process.wait()
    assert soon(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_stops_all_ranks_which_listen_on_loopback_only(tmp_path, launcher, number):
    process = launcher("wait")
    found = listeners([process.pid, *pids(tmp_path)])
    assert found
    assert found <= LOOPBACK
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    assert not any(is_alive(pid) for pid in pids(tmp_path))
    assert "Traceback" not in (tmp_path / "launcher.log").read_text()


def test_ranks_that_save_when_asked_to_stop_give_75(tmp_path, launcher):
    process = launcher("save-wait")
    process.terminate()
    assert process.wait(timeout=60) == 75
    assert notes(tmp_path)["exit-1.json"]["step"] == 14


def listeners(process_ids):
    """Addresses on which the processes listen, from /proc."""
    inodes = set()
    for pid in process_ids:
        for path in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = path.readlink().name
            except FileNotFoundError:
                continue
            if target.startswith("socket:"):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                addresses.add(fields[1].split(":")[0])
    return addresses


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


@pytest.mark.parametrize("agent_store", [pytest.param(False, marks=pytest.mark.long), True])
def test_torchrun_s_variables_join_and_the_workers_listen_on_loopback(tmp_path, agent_store):
    """Under torchrun the agent's own listener is torchrun's affair; what the ranks open is ours."""
    environ = os.environ | {"TMPDIR": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(not agent_store))}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", BODY]
    with (tmp_path / "launcher.log").open("w") as log:
        process = subprocess.Popen([*command, str(tmp_path), "wait"], cwd=ROOT, stdout=log, stderr=log, env=environ)
    try:
        assert soon(lambda: len(pids(tmp_path)) == 2, 60), (tmp_path / "launcher.log").read_text()
        found = listeners(pids(tmp_path))
        assert found
        assert found <= LOOPBACK
        assert "attempt 0, torchrun" in (tmp_path / "launcher.log").read_text()
    finally:
        process.terminate()
        process.wait(timeout=60)
    assert soon(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))
