"""An engine for verl's training workers.

Tested alone on two CPU ranks: steps, checkpoints, weights. Never run on a GPU, in verl's trainers, or with rollouts.

::

    torchrun --nproc-per-node 8 -m verl.trainer.sft_trainer engine=fsdp engine.strategy=shardwise +engine.plan=zero3
        engine._target_=shardwise.integrations.contrib.verl.ShardwiseEngineConfig ...

``_target_`` imports this module, which registers the engine under ``backend="shardwise"``. The engine is verl's FSDP
engine for language models (division of batches, loss), with a model that ``sw.parallelize`` has sharded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_id, get_device_name  # pyrefly: ignore[missing-import]
from verl.utils.torch_dtypes import PrecisionType  # pyrefly: ignore[missing-import]
from verl.workers.config import EngineConfig, FSDPEngineConfig  # pyrefly: ignore[missing-import]
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead  # pyrefly: ignore[missing-import]

import shardwise as sw
from shardwise.integrations.trainer import check_samples
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.plan import ParallelPlan

#: Fields of verl's FSDP section that the plan replaces, with their values without effect.
_IN_THE_PLAN: dict[str, tuple[Any, ...]] = {
    "wrap_policy": ({}, {"min_num_params": 0}),
    "param_offload": (False,),
    "optimizer_offload": (False,),
    "offload_policy": (False,),
    "reshard_after_forward": (True,),
    "fsdp_size": (-1,),
    "forward_prefetch": (False,),
    "use_orig_params": (False,),
    "ulysses_sequence_parallel_size": (1,),
}
_FOLDER, _EXPORTED = "shardwise", "huggingface"


@dataclasses.dataclass
class ShardwiseEngineConfig(FSDPEngineConfig):
    """The engine section of verl's configuration.

    Attributes:
        strategy: ``"shardwise"``, which selects this engine in verl.
        plan: The name of a strategy, or fields of a ``ParallelPlan``. ``tp``, ``pp`` and ``cp`` are refused, because
            verl gives every rank different samples. Without ``mp_policy``, verl's ``mixed_precision`` is used.

    Raises:
        PlanError: The plan is refused, or a field of FSDP is set that the plan replaces.
    """

    strategy: str = "shardwise"
    plan: Any = "zero3"

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.strategy != "shardwise":
            raise PlanError(
                f"engine.strategy={self.strategy!r}: expected 'shardwise'.\n  Set engine.strategy=shardwise."
            )
        for name, values in _IN_THE_PLAN.items():
            if getattr(self, name) not in values:
                raise PlanError(
                    f"engine.{name}={getattr(self, name)!r} is not done by the engine 'shardwise'.\n"
                    "  Leave it out; fields of sw.ParallelPlan go into engine.plan."
                )
        check_samples(self.parallel_plan, "verl's engine 'shardwise'")

    @property
    def parallel_plan(self) -> ParallelPlan:
        """The plan as a ``ParallelPlan``."""
        return ParallelPlan(strategy=self.plan) if isinstance(self.plan, str) else ParallelPlan(**self.plan)


@EngineRegistry.register(model_type="language_model", backend="shardwise", device=["cuda", "cpu"])
class ShardwiseEngine(FSDPEngineWithLMHead):
    """Trains a language model for verl under a plan."""

    def initialize(self) -> None:
        """Build model, optimizer and schedule.

        Collective:
            As ``sw.parallelize``.
        """
        self._build_model_optimizer()
        self._saved: list[Path] = []

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        """Shard verl's model. Rank 0 has read the weights, and sends each rank the part that the rank owns."""
        settings = self.engine_config.mixed_precision or {}
        computes = PrecisionType.to_dtype(settings.get("param_dtype", "bf16"))
        reduces = PrecisionType.to_dtype(settings.get("reduce_dtype", "fp32"))
        if computes == torch.float16:
            raise PlanError("engine.mixed_precision.param_dtype=fp16 is not done here.\n  Use bf16 or fp32.")
        plan = self.engine_config.parallel_plan
        if plan.mp_policy is None and computes != torch.float32:
            plan = dataclasses.replace(plan, mp_policy=sw.PrecisionPolicy(param_dtype=computes, reduce_dtype=reduces))
        self._autocast_dtype = computes
        self.scaler = None
        weights = module.state_dict() if self.rank == 0 else {}
        _leave_to_rank_0(module, torch.device(get_device_name()))
        return sw.parallelize(module, plan, init=weights)

    # -- a step

    @contextlib.contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        with sw.gradient_sync(self.module, is_last_micro_batch):
            yield

    def optimizer_step(self) -> float:
        """Clip by the norm of the whole model and update; if the norm is not finite, all ranks skip the update.

        Returns:
            The norm before clipping.

        Collective:
            As ``sw.clip_grad_norm``.
        """
        norm = sw.clip_grad_norm(self.module, self.optimizer_config.clip_grad)
        if norm.isfinite():
            self.optimizer.step()
        else:
            self.optimizer.zero_grad()
        return norm.item()

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:  # noqa: FBT001, FBT002  verl's form
        """Do nothing for the device of the shards, which cannot be moved.

        Raises:
            StateError: Another device is requested.
        """
        if (model or optimizer or grad) and device != get_device_name():
            raise StateError(
                f"the engine 'shardwise' cannot move shards to {device!r} between steps.\n"
                '  Use ParallelPlan(offload_policy="cpu"), or give training and rollout devices of their own.'
            )

    # -- checkpoints and weights

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write ``shardwise/`` by ``sw.save``, and with ``hf_model`` in ``save_contents`` a Hugging Face folder.

        Collective:
            As ``sw.save``, and as ``sw.export``.

        Raises:
            StateError: ``hdfs_path`` is given; verl's trainer copies the folder itself.
        """
        del kwargs
        if hdfs_path is not None:
            raise StateError(f"save_checkpoint(hdfs_path={hdfs_path!r}) is not done here.\n  Set default_hdfs_dir.")
        folder = Path(local_path)
        if self.rank == 0:
            for name in (_FOLDER, _EXPORTED):
                shutil.rmtree(folder / name, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier(group=self.get_data_parallel_group())
        state = {"step": global_step, "schedule": self.lr_scheduler.state_dict()}
        sw.save(folder / _FOLDER, self.module, self.optimizer, state=state)
        if "hf_model" in self.checkpoint_config.save_contents:
            sw.export(folder / _EXPORTED, self.module, tokenizer=self.model_config.tokenizer)
        self._saved = [*(saved for saved in self._saved if saved != folder), folder]
        if max_ckpt_to_keep is not None and max_ckpt_to_keep > 0:
            old, self._saved = self._saved[:-max_ckpt_to_keep], self._saved[-max_ckpt_to_keep:]
            for each in old if self.rank == 0 else []:
                shutil.rmtree(each, ignore_errors=True)

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,  # noqa: FBT001, FBT002  verl's form
        **kwargs: Any,
    ) -> None:
        """Load what :meth:`save_checkpoint` saved, on any number of ranks and under any strategy.

        Collective:
            As ``sw.load``.
        """
        del hdfs_path, del_local_after_load, kwargs
        state = sw.load(Path(local_path) / _FOLDER, self.module, self.optimizer)
        self.lr_scheduler.load_state_dict(state["schedule"])

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Yield unsharded weights in 16 bit, unit by unit, for verl's inference engines.

        Collective:
            As ``sw.iterate_full_parameters``, while the iterator is read. All ranks must read all of it.

        Raises:
            StateError: The model has adapters.
        """
        del kwargs
        if self._is_lora:
            raise StateError(
                "weights of adapters are not given to rollouts.\n  Merge them, or train without lora_rank."
            )
        return sw.iterate_full_parameters(self.module, dtype="bf16"), None


def _leave_to_rank_0(module: nn.Module, device: torch.device) -> None:
    """Move the parameters to meta, keeping ties, and the buffers to the device."""
    on_meta: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in on_meta:
                on_meta[id(parameter)] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            setattr(part, name, on_meta[id(parameter)])
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            part._buffers[name] = buffer.to(get_device_id() if device.type != "cpu" else device)  # noqa: SLF001
