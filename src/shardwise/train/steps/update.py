"""The optimizer's step, skipped without waiting for the device if the loss or the gradient is not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import shardwise as sw


class Update:
    """Clips the gradient and updates, unless the gradient is not finite: then parameters and optimizer do not change.

    The norm is that of all ranks, so all ranks skip the same steps without further communication. On a GPU the host
    does not wait: the optimizer's fused kernels read the decision on the device, as with torch's ``GradScaler``. For an
    optimizer without such kernels the host must read the norm. On a CPU this costs nothing.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float | None, stops: bool
    ) -> None:
        """Set the optimizer; with ``stops`` all steps after one that is not finite are skipped too."""
        self._model, self._optimizer = model, optimizer
        self._max_norm, self._stops = math.inf if max_norm is None else max_norm, stops
        self._refused: Tensor | None = None

    def make(self, scaler: sw.GradScaler) -> tuple[Tensor, bool]:
        """Clip and update; return the norm before clipping, and whether loss scaling skipped the step.

        In fp16 the host waits for the gradients here, as with torch's ``GradScaler``.

        Collective:
            Those of ``scaler.unscale_`` and ``sw.clip_grad_norm``.
        """
        scaler.unscale_(self._optimizer)
        norm = sw.clip_grad_norm(self._model, self._max_norm)
        is_skipped = scaler.has_found_inf and scaler.get_scale() > 1.0  # a scale below 1 would not help
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
    """Return whether the host must read a norm on ``device``, because the optimizer's kernels cannot skip a step."""
    is_fused = isinstance(optimizer, torch.optim.Adam) and all(group["fused"] for group in optimizer.param_groups)
    is_there = all(p.device.type == device.type for group in optimizer.param_groups for p in group["params"])
    return device.type == "cpu" or not is_fused or not is_there


def _step_unless(optimizer: torch.optim.Optimizer, refused: Tensor) -> None:
    """Run ``optimizer.step()`` so that it changes nothing if ``refused`` is 1. The host does not read ``refused``.

    torch's ``GradScaler`` sets ``found_inf`` and ``grad_scale`` in the same way for an optimizer with ``fused=True``.
    """
    vars(optimizer).update(found_inf=refused, grad_scale=None)
    try:
        optimizer.step()
    finally:
        for name in ("found_inf", "grad_scale"):
            vars(optimizer).pop(name, None)


def with_true_gradient(loss: Tensor) -> Tensor:
    """Return the loss, whose gradient becomes NaN if it is not finite, so that the norm over all ranks shows it.

    An infinite loss may have a finite gradient: for example cross-entropy of a logit of minus infinity.
    """
    if isinstance(loss, Tensor) and loss.requires_grad:  # sw.train_step refuses other losses
        is_finite = loss.detach().isfinite()
        loss.register_hook(lambda grad: torch.where(is_finite, grad, math.nan))
    return loss
