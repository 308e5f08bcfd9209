"""What is done about a step whose loss or gradient is not finite, or whose loss stands out."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.errors import NonFiniteError
from shardwise.spec.text import printable
from shardwise.train.config.sections import Config
from shardwise.train.steps.bundle import bundle_folder, write_bundle
from shardwise.train.steps.spikes import LossSpikes
from shardwise.train.steps.unread import ReadStep, not_finite


class Health:
    """Judges the steps that have been read, in order, and keeps samples and random states of odd ones."""

    def __init__(self, config: Config, directory: Path, rank: int) -> None:
        """Take what the configuration says about such steps, the run's folder, and this rank, whose file is written."""
        self._train, self._directory, self._rank = config.train, directory, rank
        self._spikes = None if config.log.loss_spikes is None else LossSpikes(config.log.loss_spikes)
        self._skipped_in_a_row = 0

    def warnings(self, step: int, values: ReadStep, *, safe: str) -> list[str]:
        """What has to be said of a step.

        Args:
            step: Its number, as in ``metrics.jsonl``.
            values: What was read of it.
            safe: Which checkpoint holds the run, for the message of the error.

        Raises:
            NonFiniteError: A loss or a norm is not finite, and such steps are not skipped, or too many of them were.
        """
        found = (self._not_finite(step, values, safe), self._spike(step, values))
        return [warning for warning in found if warning is not None]

    def _not_finite(self, step: int, values: ReadStep, safe: str) -> str | None:
        problem = not_finite(values)
        if problem is None:
            self._skipped_in_a_row = 0
            return None
        most = self._train.max_skipped_steps
        self._skipped_in_a_row += 1
        write_bundle(self._directory, self._rank, step, problem, values)
        about = f"Its samples, losses and random states are in {self._bundle(step)}."
        if self._train.non_finite == "skip" and self._skipped_in_a_row <= most:
            return f"WARNING: step {step} was left out: {problem}. {about}"
        if self._train.non_finite == "skip":
            problem += f", as in the {most} steps before (train.max_skipped_steps)"
        update = " Parameters are as before that step." if values.norm is not None else ""
        raise NonFiniteError(
            f"step {step}: {problem}.{update} Nothing was saved since; safe: {safe}.\n"
            f"  {about} Lower optimizer.lr, lengthen schedule.warmup_steps, or set train.non_finite=skip. A resume"
            " takes another rate by --set optimizer.lr=..."
        )

    def _spike(self, step: int, values: ReadStep) -> str | None:
        found = None if self._spikes is None else self._spikes.look(values.loss)
        if found is None:
            return None
        write_bundle(self._directory, self._rank, step, found, values)
        rank = max(values.losses, key=values.losses.__getitem__)
        return (
            f"WARNING: step {step}: {found}; the highest is {values.losses[rank]:.4f}, of rank {rank}. Its samples are"
            f" in {self._bundle(step)}."
        )

    def _bundle(self, step: int) -> str:
        return printable(bundle_folder(self._directory, step))
