"""Ranks as threads of one process: a Comm that is quick to start, and ways of cutting tensors over ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.comm.base import DONE, Comm
from shardwise.comm.dtype import dtype_name
from shardwise.spec.extent import Extent


class ThreadComm(Comm):
    """Collectives between threads. A peer that has left breaks the barrier instead of blocking the others."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict[Any, Any]) -> None:
        super().__init__("dp_shard", rank, size, torch.device("cpu"))
        self._barrier, self._board = barrier, board
        self.received_bytes = 0

    def _all(self, tensor: torch.Tensor, *, is_read: bool = True, only: int | None = None) -> list[torch.Tensor]:
        """What all ranks gave, or rank ``only``; nothing where it is not read."""
        self._board[self.rank] = tensor.clone()
        self._barrier.wait(240)  # a busy machine is no failure
        ranks = () if not is_read else range(self.size) if only is None else (only,)
        found = [self._board[rank] for rank in ranks]
        self._barrier.wait(240)  # a busy machine is no failure
        if only is None:
            self.received_bytes += sum(each.nbytes for rank, each in enumerate(found) if rank != self.rank)
        return found

    def _do_all_gather(self, stamp, buffer, bounds):
        slices = self._slices(buffer, bounds)
        for place, found in zip(slices, self._all(slices[self.rank]), strict=True):
            place.copy_(found)
        return DONE

    def _do_reduce_scatter(self, stamp, buffer, out, divisor, bounds):
        out.copy_(self._slices(sum(self._all(buffer)), bounds)[self.rank])
        self._divide(out, out, divisor)
        return DONE

    def _do_all_to_all(self, stamp, buffer, out, bounds, out_bounds):
        given, taken = self._slices(buffer, bounds), self._slices(out, out_bounds)
        for peer in range(self.size):
            if peer != self.rank:
                self._do_send(stamp, given[peer], peer)
        for peer in range(self.size):
            if peer != self.rank:
                self._do_receive(stamp, taken[peer], peer)
        return DONE

    def _do_all_reduce(self, stamp, buffer, out, divisor):
        total = sum(self._all(buffer))
        (buffer if out is None else out).copy_(total if divisor == 1 else total / divisor)
        return DONE

    def _do_broadcast(self, stamp, buffer, root):
        buffer.copy_(self._all(buffer, only=root)[0])
        self.received_bytes += buffer.nbytes * (self.rank != root)
        return DONE

    def _mail(self, source: int, target: int) -> queue.Queue[torch.Tensor]:
        return self._board.setdefault((source, target), queue.Queue())

    def _do_send(self, stamp, buffer, to):
        self._mail(self.rank, to).put(buffer.clone())
        return DONE

    def _do_receive(self, stamp, buffer, source):
        buffer.copy_(self._mail(source, self.rank).get(timeout=60))
        self.received_bytes += buffer.nbytes
        return DONE


def run_in_threads(body: Callable[[Comm], Any], size: int) -> list[Any]:
    """``body(comm)`` on every rank; what it returned or raised, by rank."""
    barrier, board = threading.Barrier(size), {}
    outcome: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcome[rank] = body(ThreadComm(rank, size, barrier, board))
        except BaseException as error:
            outcome[rank] = error
            if isinstance(error, threading.BrokenBarrierError):
                raise
        finally:
            if isinstance(outcome[rank], AssertionError):
                barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return outcome


def alone() -> Comm:
    """The Comm of a world of one."""
    return ThreadComm(0, 1, threading.Barrier(1), {})


def whole(name: str, tensor: torch.Tensor) -> Extent:
    """The extent of all of a tensor."""
    return Extent(name, tuple(tensor.shape), dtype_name(tensor.dtype), 0, tensor.numel())


def cut(
    tensors: dict[str, torch.Tensor], cuts: dict[str, Sequence[int]], rank: int
) -> list[tuple[Extent, torch.Tensor]]:
    """A rank's pieces where tensor ``name`` is cut at ``cuts[name]``: 0, ..., numel, one more than there are ranks."""
    pieces = []
    for name, tensor in tensors.items():
        start, stop = cuts[name][rank], cuts[name][rank + 1]
        extent = Extent(name, tuple(tensor.shape), dtype_name(tensor.dtype), start, stop)
        pieces.append((extent, tensor.reshape(-1)[start:stop].clone()))
    return pieces


def even(tensors: dict[str, torch.Tensor], size: int) -> dict[str, list[int]]:
    """Cuts into ``size`` nearly equal parts."""
    return {name: [t.numel() * rank // size for rank in range(size + 1)] for name, t in tensors.items()}


def sample(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of all kinds: odd, scalar, zero-sized, several dtypes, optimizer state and a buffer."""
    g = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(7, 5, generator=g),
        "layer.bias": torch.randn(5, generator=g),
        "scale": torch.randn((), generator=g),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(11, generator=g).bfloat16(),
        "optimizer/layer.weight/exp_avg": torch.randn(7, 5, generator=g).double(),
        "buffer/count": torch.tensor(7 + seed),
        "buffer/mask": torch.tensor([True, False, True]),
    }


def flip(file: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
