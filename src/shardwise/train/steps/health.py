"""Detection of steps with a non-finite loss or gradient, or with a loss spike, and the data stored about them."""

from __future__ import annotations

import collections
import contextlib
import math
import statistics
from pathlib import Path
from typing import Any

from shardwise.checkpoint import plain
from shardwise.spec.errors import NonFiniteError, StorageError
from shardwise.spec.run_files import ODD_STEPS
from shardwise.spec.text import printable
from shardwise.train.checkpoints import random_state
from shardwise.train.config.sections import Config
from shardwise.train.folder import replace_json
from shardwise.train.steps.pending_metrics import ReadStep, not_finite

#: Maximum number of earlier losses that a loss is compared with, and the minimum.
_WINDOW, _LEAST = 100, 20
#: Ratio of standard deviation to median absolute deviation for normally distributed values.
_DEVIATIONS = 1.4826


class Health:
    """Checks read steps in order, and stores samples and random states of abnormal ones."""

    def __init__(self, config: Config, directory: Path, rank: int) -> None:
        """Create the checks from a configuration; ``rank`` is this rank, whose files are written to ``directory``."""
        self._train, self._directory, self._rank = config.train, directory, rank
        self._spikes = None if config.log.loss_spikes is None else LossSpikes(config.log.loss_spikes)
        self._skipped_in_a_row = 0

    def warnings(self, step: int, values: ReadStep, *, safe: str) -> list[str]:
        """Return warnings about a step; raise a NonFiniteError if it is not finite and may not be skipped."""
        found = (self._not_finite(step, values, safe), self._spike(step, values))
        return [warning for warning in found if warning is not None]

    def _not_finite(self, step: int, values: ReadStep, safe: str) -> str | None:
        problem = not_finite(values)
        if problem is None:
            self._skipped_in_a_row = 0
            return None
        most = self._train.max_skipped_steps
        self._skipped_in_a_row += 1
        about = f"Its samples, losses and random states are in {self._dump_step(step, problem, values)}."
        if not values.step.is_guarded and self._train.non_finite == "skip":
            return f"WARNING: step {step}: {problem}. {about}"
        if self._train.non_finite == "skip" and self._skipped_in_a_row <= most:
            return f"WARNING: step {step} was left out: {problem}. {about}"
        if self._train.non_finite == "skip":
            problem += f", as in the {most} steps before (train.max_skipped_steps)"
        is_kept = values.norm is not None and values.step.is_guarded
        update = " Parameters are as before that step." if is_kept else ""
        raise NonFiniteError(
            f"step {step}: {problem}.{update} Nothing was saved since; safe: {safe}.\n"
            f"  {about} Lower optimizer.lr, lengthen schedule.warmup_steps, or set train.non_finite=skip. A resume"
            " takes another rate by --set optimizer.lr=..."
        )

    def _spike(self, step: int, values: ReadStep) -> str | None:
        loss = values.loss
        found = None if self._spikes is None or loss is None else self._spikes.check(loss)
        if found is None:
            return None
        where, rank = self._dump_step(step, found, values), max(values.losses, key=values.losses.__getitem__)
        return (
            f"WARNING: step {step}: {found}; the highest is {values.losses[rank]:.4f}, of rank {rank}. Its samples are"
            f" in {where}."
        )

    def _dump_step(self, step: int, problem: str, values: ReadStep) -> str:
        """Write this rank's file, unless the disk is full: its samples, all losses, its generators before the step.

        Return the folder of the files of all ranks.
        """
        content: dict[str, Any] = {
            "step": step,
            "rank": self._rank,
            "problem": problem,
            "losses": {str(other): str(loss) for other, loss in values.losses.items()},
            "grad_norm": str(values.norm),
            "lr": values.step.lr,
            "samples": values.step.samples,
            "random": plain.pack(random_state.to_plain(values.step.generators)),
        }
        folder = self._directory / ODD_STEPS / f"step-{step:08d}"
        with contextlib.suppress(StorageError, OSError):
            folder.mkdir(parents=True, exist_ok=True)
            replace_json(folder / f"rank-{self._rank:05d}.json", content)
        return printable(folder)


class LossSpikes:
    """Compares each loss with the median of the losses before it, in units of their spread.

    The median and the median absolute deviation are robust against a few outliers.
    """

    def __init__(self, threshold: float) -> None:
        """Set the number of standard deviations above the median from which on a loss is a spike."""
        self._threshold = threshold
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def check(self, loss: float) -> str | None:
        """Return a description of a spike, or ``None``, and store the loss for later comparisons."""
        before = list(self._losses)
        if math.isfinite(loss):
            self._losses.append(loss)
        if len(before) < _LEAST or not math.isfinite(loss):
            return None
        median = statistics.median(before)
        spread = _DEVIATIONS * statistics.median(abs(each - median) for each in before)
        spread = max(spread, 1e-3 * abs(median))  # if the losses are almost equal
        if not spread or loss - median <= self._threshold * spread:
            return None
        return (
            f"the loss is {loss:.4f}, {(loss - median) / spread:.0f} standard deviations above the median {median:.4f}"
            f" of the {len(before)} steps before"
        )
