"""``shardwise train --check-streams N``: a short run under the detector."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import torch

from shardwise.testing.streams.pretended import pretended_cuda
from shardwise.testing.streams.report import StreamError
from shardwise.testing.streams.stacks import shown
from shardwise.testing.streams.watched import watched

#: Most places that are listed at which the host waits.
_NUM_PLACES = 5


def checked(train: Callable[[], int], rank: int) -> int:
    """Train under the detector, on a real GPU or else a pretended one, and print the findings.

    Returns:
        The exit code of ``train``, or 1 if that is 0 and streams are not ordered.
    """
    is_pretended = not torch.cuda.is_available()
    with pretended_cuda() if is_pretended else watched() as seen:
        code = train()
    device = "pretended GPU" if is_pretended else "GPU"
    findings = seen.findings
    if findings:
        sys.stderr.write(f"rank {rank}: {StreamError(findings)}\n")
        return code or 1
    places = Counter(f"{wait.why} at {shown(wait.where[:1], '')}" for wait in seen.host_waits)
    sys.stdout.write(
        f"rank {rank}: no race and no early free on the {device}: {len(seen.collectives)} collectives,"
        f" {len(seen.host_waits)} waits of the host\n"
    )
    sys.stdout.writelines(f"  {count} x {place}\n" for place, count in places.most_common(_NUM_PLACES))
    return code
