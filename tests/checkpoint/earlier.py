"""Checkpoints as earlier versions wrote them: the same files, an object for each tensor and file in the manifest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.checkpoint import open_checkpoint
from shardwise.checkpoint.manifest import Manifest, sealed
from shardwise.checkpoint.partition import written_slices


def words_4(manifest: Manifest) -> dict[str, Any]:
    """A manifest in the words of format version 4."""
    table, tensors = manifest.table, {}
    held = table.partitions
    for number, name in enumerate(table.names):
        partition = int(table.partition[number])
        slices = table.slices(name)
        pieces = []
        first = int(held.first_slice[partition])
        for index in range(max(1, len(slices))):
            for row in range(int(held.first_row[first + index]), int(held.first_row[first + index + 1])):
                start, count = int(held.start[row]), int(held.count[row])
                run = [count, int(held.rank_step[row])] if count > 1 else []
                place = [index] if slices else []
                pieces.append([int(held.rank[row]), start, start + int(held.length[row]), *place, *run])
        stride = table.strides.get(number)
        tensors[name] = {
            "shape": list(table.shapes[number]),
            "dtype": table.dtypes[number],
            "stride": None if stride is None else list(stride),
            "pieces": pieces,
            "slices": written_slices(slices) or None,
            "is_frozen": number in table.frozen,
        }
    return {
        "format": "shardwise-checkpoint",
        "format_version": 4,
        "save_id": manifest.save_id,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "files": [entry._asdict() for entry in manifest.files],
        "frozen": None if manifest.frozen is None else [entry._asdict() for entry in manifest.frozen],
        "tensors": tensors,
        "data": manifest.data,
        "rank_data": None,
    }


def as_version_4(path: Path) -> Path:
    """Give a checkpoint the manifest that format version 4 had."""
    (path / "manifest.json").write_bytes(sealed(words_4(open_checkpoint(path).manifest)))
    return path


def rewrite(path: Path, change: Any, *, checksum: bool = True) -> None:
    """Change the manifest as someone would who can compute checksums."""
    file = path / "manifest.json"
    content = json.loads(file.read_bytes())
    before = content["checksum"]
    content = change(content) or content
    raw = sealed(content)
    file.write_bytes(raw if checksum else b'{"checksum":"%s"' % before.encode() + raw[len(b'{"checksum":""') + 64 :])
