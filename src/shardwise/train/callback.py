"""The calls to a user's own code while a run is under way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.train.record import Record

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


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
