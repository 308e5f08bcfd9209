"""What a model is, for planning: its blocks and sizes, from which parameters, operations and bytes follow. No torch."""

from shardwise.spec.shape.families import FAMILIES, from_config
from shardwise.spec.shape.model import Attention, Block, Experts, Mlp, ModelShape
from shardwise.spec.shape.names import KNOWN, known_shape

__all__ = ["FAMILIES", "KNOWN", "Attention", "Block", "Experts", "Mlp", "ModelShape", "from_config", "known_shape"]
