"""Train any PyTorch model on many devices: DDP, ZeRO and FSDP in one engine, combined with model parallelism.

This module maps every public name to the module that defines it. A name is imported when it is first used, so that
``import shardwise`` and plans need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "ModelShape": "shardwise.spec.shape",
    "ParallelPlan": "shardwise.spec.plan",
    "Placements": "shardwise.spec.placement",
    "ActivationOffloadPolicy": "shardwise.spec.policies",
    "OffloadPolicy": "shardwise.spec.policies",
    "PipelinePolicy": "shardwise.spec.schedule",
    "PrecisionPolicy": "shardwise.spec.policies",
    "RecomputePolicy": "shardwise.spec.policies",
    "bf16_supported": "shardwise.engine.extensions.precision",
    "block": "shardwise.spec.granularity",
    "wrap_by_class": "shardwise.spec.policies",
    "wrap_by_name": "shardwise.spec.policies",
    "wrap_by_size": "shardwise.spec.policies",
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
    "NonFiniteError": "shardwise.spec.errors",
    "CollectiveEvent": "shardwise.comm.base",
    "optimizer_in_backward": "shardwise.optim.in_backward",
    "ExponentialMovingAverage": "shardwise.weights.state.average",
    "parallelize": "shardwise.api.parallelize",
    "check_replicas": "shardwise.api.replicas",
    "save": "shardwise.api.save",
    "save_async": "shardwise.api.save",
    "finish_save": "shardwise.api.save",
    "save_failure": "shardwise.api.save",
    "load": "shardwise.api.save",
    "eval_step": "shardwise.api.train_step",
    "TracedModel": "shardwise.cost.traced",
    "trace_model": "shardwise.api.trace_model",
    "train_step": "shardwise.api.train_step",
    "dry_run": "shardwise.api.dry_run",
    "DryRun": "shardwise.api.dry_run",
    "parity": "shardwise.testing.parity",
    "generate": "shardwise.generation.decode",
    "generate_stream": "shardwise.generation.decode",
    "score": "shardwise.generation.score",
    "Score": "shardwise.generation.score",
    "export": "shardwise.api.export",
    "fully_shard": "shardwise.api.fully_shard",
    "register_fsdp_forward_method": "shardwise.api.fully_shard",
    "gradient_sync": "shardwise.api.model",
    "logical_shape": "shardwise.api.model",
    "record_collectives": "shardwise.api.model",
    "record_pipeline": "shardwise.parallel.pipeline.pipelined",
    "chunk_cross_entropy": "shardwise.engine.extensions.chunked_loss",
    "clip_grad_norm": "shardwise.optim.clip",
    "Muon": "shardwise.optim.muon",
    "muon_groups": "shardwise.optim.muon_groups",
    "convert_sync_batchnorm": "shardwise.engine.extensions.batch_norm",
    "data_parallel_rank": "shardwise.api.model",
    "data_parallel_size": "shardwise.api.model",
    "declare_elementwise": "shardwise.engine.storage.optimizer",
    "deferred_init": "shardwise.weights.init.deferred",
    "flat_parameters": "shardwise.engine.storage.flat_parameters",
    "declare_granularity": "shardwise.engine.storage.optimizer",
    "full_state_dict": "shardwise.weights.state.model",
    "iterate_full_parameters": "shardwise.weights.state.iterate",
    "lerp_parameters": "shardwise.weights.state.lerp",
    "load_full_state_dict": "shardwise.weights.state.model",
    "GradScaler": "shardwise.optim.scaler",
    "summary": "shardwise.api.summary",
    "full_parameters": "shardwise.weights.state.full_parameters",
    "join": "shardwise.api.join",
    "Run": "shardwise.train.run",
    "TrainSpec": "shardwise.train.spec",
    "Mean": "shardwise.train.spec",
    "Callback": "shardwise.train.callback",
    "from_pretrained": "shardwise.train.model.pretrained",
    "newest_checkpoint": "shardwise.checkpoint.store",
    "DataParallel": "shardwise.api.data_parallel",
    "DistributedSampler": "shardwise.train.data.sampler",
}
_MODULES = {"launch", "models", "planner", "train"}

__all__ = [
    "ActivationOffloadPolicy",
    "Callback",
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
    "Mean",
    "MemoryBudgetError",
    "MeshError",
    "ModelShape",
    "Muon",
    "NonFiniteError",
    "OffloadPolicy",
    "ParallelPlan",
    "PipelinePolicy",
    "PlacementError",
    "Placements",
    "PlanError",
    "PrecisionPolicy",
    "RankDisagreement",
    "RecomputePolicy",
    "Run",
    "Score",
    "ShardwiseError",
    "StateError",
    "StorageError",
    "TracedModel",
    "TrainSpec",
    "__version__",
    "bf16_supported",
    "block",
    "check_replicas",
    "chunk_cross_entropy",
    "clip_grad_norm",
    "convert_sync_batchnorm",
    "data_parallel_rank",
    "data_parallel_size",
    "declare_elementwise",
    "declare_granularity",
    "deferred_init",
    "dry_run",
    "eval_step",
    "export",
    "finish_save",
    "flat_parameters",
    "from_pretrained",
    "full_parameters",
    "full_state_dict",
    "fully_shard",
    "generate",
    "generate_stream",
    "gradient_sync",
    "iterate_full_parameters",
    "join",
    "launch",
    "lerp_parameters",
    "load",
    "load_full_state_dict",
    "logical_shape",
    "models",
    "muon_groups",
    "newest_checkpoint",
    "optimizer_in_backward",
    "parallelize",
    "parity",
    "record_collectives",
    "record_pipeline",
    "register_fsdp_forward_method",
    "save",
    "save_async",
    "save_failure",
    "score",
    "summary",
    "trace_model",
    "train",
    "train_step",
    "wrap_by_class",
    "wrap_by_name",
    "wrap_by_size",
]

if TYPE_CHECKING:
    from shardwise import models
    from shardwise.api.data_parallel import DataParallel
    from shardwise.api.dry_run import DryRun, dry_run
    from shardwise.api.export import export
    from shardwise.api.fully_shard import fully_shard, register_fsdp_forward_method
    from shardwise.api.join import join
    from shardwise.api.model import (
        data_parallel_rank,
        data_parallel_size,
        gradient_sync,
        logical_shape,
        record_collectives,
    )
    from shardwise.api.parallelize import parallelize
    from shardwise.api.replicas import check_replicas
    from shardwise.api.save import finish_save, load, save, save_async, save_failure
    from shardwise.api.summary import summary
    from shardwise.api.trace_model import trace_model
    from shardwise.api.train_step import eval_step, train_step
    from shardwise.checkpoint.store import newest_checkpoint
    from shardwise.comm.base import CollectiveEvent
    from shardwise.cost.traced import TracedModel
    from shardwise.engine.extensions.batch_norm import convert_sync_batchnorm
    from shardwise.engine.extensions.chunked_loss import chunk_cross_entropy
    from shardwise.engine.extensions.precision import bf16_supported
    from shardwise.engine.storage.flat_parameters import flat_parameters
    from shardwise.engine.storage.optimizer import declare_elementwise, declare_granularity
    from shardwise.generation.decode import generate, generate_stream
    from shardwise.generation.score import Score, score
    from shardwise.launch.function import launch
    from shardwise.optim.clip import clip_grad_norm
    from shardwise.optim.in_backward import optimizer_in_backward
    from shardwise.optim.muon import Muon
    from shardwise.optim.muon_groups import muon_groups
    from shardwise.optim.scaler import GradScaler
    from shardwise.parallel.pipeline.pipelined import record_pipeline
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
    from shardwise.spec.placement import Placements
    from shardwise.spec.plan import ParallelPlan
    from shardwise.spec.policies import (
        ActivationOffloadPolicy,
        OffloadPolicy,
        PrecisionPolicy,
        RecomputePolicy,
        wrap_by_class,
        wrap_by_name,
        wrap_by_size,
    )
    from shardwise.spec.schedule import PipelinePolicy
    from shardwise.spec.shape import ModelShape
    from shardwise.testing.parity import parity
    from shardwise.train.call import train
    from shardwise.train.callback import Callback
    from shardwise.train.data.sampler import DistributedSampler
    from shardwise.train.model.pretrained import from_pretrained
    from shardwise.train.run import Run
    from shardwise.train.spec import Mean, TrainSpec
    from shardwise.weights.init.deferred import deferred_init
    from shardwise.weights.state.average import ExponentialMovingAverage
    from shardwise.weights.state.full_parameters import full_parameters
    from shardwise.weights.state.iterate import iterate_full_parameters
    from shardwise.weights.state.lerp import lerp_parameters
    from shardwise.weights.state.model import full_state_dict, load_full_state_dict


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
