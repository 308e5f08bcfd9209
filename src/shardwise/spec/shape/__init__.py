"""The shape of a model, for planning: blocks and sizes, from which parameters, FLOPs and bytes follow. No torch."""

from shardwise.spec.shape.families import FAMILIES, from_config
from shardwise.spec.shape.find import find_shape
from shardwise.spec.shape.gpt import gpt_shape
from shardwise.spec.shape.model import Attention, Block, Experts, Latent, Mlp, ModelShape
from shardwise.spec.shape.names import KNOWN, known_shape

__all__ = [
    "FAMILIES",
    "KNOWN",
    "Attention",
    "Block",
    "Experts",
    "Latent",
    "Mlp",
    "ModelShape",
    "find_shape",
    "from_config",
    "gpt_shape",
    "known_shape",
]
