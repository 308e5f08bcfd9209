"""What a user's own code is told while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.train.log.metrics import Record
    from shardwise.train.loop import Loop


class Callback:
    """Base of callbacks: each method does nothing until it is overridden. All of them are called on every rank.

    ``run`` has ``step``, ``model``, ``optimizer``, ``directory``, ``control.rank`` and ``control.is_first``;
    ``run.progress.say(text)`` prints on rank 0, and ``run.must_end = "reason"``, set on every rank in the same step,
    ends the run with a last checkpoint.

    A callback runs between steps. Collective operations are allowed where every rank makes them.
    """

    def on_start(self, run: Loop) -> None:
        """The run begins, after a checkpoint has been loaded, if one was."""

    def on_step(self, run: Loop, record: Record) -> None:
        """The values of a step have been read. They are read every ``log.every`` steps, so this may come later."""

    def on_evaluation(self, run: Loop, values: Mapping[str, float]) -> None:
        """An evaluation is over: ``eval_loss`` and the metrics, the same on every rank."""

    def on_save(self, run: Loop) -> None:
        """A checkpoint has been written, or, where it is asynchronous, begun."""

    def on_end(self, run: Loop) -> None:
        """The steps are over: all have been made, or a stop was requested. Not called after an error."""
