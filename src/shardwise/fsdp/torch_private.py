"""The private parts of torch that the engine needs, each with the public alternative that is missing.

Nothing else in shardwise may touch torch's private modules.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

#: Number of the backward that runs in this thread, -1 outside of any. There is no public way to ask whether code runs
#: inside a backward (https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/init.cpp).
current_backward: Callable[[], int] = torch._C._current_graph_task_id

#: The sequence number that the next autograd node of this thread will get. ``Node._sequence_nr`` is what public hooks
#: show of finished nodes; there is no public way to read the counter itself.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward under way has finished.

    The engine's own DDP and FSDP use the same call. ``Tensor.register_post_accumulate_grad_hook`` and
    ``register_multi_grad_hook`` cannot serve: parameters that were not used never fire.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The key-value store that the ranks of ``group`` share. ``init_process_group`` gives no public handle to it."""
    return group.get_group_store()
