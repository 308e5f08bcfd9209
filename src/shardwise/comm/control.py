"""Small control messages: JSON and status codes, over the same Comm as the tensors. No pickle anywhere."""

from __future__ import annotations

import json
from typing import Any

import torch

from shardwise.comm.base import Comm
from shardwise.spec import errors
from shardwise.spec.errors import ShardwiseError


def agree(comm: Comm, code: int) -> list[int]:
    """Every rank's ``code``, in rank order, on every rank.

    Collective:
        One all-gather of eight bytes per rank. All ranks must call.
    """
    comm = comm.host
    buffer = torch.zeros(comm.size, dtype=torch.int64, device=comm.device)
    buffer[comm.rank] = code
    comm.all_gather(buffer, unit="control").wait()
    return [int(value) for value in buffer.tolist()]


def all_gather_json(comm: Comm, value: Any) -> list[Any]:
    """Every rank's ``value`` (anything that JSON can hold), in rank order, on every rank.

    Collective:
        Two all-gathers: the lengths, then texts padded to the longest. All ranks must call.
    """
    comm = comm.host
    text = json.dumps(value, separators=(",", ":")).encode()
    lengths = agree(comm, len(text))
    longest = max(lengths)
    buffer = torch.zeros(comm.size, longest, dtype=torch.uint8)
    buffer[comm.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    moved = buffer.to(comm.device).view(-1)
    comm.all_gather(moved, unit="control").wait()
    rows = moved.cpu().view(comm.size, longest)
    return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]


def fail_together(comm: Comm, error: ShardwiseError | None) -> None:
    """Raise on every rank what one of them met before it could act with the others.

    Args:
        comm: All that act together.
        error: What this rank met; ``None``: nothing.

    Collective:
        An all-gather of JSON. All ranks must call.

    Raises:
        ShardwiseError: The first rank's that met one, of its class, on all ranks.
    """
    told = all_gather_json(comm, None if error is None else [type(error).__name__, str(error)])
    failed = [(rank, *found) for rank, found in enumerate(told) if found is not None]
    if failed:
        rank, kind, text = failed[0]
        where = "" if len(failed) == len(told) else f"rank {rank}: "
        raise getattr(errors, kind, ShardwiseError)(where + text) from error
