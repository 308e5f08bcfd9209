"""A strategy for Lightning Fabric.

::

    from shardwise.integrations.fabric import ShardwiseFabricStrategy

    strategy = ShardwiseFabricStrategy(sw.ParallelPlan(strategy="zero3"))
    fabric = lightning.Fabric(strategy=strategy, accelerator="gpu", devices=8)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

The training loop does not change: ``fabric.backward``, ``clip_gradients``, ``no_backward_sync``, ``save`` and ``load``.

Fabric and Lightning's Trainer have separate base classes for strategies, whose methods have equal names and different
arguments. Therefore ``ShardwiseStrategy`` (:mod:`shardwise.integrations.lightning`) only works with the Trainer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import MixedPrecision, Precision  # pyrefly: ignore[missing-import]
from lightning.fabric.strategies import DDPStrategy  # pyrefly: ignore[missing-import]
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import attachment_of
from shardwise.integrations.trainer import check_ddp_options, check_samples, optimizers_of
from shardwise.spec.errors import CheckpointError, PlanError, StateError
from shardwise.spec.plan import ParallelPlan

#: File in a saved folder with everything except models and optimizers.
_REST = "rest.pt"


class ShardwiseFabricStrategy(DDPStrategy):
    """Makes ``Fabric.setup`` shard models under a plan.

    Args:
        plan: The plan; by default zero3 over all ranks. ``tp``, ``pp`` and ``cp`` are refused, because every rank gets
            different samples.
        **kwargs: As for Fabric's ``DDPStrategy``, without options of ``DistributedDataParallel``.

    Raises:
        PlanError: The plan or Fabric's precision is not supported here.
    """

    def __init__(self, plan: ParallelPlan | str | None = None, **kwargs: Any) -> None:
        self.plan = ParallelPlan(strategy=plan) if isinstance(plan, str) else plan or ParallelPlan()
        check_samples(self.plan, "ShardwiseFabricStrategy")
        super().__init__(**kwargs)
        check_ddp_options(self._ddp_kwargs, "ShardwiseFabricStrategy")
        self._backward_sync_control = _Accumulation()

    @property
    def precision(self) -> Any:
        """The precision plugin for Fabric's argument ``precision``."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        is_autocast = isinstance(plugin, MixedPrecision) and plugin.precision == "bf16-mixed"
        if not (plugin is None or type(plugin) is Precision or is_autocast):
            raise PlanError(
                f"precision={plugin.precision!r} is not done by ShardwiseFabricStrategy.\n"
                '  Use "32-true" or "bf16-mixed"; ParallelPlan(mp_policy="bf16") computes and gathers 16 bit.'
            )
        self._precision = plugin

    # -- the model

    def module_init_context(self, empty_init: bool | None = None) -> Any:  # noqa: FBT001  fabric's form
        """Device for ``fabric.init_module()``: meta with ``empty_init=True``, and ``setup`` initializes the values."""
        return torch.device("meta") if empty_init else super().module_init_context(empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        """Move the module; a module on meta stays there until :meth:`setup_module`."""
        if not any(tensor.is_meta for tensor in module.parameters()):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module. An optimizer that was built before keeps working.

        Collective:
            As ``sw.parallelize``. All ranks must call.
        """
        return sw.parallelize(module, self.plan)

    # -- gradients

    def clip_gradients_norm(
        self,
        module: nn.Module,  # noqa: ARG002
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,  # noqa: FBT001, FBT002  fabric's form
    ) -> Tensor:
        """Clip by the norm of the optimizer's gradients, and return the norm.

        Collective:
            As ``sw.clip_grad_norm``.

        Raises:
            StateError: The norm is not finite, with ``error_if_nonfinite``.
        """
        parameters = self.precision.main_params(optimizer)
        return sw.clip_grad_norm(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    # -- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the plain model's state dict on rank 0, ``{}`` elsewhere. All ranks must call."""
        return sw.full_state_dict(module)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Refuse, because ``optimizer.state_dict()`` has only this rank's part.

        Raises:
            StateError: Always.
        """
        raise StateError(
            f"{type(optimizer).__name__}.state_dict() would have this rank's part of the state alone.\n"
            "  Call fabric.save(path, {'model': model, 'optimizer': optimizer})."
        )

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002  fabric's form
    ) -> None:
        """Write a folder, with a subfolder by ``sw.save`` for each model, and a file with the rest of ``state``.

        An existing folder (or file) of this name is kept until the new one is complete.

        Collective:
            As ``sw.save`` for each model. All ranks must call.

        Raises:
            CheckpointError: An optimizer belongs to no model in ``state``, models or optimizers are to be filtered, or
                there are storage options.
        """
        parts = _Parts(state)
        if storage_options is not None or parts.whole & set(filter or {}):
            raise CheckpointError(
                "fabric.save() writes models and optimizers whole, to a file system.\n"
                "  Filter other values alone; sw.full_state_dict(model.module) gives weights to choose from."
            )
        target = Path(self.broadcast(os.fspath(path)))
        part = target.with_name(f"{target.name}.new")
        if self.is_global_zero:
            _remove(part)
            part.mkdir(parents=True)
        self.barrier()
        for name, model in parts.models.items():
            sw.save(part / name, model, parts.optimizers_of(model) or None)
        if self.is_global_zero:
            rest = self._convert_stateful_objects_in_state(parts.rest, filter=dict(filter or {}))
            torch.save(rest, part / _REST)
            _remove(target)
            part.rename(target)
        self.barrier()

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,  # noqa: FBT001, FBT002  fabric's form
        weights_only: bool | None = None,  # noqa: FBT001  fabric's form
    ) -> dict[str, Any]:
        """Fill the objects in ``state`` from a checkpoint of any number of ranks and any strategy.

        Collective:
            As ``sw.load`` for each model. All ranks must call.

        Returns:
            Saved values other than models and optimizers that are not in ``state``.

        Raises:
            CheckpointError: There is no such checkpoint, or it lacks something in ``state``.
        """
        source = Path(self.broadcast(os.fspath(path)))
        if isinstance(state, nn.Module):  # fabric.load_raw()
            full = torch.load(source, map_location="cpu", weights_only=weights_only) if self.is_global_zero else {}
            sw.load_full_state_dict(state, full, strict=strict)
            return {}
        if isinstance(state, torch.optim.Optimizer) or not (source / _REST).is_file():
            raise CheckpointError(
                f"{source} is not a folder of fabric.save(), or an optimizer alone is to be read from it.\n"
                "  fabric.load(path, {'model': model, 'optimizer': optimizer}) reads such folders;"
                " fabric.load_raw(path, model) reads a file with a plain model's state dict."
            )
        rest = torch.load(source / _REST, map_location="cpu", weights_only=weights_only)
        targets = state if state is not None else {}
        parts = _Parts(targets)
        found = {entry.name for entry in source.iterdir() if entry.is_dir()} | rest.keys()
        missing = [name for name in (*parts.models, *parts.rest) if name not in found]
        if missing and strict:
            raise CheckpointError(
                f"{source} has {', '.join(sorted(found))}, but not {', '.join(missing)}.\n"
                "  Ask for what is there, or pass strict=False."
            )
        for name, model in parts.models.items():
            if name in found:
                sw.load(source / name, model, parts.optimizers_of(model) or None)
        for name, value in parts.rest.items():
            if name not in rest:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(name))
            else:
                targets[name] = rest.pop(name)
        return rest


class _Accumulation:
    """Implements ``fabric.no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Any:  # noqa: FBT001  fabric's form
        return sw.gradient_sync(module, is_enabled=False) if enabled else contextlib.nullcontext()


class _Parts:
    """The content of a checkpoint, by kind.

    Attributes:
        models: Parallelized models.
        optimizers: Optimizers, each with parameters of one of the models.
        rest: Everything else.
        whole: Names of models and optimizers.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.models = {name: value for name, value in state.items() if _is_sharded(value)}
        self.optimizers = {name: value for name, value in state.items() if isinstance(value, torch.optim.Optimizer)}
        self.whole = self.models.keys() | self.optimizers.keys()
        self.rest = {name: value for name, value in state.items() if name not in self.whole}
        owned = [id(each) for model in self.models.values() for each in self.optimizers_of(model)]
        for name, optimizer in self.optimizers.items():
            if id(optimizer) not in owned:
                raise CheckpointError(
                    f"the optimizer {name!r} is of no model that is saved or loaded with it.\n"
                    "  Pass both: {'model': model, 'optimizer': optimizer}."
                )

    def optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        return optimizers_of(model, self.optimizers.values())


def _is_sharded(value: Any) -> bool:
    return isinstance(value, nn.Module) and attachment_of(value) is not None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
