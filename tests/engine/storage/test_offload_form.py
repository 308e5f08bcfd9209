"""Copies to the host, with stand-ins for CUDA's streams: what is lent again when."""

from __future__ import annotations

import contextlib

import pytest
import torch

from shardwise.comm.base import Handle
from shardwise.engine.storage.host import Transfers
from shardwise.engine.storage.packed import PackedPool


class Stream:
    """Takes note of what it is told to wait for."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Summing(Handle):
    """A reduction that gives back what it was sent from when it has been added up."""

    def __init__(self, pool: PackedPool) -> None:
        self.pool = pool
        self.sent = pool.acquire(64, torch.device("cpu"))

    def wait(self) -> None:
        self.pool.release(self.sent)


def test_packed_buffers_are_lent_again_when_the_copy_has_been_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Stream()
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: compute)
    pool = PackedPool()
    pool.reserve(64)
    transfers = Transfers(torch.device("cpu"))
    transfers._download = Stream()
    reduction = Summing(pool)
    handle = transfers.send(torch.ones(4), torch.zeros(4), reduction, pool)
    other = pool.acquire(64, torch.device("cpu"))
    assert other is not reduction.sent  # the stream that goes down may still read it
    handle.wait()
    handle.wait()
    assert len(compute.waited) == 2
    assert pool.acquire(64, torch.device("cpu")) is reduction.sent
    assert pool.acquire(64, torch.device("cpu")) not in {other, reduction.sent}
