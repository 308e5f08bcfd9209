"""Findings of the detector, and the error that shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.testing.streams.clocks import Agent, Clock
from shardwise.testing.streams.memory import Access, Memory
from shardwise.testing.streams.places import Stack, shown

#: Findings of each kind that an error shows in full.
_MAX_SHOWN = 5


class StreamError(AssertionError):
    """Work on different streams, or on a stream and the host, is not ordered where it must be.

    Attributes:
        findings: All of them.
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
    """Two accesses of the same bytes, one of them a write, in no certain order.

    Attributes:
        first, second: The accesses, in the order in which the host came to them.
        made: Where the memory was allocated.
        num_bytes: Its size.
        count: How often it happened at these two places.
    """

    first: Access
    second: Access
    made: Stack
    num_bytes: int
    count: int = 1

    @property
    def key(self) -> tuple[object, ...]:
        """Races with the same key are one."""
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
    """Memory that went back to the allocator while a stream may still have used it.

    Attributes:
        access: The use.
        made, freed: Where the memory was allocated and freed.
        home: The stream whose next allocation may have got it.
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
        what: The operator and what is wrong with its arguments.
        where: The caller.
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
    """The host waited for the device: nothing could be enqueued meanwhile.

    Attributes:
        why: The call, as ``aten::_local_scalar_dense`` of ``.item()``.
        where: The caller.
    """

    why: str
    where: Stack

    def __str__(self) -> str:
        return f"{self.why}\n{shown(self.where)}"


@dataclass(frozen=True)
class Collective:
    """One collective as this rank has issued it.

    Attributes:
        kind: The call, as ``all_gather``; ``open``: the ranks of the communicator connected, for which the host waited.
        unit: What it serves; of ``open`` the axis and the purpose.
        group: Name of the communicator; collectives of one communicator run in the order of issue.
        ranks: Ranks of the communicator, in the numbers of the world.
        numel: Elements of the result on this rank; 0 of messages.
        messages: Of sends and receives: pairs of ranks in the communicator, from and to.
        agent: Number of its stream in ``clock``; of ``open`` that of the host's thread.
        clock: What the agent had seen, by number of agent: for its own number, the collective itself.
        where: The caller.
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
        early_frees: Memory that was freed under a stream that used it.
        mismatches: Operators on tensors of both sides.
        host_waits: Waits of the host for the device, each time.
        collectives: Collectives that this rank has issued on the device, in order.
    """

    races: list[Race] = field(default_factory=list)
    early_frees: list[EarlyFree] = field(default_factory=list)
    mismatches: list[Mismatch] = field(default_factory=list)
    host_waits: list[HostWait] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    #: Looks once more at memory that was freed since the last allocation.
    settle: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def findings(self) -> list[Race | EarlyFree | Mismatch]:
        """All that is wrong. Waits of the host are slow and not wrong."""
        self.settle()
        return [*self.races, *self.early_frees, *self.mismatches]

    def check(self) -> None:
        """Raise an error that shows every finding.

        Raises:
            StreamError: There is one.
        """
        found = self.findings
        if found:
            raise StreamError(found)


class Findings:
    """Puts findings into a :class:`Seen`, each once."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._known: dict[tuple[object, ...], Race | EarlyFree | Mismatch] = {}

    def add(self, finding: Race | EarlyFree | Mismatch) -> None:
        """Note a finding, or that a known one has come up again."""
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
    """A race about ``memory``."""
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
