"""The context that installs and removes the pretended GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwise import torch_private
from shardwise.comm import axes
from shardwise.testing.streams import device, tensors, threads
from shardwise.testing.streams.calls import Calls, OverGloo, opening
from shardwise.testing.streams.detector import Detector, observing
from shardwise.testing.streams.operators import Watch
from shardwise.testing.streams.patches import Patches
from shardwise.testing.streams.report import Seen, StreamError

_init_process_group = dist.init_process_group


@contextlib.contextmanager
def pretended_cuda(*, has_nccl: bool = True, has_backward_thread: bool = False) -> Iterator[Seen]:
    """Make ``torch.cuda`` a pretended GPU inside, which uses host memory, and check the order of its streams.

    Args:
        has_nccl: Device tensors are sent by ``NcclComm``, over groups of Gloo; else through host memory, as on a
            machine without NCCL.
        has_backward_thread: Backward runs in a thread of the device, as on CUDA.

    Yields:
        The observations; ``check()`` raises if work is not ordered.

    Raises:
        RuntimeError: There is a real GPU, or another pretended one.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "this machine has a GPU, or one is pretended already.\n"
            "  Use streams.watched() there; or hide the GPU with CUDA_VISIBLE_DEVICES=''."
        )
    detector, patches = Detector(), Patches()
    carrier = OverGloo(detector)
    with observing(detector) as seen:
        try:
            device.install(patches, detector)
            tensors.install(patches, detector)
            threads.install(patches, detector)
            for name in torch_private.CUDA_STARTS:
                patches.set(torch.cuda, name, lambda *_: None)
            if has_backward_thread:
                threads.run_backward_in_a_thread(patches, detector)
            patches.set(dist, "init_process_group", _init_over_gloo)
            if has_nccl:
                calls = Calls(detector, carrier)
                patches.set(axes, "communicator", opening(detector, axes.communicator))
                patches.set(axes, "transport", axes.Transport("gloo", calls, torch.device("cpu")))
            with Watch(detector):
                yield seen
            seen.check_freed()
        except Exception as error:
            if seen.findings:  # these may be the cause
                error.add_note(f"Before that the pretended device has seen\n{StreamError(seen.findings)}")
            raise
        finally:
            carrier.close()
            patches.undo()


def _init_over_gloo(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """Initialize the process group with Gloo, whatever backend was requested."""
    del backend
    options: Mapping[str, Any] = {name: value for name, value in kwargs.items() if name != "device_id"}
    _init_process_group("gloo", *args, **options)
