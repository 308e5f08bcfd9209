"""Tensors in values of any common shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.nested import replace_tensors, tensors_in


@dataclass
class Config:
    """As configurations of transformers whose layers differ (Gemma 4): a field that may not be read."""

    head_dim: int = 8
    tensor: Any = field(default_factory=lambda: torch.ones(2))

    def __getattribute__(self, name: str) -> Any:
        if name == "head_dim":
            raise ValueError("ask the layer")
        return super().__getattribute__(name)


def test_a_data_class_is_read_past_its_class():
    config = Config()
    assert list(tensors_in({"config": config})) == [config.tensor]
    changed = replace_tensors([config], lambda tensor: tensor)
    assert changed[0] is config
