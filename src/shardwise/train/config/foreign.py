"""Recognizes configurations of other projects by their keys, so that verbs can name ``shardwise convert``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable

#: Top-level keys of each project that no configuration of ours has, and how many of them a file needs at least.
MARKS: Mapping[str, tuple[int, Collection[str]]] = {
    "Accelerate": (1, {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"}),
    "DeepSpeed": (
        1,
        {
            *("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16"),
            *("gradient_clipping", "gradient_accumulation_steps", "zero_allow_untested_optimizer"),
        },
    ),
    "torchtitan": (
        2,
        {"job", "training", "parallelism", "lr_scheduler", "activation_checkpoint", "metrics", "profiling", "float8"},
    ),
}


def kind_of(values: Mapping[str, Any]) -> str | None:
    """The project whose configuration has these keys; ``None``: one of ours, or an unknown one."""
    return next((kind for kind, (least, marks) in MARKS.items() if len(marks & values.keys()) >= least), None)


def check_is_ours(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a configuration of another project."""
    if kind := kind_of(values):
        raise ConfigError(
            f"{printable(path)} is a configuration of {kind}, not of shardwise.\n"
            f"  Convert it: shardwise convert {printable(path)} --out run.yaml"
        )
