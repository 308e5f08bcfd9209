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


@pytest.mark.parametrize(
    ("given", "timeout_s", "expected", "warned"),
    [
        ({}, 1860.0, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1920"}, []),
        ({}, 60.0, {"TORCH_FR_BUFFER_SIZE": "2000"}, []),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, 60.0, {}, []),
        ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600"}, 1860.0, {"TORCH_FR_BUFFER_SIZE": "2000"}, ["at least 1920"]),
        (
            {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "600", "TORCH_NCCL_ENABLE_MONITORING": "0"},
            1860.0,
            {"TORCH_FR_BUFFER_SIZE": "2000"},
            [],
        ),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, 60.0, {"TORCH_FR_BUFFER_SIZE": "2000"}, ["wait in every collective"]),
    ],
)
def test_torch_waits_longer_than_shardwise_and_settings_of_the_user_stay(
    given: dict[str, str],
    timeout_s: float,
    expected: dict[str, str],
    warned: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "shardwise"):
        watchdog.prepare(timeout_s)
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == given | expected
    assert len(caplog.messages) == len(warned)
    for message, part in zip(caplog.messages, warned, strict=True):
        assert part in message
