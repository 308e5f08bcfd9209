"""Batch norm over the samples of all ranks, on any device. torch's refuses CPU tensors in a world of several ranks.

Statistics are exchanged in float64, and every rank combines them in rank order. Results are the same on every rank, and
differ from those of one process with the full batch only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise import torch_private
from shardwise.comm.base import Comm
from shardwise.engine.storage.attachment import attachment_of
from shardwise.spec.errors import PlanError, StateError

#: Unit name of the collectives in traces.
_UNIT = "sync_batch_norm"


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance in training are taken over the samples of all data-parallel ranks.

    Made by :func:`convert_sync_batchnorm`. Before ``sw.parallelize``, and in a world of one, it is plain batch norm.

    Collective:
        In each forward in training mode one all-gather of ``2 C + 1`` float64 per rank for ``C`` channels; in its
        backward one all-reduce of ``2 C``. All ranks must run it equally often; the numbers of samples may differ.
    """

    comm: Comm | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's signature
        """Normalize ``input[N, C, ...]`` as ``torch.nn.BatchNorm2d``, with the statistics of all ranks."""
        x = input
        uses_batch = self.training or self.running_mean is None
        if self.comm is None or self.comm.size == 1 or not uses_batch:
            return super().forward(x)
        self._check_input_dim(x)
        y, mean, var, count = _Normalize.apply(x, self.weight, self.bias, self.comm, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, var * (count / (count - 1).clamp(min=1)))
        return y

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.item()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), factor)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's signature
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions [N, C, ...], got {list(input.shape)}")


