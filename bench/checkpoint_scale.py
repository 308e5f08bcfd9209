"""A checkpoint of 4,096 ranks x 200 units x 3 tensors, saved and loaded by simulation, within written limits.

Every tensor is divided over all ranks: 2,457,600 pieces. The parts of a rank run one after the other in one process,
with the files that a real save would make; only the collectives are left out: rank 0 is handed the reports.

- ``even``: every rank has an equal part of every tensor. ``uneven``: every piece has another length, in every tensor
  in another way, so that nothing can be left out of the manifest. ``cut``: each rank has a slice of the columns.
- Rank 0: the reports of all ranks are combined, and the manifest is encoded, read back and checked.
- A rank: its report, its file, opening the checkpoint, the plan of what it loads (its own part shifted by an element,
  so that it needs files of several ranks), and the files that the plan names, verified and copied.
- Listing and retention: three such folders, the files that are opened and the bytes that are read.

Seconds are processor time of the one process, so that a busy machine does not change them much. Disks are left out:
give a ``--folder`` in memory.

The second part reads manifests of 100,000, 200,000 and 400,000 entries of several kinds.

    python -m bench.checkpoint_scale [--ranks 4096] [--units 200] [--folder DIR] [--parts scale manifests]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch

from shardwise.checkpoint import folder as folders
from shardwise.checkpoint.combine import Combined, encode_ranges
from shardwise.checkpoint.manifest import MANIFEST_NAME, decode, encode, file_columns, with_checksum
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.checkpoint.shard import Piece, layout, shard_name, write_shard
from shardwise.checkpoint.store import find_latest, retain
from shardwise.spec.extent import Extent
from shardwise.spec.slice import Cut

KINDS = ("even", "uneven", "cut")
NAMES = ("qkv", "up", "down")
#: Seconds of processor time, and bytes of memory above what the imports take.
LIMITS = {
    "rank 0: combine": 60.0,
    "rank 0: manifest": 60.0,
    "a rank: report": 1.0,
    "a rank: file": 1.0,
    "a rank: open": 30.0,
    "a rank: plan": 5.0,
    "a rank: verify and copy": 5.0,
    "memory": 2 * 2**30,
}
#: Microseconds for each entry of a manifest that is read.
MOST_US = 5.0


def divided(kind: str, ranks: int, units: int) -> Callable[[int], list[Extent]]:
    """What each rank holds: two elements of each tensor, but for ``uneven``: one to three."""
    names = [f"blocks.{unit}.{name}.weight" for unit in range(units) for name in NAMES]
    shape = (2, ranks)
    if kind == "cut":
        return lambda rank: [
            Extent(name, shape, "fp32", 0, 2, cuts=(Cut(1, ((rank, rank + 1),)),) if ranks > 1 else ())
            for name in names
        ]
    if kind == "even":
        return lambda rank: [Extent(name, shape, "fp32", 2 * rank, 2 * rank + 2) for name in names]
    numbers = random.Random(0)  # noqa: S311 - no secret
    marks = {name: [0, *(2 * rank + numbers.randint(0, 1) for rank in range(1, ranks)), 2 * ranks] for name in names}
    return lambda rank: [Extent(name, shape, "fp32", *marks[name][rank : rank + 2]) for name in names]


class Watch:
    """Seconds by part, and the most memory above that of the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def time(self, part: str, body: Callable[[], Any]) -> Any:
        """Run a part; of several of one name the longest is kept."""
        begin = time.process_time()
        result = body()
        self.seconds[part] = max(self.seconds.get(part, 0.0), time.process_time() - begin)
        return result

    def peak_bytes(self) -> int:
        """The most memory so far, above that of the start."""
        return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._before)


class Opened:
    """Counts the files that are opened for reading, and the bytes that are read."""

    def __init__(self) -> None:
        self.files, self.bytes = 0, 0
        self._open, self._read = folders.open_for_reading, folders.read_at

    def __enter__(self) -> Self:
        def opened(*args: Any, **kwargs: Any) -> Any:
            self.files += 1
            return self._open(*args, **kwargs)

        def read(file: int, target: memoryview, offset: int) -> None:
            self.bytes += len(target)
            self._read(file, target, offset)

        folders.open_for_reading, folders.read_at = opened, read
        return self

    def __exit__(self, *_: object) -> None:
        folders.open_for_reading, folders.read_at = self._open, self._read


