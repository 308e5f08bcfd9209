"""Faults by name are armed by a variable of their own, and nothing misspelt is passed over."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from shardwise.launch import inject

BODY = "from shardwise.launch import inject; inject.at('step_begin', 3); inject.at('after_step', 3); print('alive')"


def test_a_fault_strikes_where_it_is_armed_and_nowhere_else() -> None:
    def run(text: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, inject.FAULT: text, inject.ARMED: "1", "RANK": "1", **more}
        command = [sys.executable, "-c", BODY]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    assert run("after_step@rank=1@step=3:kill").returncode == -signal.SIGKILL
    assert "injected at step_begin" in run("step_begin:raise").stderr
    assert run("step_begin:exit=42").returncode == 42
    untouched = [
        run("after_step:kill", **{inject.ARMED: "0"}),
        run("after_step@rank=0:kill"),
        run("after_step@step=4:kill"),
        run("after_step:kill", SHARDWISE_RESTART_COUNT="1"),
    ]
    assert [ended.stdout for ended in untouched] == ["alive\n"] * 4
    assert run("after_step@attempt=any:kill", SHARDWISE_RESTART_COUNT="1").returncode == -signal.SIGKILL
    assert "is not a fault" in run("after_stop:kill").stderr


def test_a_full_disk_and_an_odd_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "_FAULTS", inject.parse("save_begin:enospc;before_rename:sleep=0.5"))
    with pytest.raises(OSError, match="No space left") as raised:
        inject.at("save_begin")
    assert raised.value.errno == errno.ENOSPC
    monkeypatch.setattr(inject, "_FAULTS", inject.parse("save_begin:edquot"))
    with pytest.raises(OSError, match="quota") as raised:
        inject.at("save_begin")
    assert raised.value.errno == errno.EDQUOT
    for wrong in ("save_begin:burn", "save_begin@day=3:kill", "save_begin"):
        with pytest.raises(ValueError, match=inject.FAULT):
            inject.parse(wrong)
