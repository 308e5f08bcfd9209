"""Training in one plain process, with the samples and the order of additions of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.dtype import as_real
from shardwise.parallel.pipeline.batch import Forward, LossFn, forward_loss

OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Job:
    """The training that is compared.

    Attributes:
        build_model: Builds the model, with the same weights at every call.
        parts: The batches by step, reader and microbatch. A reader is the set of ranks that read the same samples.
        loss_fn: See ``sw.train_step``.
        make_optimizer: Makes the optimizer of a model, plain or parallelized.
        max_norm: Norm to which gradients are clipped.
        forward: See ``sw.train_step``.
    """

    build_model: Callable[[], nn.Module]
    parts: Sequence[Sequence[Sequence[Any]]]
    loss_fn: LossFn | None
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    max_norm: float
    forward: Forward | None = None


@dataclass
class Run:
    """The results of a run.

    Attributes:
        losses: The loss of each step on this rank; in a pipeline the mean over all ranks.
        norms: The gradient norm of each step.
        parameters: The parameters after the last step, on rank 0.
        lr: The largest learning rate.
        splits_sums: Gradients are added up in a different order than in one process.
        has_mean: ``losses`` are means over all ranks.
        by_reader: In one process: the loss of each reader's samples, for each step.
        means: In one process: the mean of ``by_reader``, for each step.
        draws: In one process: whether a step draws random numbers, as dropout does.
    """

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    lr: float
    splits_sums: bool = False
    has_mean: bool = False
    by_reader: list[list[float]] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    draws: bool = False


class OneProcess:
    """Trains a plain model.

    Gradients of a reader's microbatches are added up first, then the readers of each group of ``group_size``, then the
    groups.

    Attributes:
        model: The model.
        optimizer: The model's optimizer.
        losses: The loss of each reader in the last step.
        dtype: Dtype of the losses.
    """

    def __init__(self, job: Job, group_size: int, model: nn.Module | None = None) -> None:
        self.model = job.build_model() if model is None else model
        self.optimizer = job.make_optimizer(self.model)
        self.losses: list[float] = []
        self.dtype = torch.float32
        self._job, self._group_size = job, group_size
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]

    def backward(
        self, readers: Sequence[Sequence[Any]], begins: Callable[[int, int], object] = lambda _reader, _microbatch: None
    ) -> None:
        """Run forward and backward of a step, and set the parameters' gradients to the means over readers.

        Args:
            readers: The microbatches of each reader.
            begins: Called with the reader and the index of the microbatch before each microbatch, and with the number
                of microbatches after the last one of a reader.
        """
        before = [buffer.clone() for buffer in self.model.buffers()]
        buffers: list[Tensor] = []
        total: dict[nn.Parameter, Tensor] = {}
        group: dict[nn.Parameter, Tensor] = {}
        self.losses = []
        for reader, microbatches in enumerate(readers):
            _put_buffers(self.model, before)
            count = len(microbatches)
            sum_of_losses = 0.0
            for index, microbatch in enumerate(microbatches):
                begins(reader, index)
                loss = forward_loss(self.model, microbatch, self._job.loss_fn, self._job.forward)
                (loss / count if count > 1 else loss).backward()
                sum_of_losses += loss.item()
                self.dtype = loss.dtype
            begins(reader, count)
            self.losses.append(sum_of_losses / count)
            buffers = buffers or [buffer.clone() for buffer in self.model.buffers()]
            _add(group, _take_gradients(self._parameters))
            if (reader + 1) % self._group_size == 0:
                _add(total, group)
                group = {}
        _put_buffers(self.model, buffers)
        for parameter, grad in total.items():
            dtype = torch.promote_types(grad.dtype, torch.float32)
            parameter.grad = grad.div_(torch.full((1,) * grad.dim(), len(readers), dtype=dtype, device=grad.device))

    def update(self) -> float:
        """Clip gradients, step the optimizer, and return the norm of the gradients."""
        grads = [as_real(p.grad) for p in self._parameters if p.grad is not None]
        wide = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt() if grads else torch.zeros(())
        norm = wide.to(torch.float64 if any(g.dtype is torch.float64 for g in grads) else torch.float32)
        coefficient = torch.clamp(self._job.max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(coefficient)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


def _as(dtype: torch.dtype, value: float) -> float:
    """Round a loss like ``sw.train_step``, which computes the mean of microbatches in fp64."""
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def run_one_process(job: Job, group_size: int) -> Run:
    """Run the training in this process."""
    reference = OneProcess(job, group_size)
    run = Run([], [], {}, largest_rate(reference.optimizer))
    for readers in job.parts:
        before = _generators()
        reference.backward(readers)
        run.draws |= any(not torch.equal(one, other) for one, other in zip(before, _generators(), strict=True))
        run.by_reader.append([_as(reference.dtype, loss) for loss in reference.losses])
        run.means.append(_as(reference.dtype, sum(reference.losses) / len(readers)))
        run.norms.append(reference.update())
    state = reference.model.state_dict()
    run.parameters = {name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)}
    return run


def _generators() -> list[Tensor]:
    """The states of torch's generators: of the CPU, and of the current GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def largest_rate(optimizer: torch.optim.Optimizer) -> float:
    """The largest learning rate of an optimizer's groups."""
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _take_gradients(parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    gradients = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    for parameter in gradients:
        parameter.grad = None
    return gradients


def _add(total: dict[nn.Parameter, Tensor], more: dict[nn.Parameter, Tensor]) -> None:
    for parameter, grad in more.items():
        total[parameter] = total[parameter].add_(grad) if parameter in total else grad


def _put_buffers(model: nn.Module, values: Sequence[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.data.copy_(value)
