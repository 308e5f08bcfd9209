"""Small control messages: JSON and status codes, over the same Comm as the tensors. No pickle anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
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


def gather_json(comm: Comm, value: Any, *, root: int = 0) -> list[Any]:
    """Every rank's ``value`` (anything that JSON can hold), in rank order, on ``root``; ``[]`` elsewhere.

    Collective:
        A gather of lengths, a broadcast of the longest, and a gather of texts padded to it. Ranks other than ``root``
        receive eight bytes. All ranks must call.
    """
    comm = comm.host
    text = _encoded(value)
    is_root = comm.rank == root
    lengths = torch.zeros(comm.size, dtype=torch.int64, device=comm.device) if is_root else None
    own = torch.tensor([text.numel()], dtype=torch.int64, device=comm.device)
    comm.gather(own, lengths, root=root, unit="control").wait()
    longest = own if lengths is None else lengths.max().view(1)
    comm.broadcast(longest, root=root, unit="control").wait()
    padded = torch.zeros(int(longest), dtype=torch.uint8)
    padded[: text.numel()] = text
    rows = torch.zeros(comm.size * int(longest), dtype=torch.uint8, device=comm.device) if is_root else None
    comm.gather(padded.to(comm.device), rows, root=root, unit="control").wait()
    if rows is None or lengths is None:
        return []
    held = rows.cpu().view(comm.size, -1)
    return [_decoded(row[:length]) for row, length in zip(held, lengths.tolist(), strict=True)]


def broadcast_json(comm: Comm, value: Any, *, root: int = 0) -> Any:
    """The ``value`` of ``root`` (anything that JSON can hold), on every rank.

    Collective:
        Two broadcasts: the length, then the text. All ranks must call.
    """
    comm = comm.host
    text = _encoded(value if comm.rank == root else None)
    length = torch.tensor([text.numel()], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root=root, unit="control").wait()
    moved = (
        text.to(comm.device) if comm.rank == root else torch.zeros(int(length), dtype=torch.uint8, device=comm.device)
    )
    comm.broadcast(moved, root=root, unit="control").wait()
    return _decoded(moved.cpu())


def scatter_json(comm: Comm, values: Sequence[Any], *, root: int = 0) -> Any:
    """Of the ``values`` on ``root``, one for each rank, this rank's; elsewhere ``values`` is not looked at.

    Collective:
        A broadcast of the longest text's length, and a scatter of texts padded to it. All ranks must call.
    """
    comm = comm.host
    texts = [_encoded(value) for value in values] if comm.rank == root else []
    longest = torch.tensor([max((text.numel() for text in texts), default=0)], dtype=torch.int64, device=comm.device)
    comm.broadcast(longest, root=root, unit="control").wait()
    rows = None
    if comm.rank == root:
        rows = torch.full((comm.size, int(longest)), ord(" "), dtype=torch.uint8)
        for row, text in zip(rows, texts, strict=True):
            row[: text.numel()] = text
        rows = rows.view(-1).to(comm.device)
    own = torch.zeros(int(longest), dtype=torch.uint8, device=comm.device)
    comm.scatter(rows, own, root=root, unit="control").wait()
    return _decoded(own.cpu())


def _encoded(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


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
