"""What torch's own watch over NCCL is told before a group is made."""

from __future__ import annotations

import logging
import os

import pytest

from shardwise.launch import watchdog

NAMES = (
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_BLOCKING_WAIT",
)


RECORDS = {"TORCH_FR_BUFFER_SIZE": "2000"}
EARLY = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}


@pytest.mark.parametrize(
    ("given", "timeout_s", "added", "warned"),
    [
        ({}, 1860.0, RECORDS | {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1920"}, ""),
        ({}, 60.0, RECORDS, ""),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, 60.0, {}, ""),
        (EARLY, 1860.0, RECORDS, "at least 1920"),
        (EARLY | {"TORCH_NCCL_ENABLE_MONITORING": "0"}, 1860.0, RECORDS, ""),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, 60.0, RECORDS, "wait in every collective"),
    ],
)
@pytest.mark.usefixtures("_unset")
def test_torch_waits_longer_than_shardwise_and_settings_of_the_user_stay(
    given: dict[str, str], timeout_s: float, added: dict[str, str], warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ.update(given)
    with caplog.at_level(logging.WARNING, "shardwise"):
        watchdog.prepare(timeout_s)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == given | added
    assert bool(caplog.messages) == bool(warned)
    assert warned in caplog.text


@pytest.fixture
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
