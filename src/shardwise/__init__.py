"""Train any PyTorch model on many devices: FSDP, ZeRO and DDP by one engine, planned, run and reported.

Names are loaded when they are first used, so that ``import shardwise`` and planning need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "ParallelPlan": "shardwise.spec.plan",
    "Placements": "shardwise.spec.placement",
    "OffloadPolicy": "shardwise.spec.offload",
    "PipelinePolicy": "shardwise.spec.schedule",
    "PrecisionPolicy": "shardwise.spec.precision",
    "RecomputePolicy": "shardwise.spec.recompute",
    "bf16_supported": "shardwise.fsdp.precision",
    "block": "shardwise.spec.granularity",
    "wrap_by_class": "shardwise.spec.wrap",
    "wrap_by_name": "shardwise.spec.wrap",
    "wrap_by_size": "shardwise.spec.wrap",
    "ShardwiseError": "shardwise.spec.errors",
    "ConfigError": "shardwise.spec.errors",
    "PlanError": "shardwise.spec.errors",
    "MemoryBudgetError": "shardwise.spec.errors",
    "MeshError": "shardwise.spec.errors",
    "PlacementError": "shardwise.spec.errors",
    "StateError": "shardwise.spec.errors",
    "StorageError": "shardwise.spec.errors",
    "CommError": "shardwise.spec.errors",
    "RankDisagreement": "shardwise.spec.errors",
    "CommTimeout": "shardwise.spec.errors",
    "CheckpointError": "shardwise.spec.errors",
    "CollectiveEvent": "shardwise.comm.base",
    "optimizer_in_backward": "shardwise.fsdp.in_backward",
    "ExponentialMovingAverage": "shardwise.fsdp.average",
    "parallelize": "shardwise.recipe.parallelize",
    "save": "shardwise.recipe.persist",
    "load": "shardwise.recipe.persist",
    "eval_step": "shardwise.recipe.step",
    "train_step": "shardwise.recipe.step",
    "dry_run": "shardwise.recipe.dry_run",
    "DryRun": "shardwise.recipe.dry_run",
    "parity": "shardwise.recipe.parity",
    "generate": "shardwise.recipe.decoding",
    "generate_stream": "shardwise.recipe.decoding",
    "fully_shard": "shardwise.fsdp.fully_shard",
    "register_fsdp_forward_method": "shardwise.fsdp.fully_shard",
    "gradient_sync": "shardwise.fsdp.api",
    "logical_shape": "shardwise.fsdp.api",
    "record_collectives": "shardwise.fsdp.api",
    "record_pipeline": "shardwise.recipe.pipelined",
    "clip_grad_norm": "shardwise.fsdp.clip",
    "convert_sync_batchnorm": "shardwise.fsdp.batch_norm",
    "data_parallel_rank": "shardwise.fsdp.api",
    "data_parallel_size": "shardwise.fsdp.api",
    "declare_elementwise": "shardwise.fsdp.optimizer",
    "deferred_init": "shardwise.fsdp.deferred",
    "flat_parameters": "shardwise.fsdp.flat",
    "declare_granularity": "shardwise.fsdp.optimizer",
    "full_state_dict": "shardwise.fsdp.state",
    "load_full_state_dict": "shardwise.fsdp.state",
    "GradScaler": "shardwise.fsdp.scaler",
    "summary": "shardwise.fsdp.summary",
    "full_parameters": "shardwise.fsdp.whole",
    "join": "shardwise.fsdp.join",
    "newest_checkpoint": "shardwise.checkpoint.store",
    "DataParallel": "shardwise.recipe.data_parallel",
    "DistributedSampler": "shardwise.train.sampler",
}
_MODULES = {"models"}

__all__ = [
    "CheckpointError",
    "CollectiveEvent",
    "CommError",
    "CommTimeout",
    "ConfigError",
    "DataParallel",
    "DistributedSampler",
    "DryRun",
    "ExponentialMovingAverage",
    "GradScaler",
    "MemoryBudgetError",
    "MeshError",
    "OffloadPolicy",
    "ParallelPlan",
    "PipelinePolicy",
    "PlacementError",
    "Placements",
    "PlanError",
    "PrecisionPolicy",
    "RankDisagreement",
    "RecomputePolicy",
    "ShardwiseError",
    "StateError",
    "StorageError",
    "__version__",
    "bf16_supported",
    "block",
    "clip_grad_norm",
    "convert_sync_batchnorm",
    "data_parallel_rank",
    "data_parallel_size",
    "declare_elementwise",
    "declare_granularity",
    "deferred_init",
    "dry_run",
    "eval_step",
    "flat_parameters",
    "full_parameters",
    "full_state_dict",
    "fully_shard",
    "generate",
    "generate_stream",
    "gradient_sync",
    "join",
    "load",
    "load_full_state_dict",
    "logical_shape",
    "models",
    "newest_checkpoint",
    "optimizer_in_backward",
    "parallelize",
    "parity",
    "record_collectives",
    "record_pipeline",
    "register_fsdp_forward_method",
    "save",
    "summary",
    "train_step",
    "wrap_by_class",
    "wrap_by_name",
    "wrap_by_size",
]

if TYPE_CHECKING:
    from shardwise import models
    from shardwise.checkpoint.store import newest_checkpoint
    from shardwise.comm.base import CollectiveEvent
    from shardwise.fsdp.api import (
        data_parallel_rank,
        data_parallel_size,
        gradient_sync,
        logical_shape,
        record_collectives,
    )
    from shardwise.fsdp.average import ExponentialMovingAverage
    from shardwise.fsdp.batch_norm import convert_sync_batchnorm
    from shardwise.fsdp.clip import clip_grad_norm
    from shardwise.fsdp.deferred import deferred_init
    from shardwise.fsdp.flat import flat_parameters
    from shardwise.fsdp.fully_shard import fully_shard, register_fsdp_forward_method
    from shardwise.fsdp.in_backward import optimizer_in_backward
    from shardwise.fsdp.join import join
    from shardwise.fsdp.optimizer import declare_elementwise, declare_granularity
    from shardwise.fsdp.precision import bf16_supported
    from shardwise.fsdp.scaler import GradScaler
    from shardwise.fsdp.state import full_state_dict, load_full_state_dict
    from shardwise.fsdp.summary import summary
    from shardwise.fsdp.whole import full_parameters
    from shardwise.recipe.data_parallel import DataParallel
    from shardwise.recipe.decoding import generate, generate_stream
    from shardwise.recipe.dry_run import DryRun, dry_run
    from shardwise.recipe.parallelize import parallelize
    from shardwise.recipe.parity import parity
    from shardwise.recipe.persist import load, save
    from shardwise.recipe.pipelined import record_pipeline
    from shardwise.recipe.step import eval_step, train_step
    from shardwise.spec.errors import (
        CheckpointError,
        CommError,
        CommTimeout,
        ConfigError,
        MemoryBudgetError,
        MeshError,
        PlacementError,
        PlanError,
        RankDisagreement,
        ShardwiseError,
        StateError,
        StorageError,
    )
    from shardwise.spec.granularity import block
    from shardwise.spec.offload import OffloadPolicy
    from shardwise.spec.placement import Placements
    from shardwise.spec.plan import ParallelPlan
    from shardwise.spec.precision import PrecisionPolicy
    from shardwise.spec.recompute import RecomputePolicy
    from shardwise.spec.schedule import PipelinePolicy
    from shardwise.spec.wrap import wrap_by_class, wrap_by_name, wrap_by_size
    from shardwise.train.sampler import DistributedSampler


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"shardwise.{name}")
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
