"""Vector clocks: which of two things is certain to have happened before the other.

An *agent* does one thing after the other: a stream of the device, or a thread of the host. Its *time* is the number of
things that it has done. Its *clock* says, for every agent, up to which time that agent's work is certain to be done
before whatever this agent does next. What has not been seen by a clock may still be under way.
"""

from __future__ import annotations

from collections.abc import Mapping

Clock = dict[int, int]


class Agent:
    """A stream of the device, or a thread of the host.

    Attributes:
        number: Its key in clocks.
        name: Shown in messages.
        is_host: It is a thread of the host.
        clock: What it has seen, itself included.
    """

    __slots__ = ("clock", "is_host", "name", "number")

    def __init__(self, number: int, name: str, *, is_host: bool) -> None:
        self.number, self.name, self.is_host = number, name, is_host
        self.clock: Clock = {number: 0}

    @property
    def time(self) -> int:
        """The number of things that it has done."""
        return self.clock[self.number]

    def tick(self) -> int:
        """Do one more thing; returns its time."""
        self.clock[self.number] += 1
        return self.clock[self.number]

    def learn(self, clock: Mapping[int, int]) -> None:
        """See all that ``clock`` has seen: this agent has waited for it."""
        own = self.clock
        for number, time in clock.items():
            if own.get(number, -1) < time:
                own[number] = time

    def has_seen(self, agent: Agent, time: int) -> bool:
        """Whether what ``agent`` did at ``time`` is done before whatever this agent does next."""
        return agent is self or self.clock.get(agent.number, 0) >= time
