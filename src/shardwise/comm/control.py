"""Small control messages: JSON, status codes, and the check that ranks agree.

They use :attr:`Comm.host`: Gloo and host memory, also where NCCL moves the tensors. So a rank waits for them on the
host, where the time limit applies and ``comm.stall`` can wake it. Nothing is pickled: a peer can send data, never code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.spec import errors
from shardwise.spec.errors import RankDisagreement, ShardwiseError

#: Axes whose ranks compute one model together; error messages name the axis along which a rank is numbered.
_INNER_AXES = {"tp", "pp", "cp", "ep"}


def all_gather_int(comm: Comm, code: int) -> list[int]:
    """Return every rank's ``code``, in rank order, on every rank.

    Collective:
        One all-gather of eight bytes per rank. All ranks must call.
    """
    return [row[0] for row in all_gather_ints(comm, [code])]


def all_gather_ints(comm: Comm, row: Sequence[int], *, unit: str = "control") -> list[list[int]]:
    """Return every rank's ``row`` of integers, in rank order, on every rank.

    Collective:
        One all-gather of eight bytes per integer and rank. All ranks must call.
    """
    comm = comm.host
    buffer = torch.zeros(comm.size, len(row), dtype=torch.int64)
    buffer[comm.rank] = torch.tensor(row)
    moved = buffer.view(-1).to(comm.device)
    comm.all_gather(moved, unit=unit).wait()
    return moved.view(comm.size, -1).tolist()


def all_reduce_max(comm: Comm, row: Sequence[int], *, unit: str = "control") -> list[int]:
    """Return the highest of each integer of ``row`` over the ranks, on every rank.

    Collective:
        Eight bytes per integer to the ranks at distance 1, 2, 4, ...: ``log2(size)`` messages per rank, rounded up,
        compared with ``size - 1`` of :func:`all_gather_ints`. All ranks must call.
    """
    comm, distance = comm.host, 1
    highest = torch.tensor(row, dtype=torch.int64, device=comm.device)
    while distance < comm.size:
        received, to, source = torch.empty_like(highest), (comm.rank + distance) % comm.size, comm.rank - distance
        comm.exchange([(highest, to, unit)], [(received, source % comm.size, unit)]).wait()
        highest = torch.maximum(highest, received)
        distance *= 2
    return highest.tolist()


def all_gather_json(comm: Comm, value: Any) -> list[Any]:
    """Return every rank's ``value`` (any JSON value), in rank order, on every rank.

    Collective:
        Two all-gathers: the lengths, then texts padded to the longest. All ranks must call.
    """
    comm = comm.host
    text = _encode(value)
    lengths = all_gather_int(comm, text.numel())
    rows = torch.zeros(comm.size, max(lengths), dtype=torch.uint8)
    rows[comm.rank, : text.numel()] = text
    moved = rows.to(comm.device).view(-1)
    comm.all_gather(moved, unit="control").wait()
    texts = moved.cpu().view(comm.size, -1)
    return [_decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]


def gather_json(comm: Comm, value: Any) -> list[Any]:
    """Return every rank's ``value`` (any JSON value), in rank order, on rank 0; ``[]`` on other ranks.

    Collective:
        Two messages from every other rank to rank 0: the length, then the text. All ranks must call.
    """
    comm = comm.host
    text = _encode(value)
    if comm.rank:
        for part in (_int_tensor(comm, text.numel()), text.to(comm.device)):
            comm.send(part, to=0, unit="control").wait()
        return []
    lengths = [_int_tensor(comm, 0) for _ in range(1, comm.size)]
    _exchange_with_peers(comm, receives=lengths)
    texts = [torch.empty(int(length), dtype=torch.uint8, device=comm.device) for length in lengths]
    _exchange_with_peers(comm, receives=texts)
    return [_decode(each) for each in (text, *texts)]


def broadcast_json(comm: Comm, value: Any) -> Any:
    """Return the ``value`` of rank 0 (any JSON value) on every rank.

    Collective:
        Two broadcasts: the length, then the text. All ranks must call.
    """
    comm = comm.host
    text = _encode(value if comm.rank == 0 else None)
    length = _int_tensor(comm, text.numel())
    comm.broadcast(length, root=0, unit="control").wait()
    moved = text if comm.rank == 0 else torch.zeros(int(length), dtype=torch.uint8)
    moved = moved.to(comm.device)
    comm.broadcast(moved, root=0, unit="control").wait()
    return _decode(moved)


def scatter_json(comm: Comm, values: Sequence[Any]) -> Any:
    """Return this rank's value of rank 0's ``values``, one for each rank; other ranks' ``values`` are not read.

    Collective:
        Two messages from rank 0 to every other rank: the length, then the text. All ranks must call.
    """
    comm = comm.host
    if comm.rank:
        length = _int_tensor(comm, 0)
        comm.receive(length, source=0, unit="control").wait()
        text = torch.empty(int(length), dtype=torch.uint8, device=comm.device)
        comm.receive(text, source=0, unit="control").wait()
        return _decode(text)
    own, *texts = map(_encode, values)
    _exchange_with_peers(comm, sends=[_int_tensor(comm, text.numel()) for text in texts])
    _exchange_with_peers(comm, sends=[text.to(comm.device) for text in texts])
    return _decode(own)


def _exchange_with_peers(comm: Comm, *, sends: Sequence[Tensor] = (), receives: Sequence[Tensor] = ()) -> None:
    """On rank 0, send or receive a tensor for each of the other ranks."""
    outgoing, incoming = ([(each, peer, "control") for peer, each in enumerate(side, 1)] for side in (sends, receives))
    comm.exchange(outgoing, incoming).wait()


def _int_tensor(comm: Comm, value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device=comm.device)


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value, separators=(",", ":")).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())


# -- checks that ranks agree


def digest_text(text: str | bytes) -> int:
    """Return a 56-bit digest of a text, for :func:`check_same`."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def check_same(
    comm: Comm,
    value: int,
    what: str,
    advice: str,
    *,
    show: Callable[[], Any] | None = None,
    error: type[ShardwiseError] = RankDisagreement,
) -> None:
    """Raise on every rank unless ``value`` is the same on all. Arguments as :func:`refuse_different`.

    Collective:
        An all-gather of eight bytes per rank; if the ranks disagree and ``show`` is given, one of JSON. All ranks must
        call.
    """
    refuse_different(comm, all_gather_int(comm, value), what, advice, show=show, error=error)


