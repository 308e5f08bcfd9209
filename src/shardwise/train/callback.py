"""Callbacks: methods of a user's code that a run calls, and the record of a step that they receive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Record:
    """A line of ``metrics.jsonl``: one step.

    Attributes:
        step: Number of steps made, including this one.
        loss: Mean training loss of the step over all ranks and microbatches; ``None`` if a user's loop recorded none.
        grad_norm: Global norm of the gradient before clipping. Not finite in a step that fp16's loss scaling skipped;
            ``None`` if parameters are updated in backward, because the full gradient never exists then.
        lr: Learning rate of the step.
        tokens: Tokens trained on so far, over all ranks.
        tokens_per_s: Tokens of this step over its time, over all ranks.
        step_time_s: Wall time of the step.
        data_time_s: Part of ``step_time_s`` spent waiting for data.
        mfu: Share of the devices' dense peak, per GPU; ``None`` if the peak is unknown.
        peak_memory_bytes: Peak bytes of tensors so far, the maximum over the ranks.
        collective_bytes: Bytes that rank 0 sent in this step.
        exposed_time_s: Part of ``step_time_s`` in which rank 0 waited for communication of the model (gathers,
            reductions, ``tp``, ``pp``, ``cp``, ``ep``), including waits for slower ranks; measured on the host.
            ``None`` on a GPU, where the host does not wait: ``--profile-steps`` shows the time there.
        optimizer_time_s: Part of ``step_time_s`` for clipping and the optimizer's step, on rank 0; ``None`` if
            parameters are updated in backward.
        loss_scale: Factor of the loss in backward; ``None`` unless fp16 is used.
        eval_loss: Held-out loss after this step, left out of the line if it was not evaluated. The evaluation before
            the first step is in ``summary.json``.
        values: Other values of the step or its evaluation, by name; each becomes a key of the line.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    tokens_per_s: float
    step_time_s: float
    data_time_s: float
    mfu: float | None
    peak_memory_bytes: int
    collective_bytes: int
    loss_scale: float | None = None
    optimizer_time_s: float | None = None
    exposed_time_s: float | None = None
    eval_loss: float | None = None
    values: dict[str, float] = field(default_factory=dict)


class RunView(Protocol):
    """The attributes of a run that a callback may use.

    Attributes:
        step: Steps made so far.
        model, optimizer: The model and the optimizer in training.
        directory: The run's folder.
        control: ``control.rank``, ``control.size`` and ``control.is_first`` of this rank.
        progress: ``progress.say(text)`` prints on rank 0.
        must_end: If set to a reason on any rank, the run saves and ends when values of steps are next read.
    """

    step: int
    model: nn.Module
    optimizer: Optimizer
    directory: Path
    control: Any
    progress: Any
    must_end: str | None


class Callback:
    """Base class of callbacks. Methods do nothing until they are overridden; all of them are called on every rank.

    Callbacks run between steps. They may communicate if every rank makes the same calls.
    """

    def on_start(self, run: RunView) -> None:
        """The run starts; a checkpoint has been loaded if there was one."""

    def on_step(self, run: RunView, record: Record) -> None:
        """The values of a step have been read. Because of ``log.every``, several steps may have passed since."""

    def on_evaluation(self, run: RunView, values: Mapping[str, float]) -> None:
        """An evaluation has finished: ``eval_loss`` and the metrics, the same on every rank."""

    def on_save(self, run: RunView) -> None:
        """A save has returned: written, started (asynchronous), or failed because of the disk."""

    def on_end(self, run: RunView) -> None:
        """The steps have ended: all are made, or a stop was requested. Not called after an error."""
