"""Runs the real CUDA code on a CPU, under a detector of races between streams.

::

    with streams.pretended_cuda() as seen:
        train()  # "cuda" tensors are in host memory, NCCL's collectives use Gloo
    seen.check()  # StreamError: every race and every early free, with both stacks and the missing wait

Modules: ``clocks`` (vector clocks), ``memory`` (accesses to bytes), ``detector`` (the rules), ``operators`` (reads and
writes of a kernel), ``device`` and ``tensors`` (the pretended GPU), ``threads`` (order between host threads), ``calls``
(NCCL's collectives without NCCL), ``one_rank`` (one rank of a world that does not exist), ``report`` (findings),
``deadlocks`` (whether the collectives of all ranks can end), ``world`` (collectives of a large world, by dry runs).
"""

from shardwise.testing.streams.deadlocks import DeadlockError, refuse_deadlocks
from shardwise.testing.streams.one_rank import lone_model, lone_rank
from shardwise.testing.streams.pretended import pretended_cuda
from shardwise.testing.streams.report import (
    Collective,
    EarlyFree,
    HostWait,
    Mismatch,
    Race,
    Seen,
    StreamError,
)
from shardwise.testing.streams.watched import watched
from shardwise.testing.streams.world import world_traces

__all__ = [
    "Collective",
    "DeadlockError",
    "EarlyFree",
    "HostWait",
    "Mismatch",
    "Race",
    "Seen",
    "StreamError",
    "lone_model",
    "lone_rank",
    "pretended_cuda",
    "refuse_deadlocks",
    "watched",
    "world_traces",
]
