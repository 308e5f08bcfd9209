"""metrics.jsonl: one record for each step."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from shardwise.launch.file import replace
from shardwise.spec.errors import StorageError
from shardwise.spec.text import printable


@dataclass(frozen=True, slots=True)
class Record:
    """What ``metrics.jsonl`` holds for one step.

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


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line, each line written whole."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        """Open the file; of an earlier run, records after step ``keep_steps`` are dropped: they are made again.

        Raises:
            StorageError: The file cannot be written.
        """
        self.path = path
        with self._refusals():
            kept = [line for line in _lines(path) if _step(line) <= keep_steps]
            replace(path, "".join(f"{line}\n" for line in kept))
            self._file: TextIO = path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append one record."""
        with self._refusals():
            self._file.write(to_line(record))

    def close(self) -> None:
        """Close the file. What could not be written is refused a second time, which is no news."""
        with contextlib.suppress(OSError):
            self._file.close()

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{printable(self.path)} cannot be written: {error.strerror}.\n  Free space on the disk."
            ) from None


def to_line(record: Record) -> str:
    """A record as its line of the file."""
    values: dict[str, Any] = asdict(record)
    values |= values.pop("values")
    if record.eval_loss is None:
        del values["eval_loss"]
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None  # JSON has no infinity
    return json.dumps(values) + "\n"


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; lines cut short by a crash count as after everything."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
