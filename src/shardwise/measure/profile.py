"""Some steps of a real run as rows of a trace: computation, gathers, reductions and waits, by unit.

torch's profiler times the ranges that the engine and the Comms mark (``engine.hooks.label``). These cost nothing while
no profiler runs. On a CPU the rows show the host's time:

============  =========================================================================================================
compute       the forward of a unit; its backward, from the time at which backward enters the unit until it enters the
              next one
gather        from the issue of a unit's gather until its wait
reduce        from the issue of a unit's reduction until its wait
wait          time in which the host waits for a gather, a reduction, or a message
============  =========================================================================================================

On CUDA there are also rows for the device's streams, with their kernels and copies.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.sim.chrome import Slice

_NAME = re.compile(r"shardwise::(\w+) \[(.*)\]")


class StepProfile:
    """A context manager that profiles its block.

    Attributes:
        slices: The rows, after the exit; the first range begins at 0.
    """

    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self.slices: list[Slice] = []

    def __enter__(self) -> Self:
        """Begin to profile."""
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the profile, and make the rows."""
        self._profile.__exit__(kind, error, trace)
        if error is None:
            self.slices = _slices(self._profile.events() or [])


def step_range(step: int, what: str = "step") -> record_function:
    """A range around a step, or a part of it, for the profile."""
    return record_function(f"shardwise::{what} [{step}]")


def _slices(events: Any) -> list[Slice]:
    ranges, others = [], []
    for event in events:
        begin, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        found = _NAME.fullmatch(event.name)
        if found is not None and event.device_type == torch.autograd.DeviceType.CPU:
            ranges.append((begin, end, found[1], found[2]))
        elif event.device_type == torch.autograd.DeviceType.CUDA and found is None:  # torch repeats ranges there
            others.append((begin, end, f"stream {getattr(event, 'device_resource_id', 0)}", event.name))
    ranges.sort()
    zero = min((begin for begin, *_ in [*ranges, *others]), default=0.0)
    rows = [*_of_units(ranges), *(Slice(row, name, begin, end, "kernel") for begin, end, row, name in others)]
    return [each._replace(begin_s=each.begin_s - zero, end_s=each.end_s - zero) for each in rows]


def _of_units(ranges: list[tuple[float, float, str, str]]) -> list[Slice]:
    """The rows of the host, from ranges sorted by start."""
    found: list[Slice] = []
    under_way: dict[tuple[str, str], float] = {}
    for index, (begin, end, what, unit) in enumerate(ranges):
        if what in {"step", "optimizer"}:
            found.append(Slice("steps" if what == "step" else "compute", f"{what} {unit}", begin, end, what))
        elif what == "forward":
            found.append(Slice("compute", f"forward {unit}", begin, end, "forward"))
        elif what == "backward":
            after = (start for start, _, kind, _ in ranges[index + 1 :] if kind in _ENDS_BACKWARD and start >= end)
            found.append(Slice("compute", f"backward {unit}", end, next(after, end), "backward"))
        elif what in {"gather", "reduce"}:
            under_way.setdefault((what, unit), begin)
        elif what == "wait":
            begun = under_way.pop(("gather", unit), None)
            if begun is not None:
                found.append(Slice("gather", f"gather {unit}", begun, end, "gather"))
        elif what == "arrive":
            found.append(Slice("wait", unit, begin, end, "wait"))
            kind, _, name = unit.partition(" ")
            begun = under_way.pop(("reduce", name), None) if kind in {"reduce_scatter", "all_reduce"} else None
            if begun is not None:
                found.append(Slice("reduce", f"reduce {name}", begun, end, "reduce"))
    return found


#: Ranges whose start is the end of the previous unit's backward.
_ENDS_BACKWARD = {"backward", "reduce", "optimizer"}
