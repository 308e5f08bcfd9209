"""A strategy for ``lightning.Trainer``.

::

    from shardwise.integrations.lightning import ShardwiseStrategy

    strategy = ShardwiseStrategy(sw.ParallelPlan(strategy="zero3"))
    lightning.Trainer(strategy=strategy, accelerator="gpu", devices=8).fit(module, loader)

The full LightningModule is sharded, also on a CPU (``accelerator="cpu"``). A checkpoint is the usual file with the
plain weights, which ``LightningModule.load_from_checkpoint`` reads anywhere, and next to it the folder
``NAME.ckpt.shardwise`` with masters and optimizer state from ``sw.save``: ``fit(ckpt_path=...)`` continues from it on
any number of ranks and under any strategy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision  # pyrefly: ignore[missing-import]
from lightning.pytorch.strategies import DDPStrategy  # pyrefly: ignore[missing-import]
from lightning.pytorch.trainer.states import TrainerFn  # pyrefly: ignore[missing-import]

import shardwise as sw
from shardwise.engine.storage.attachment import attachment_of
from shardwise.integrations.trainer import check_ddp_options, check_samples, save_over
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class _ClipsShards:
    """Clips by the norm of the optimizer's gradients, which are complete before its step begins."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        result = self._wrap_closure(model, optimizer, closure)  # type: ignore[attr-defined]
        if result is not None or not model.automatic_optimization:  # otherwise training_step() has skipped the batch
            optimizer.step(**kwargs)
        return result

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        sw.clip_grad_norm(self.main_params(optimizer), clip_val)  # type: ignore[attr-defined]


class _Plain(_ClipsShards, Precision):
    """The precision ``32-true``."""


class _Autocast(_ClipsShards, MixedPrecision):
    """The precision ``bf16-mixed``."""


class ShardwiseStrategy(DDPStrategy):
    """Trains a LightningModule under a plan.

    Args:
        plan: The plan; by default zero3 over all ranks. ``tp``, ``pp`` and ``cp`` are refused, because every rank gets
            different samples.
        **kwargs: As for Lightning's ``DDPStrategy``, without options of ``DistributedDataParallel``.

    Raises:
        PlanError: The plan or the trainer's precision is not supported here.
    """

    def __init__(self, plan: ParallelPlan | str | None = None, **kwargs: Any) -> None:
        self.plan = ParallelPlan(strategy=plan) if isinstance(plan, str) else plan or ParallelPlan()
        check_samples(self.plan, "ShardwiseStrategy")
        self._read_from: Path | None = None
        super().__init__(**kwargs)
        hooks = {name for name in kwargs if name.startswith("ddp_comm_") or name == "model_averaging_period"}
        check_ddp_options(self._ddp_kwargs.keys() | hooks, "ShardwiseStrategy")

    # -- precision

    @property
    def precision_plugin(self) -> Any:
        """The trainer's precision plugin, extended to clip gradients of shards."""
        return self._precision_plugin if self._precision_plugin is not None else _Plain()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is None:
            self._precision_plugin = None  # then the trainer's argument is used
        elif type(plugin) is Precision:
            self._precision_plugin = _Plain()
        elif type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
            self._precision_plugin = _Autocast(plugin.precision, plugin.device)
        elif isinstance(plugin, _ClipsShards):
            self._precision_plugin = plugin
        else:
            raise PlanError(
                f"precision={plugin.precision!r} is not done by ShardwiseStrategy.\n"
                '  Use "32-true" or "bf16-mixed"; ParallelPlan(mp_policy="bf16") computes and gathers 16 bit.'
            )

    # -- the model

    def setup(self, trainer: Any) -> None:
        """Shard the module; its optimizers are built afterwards.

        Collective:
            As ``sw.parallelize``.
        """
        self.accelerator.setup(trainer)
        if attachment_of(self.model) is None:
            self.model_to_device()
            if self._layer_sync:  # the trainer's sync_batchnorm=True
                sw.convert_sync_batchnorm(self.model)
            sw.parallelize(self.model, self.plan)
            for name in _STEPS:
                sw.register_fsdp_forward_method(self.model, name)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in this block."""
        with sw.gradient_sync(self.model, is_enabled=False):
            yield

    def teardown(self) -> None:
        """Tear down as Lightning, but do not move the shards."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True, because checkpoints are loaded into shards and not into the plain module."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the plain module's state dict on rank 0. All ranks must call."""
        return sw.full_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:  # noqa: ARG002
        """Return an empty dict, because the state is in the folder next to the file."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write the file, and the folder next to it; an existing folder is kept until the new one is complete."""
        save_over(_beside(filepath), self.model, [_bare(each) for each in self.optimizers] or None)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.barrier()

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove the file and the folder next to it."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(
        self,
        checkpoint_path: str | os.PathLike[str],
        weights_only: bool | None = None,  # noqa: FBT001  lightning's form
    ) -> dict[str, Any]:
        """Read the file; shards are later read from the folder next to it, if there is one."""
        folder = _beside(os.path.realpath(checkpoint_path))  # ModelCheckpoint(save_last="link") links only the file
        self._read_from = folder if folder.is_dir() else None
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002  lightning's form
        """Fill the shards."""
        if self._read_from is not None:
            sw.load(self._read_from, self.model)
        else:
            sw.load_full_state_dict(self.model, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Fill the optimizers' state.

        Raises:
            CheckpointError: There is no folder next to the file.
        """
        if self._read_from is None:
            raise sw.CheckpointError(
                "the checkpoint has no folder .shardwise beside it: another strategy saved it.\n"
                "  Load its weights with load_from_checkpoint and start a new run."
            )
        sw.load(self._read_from, self.model, [_bare(each) for each in self.optimizers])


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "_optimizer", optimizer)


def _beside(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.shardwise")
