"""Counting storages: what lives, what is resized in place, and the most that there was."""

from __future__ import annotations

import pytest
import torch

from shardwise.measure.storage import StorageCount


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_that_are_resized_in_place_are_followed(device):
    """FSDP2 frees and restores its gathered parameters so, below the dispatcher."""
    with StorageCount(device) as count:
        held = torch.zeros(1000, device=device)
        view = held[10:20]
        storage = held.untyped_storage()
        assert count.live_bytes == count.peak_bytes == 4000
        storage.resize_(0)
        assert (count.live_bytes, count.peak_bytes) == (0, 4000)
        storage.resize_(4000)
        other = torch.zeros(500, device=device)
        assert (count.live_bytes, count.peak_bytes) == (6000, 6000)
        other.resize_(1000)  # through the dispatcher
        assert count.live_bytes == 8000
        count.begin_peak()
        storage.resize_(0)
        other.untyped_storage().resize_(0)
        assert (count.live_bytes, count.peak_bytes) == (0, 8000)
        del held, other, storage, view
        assert count.live_bytes == 0


def test_what_was_not_seen_before_it_is_resized_is_seen_then():
    storage = torch.zeros(1000).untyped_storage()
    with StorageCount("cpu") as count:
        storage.resize_(8000)
        assert count.live_bytes == 8000
    storage.resize_(0)  # the count is over
    assert count.live_bytes == 8000
    count.forget()
