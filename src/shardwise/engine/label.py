"""Names in a profile: ``shardwise::gather [blocks.3]``, as FSDP2 has ``FSDP::all_gather``.

=============  ====================================================================================================
``gather``     a unit's gather is issued; on a GPU the profiler shows the range beside its kernels too
``wait``       the host waits for a gather (on a GPU: makes the compute stream wait)
``forward``    a unit computes, from before its forward to after it; the gathers that it waits for are before
``backward``   backward enters a unit: finalises those that it has left, and waits for this one's parameters
``reduce``     the reduction of a unit's gradients is issued
=============  ====================================================================================================

While no profiler runs a name costs a look at a flag.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

from torch.autograd import profiler
from torch.profiler import record_function

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


#: Ranges that have begun, innermost last.
Labels = list[AbstractContextManager[Any]]


def label(what: str, unit: str) -> AbstractContextManager[Any]:
    """A range of the profile inside the context."""
    # torch asks its own flag before it names ranges of its optimizers; there is no public way to ask.
    is_profiled = profiler._is_profiler_enabled  # noqa: SLF001
    return record_function(f"shardwise::{what} [{unit}]") if is_profiled else _NOTHING


def begin(labels: Labels, what: str, unit: str) -> None:
    """Begin a range that :func:`end` ends."""
    named = label(what, unit)
    if named is not _NOTHING:
        named.__enter__()
        labels.append(named)


def end(labels: Labels) -> None:
    """End the range that was begun last, if there is one."""
    if labels:
        labels.pop().__exit__(None, None, None)
