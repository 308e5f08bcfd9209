"""The lines and the progress bar of a run in the terminal."""

from __future__ import annotations

import math
import sys
from typing import Any

from shardwise.spec.text import printable
from shardwise.train.callback import Record


class Progress:
    """Lines and a progress bar, on rank 0 only."""

    def __init__(self, *, steps: int, every: int, is_shown: bool) -> None:
        self._steps = steps
        self._every = every
        self._is_shown = is_shown
        self._bar: Any = None

    def open(self, start: int) -> None:
        """Show the bar for a run that has made ``start`` steps."""
        if self._is_shown and sys.stdout.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("training", total=self._steps, completed=start, numbers="")
            self._bar.start()

    def step(self, record: Record) -> None:
        """Show a step."""
        if not self._is_shown:
            return
        norm = "norm n/a" if record.grad_norm is None else f"norm {record.grad_norm:.3f}"
        if record.grad_norm is not None:
            norm = norm if math.isfinite(record.grad_norm) else "skipped"
            norm += "" if record.loss_scale is None else f"  scale {record.loss_scale:g}"
        loss = "loss n/a" if record.loss is None else f"loss {record.loss:.4f}"
        speed = f"  {record.tokens_per_s:,.0f} tok/s" if record.tokens else ""
        numbers = f"{loss}  {norm}{speed}"
        if self._bar is not None:
            self._bar.update(self._task, completed=record.step, numbers=numbers)
        elif record.step % self._every == 0 or record.step in (1, self._steps):
            mfu = "n/a" if record.mfu is None or math.isnan(record.mfu) else f"{100 * record.mfu:.1f}%"
            self.say(
                f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {loss}  "
                f"{norm}  lr {record.lr:.2e}  {record.step_time_s * 1000:.0f} ms{speed}  mfu/GPU {mfu}"
            )

    def say(self, text: str) -> None:
        """Show a line of text above the bar."""
        if not self._is_shown:
            return
        safe = printable(text, is_block=True)
        if self._bar is not None:
            self._bar.console.print(safe, markup=False, highlight=False, soft_wrap=True)
        else:
            sys.stdout.write(safe + "\n")
            sys.stdout.flush()

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar() -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
    )
