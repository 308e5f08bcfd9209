"""Checkpoints: safetensors files and a JSON manifest in a folder that appears whole or not at all.

It works on :class:`~shardwise.spec.extent.Extent`: ranges of named logical tensors. Who holds which range at saving and
at loading does not matter, so a checkpoint loads on any number of ranks.
"""

from __future__ import annotations

from shardwise.checkpoint.manifest import Manifest
from shardwise.checkpoint.reader import Checkpoint, describe_summary, open_checkpoint
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
    step_of,
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
