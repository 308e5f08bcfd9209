"""The optimizer's step, left out where the loss or the gradient is not finite, without waiting for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import shardwise as sw


class Update:
    """Clips the gradient and steps, unless the gradient is not finite: then parameters and optimizer stay as they are.

    The norm is that of all ranks, so that all of them leave the step out, and nothing is exchanged for it. On a GPU the
    host does not wait: the optimizer's fused kernels look at the finding on the device, as they do for torch's
    ``GradScaler``. An optimizer without such kernels needs a host that reads the norm. On a CPU it is there already.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float | None, stops: bool
    ) -> None:
        """Take what is stepped; with ``stops`` all steps after one that is not finite are left out too."""
        self._model, self._optimizer = model, optimizer
        self._max_norm, self._stops = math.inf if max_norm is None else max_norm, stops
        self._refused: Tensor | None = None

    def make(self, scaler: sw.GradScaler) -> tuple[Tensor, bool]:
        """Clip and step: the norm before clipping, and whether loss scaling has left the step out.

        In fp16 the host waits for the gradients here, as with torch's own ``GradScaler``.

        Collective:
            Those of ``scaler.unscale_`` and ``sw.clip_grad_norm``.
        """
        scaler.unscale_(self._optimizer)
        norm = sw.clip_grad_norm(self._model, self._max_norm)
        is_skipped = scaler.has_found_inf and scaler.get_scale() > 1.0  # at 1 a smaller one would not help
        if scaler.is_enabled():
            scaler.step(self._optimizer)
            scaler.update()
        else:
            self._step_if_finite(norm)
        self._optimizer.zero_grad()
        return norm, is_skipped

    def _step_if_finite(self, norm: Tensor) -> None:
        refused = (~norm.isfinite()).float()
        if self._stops:
            refused = self._refused = refused if self._refused is None else torch.maximum(self._refused, refused)
        if not needs_host(self._optimizer, norm.device):
            _step_unless(self._optimizer, refused)
        elif not refused.item():
            self._optimizer.step()


def needs_host(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the host has to read a norm on ``device``, as the optimizer's kernels cannot be told to do nothing."""
    is_fused = isinstance(optimizer, torch.optim.Adam) and all(group["fused"] for group in optimizer.param_groups)
    is_there = all(p.device.type == device.type for group in optimizer.param_groups for p in group["params"])
    return device.type == "cpu" or not is_fused or not is_there


def _step_unless(optimizer: torch.optim.Optimizer, refused: Tensor) -> None:
    """``optimizer.step()`` that changes nothing where ``refused`` is 1. The host does not read it.

    ``found_inf`` and ``grad_scale`` are how torch's ``GradScaler`` tells an optimizer with ``fused=True``.
    """
    vars(optimizer).update(found_inf=refused, grad_scale=None)
    try:
        optimizer.step()
    finally:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)


def with_true_gradient(loss: Tensor) -> Tensor:
    """The loss itself; where it is not finite its gradient is nan, so that the norm of all ranks says so.

    An infinite loss may have a finite gradient: that of a cross entropy over a logit of minus infinity has.
    """
    if loss.requires_grad:
        is_finite = loss.detach().isfinite()
        loss.register_hook(lambda grad: torch.where(is_finite, grad, math.nan))
    return loss
