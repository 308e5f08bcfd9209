"""Vector clocks, which show whether one event is certain to happen before another.

An *agent* is a stream of the device or a thread of the host, whose events happen one after the other. Its *time* is the
number of its events. Its *clock* contains, for every agent, the time up to which that agent's events are certain to be
finished before this agent's next event. Later events of the other agent may still be running.
"""

from __future__ import annotations

from collections.abc import Mapping

Clock = dict[int, int]


class Agent:
    """A stream of the device, or a thread of the host.

    Attributes:
        number: The agent's key in clocks.
        name: Name in messages.
        is_host: The agent is a thread of the host.
        clock: The agent's clock, with its own time.
    """

    __slots__ = ("clock", "is_host", "name", "number")

    def __init__(self, number: int, name: str, *, is_host: bool) -> None:
        self.number, self.name, self.is_host = number, name, is_host
        self.clock: Clock = {number: 0}

    @property
    def time(self) -> int:
        """The number of the agent's events."""
        return self.clock[self.number]

    def tick(self) -> int:
        """Count one more event, and return its time."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def merge(self, clock: Mapping[int, int]) -> None:
        """Merge ``clock`` into this agent's clock, because this agent has waited for it."""
        own = self.clock
        for number, time in clock.items():
            if own.get(number, -1) < time:
                own[number] = time

    def has_seen(self, agent: Agent, time: int) -> bool:
        """Whether the event of ``agent`` at ``time`` is certain to finish before this agent's next event."""
        return agent is self or self.clock.get(agent.number, 0) >= time