class _Normalize(torch.autograd.Function):
    """Normalizes ``x``; returns ``y``, the mean and (biased) variance of each channel, and the count of samples."""

    @staticmethod
    def forward(  # noqa: PLR0917 - apply() takes no keywords
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, comm: Comm, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _statistics(x, comm)
        scale = torch.rsqrt(var + eps)
        normalized = _normalized(x, mean, scale)
        y = normalized if weight is None else normalized * _per_channel(weight, x)
        y = y if bias is None else y + _per_channel(bias, x)
        ctx.comm = comm
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.mark_non_differentiable(mean, var, count)
        return y.to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    # pyrefly: ignore [bad-override]  the decorator makes ctx positional-only
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = _all_but_channels(x)
        normalized = _normalized(x, mean, scale)
        dy = grad_outputs[0].to(normalized.dtype)
        sum_dy, sum_dy_normalized = dy.sum(dims), (dy * normalized).sum(dims)
        dx = None
        if ctx.needs_input_grad[0]:
            means = torch.cat([sum_dy, sum_dy_normalized]).double()
            ctx.comm.all_reduce(means, unit=_UNIT).wait()
            mean_dy, mean_dy_normalized = (means / count).chunk(2)
            dx = dy - _per_channel(mean_dy, x) - normalized * _per_channel(mean_dy_normalized, x)
            dx = (dx * _per_channel(scale if weight is None else scale * weight, x)).to(x.dtype)
        dweight = None if weight is None else sum_dy_normalized.to(weight.dtype)
        dbias = sum_dy.to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None


def _statistics(x: Tensor, comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of each channel, and the number of samples, over all ranks, in float64.

    Collective:
        One all-gather.
    """
    channels = x.shape[1]
    count = x.numel() // max(channels, 1)
    rows = torch.zeros(comm.size, 2 * channels + 1, dtype=torch.float64, device=x.device)
    if count:
        var, mean = torch.var_mean(_widened(x), _all_but_channels(x), correction=0)
        rows[comm.rank] = torch.cat([mean.double(), count * var.double(), mean.new_tensor([count]).double()])
    comm.all_gather(rows.view(-1), unit=_UNIT).wait()
    means, squares, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    var = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


def _normalized(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (_widened(x) - _per_channel(mean, x)) * _per_channel(scale, x)


def _widened(x: Tensor) -> Tensor:
    """Convert 16-bit samples to float32, in which torch computes them too."""
    return x.float() if x.dtype in {torch.float16, torch.bfloat16} else x


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape and cast ``values[C]`` to be combined with ``x[N, C, ...]``."""
    dtype = torch.float32 if x.dtype in {torch.float16, torch.bfloat16} else x.dtype
    return values.to(dtype).view(1, -1, *[1] * (x.dim() - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Replace every batch norm in ``module`` by one over the samples of all data-parallel ranks.

    Like ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``, for CPU (Gloo) and CUDA alike. Call it before
    ``sw.parallelize`` or ``sw.fully_shard``, which connect the ranks. Parameters and buffers stay the same objects
    under the same names.

    Returns:
        ``module``, changed in place; a new module where it is a batch norm itself.

    Raises:
        StateError: A part of ``module`` is parallelized already.
        PlanError: A batch norm does more than that, such as timm's, which end with the activation.
    """
    for path, child in module.named_modules():
        if _is_convertible(child) and type(child).forward not in {_BatchNorm.forward, nn.SyncBatchNorm.forward}:
            raise PlanError(
                f"{path or type(module).__name__!r} is a {type(child).__name__}, whose own forward would be lost.\n"
                "  On GPUs convert it by its library (timm.layers.convert_sync_batchnorm). Else make two modules of it,"
                " an nn.BatchNorm2d and what follows, or do without: each rank's norm then has its own samples."
            )
        if attachment_of(child) is not None:
            raise StateError(
                f"{path or type(module).__name__!r} is parallelized already.\n"
                "  Call sw.convert_sync_batchnorm() before sw.parallelize()."
            )
    made: dict[int, nn.Module] = {}
    for parent in list(module.modules()):
        children = torch_private.children_of(parent)
        for name, child in children.items():
            if child is not None and _is_convertible(child):
                children[name] = made.setdefault(id(child), _converted(child))
    return _converted(module) if _is_convertible(module) else module


def _is_convertible(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


def _converted(old: nn.Module) -> SyncBatchNorm:
    assert isinstance(old, _BatchNorm)
    new = SyncBatchNorm(
        old.num_features,
        eps=old.eps,
        momentum=old.momentum,
        affine=False,
        track_running_stats=False,
        device="meta",  # its parameters and buffers are replaced below
    )
    new.affine, new.track_running_stats = old.affine, old.track_running_stats
    for name, parameter in old.named_parameters(recurse=False):
        new.register_parameter(name, parameter)
    for name, buffer in old.named_buffers(recurse=False):
        new.register_buffer(name, buffer)
    return new.train(old.training)


def check(model: nn.Module, device: torch.device, world_size: int, call: str) -> None:
    """Refuse ``torch.nn.SyncBatchNorm`` on the CPU, which would raise in the first forward after ``call``."""
    if device.type != "cpu" or world_size == 1:
        return
    for path, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            name = repr(path) if path else type(module).__name__
            raise PlanError(
                f"{name} is a torch.nn.SyncBatchNorm, which refuses CPU tensors in a world of several ranks.\n"
                f"  Call sw.convert_sync_batchnorm(model) before {call}: it takes torch's as well."
            )


def connect(model: nn.Module, open_comm: Callable[[], Comm]) -> None:
    """Open one separate Comm for the batch norms that :func:`convert_sync_batchnorm` made.

    A Comm of the engine would not do, because ranks with different paths order gathers and batch norms differently.
    """
    norms = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
    if all(norm.comm is not None for norm in norms):
        return
    comm = next((norm.comm for norm in norms if norm.comm is not None), None) or open_comm()
    for norm in norms:
        norm.comm = comm


def comms_of(model: nn.Module) -> list[Comm]:
    """The Comms of the batch norms of ``model``."""
    found = (module.comm for module in model.modules() if isinstance(module, SyncBatchNorm))
    return list(dict.fromkeys(comm for comm in found if comm is not None))
