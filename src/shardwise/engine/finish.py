"""What is done last to a model, when its units are there and nobody has computed with it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from shardwise.comm.base import Comm
from shardwise.engine.engine import Engine
from shardwise.features import batch_norm
from shardwise.features.generate_calls import keep_in_step
from shardwise.features.module_buffers import BufferSync


def finish(model: nn.Module, engine: Engine, open_samples: Callable[[], Comm], *, sync_buffers: str) -> None:
    """Keep buffers equal over the ranks, connect batch norm over all ranks, and keep ``generate()`` in step.

    Args:
        model: The root.
        engine: Its engine.
        open_samples: Opens a Comm over the ranks that have samples of their own, where some batch norm needs one.
        sync_buffers: As ``ParallelPlan.sync_buffers``.

    Collective:
        As ``open_samples``, where it is called.
    """
    engine.buffers = BufferSync(model, sync_buffers, engine.comms.control, engine.ignored.buffers)
    batch_norm.connect(model, open_samples)
    if engine.comms.num_ranks > 1:
        keep_in_step(model)
