"""What this process last communicated, for whoever has to explain a hang.

Kept in plain Python objects that any thread may read; writing costs well under a microsecond.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class Issued:
    """One collective of one Comm.

    Attributes:
        channel: Name of the Comm.
        sequence: Its place in that Comm's order, from 0.
        kind: Kind of collective.
        unit: What it serves.
        numel: Elements of the buffer.
    """

    channel: str
    sequence: int
    kind: str
    unit: str
    numel: int
    issued_at_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.channel} #{self.sequence} {self.kind}({self.unit}, {self.numel} elements)"


#: The newest collectives of this process, oldest first. The host may be some hundreds ahead of the device.
history: deque[Issued] = deque(maxlen=1024)

#: By channel: the sequence number of its newest collective. Unlike the history it forgets nothing.
newest: dict[str, int] = {}

#: The collective that some thread is waiting for at the moment.
waiting: Issued | None = None


def note(issued: Issued) -> None:
    """A collective has been issued."""
    history.append(issued)
    newest[issued.channel] = issued.sequence


def last() -> str:
    """One line: the last collective, and whether this process is waiting for one."""
    if waiting is not None:
        return f"waiting in {waiting} for {time.monotonic() - waiting.issued_at_s:.1f} s"
    if history:
        return f"not in a collective; last issued {history[-1]}"
    return "no collective yet"
