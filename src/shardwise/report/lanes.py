"""Time from left to right, a lane for each thing that is busy or full: streams, ranks, memory slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.report.element import Content
from shardwise.report.scale import linear
from shardwise.report.svg import CHARACTER, box, fits, level, text


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that occupies a lane for a while.

    Attributes:
        lane: Key of the lane.
        start, stop: When.
        label: Words in the bar, where they fit.
        fill: Class of its colour.
        title: Words that the mouse shows.
    """

    lane: str
    start: float
    stop: float
    label: str
    fill: str
    title: str | None = None


@dataclass(slots=True)
class Lanes:
    """Where the lanes of a drawing lie.

    Attributes:
        names: What stands before each lane, by its key, from top to bottom.
        end: The last moment; the first is 0.
        width: Pixels of the whole drawing.
        top: Pixels above the first lane.
        height: Of a lane.
        gap: Between two lanes.
        breaks: Keys of lanes with a wider gap before them.
    """

    names: Mapping[str, str]
    end: float
    width: float = 1080
    top: float = 8
    height: float = 26
    gap: float = 8
    breaks: Sequence[str] = ()
    left: float = field(init=False)
    y: dict[str, float] = field(init=False)
    bottom: float = field(init=False)

    def __post_init__(self) -> None:
        """Place the lanes."""
        self.left = 14 + CHARACTER * max((len(name) for name in self.names.values()), default=0)
        self.y, at = {}, self.top
        for key in self.names:
            at += 14 if key in self.breaks else 0
            self.y[key] = at
            at += self.height + self.gap
        self.bottom = at - self.gap

    def x(self, moment: float) -> float:
        """Where a moment lies."""
        return self.left + moment / self.end * (self.width - self.left - 10)

    def parts(self, bars: Iterable[Bar]) -> list[Content]:
        """The lanes' names and the bars."""
        middle = self.height / 2 + 4
        made: list[Content] = []
        for key, name in self.names.items():
            made.append(text(self.left - 8, self.y[key] + middle, name, anchor="end"))
            made.append(level(self.left, self.width - 10, self.y[key] + self.height))
        for bar in bars:
            x, width = self.x(bar.start), self.x(bar.stop) - self.x(bar.start)
            shape = box(x, self.y[bar.lane], max(width, 0.8), self.height, bar.fill, title=bar.title)
            if width < 3:  # the edge would be all that is seen
                shape.set("class", bar.fill)
            made.append(shape)
            if bar.label and fits(bar.label, width):
                made.append(text(x + width / 2, self.y[bar.lane] + middle, bar.label, class_="on", anchor="middle"))
        return made

    def axis(self, unit: str, *, factor: float = 1.0) -> list[Content]:
        """Ticks below the lanes; ``factor`` of the moments' unit is one ``unit``."""
        made: list[Content] = []
        scale = linear(0.0, self.end / factor, num_ticks=8, is_tight=True)
        for tick in scale.ticks:
            x = self.x(tick * factor)
            words = f"{tick:g} {unit}" if tick else "0"
            made.append(
                text(x, self.bottom + 20, words, class_="faint", anchor="end" if x > self.width - 40 else "middle")
            )
        return made


def merged(bars: Iterable[Bar], lanes: Lanes, *, least: float = 0.7) -> list[Bar]:
    """Fewer bars that look the same: neighbours of one colour that are too narrow to be seen apart become one."""
    found: list[Bar] = []
    last: dict[str, int] = {}
    for bar in sorted(bars, key=lambda bar: bar.start):
        index = last.get(bar.lane)
        if index is not None:
            before = found[index]
            is_close = lanes.x(bar.start) - lanes.x(before.stop) < least
            is_narrow = lanes.x(bar.stop) - lanes.x(bar.start) < 2 and lanes.x(before.stop) - lanes.x(before.start) < 40
            if is_close and is_narrow and bar.fill == before.fill and not fits(before.label, 20):
                found[index] = Bar(bar.lane, before.start, max(before.stop, bar.stop), "", bar.fill)
                continue
        last[bar.lane] = len(found)
        found.append(bar)
    return found
