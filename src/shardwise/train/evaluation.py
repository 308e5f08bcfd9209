"""The loss and the metrics on held-out samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable
from shardwise.train.config.resolve import RunConfig
from shardwise.train.control import Control
from shardwise.train.data.rows import Samples
from shardwise.train.microbatches import Microbatches
from shardwise.train.model.build import objective_of
from shardwise.train.spec import Mean

#: Number of microbatches after which an evaluation checks for a request to stop.
MICROBATCHES_AT_ONCE = 16


@dataclass(frozen=True)
class Evaluation:
    """Computes the held-out loss and metrics of a model."""

    resolved: RunConfig  # the run's configuration
    model: nn.Module
    part: Samples  # the held-out samples
    reader: int  # this rank among those that read different samples
    microbatches: Microbatches  # reads the samples
    control: Control  # communication of the ranks
    must_stop: Callable[[], bool]  # whether any rank was asked to stop. Collective.

    @property
    def num_samples(self) -> int:
        """Number of samples of one evaluation, over all ranks.

        ``train.eval_batches`` global batches. If there are fewer samples, the largest multiple of those that all ranks
        forward at once, which depends on the number of ranks.
        """
        batch = self.resolved.batch
        at_once = batch.micro * batch.data_parallel_size
        most = self.resolved.config.train.eval_batches * batch.total
        return min(self.part.num_samples // at_once * at_once, most)

    def values(self) -> dict[str, float] | None:
        """Return the mean loss (``eval_loss``) and metrics (``eval_NAME``) over ``num_samples``, equal on every rank.

        The samples are spread evenly over their part. Returns ``None`` if a request to stop came first; a pipeline
        always evaluates to the end.

        Collective:
            The model's forwards, then one all-gather of 32 bytes and 16 per metric and rank; and one of eight bytes
            every ``MICROBATCHES_AT_ONCE`` microbatches.
        """
        batch, count, metrics = self.resolved.batch, self.num_samples, self.resolved.spec.metrics
        objective, names = objective_of(self.resolved), sorted(metrics)
        batch_size, stride = batch.micro * batch.data_parallel_size, self.part.num_samples // count
        starts = range(self.reader * batch.micro, count, batch_size)
        samples = [[index * stride for index in range(start, start + batch.micro)] for start in starts]
        losses: list[Tensor] = []
        sums: dict[str, list[tuple[Any, Any]]] = {name: [] for name in ("", *names)}

        def loss_fn(output: Any, part: Any) -> Tensor:
            for name in names:
                found = metrics[name](output, part)
                if not isinstance(found, Mean):
                    raise ConfigError(
                        f"TrainSpec(metrics=...): {printable(name)!r} gave {type(found).__name__}, expected sw.Mean.\n"
                        "  Return a sum and its count, for example sw.Mean(is_right.sum(), len(is_right))."
                    )
                sums[name].append((found.total, found.count))
            loss = objective.loss_fn(output, part)
            if not isinstance(loss, Mean):
                return loss
            sums[""].append((loss.total, loss.count))
            return loss.total

        microbatches = self.microbatches.read(self.part, samples, range(0, count * stride, stride), count)
        at_once = len(samples) if self.resolved.plan.pp > 1 else MICROBATCHES_AT_ONCE
        self.model.eval()
        try:
            for first in range(0, len(samples), at_once):
                if first and self.must_stop():
                    return None
                number = min(at_once, len(samples) - first)
                sw.eval_step(
                    self.model,
                    itertools.islice(microbatches, number),
                    loss_fn,
                    number,
                    forward=objective.forward,
                    losses=losses,
                )
            found = torch.stack(losses).tolist() if losses else []  # read once, after all are computed
        finally:
            self.model.train()
        metric_sums = [float(sum(pair[which] for pair in sums[name])) for name in ("", *names) for which in (0, 1)]
        rows = [row for row in self.control.rows([sum(found), float(bool(found)), *metric_sums]) if row[1]]
        total = [sum(row[column] for row in rows) for column in range(4 + 2 * len(names))]
        mean = total[0] * batch.micro / count / (len(rows) / batch.data_parallel_size)
        values = {"eval_loss": total[2] / total[3] if total[3] else mean}
        for column, name in enumerate(names, 2):
            values[f"eval_{name}"] = total[2 * column] / total[2 * column + 1] if total[2 * column + 1] else math.nan
        return values