def save(folder: Path, watch: Watch, extents_of: Callable[[int], list[Extent]], ranks: int, step: int) -> None:
    """Every part of a save on every rank."""
    save_id = secrets.token_hex(8)
    reports = [watch.time("a rank: report", lambda rank=rank: encode_ranges(extents_of(rank))) for rank in range(ranks)]
    combined = watch.time("rank 0: combine", lambda: Combined(enumerate(reports)))
    assert not combined.problems, combined.problems[:3]
    columns, slices = combined.table.columns(), list(combined.slice_numbers())
    del combined
    reports.clear()
    folder.mkdir(parents=True)

    def write(rank: int, into: int) -> dict[str, Any]:
        content = {
            Piece(each.name, each.dtype, each.start, each.stop, number): torch.full((each.numel,), float(rank))
            for each, number in zip(extents_of(rank), slices[rank], strict=True)
        }
        plan = layout(save_id=save_id, run_id="bench", step=step, rank=rank, pieces=content)
        return {"bytes": plan.file_bytes, "hash": write_shard(into, shard_name(save_id, rank), plan, content)}

    with folders.open_folder(folder) as into:
        entries = [watch.time("a rank: file", lambda rank=rank: write(rank, into)) for rank in range(ranks)]
        head = {"save_id": save_id, "run_id": "bench", "step": step, "world_size": ranks, "data": {}}
        content = {**head, **columns, "files": file_columns(entries), "frozen": None}
        raw = watch.time("rank 0: manifest", lambda: encode(content))
        folders.write_file(into, MANIFEST_NAME, raw)


def load(folder: Path, watch: Watch, wanted: Callable[[int], list[Extent]], rank: int) -> int:
    """Every part of a load on one rank; the number of files that it read."""
    found = watch.time("a rank: open", lambda: open_checkpoint(folder))
    pairs = [(extent, torch.full((extent.numel,), -1.0)) for extent in wanted(rank)]
    watch.time("a rank: plan", lambda: found._plan(pairs))  # noqa: SLF001 - timed by itself
    files = watch.time("a rank: verify and copy", lambda: found.read_into(pairs, ignored=found.tensors))
    assert all(bool((target >= 0).all()) for _, target in pairs)
    return len(files)


