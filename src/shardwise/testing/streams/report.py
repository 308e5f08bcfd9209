"""Findings of the detector, and the error that reports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.testing.streams.clocks import Agent, Clock
from shardwise.testing.streams.memory import Access, Memory
from shardwise.testing.streams.stacks import Stack, shown

#: Most findings that an error shows in full.
_MAX_SHOWN = 5


class StreamError(AssertionError):
    """Work on different streams, or on a stream and the host, is not ordered as it must be.

    Attributes:
        findings: All findings.
    """

    def __init__(self, findings: list[Race | EarlyFree | Mismatch]) -> None:
        self.findings = findings
        parts = [f"{len(findings)} place{'s' * (len(findings) > 1)} where a missing wait can change the result"]
        parts += [str(finding) for finding in findings[:_MAX_SHOWN]]
        if len(findings) > _MAX_SHOWN:
            parts.append(f"and {len(findings) - _MAX_SHOWN} more: see .findings")
        super().__init__("\n\n".join(parts))


@dataclass
class Race:
    """Two accesses to the same bytes, one of them a write, that no wait orders.

    Attributes:
        first: The earlier access in the host's order.
        second: The later access.
        made: Stack of the memory's allocation.
        num_bytes: Size of the memory.
        count: Number of such races at these two places.
    """

    first: Access
    second: Access
    made: Stack
    num_bytes: int
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """A key; races with equal keys are reported once."""
        return ("race", *(part for a in (self.first, self.second) for part in (a.operation, a.is_write, a.where[:1])))

    def __str__(self) -> str:
        low, high = max(self.first.low, self.second.low), min(self.first.high, self.second.high)
        return (
            f"Race over bytes {low} to {high} of {self.num_bytes}{_times(self.count)}:\n"
            f"  {_described(self.second)}\n{shown(self.second.where)}\n"
            f"  while this may not be done: {_described(self.first)}\n{shown(self.first.where)}\n"
            f"  The memory was allocated at\n{shown(self.made)}\n"
            f"  Missing: {_missing_wait(self.first, self.second)}"
        )


@dataclass
class EarlyFree:
    """Memory that was freed while a stream may still have used it.

    Attributes:
        access: The access that may still have been running.
        made: Stack of the memory's allocation.
        freed: Stack of the free.
        home: The stream whose next allocation may reuse the memory.
        count: Number of such findings at these places.
    """

    access: Access
    made: Stack
    freed: Stack
    home: Agent
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Findings with the same key are one."""
        return "early free", self.access.operation, self.access.is_write, self.access.where[:1], self.freed[:1]

    def __str__(self) -> str:
        user = self.access.agent.name
        return (
            f"Early free{_times(self.count)}: memory went back to the allocator at\n{shown(self.freed)}\n"
            f"  while this may not be done: {_described(self.access)}\n{shown(self.access.where)}\n"
            f"  The memory was allocated at\n{shown(self.made)}\n"
            f"  Missing: {self.home.name} must wait for an event that {user} records after that, before the last"
            f" reference to the tensor goes; or tensor.record_stream({user})."
        )


@dataclass
class Mismatch:
    """An operator on tensors of the host and of the device, which a GPU refuses.

    Attributes:
        what: The operator, and the problem of its arguments.
        where: Stack of the caller.
        count: Number of such calls at this place.
    """

    what: str
    where: Stack
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Findings with the same key are one."""
        return "mismatch", self.what, self.where[:2]

    def __str__(self) -> str:
        return f"{self.what}{_times(self.count)}, at\n{shown(self.where)}\n  Missing: a copy to the right device."


@dataclass(frozen=True)
class HostWait:
    """A wait of the host for the device, during which nothing is enqueued.

    Attributes:
        why: The call, such as ``aten::_local_scalar_dense`` for ``.item()``.
        where: Stack of the caller.
    """

    why: str
    where: Stack

    def __str__(self) -> str:
        return f"{self.why}\n{shown(self.where)}"


@dataclass(frozen=True)
class Collective:
    """One collective that this rank has issued.

    Attributes:
        kind: The call, such as ``all_gather``; ``open``: the ranks of the communicator connected, and the host waited.
        unit: The unit for which the collective was issued; for ``open`` the axis and the purpose.
        group: Name of the communicator; collectives of one communicator run in the order of issue.
        ranks: Ranks of the world in the communicator.
        numel: Elements of the result on this rank; 0 for messages.
        messages: For sends and receives, pairs (source, target) of ranks of the communicator.
        agent: Number of the stream in ``clock``; for ``open``, of the host's thread.
        clock: Clock of the agent, by number of agent; its own number has the time of the collective.
        where: Stack of the caller.
    """

    kind: str
    unit: str
    group: str
    ranks: tuple[int, ...]
    numel: int
    messages: tuple[tuple[int, int], ...]
    agent: int
    clock: Clock
    where: Stack


@dataclass
class Seen:
    """The detector's observations so far in its context.

    Attributes:
        races: Accesses that no wait orders.
        early_frees: Memory that was freed while a stream may have used it.
        mismatches: Operators on tensors of both sides.
        host_waits: All waits of the host for the device.
        collectives: Collectives that this rank has issued on the device, in order.
    """

    races: list[Race] = field(default_factory=list)
    early_frees: list[EarlyFree] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    host_waits: list[HostWait] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    #: Checks memory that was freed since the last allocation.
    check_freed: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def findings(self) -> list[Race | EarlyFree | Mismatch]:
        """All errors. Host waits are not errors, only slow."""
        self.check_freed()
        return [*self.races, *self.early_frees, *self.mismatches]

    def check(self) -> None:
        """Raise an error if there is any finding.

        Raises:
            StreamError: There are findings.
        """
        found = self.findings
        if found:
            raise StreamError(found)


class Findings:
    """Adds findings to a :class:`Seen`, each once."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._known: dict[tuple[object, ...], Race | EarlyFree | Mismatch] = {}

    def add(self, finding: Race | EarlyFree | Mismatch) -> None:
        """Add a finding, or count a known one again."""
        known = self._known.setdefault(finding.key, finding)
        if known is not finding:
            known.count += 1
        elif isinstance(finding, Race):
            self._seen.races.append(finding)
        elif isinstance(finding, EarlyFree):
            self._seen.early_frees.append(finding)
        else:
            self._seen.mismatches.append(finding)


def race(first: Access, second: Access, memory: Memory) -> Race:
    """A race over ``memory``."""
    return Race(first, second, memory.made, memory.num_bytes)


def _described(access: Access) -> str:
    return f"{access.operation} on {access.agent.name} {'writes' if access.is_write else 'reads'}"


def _missing_wait(first: Access, second: Access) -> str:
    one, other = first.agent, second.agent
    if first.operation == "allocation":
        return f"{other.name} must wait for {one.name}, on which the memory was allocated, before it uses it."
    if one.is_host and other.is_host:
        return f"{other.name} must wait for {one.name} (join, a future's result), as it works on the same memory."
    if one.is_host:
        return f"{one.name} must have finished before the work on {other.name} is enqueued."
    if other.is_host:
        return f"the host must wait for an event that {one.name} records after the earlier access."
    return f"{other.name} must wait for an event that {one.name} records after the earlier access."


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""
