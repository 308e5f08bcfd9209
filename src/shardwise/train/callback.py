"""The calls to a user's own code while a run is under way, and the record of a step that they get."""

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
        step: From 1: steps done after this one.
        loss: Mean training loss of the step over all ranks and microbatches; ``None`` where a loop of one's own has
            not said any.
        grad_norm: Global norm of the gradient before clipping. Not finite in a step that fp16's loss scaling skipped;
            ``None`` where backward updates, as all gradients are never there at once.
        lr: Learning rate of the step.
        tokens: Tokens trained on so far, over all ranks.
        tokens_per_s: Tokens of this step over its time, over all ranks.
        step_time_s: Wall time of the step.
        data_time_s: Part of it that was spent waiting for data.
        mfu: Share of the devices' dense peak, per GPU; ``None`` where the peak is unknown.
        peak_memory_bytes: Most bytes of tensors held at once so far, the largest over the ranks.
        collective_bytes: Bytes that rank 0 sent in this step.
        exposed_time_s: Part of ``step_time_s`` in which rank 0 waited for communication of the model (gathers,
            reductions, ``tp``, ``pp``, ``cp``, ``ep``), a wait for a rank that comes later included; measured by the
            host where it waits. ``None`` on a GPU, where the host does not wait: ``--profile-steps`` shows it there.
        optimizer_time_s: Part of ``step_time_s`` for clipping and the optimizer's step, on rank 0; ``None`` where
            backward updates.
        loss_scale: What the loss was multiplied by for the backward; ``None`` where nothing is in fp16.
        eval_loss: The held-out loss after this step, left out of the line where it was not taken. The one before the
            first step is in ``summary.json``.
        values: Other values of the step or its evaluation, by name: each is a key of its own in the line.
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
    """A callback's view of a run.

    Attributes:
        step: Steps made so far.
        model, optimizer: What is trained.
        directory: The run's folder.
        control: ``control.rank``, ``control.size`` and ``control.is_first``, of this rank.
        progress: ``progress.say(text)`` prints on rank 0.
        must_end: Set to a reason, on any rank, it ends the run with a last checkpoint when steps are read next.
    """

    step: int
    model: nn.Module
    optimizer: Optimizer
    directory: Path
    control: Any
    progress: Any
    must_end: str | None


class Callback:
    """Base of callbacks: each method does nothing until it is overridden. All of them are called on every rank.

    A callback runs between steps. Collective operations are allowed where every rank makes them.
    """

    def on_start(self, run: RunView) -> None:
        """The run begins, after a checkpoint has been loaded, if one was."""

    def on_step(self, run: RunView, record: Record) -> None:
        """The values of a step have been read. They are read every ``log.every`` steps, so this may come later."""

    def on_evaluation(self, run: RunView, values: Mapping[str, float]) -> None:
        """An evaluation is over: ``eval_loss`` and the metrics, the same on every rank."""

    def on_save(self, run: RunView) -> None:
        """A save has returned: written, begun where it is asynchronous, or refused by the disk (``run.saves``)."""

    def on_end(self, run: RunView) -> None:
        """The steps are over: all have been made, or a stop was requested. Not called after an error."""
