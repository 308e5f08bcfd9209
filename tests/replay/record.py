"""The file of record, and the first difference between it and a run, in words.

The lists of collectives are kept once each, under their digest: those of most steps and ranks are alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.replay.run import Run

PATH = Path(__file__).with_name("record.json")


@dataclass
class Record:
    """What the runs were when they were written down.

    Attributes:
        probe: What one plain process computed on the machine that wrote it (``run.probe``).
        traces: Lists of collectives, by digest.
        cases: Runs by name; ``events`` are digests into ``traces``.
    """

    probe: str
    traces: dict[str, list[str]]
    cases: dict[str, Run]

    @classmethod
    def read(cls, path: Path = PATH) -> Record:
        """The file of record."""
        return cls(**json.loads(path.read_text("utf-8")))

    def write(self, path: Path = PATH) -> None:
        """Write the file: one line for each trace and each case, so that a difference can be read."""
        lines = ["{", f'"probe": {json.dumps(self.probe)},']
        for name in ("traces", "cases"):
            entries = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(getattr(self, name).items())]
            lines += [f'"{name}": {{', ",\n".join(entries), "}," if name == "traces" else "}"]
        path.write_text("\n".join([*lines, "}", ""]), "utf-8")

    def put(self, name: str, run: Run) -> None:
        """Put a run on record in place of the one of this name."""
        self.cases[name] = self._packed(run)

    def drop_unused_traces(self) -> None:
        """Forget lists that no run refers to any more."""
        used = {events for run in self.cases.values() for _, events in _events_of(run)}
        self.traces = {key: trace for key, trace in self.traces.items() if key in used}

    def first_difference(self, name: str, run: Run, *, has_values: bool) -> str | None:
        """Where ``run`` departs from the record first; ``None`` where it does not.

        Args:
            name: Of the case.
            run: What happened now.
            has_values: Numbers are compared, too: this machine computes as the one that wrote the record did.
        """
        if name not in self.cases:
            return f"{name}: there is no record of it"
        return next(self._differences(name, self.cases[name], run, has_values=has_values), None)

    def _packed(self, run: Run) -> Run:
        packed = json.loads(json.dumps(run))
        for holder, events in _events_of(packed):
            digest = hashlib.sha256("\n".join(events).encode()).hexdigest()[:12]
            self.traces[digest] = events
            holder["events"] = digest
        return packed

    def _differences(self, name: str, old: Run, new: Run, *, has_values: bool) -> Iterator[str]:
        if ("predicted" in old) != ("predicted" in new):
            yield f"{name}: a prediction is there in one of the two only"
        if "predicted" in old and "predicted" in new:
            yield from self._in_events(f"{name}, predicted", old["predicted"], new["predicted"], has_values=has_values)
            yield from _in_mapping(f"{name}, predicted bytes", old["predicted"]["bytes"], new["predicted"]["bytes"])
        if len(old["ranks"]) != len(new["ranks"]):
            yield f"{name}: {len(old['ranks'])} ranks, now {len(new['ranks'])}"
        for rank, (was, now) in enumerate(zip(old["ranks"], new["ranks"], strict=False)):
            for step, (before, after) in enumerate(zip(was["steps"], now["steps"], strict=True)):
                where = f"{name}, rank {rank}, step {step}"
                yield from self._in_events(where, before, after, has_values=has_values)
                for value in ("loss", "norm") if has_values else ():
                    if before[value] != after[value]:
                        yield f"{where}: {value} {_number(before[value])}, now {_number(after[value])}"
        yield from _in_digests(f"{name}, state", old["state"], new["state"], has_values=has_values)
        if len(old["checkpoint"]) != len(new["checkpoint"]):
            yield f"{name}: a checkpoint of {len(old['checkpoint'])} files, now of {len(new['checkpoint'])}"
        for rank, (was, now) in enumerate(zip(old["checkpoint"], new["checkpoint"], strict=False)):
            compared = was.keys() if has_values else ("names",)
            yield from (f"{name}, checkpoint, file {rank}: other {key}" for key in compared if was[key] != now[key])

    def _in_events(self, where: str, old: dict[str, Any], new: dict[str, Any], *, has_values: bool) -> Iterator[str]:
        before, after = self.traces[old["events"]], new["events"]
        for index, (was, now) in enumerate(zip(before, after, strict=False)):
            if was != now and (has_values or _without_length(was) != _without_length(now)):
                yield f"{where}, event {index}: {was}, now {now}"
        if len(before) != len(after):
            first = min(len(before), len(after))
            longer = before if len(before) > len(after) else after
            yield f"{where}: {len(before)} events, now {len(after)}; the first that one alone has is {longer[first]}"


def _without_length(event: str) -> str:
    """An event; of a text between ranks without its length, which follows from the digits of numbers in it."""
    return event.rpartition(" ")[0] if " control uint8 " in event else event


def _events_of(run: Run) -> Iterator[tuple[dict[str, Any], Any]]:
    for holder in [*(step for rank in run["ranks"] for step in rank["steps"]), run.get("predicted")]:
        if holder is not None:
            yield holder, holder["events"]


def _in_mapping(where: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{where}: {key} {old.get(key)}, now {new.get(key)}"


def _in_digests(where: str, old: dict[str, str], new: dict[str, str], *, has_values: bool) -> Iterator[str]:
    """Names always, digests where numbers can be compared."""
    if has_values:
        yield from _in_mapping(where, old, new)
    elif old.keys() != new.keys():
        yield f"{where}: other names, {', '.join(sorted(old.keys() ^ new.keys())[:4])}"


def _number(value: str | None) -> str:
    return "none" if value is None else f"{float.fromhex(value)!r} ({value})"
