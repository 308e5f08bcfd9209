# The public names, and the module that defines each: for type checkers, and for __init__.py.

from shardwise import models as models
from shardwise.api.data_parallel import DataParallel as DataParallel
from shardwise.api.dry_run import DryRun as DryRun, dry_run as dry_run
from shardwise.api.export import export as export
from shardwise.api.fully_shard import (
    fully_shard as fully_shard,
    register_fsdp_forward_method as register_fsdp_forward_method,
)
from shardwise.api.join import join as join
from shardwise.api.model import (
    data_parallel_rank as data_parallel_rank,
    data_parallel_size as data_parallel_size,
    gradient_sync as gradient_sync,
    logical_shape as logical_shape,
    record_collectives as record_collectives,
)
from shardwise.api.parallelize import parallelize as parallelize
from shardwise.api.replicas import check_replicas as check_replicas
from shardwise.api.save import (
    finish_save as finish_save,
    load as load,
    save as save,
    save_async as save_async,
    save_failure as save_failure,
)
from shardwise.api.summary import summary as summary
from shardwise.api.trace_model import trace_model as trace_model
from shardwise.api.train_step import eval_step as eval_step, train_step as train_step
from shardwise.checkpoint.store import newest_checkpoint as newest_checkpoint
from shardwise.comm.base import CollectiveEvent as CollectiveEvent
from shardwise.cost.traced import TracedModel as TracedModel
from shardwise.engine.extensions.batch_norm import convert_sync_batchnorm as convert_sync_batchnorm
from shardwise.engine.extensions.chunked_loss import chunk_cross_entropy as chunk_cross_entropy
from shardwise.engine.extensions.precision import bf16_supported as bf16_supported
from shardwise.engine.storage.flat_parameters import flat_parameters as flat_parameters
from shardwise.engine.storage.optimizer import (
    declare_elementwise as declare_elementwise,
    declare_granularity as declare_granularity,
)
from shardwise.generation.decode import generate as generate, generate_stream as generate_stream
from shardwise.generation.score import Score as Score, score as score
from shardwise.launch.function import launch as launch
from shardwise.optim.clip import clip_grad_norm as clip_grad_norm
from shardwise.optim.in_backward import optimizer_in_backward as optimizer_in_backward
from shardwise.optim.muon import Muon as Muon
from shardwise.optim.muon_groups import muon_groups as muon_groups
from shardwise.optim.scaler import GradScaler as GradScaler
from shardwise.parallel.pipeline.pipelined import record_pipeline as record_pipeline
from shardwise.spec.errors import (
    CheckpointError as CheckpointError,
    CommError as CommError,
    CommTimeout as CommTimeout,
    ConfigError as ConfigError,
    MemoryBudgetError as MemoryBudgetError,
    MeshError as MeshError,
    NonFiniteError as NonFiniteError,
    PlacementError as PlacementError,
    PlanError as PlanError,
    RankDisagreement as RankDisagreement,
    ShardwiseError as ShardwiseError,
    StateError as StateError,
    StorageError as StorageError,
)
from shardwise.spec.granularity import block as block
from shardwise.spec.placement import Placements as Placements
from shardwise.spec.plan import ParallelPlan as ParallelPlan
from shardwise.spec.policies import (
    ActivationOffloadPolicy as ActivationOffloadPolicy,
    OffloadPolicy as OffloadPolicy,
    PrecisionPolicy as PrecisionPolicy,
    RecomputePolicy as RecomputePolicy,
    wrap_by_class as wrap_by_class,
    wrap_by_name as wrap_by_name,
    wrap_by_size as wrap_by_size,
)
from shardwise.spec.schedule import PipelinePolicy as PipelinePolicy
from shardwise.spec.shape import ModelShape as ModelShape
from shardwise.testing.parity import parity as parity
from shardwise.train.call import train as train
from shardwise.train.callback import Callback as Callback
from shardwise.train.data.sampler import DistributedSampler as DistributedSampler
from shardwise.train.model.pretrained import from_pretrained as from_pretrained
from shardwise.train.run import Run as Run
from shardwise.train.spec import Mean as Mean, TrainSpec as TrainSpec
from shardwise.weights.init.deferred import deferred_init as deferred_init
from shardwise.weights.state.average import ExponentialMovingAverage as ExponentialMovingAverage
from shardwise.weights.state.full_parameters import full_parameters as full_parameters
from shardwise.weights.state.iterate import iterate_full_parameters as iterate_full_parameters
from shardwise.weights.state.lerp import lerp_parameters as lerp_parameters
from shardwise.weights.state.model import (
    full_state_dict as full_state_dict,
    load_full_state_dict as load_full_state_dict,
)

__version__: str
