"""The real CUDA code on a CPU, under a detector of races between streams.

::

    with streams.pretended_cuda() as seen:
        train()  # tensors of "cuda" lie in memory of the host, NCCL's collectives go over Gloo
    seen.check()  # StreamError: every race and every early free, with both stacks and the wait that is missing

Where to read: ``clocks`` (what is certain to have happened), ``memory`` (who has used which bytes), ``detector`` (the
rules), ``operators`` (what a kernel reads and writes), ``device`` and ``tensors`` (what is pretended), ``threads``,
``calls`` (NCCL without NCCL), ``lone`` (one rank of a world that is not there), ``report`` (what is found),
``deadlocks`` (whether the collectives of all ranks can end), ``world`` (those of a large world, by dry runs).
"""

from shardwise.testing.streams.deadlocks import DeadlockError, refuse_deadlocks
from shardwise.testing.streams.lone import lone_model, lone_rank
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
