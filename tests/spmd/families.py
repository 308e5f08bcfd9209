"""Small models of every family in ``planner.legal.SUPPORT``, and the degrees in which they are checked."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

import shardwise as sw
from shardwise.planner.legal import SUPPORT
from tests.common import shapes

SEQ = 32
#: Grouped products want rows of a multiple of 16 bytes.
_EXPERTS = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 128)
#: Sizes that differ from those of ``tests.common.shapes``.
_CHANGES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gpt2": {"n_head": 8},
    "vit": {"image_size": 24},
    "gpt_oss": _EXPERTS,
    "mixtral": _EXPERTS,
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
}
#: Name, degrees, and the number of ranks. ``all`` is the product of those that a family takes.
DEGREES: dict[str, tuple[dict[str, Any], int]] = {
    "dp": ({"strategy": "hsdp", "dp_replicate": 2}, 8),
    "tp": ({"strategy": "zero3", "tp": 2}, 8),
    "tp-wide": ({"strategy": "ddp", "tp": 8}, 64),
    "sequence": ({"strategy": "zero2", "tp": 2, "sequence_parallel": True}, 16),
    "recompute": ({"strategy": "zero3", "tp": 2, "activation_checkpointing": "full"}, 8),
    "rows": ({"strategy": "zero3", "row_sharded": ["token_embedding"]}, 8),
    "cp": ({"strategy": "zero3", "cp": 2}, 8),
    "ep": ({"strategy": "zero3", "ep": 4}, 16),
    "pp": ({"strategy": "zero1", "pp": 2}, 8),
    "pp-split": ({"strategy": "zero2", "pp": 2, "tp": 2, "pipeline": sw.PipelinePolicy(schedule="zb-h1")}, 8),
    "all": ({}, 1024),
}


def degrees_of(family: str, name: str) -> dict[str, Any] | None:
    """Fields of a plan; ``None`` where the family does not take them."""
    held = SUPPORT[family]
    if name == "rows" and family != "gpt":
        return None  # no exchange that others do not have
    if name != "all":
        fields, _ = DEGREES[name]
        return dict(fields) if all(getattr(held, axis, True) for axis in fields) else None
    fields = {"strategy": "hsdp", "dp_replicate": 4}
    fields |= {axis: size for axis, size in {"tp": 4, "cp": 4, "pp": 2, "ep": 4}.items() if getattr(held, axis)}
    if held.sequence_parallel and not held.ep:
        fields |= {"sequence_parallel": True} | ({"tp": 2} if family == "vit" else {})  # 10 positions
    return fields


@functools.cache
def _config(family: str) -> Any:
    config = shapes.small_config(family, **_CHANGES.get(family, {}))
    for name, value in config.to_dict().items():
        if isinstance(value, float) and "drop" in name:  # random numbers have no types
            setattr(config, name, 0.0)
    config.use_cache = False
    return config


def build(family: str, fields: Mapping[str, Any], **changes: Any) -> nn.Module:
    """A model for a plan of these fields; ``changes`` of the sizes of our GPT."""
    if family == "gpt":
        sizes: dict[str, Any] = {"num_layers": 3, "hidden": 64, "num_heads": 8, "vocab_size": 136, "seq_len": SEQ}
        sizes |= {"num_experts": 8} if fields.get("ep", 1) > 1 else {}
        sizes |= {"tied": False} if "row_sharded" in fields else {}
        return sw.models.gpt("gpt-tiny", **(sizes | changes))
    return shapes.on_meta(copy.deepcopy(_config(family)))[
        0
    ].bfloat16()  # grouped products of experts take nothing else on meta


def batch(family: str) -> Any:
    """What it is called with."""
    example = shapes.example_batch("llama" if family == "gpt" else family, samples=2, seq_len=SEQ)
    if family == "vit":
        example["pixel_values"] = example["pixel_values"][..., :24, :24].bfloat16()
    return (example["input_ids"], example["labels"]) if family == "gpt" else example
