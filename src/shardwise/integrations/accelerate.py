"""``accelerate.Accelerator`` under a plan.

::

    from shardwise.integrations.accelerate import ShardwiseAccelerator

    accelerator = ShardwiseAccelerator(plan=sw.ParallelPlan(strategy="zero3"), gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The training loop does not change: ``accumulate``, ``backward``, ``clip_grad_norm_``, ``gather_for_metrics``,
``save_state`` and ``load_state``, ``get_state_dict``. Start the processes by ``torchrun`` or ``accelerate launch``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # pyrefly: ignore[missing-import]
from accelerate.utils import DDPCommunicationHookType  # pyrefly: ignore[missing-import]
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import attachment_of
from shardwise.integrations.trainer import (
    check_alone,
    check_axes,
    check_ddp_options,
    check_samples,
    optimizers_of,
    save_over,
)
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan

_FOLDER = "shardwise"


class ShardwiseAccelerator(Accelerator):
    """An accelerator whose models train under a plan.

    Args:
        plan: The plan; by default zero3 over all ranks. ``tp``, ``pp`` and ``cp`` are refused, because every rank gets
            different samples.
        *args: The accelerator's arguments.
        **kwargs: The accelerator's arguments. ``mixed_precision="fp16"`` is refused. ``"bf16"`` runs forwards under
            autocast; a plan with ``mp_policy="bf16"`` also gathers in 16 bit.

    Raises:
        PlanError: The plan or the arguments are not supported here.
    """

    def __init__(self, *args: Any, plan: ParallelPlan | str | None = None, **kwargs: Any) -> None:
        self.plan = ParallelPlan(strategy=plan) if isinstance(plan, str) else plan or ParallelPlan()
        check_samples(self.plan, "ShardwiseAccelerator")
        super().__init__(*args, **kwargs)
        check_alone("ShardwiseAccelerator")
        if self.ddp_handler is not None and self.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
            check_ddp_options({"DistributedDataParallelKwargs(comm_hook=...)"}, "ShardwiseAccelerator")
        if self.mixed_precision == "fp16":
            raise PlanError(
                'mixed_precision="fp16": the loss scaler would skip a step on one rank alone.\n'
                '  Use "bf16", or sw.GradScaler in a loop of your own.'
            )

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,  # noqa: FBT001  accelerate's form
        evaluation_mode: bool = False,  # noqa: FBT001, FBT002  accelerate's form
    ) -> nn.Module:
        """Shard the model. An optimizer that was built before keeps working.

        A model that is parallelized already, such as one of ``sw.from_pretrained``, keeps its plan.

        Collective:
            As ``sw.parallelize``. All ranks must call.
        """
        del device_placement, evaluation_mode
        if attachment_of(model) is None:
            sw.parallelize(model.to(self.device), self.plan)
        check_axes(model, "ShardwiseAccelerator")
        # With evaluation_mode accelerate does not wrap the model: it adds autocast, and registers the model.
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients in this block, as ``sw.gradient_sync(model, False)``."""
        with sw.gradient_sync(model, is_enabled=False):
            yield

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the gradients of these parameters by their norm, and return the norm.

        Collective:
            As ``sw.clip_grad_norm``.
        """
        clipped = list(parameters)
        chosen = {id(parameter) for parameter in clipped}
        for model in self._models:  # includes parameters outside of units, and works on a rank without any
            if chosen == {id(parameter) for parameter in model.parameters()}:
                return sw.clip_grad_norm(model, max_norm, norm_type)
        return sw.clip_grad_norm(clipped, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002, ARG002  accelerate's form
        """Return the plain model's state dict on the main process, ``{}`` elsewhere. All ranks must call."""
        return sw.full_state_dict(model)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save as the accelerator; models and optimizers are saved by ``sw.save``, and load on any number of ranks."""
        with self._without_models():
            folder = super().save_state(output_dir, *args, **kwargs)
        for index, model in enumerate(self._models):
            save_over(Path(folder) / f"{_FOLDER}-{index}", model, self._optimizers_of(model) or None)
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` saved."""
        with self._without_models():
            super().load_state(input_dir, *args, **kwargs)
        folder = Path(input_dir) if input_dir is not None else self._newest()
        for index, model in enumerate(self._models):
            sw.load(folder / f"{_FOLDER}-{index}", model, self._optimizers_of(model) or None)

    @contextlib.contextmanager
    def _without_models(self) -> Iterator[None]:
        """Exclude models and optimizers from the accelerator's saves and loads in this block."""
        hidden = self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = hidden

    def _optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return optimizers_of(model, [each.optimizer for each in self._optimizers])

    def _newest(self) -> Path:
        """Return the folder that the accelerator reads by default."""
        found = (Path(self.project_dir) / "checkpoints").glob("checkpoint_*")
        return max(found, key=lambda path: int(path.name.rpartition("_")[2]))