def refuse_different(
    comm: Comm,
    values: Sequence[Any],
    what: str,
    advice: str,
    *,
    show: Callable[[], Any] | None = None,
    error: type[ShardwiseError] = RankDisagreement,
) -> None:
    """Raise unless all ``values`` are equal. Every check that ranks agree uses this form of message.

    The message is ``WHAT: rank 0 has A, rank 1 has B.`` and, on the next line, the advice.

    Args:
        comm: Comm over the ranks.
        values: Every rank's value, in rank order, known to all ranks.
        what: The difference between the ranks, as a sentence with its subject first.
        advice: Advice to the user.
        show: Returns this rank's value in readable form. Of a list, the first entry that the other rank lacks is shown.
        error: Class of the error.

    Collective:
        None if the values are equal, or ``show`` is ``None``; otherwise an all-gather of JSON.
    """
    odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if odd is None:
        return
    along = f" along {comm.axis}" if comm.axis in _INNER_AXES else ""
    found = f"rank {odd}{along} differs from rank 0"
    if show is not None:
        shown = all_gather_json(comm, show())
        here, there = _first_differences(shown[0], shown[odd])
        found = f"rank 0{along} has {here}, rank {odd}{along} has {there}"
    raise error(f"{what}: {found}.\n  {advice}")


def _first_differences(here: Any, there: Any) -> tuple[Any, Any]:
    """Return the first entry of each list that the other one lacks; values that are no lists are unchanged."""
    if not isinstance(here, list):
        return here, there
    first, second = ((next((entry for entry in a if entry not in b), None)) for a, b in ((here, there), (there, here)))
    if first is None and second is None:
        return "the same", "it in another order"
    return first or "nothing more", second or "nothing more"


def fail_together(comm: Comm, error: ShardwiseError | None) -> None:
    """Raise on every rank the error of the first rank that has one; ``None``: this rank has none.

    Collective:
        An all-gather of JSON. All ranks must call.
    """
    by_rank = all_gather_json(comm, None if error is None else [type(error).__name__, str(error)])
    failed = [(rank, *found) for rank, found in enumerate(by_rank) if found is not None]
    if failed:
        rank, kind, text = failed[0]
        where = "" if len(failed) == len(by_rank) else f"rank {rank}: "
        raise getattr(errors, kind, ShardwiseError)(where + text) from error