def measure(kind: str, ranks: int, units: int, folder: Path) -> dict[str, Any]:
    """One kind: seconds of each part, memory, sizes and what listing reads."""
    watch, extents_of = Watch(), divided(kind, ranks, units)
    root = folder / kind
    first = root / "checkpoints" / "step-00000001"
    save(first, watch, extents_of, ranks, 1)
    wanted = extents_of if kind == "cut" else lambda rank: [_shifted(each) for each in extents_of(rank)]
    num_files = [load(first, watch, wanted, rank) for rank in (0, ranks // 2)]
    found: dict[str, Any] = {
        "pieces": ranks * units * len(NAMES),
        "manifest bytes": (first / MANIFEST_NAME).stat().st_size,
        "bytes": sum(file.stat().st_size for file in first.iterdir()),
        "files of a load": max(num_files),
        "seconds": watch.seconds,
        "memory": watch.peak_bytes(),
    }
    with Opened() as opened:
        begin = time.process_time()
        assert find_latest(root).step == 1
        found["latest"] = [opened.files, opened.bytes, time.process_time() - begin]
    with Opened() as opened:
        begin = time.process_time()
        assert retain(root, 2, known_good=[first]).good == (first,)
        found["retain"] = [opened.files, opened.bytes, time.process_time() - begin]
    shutil.rmtree(root)
    return found


def _shifted(extent: Extent) -> Extent:
    """An element later, as far as there is one."""
    stop = min(extent.stop + 1, extent.logical_numel)
    return dataclasses.replace(extent, start=min(extent.start + 1, stop), stop=stop)


# -- manifests


def manifests(num_entries: int) -> Iterator[tuple[str, bytes]]:
    """Manifests with so many entries, by kind."""
    numbers = random.Random(0)  # noqa: S311 - no secret
    shapes = [(numbers.randint(1, 4000), numbers.randint(1, 4000)) for _ in range(num_entries)]
    whole = [Extent(f"blocks.{i}.weight", shape, "fp32", 0, shape[0] * shape[1]) for i, shape in enumerate(shapes)]
    yield "tensors, each of another shape", _manifest([whole])
    ranks = num_entries // 10
    marks = {f"w{i}": [0, *(3 * r + numbers.randint(0, 2) for r in range(1, ranks)), 3 * ranks] for i in range(10)}
    pieces = [
        [Extent(name, (3 * ranks,), "fp32", *offsets[rank : rank + 2]) for name, offsets in marks.items()]
        for rank in range(ranks)
    ]
    yield "pieces of 10 tensors", _manifest(pieces)
    yield "files", _manifest([[Extent("w", (num_entries,), "fp32", i, i + 1)] for i in range(num_entries)])
    edges = [0, *sorted(numbers.sample(range(1, 10 * num_entries), num_entries - 1)), 10 * num_entries]
    slices = [
        Extent("w", (10 * num_entries,), "fp32", 0, b - a, cuts=(Cut(0, ((a, b),)),))
        for a, b in itertools.pairwise(edges)
    ]
    yield "slices of one tensor", _manifest([slices])


def _content(ranks: int) -> dict[str, Any]:
    return {"save_id": "0" * 16, "run_id": "bench", "step": 1, "world_size": ranks, "data": {}, "frozen": None}


def _manifest(by_rank: list[list[Extent]]) -> bytes:
    combined = Combined((rank, encode_ranges(extents)) for rank, extents in enumerate(by_rank))
    assert not combined.problems, combined.problems[:3]
    files = {"bytes": [1] * len(by_rank), "hash": [secrets.token_hex(16) for _ in by_rank]}
    head = {"format": "shardwise-checkpoint", "format_version": 5}
    return with_checksum(head | _content(len(by_rank)) | {"files": files, **combined.table.columns()})


def read_manifests(sizes: tuple[int, ...] = (100_000, 200_000, 400_000)) -> dict[str, dict[int, float]]:
    """Microseconds for each entry, by kind and number of entries: the best of three."""
    found: dict[str, dict[int, float]] = {}
    for num_entries in sizes:
        for kind, raw in manifests(num_entries):
            times = []
            for _ in range(3):
                begin = time.process_time()
                decode(raw)
                times.append(time.process_time() - begin)
            found.setdefault(kind, {})[num_entries] = 1e6 * min(times) / num_entries
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--parts", nargs="+", default=["scale", "manifests"], choices=["scale", "manifests"])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone is not None:
        print(json.dumps(measure(args.alone, args.ranks, args.units, args.folder)))
        return
    if "scale" in args.parts:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for kind in args.kinds:  # each in a process of its own, for its memory
                words = ["--ranks", str(args.ranks), "--units", str(args.units), "--folder", folder, "--alone", kind]
                done = subprocess.run(
                    [sys.executable, "-m", "bench.checkpoint_scale", *words],
                    check=True,
                    stdout=subprocess.PIPE,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                )
                print_report(kind, json.loads(done.stdout))
    if "manifests" in args.parts:
        for kind, times in read_manifests().items():
            shown = ", ".join(f"{value:.2f}" for value in times.values())
            print(f"| {kind} | {shown} | {'yes' if max(times.values()) <= MOST_US else 'no'} |", flush=True)


def print_report(kind: str, found: dict[str, Any]) -> None:
    """Print what was measured beside its limits."""
    size, whole = found["manifest bytes"] / 1e6, found["bytes"] / 1e6
    print(f"{kind}: {found['pieces']} pieces, manifest {size:.2f} MB, all files {whole:.0f} MB")
    measured = found["seconds"] | {"memory": found["memory"]}
    for part, limit in LIMITS.items():
        value = measured[part]
        scale, unit = (2**20, "MiB") if part == "memory" else (1, "s")
        verdict = "within" if value <= limit else "beyond"
        print(f"| {kind} | {part} | {value / scale:.3g} {unit} | {verdict} {limit / scale:g} {unit} |")
    for part in ("latest", "retain"):
        files, num_bytes, seconds = found[part]
        print(
            f"| {kind} | {part} | {files} files opened, {num_bytes / 1e6:.2f} MB read, {seconds:.2f} s | |", flush=True
        )


if __name__ == "__main__":
    main()
