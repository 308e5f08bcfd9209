"""One record per step, on disk and on the screen."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from shardwise.launch.file import replace
from shardwise.models.shape import GPTConfig
from shardwise.spec.errors import StorageError
from shardwise.train.text import printable

#: Dense peaks in TFLOP/s by device name, as torch gives it, and dtype; every row with its source.
PEAKS = Path(__file__).with_name("peaks.csv")


@dataclass(frozen=True, slots=True)
class Record:
    """What ``metrics.jsonl`` holds for one step.

    Attributes:
        step: From 1: steps done after this one.
        loss: Mean training loss of the step over all ranks and microbatches.
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
        loss_scale: What the loss was multiplied by for the backward; ``None`` where nothing is in fp16.
        eval_loss: The held-out loss after this step, left out of the line where it was not taken. The one before the
            first step is in ``summary.json``.
    """

    step: int
    loss: float
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
    eval_loss: float | None = None


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
        """Close the file."""
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
    if record.eval_loss is None:
        del values["eval_loss"]
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[key] = None  # JSON has no infinity
    return json.dumps(values) + "\n"


def flops_per_token(shape: GPTConfig, seq_len: int) -> float:
    """Forward and backward FLOPs per token: ``6 N + 12 L h s`` (Chowdhery et al., PaLM, 2022, appendix B).

    ``N`` leaves out position embeddings, which are only looked up, and counts the token embedding once, for the output
    projection.
    """
    lookups = shape.seq_len * shape.hidden + (0 if shape.tied else shape.vocab_size * shape.hidden)
    active = shape.num_parameters - lookups
    return 6.0 * active + 12.0 * shape.num_layers * shape.hidden * seq_len


def peak_flops(device_name: str, dtype: str, *, uses_tf32: bool) -> float | None:
    """Dense peak in FLOP/s of a device for matrix products in ``dtype``; ``None`` where it is unknown.

    Args:
        device_name: As ``torch.cuda.get_device_name`` gives it; variants (PCIe, NVL) have names of their own.
        dtype: Short name of the dtype that the products take.
        uses_tf32: Products in fp32 go to the TF32 units, where the device has them.
    """
    with PEAKS.open(encoding="utf-8", newline="") as file:
        row = next((row for row in csv.DictReader(file) if row["device_name"] == device_name), None)
    if row is None or dtype not in {"bf16", "fp16", "fp32"}:
        return None
    found = row["tflops_tf32"] if dtype == "fp32" and uses_tf32 and row["tflops_tf32"] else row[f"tflops_{dtype}"]
    return float(found) * 1e12 if found else None


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8", "replace").splitlines() if path.exists() else []


def _step(line: str) -> float:
    """The step of a line; lines cut short by a crash count as after everything."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
