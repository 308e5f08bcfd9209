"""Checkpoints: safetensors files and a JSON manifest in a folder that appears whole or not at all.

It works on :class:`~shardwise.spec.extent.Extent`: ranges of named logical tensors. Who holds which range at saving and
at loading does not matter, so a checkpoint loads on any number of ranks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# By module, imported when first used: the writing process (writing_process.py) needs none of them, and no torch.
_LAZY = {
    "Manifest": "manifest",
    "Checkpoint": "reader",
    "describe_summary": "reader",
    "open_checkpoint": "reader",
    "CHECKPOINTS": "store",
    "LATEST": "store",
    "Latest": "store",
    "Retained": "store",
    "find_latest": "store",
    "newest_checkpoint": "store",
    "publish_latest": "store",
    "retain": "store",
    "step_directory": "store",
    "step_of": "storage",
    "write": "writer",
}

if TYPE_CHECKING:
    from shardwise.checkpoint.manifest import Manifest
    from shardwise.checkpoint.reader import Checkpoint, describe_summary, open_checkpoint
    from shardwise.checkpoint.storage import step_of
    from shardwise.checkpoint.store import (
        CHECKPOINTS,
        LATEST,
        Latest,
        Retained,
        find_latest,
        newest_checkpoint,
        publish_latest,
        retain,
        step_directory,
    )
    from shardwise.checkpoint.writer import write

__all__ = [
    "CHECKPOINTS",
    "LATEST",
    "Checkpoint",
    "Latest",
    "Manifest",
    "Retained",
    "describe_summary",
    "find_latest",
    "newest_checkpoint",
    "open_checkpoint",
    "publish_latest",
    "retain",
    "step_directory",
    "step_of",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value
