"""What of a run deserves a look, in sentences: the first thing that its page says."""

from __future__ import annotations

from shardwise.report import beside
from shardwise.report.run import Run

#: Measured over predicted from which on a run is worth a look: of memory, and of the time of a step.
MEMORY, TIME = 1.05, 1.25


def warnings(run: Run) -> list[str]:
    """One sentence for each thing that went wrong, or otherwise than predicted."""
    found = []
    skipped = sum(
        scale is not None and norm is None
        for scale, norm in zip(run.values("loss_scale"), run.values("grad_norm"), strict=True)
    )
    if skipped:
        found.append(f"Loss scaling skipped {_count(skipped, 'step')}: a gradient was not finite.")
    broken = run.values("loss").count(None)
    if broken:
        found.append(f"{_count(broken, 'step')} recorded no finite loss.")
    failed = run.summary.get("failed_saves")
    if isinstance(failed, list) and failed:
        found.append(f"{_count(len(failed), 'checkpoint')} could not be saved: {'; '.join(map(str, failed))}.")
    peak, time_s = beside.peak_bytes(run), beside.step_time(run)
    predicted = beside.first("predicted_peak_memory_bytes", run.summary, run.plan)
    if peak and predicted and peak > MEMORY * predicted:
        found.append(f"Peak memory was {peak / predicted:.2f} times the prediction.")
    predicted = beside.first("predicted_step_time_s", run.summary, run.plan)
    if time_s and predicted and time_s > TIME * predicted:
        found.append(f"A step took {time_s / predicted:.2f} times the predicted time.")
    return found


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
