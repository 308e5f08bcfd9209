"""What torch's flight recorders know of a run that hangs: the collectives that each rank has begun and finished.

torch keeps the newest collectives of each process (``TORCH_FR_BUFFER_SIZE``), those of NCCL in one recorder and those
of Gloo in another; what ``comm.gloo`` sends from rank to rank is in neither. A rank is asked for them through the
folder of heartbeats: whoever watches makes the file ``flight-request`` (:func:`request`), and the thread that writes
the heartbeat answers with ``flight-RANK.json``, a line of JSON for each recorder. That is torch's own format, which
``torch.distributed.flight_recorder`` documents, without stacks.

Everything here is for a message that can do without: what is missing or cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Functions of torch, NCCL's first; a build without CUDA lacks that.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
_REQUEST = "flight-request"
#: A message has at most so many lines of it.
_MOST_LINES = 16


@dataclass(frozen=True, slots=True)
class Recorded:
    """A collective in a flight recorder.

    Attributes:
        group: Name of its process group, the same on all members.
        label: What the group is for, where torch was told, else its name.
        sequence: Number in the group's collectives, or in its messages.
        what: Backend and kind, such as ``nccl:all_reduce``.
        size: Elements and dtype of what goes in.
        is_message: Whether it is a send or a receive.
        is_done: Whether it has finished.
    """

    group: str
    label: str
    sequence: int
    what: str
    size: str
    is_message: bool
    is_done: bool

    def __str__(self) -> str:
        return f"{self.what} #{self.sequence} of {self.label} ({self.size})"


def path_of(directory: Path, rank: int) -> Path:
    """The file that a rank writes its recorders to."""
    return directory / f"flight-{rank}.json"


def request(directory: Path) -> None:
    """Ask all ranks for their recorders, once in an attempt: several ranks may find a hang at the same time."""
    with contextlib.suppress(OSError):
        (directory / _REQUEST).touch(exist_ok=False)


def clear(directory: Path) -> None:
    """Remove what an earlier attempt has asked for and got."""
    for path in [directory / _REQUEST, *directory.glob("flight-*.json")]:
        path.unlink(missing_ok=True)


def requested(directory: Path) -> tuple[int, int] | None:
    """The newest request, to be compared with the one before; ``None`` where there is none."""
    try:
        found = (directory / _REQUEST).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def write(directory: Path, rank: int) -> None:
    """Write this process's recorders. The file is made also where they hold nothing.

    NCCL's asks the device which collectives it has done, without waiting for it.
    """
    with contextlib.suppress(OSError):
        path = path_of(directory, rank)
        partial = path.with_suffix(".partial")
        partial.write_bytes(b"\n".join(_dumps()) + b"\n")
        partial.replace(path)


def _dumps() -> Iterator[bytes]:
    torch = sys.modules.get("torch")  # where nobody has loaded it there is nothing to dump
    library = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    for name in _DUMPS:
        with contextlib.suppress(Exception):  # a private function, in a process that is in trouble
            yield bytes(getattr(library, name)())


def read(directory: Path, rank: int) -> list[Recorded]:
    """What a rank has written, in the order in which it was issued, NCCL's first; empty where nothing can be read."""
    found: list[Recorded] = []
    with contextlib.suppress(OSError):
        for line in path_of(directory, rank).read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
                entries = json.loads(line)["entries"]
                found += [_recorded(entry) for entry in sorted(entries, key=lambda entry: entry["record_id"])]
    return found


def _recorded(entry: Mapping[str, Any]) -> Recorded:
    group, label = (str(part) for part in entry["process_group"])
    is_message, what = bool(entry["is_p2p"]), str(entry["profiling_name"])
    # Gloo has no events that say how far a collective is. NCCL gives one up, undone, when its time is over.
    is_done = entry["state"] == "completed" or (bool(entry["retired"]) and not what.startswith("nccl"))
    sequence = int(entry["p2p_seq_id" if is_message else "collective_seq_id"])
    return Recorded(group, label or group, sequence, what, _size(entry), is_message, is_done)


def _size(entry: Mapping[str, Any]) -> str:
    numel = 0
    for shape in entry["input_sizes"]:
        product = 1
        for length in shape:
            product *= int(length)
        numel += product
    dtypes = sorted({str(dtype) for dtype in entry["input_dtypes"]})
    return f"{numel} elements{', ' if dtypes else ''}{'/'.join(dtypes)}"


def summary(directory: Path, ranks: Iterable[int]) -> list[str]:
    """Lines for a message: what each rank is in and has finished last, who is behind, and the files.

    Empty where no rank has recorded a collective that is not done, nor any of NCCL.
    """
    by_rank = {rank: found for rank in ranks if (found := read(directory, rank))}
    if not any(not each.is_done or each.what.startswith("nccl") for found in by_rank.values() for each in found):
        return []
    lines = ["  torch's flight recorder:"]
    for rank, found in by_rank.items():
        now = next((each for each in found if not each.is_done), None)
        last = next((each for each in reversed(found) if each.is_done), None)
        lines.append(f"    rank {rank}: in {now or 'no collective'}; last finished: {last or 'none'}")
    lines = _shortened(lines) + _shortened(_behind(by_rank))
    files = [str(path_of(directory, rank)) for rank in by_rank]
    return [*lines, f"    files: {', '.join(files[:_MOST_LINES])}"]


def _behind(by_rank: Mapping[int, Sequence[Recorded]]) -> list[str]:
    """Which ranks have not begun a collective that others are in."""
    groups: dict[str, dict[int, list[Recorded]]] = {}
    for rank, found in by_rank.items():
        for each in found:
            if not each.is_message:
                groups.setdefault(each.group, {}).setdefault(rank, []).append(each)
    lines = []
    for by_member in groups.values():
        waited = [each for found in by_member.values() for each in found if not each.is_done]
        first = min(waited, key=lambda each: each.sequence, default=None)
        late = [rank for rank, found in by_member.items() if first is not None and found[-1].sequence < first.sequence]
        if late:
            who = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"
            lines.append(f"    {who} not begun {first}")
    return lines


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"    and {more} more lines"]
