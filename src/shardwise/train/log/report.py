"""Reports of a run: plan.json, summary.json and other files of its folder; first and last lines in the terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.launch.environment import environment
from shardwise.planner.explain import odd_sizes
from shardwise.report import read_run, run_page
from shardwise.report.numbers import finite, thin
from shardwise.spec.bound import read_json
from shardwise.spec.errors import StorageError
from shardwise.spec.mesh import Mesh
from shardwise.spec.run_files import CONFIG, ENVIRONMENT, MEMORY, MODEL, PLAN, PREDICTED, REPORT, SUMMARY
from shardwise.spec.text import printable, size
from shardwise.train.checkpoints.saved_state import Progressed
from shardwise.train.control import Control
from shardwise.train.folder import replace_json, replace_text
from shardwise.train.log.progress import Progress
from shardwise.train.predicted.step import PredictedStep

#: Measurements of the steps of a start, in summary.json.
_MEASURED = (
    *("tokens_per_s", "peak_memory_bytes", "step_time_s", "timed_steps"),
    *("wall_time_s", "steps_time_s", "eval_time_s", "checkpoint_time_s"),
)
#: Fields that must be equal for earlier measurements to be kept.
_SAME = "steps", "world_size", "strategy", "predicted_peak_memory_bytes", "predicted_step_time_s"
#: Number of units that are named at the end of a run.
_LARGEST = 4
#: Fraction of the step time above which the time for data is reported.
_MUCH_DATA = 0.1
#: Outcome reason of a run that made all of its steps.
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run."""

    exit_code: int
    reason: str


@dataclass(slots=True)
class Speed:
    """Time and memory measurements of this process's steps."""

    tokens: int = 0  # tokens of the timed steps, over all ranks
    seconds: float = 0.0  # total time of the timed steps
    data_s: float = 0.0  # part of it that this rank's host spent on data
    timed_steps: int = 0  # number of timed steps
    made_steps: int = 0  # steps of this process
    timed_from: int = 0  # number of first steps that are not timed
    own_peak_bytes: int = 0  # peak bytes of this rank's tensors
    #: On a CPU: bytes allocated by each unit, at the peak of a measured step on this rank
    peak_by_unit: dict[str, int] = field(default_factory=dict)
    steps_s: float = 0.0  # seconds of all steps, also those that are not timed
    eval_s: float = 0.0  # seconds of evaluations
    checkpoint_s: float = 0.0  # seconds that training waited for saves
    began_at: float = field(default_factory=time.perf_counter)  # start of this process, in ``time.perf_counter``

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second; ``None`` before the first timed step."""
        return self.tokens / self.seconds if self.seconds else None

    @property
    def step_time_s(self) -> float | None:
        """The mean time of the timed steps; ``None`` before the first one."""
        return self.seconds / self.timed_steps if self.timed_steps else None


@dataclass(frozen=True, slots=True)
class Report:
    """The facts of a run, and their output in files (on rank 0) and in the terminal."""

    directory: Path  # the run's folder
    device: torch.device  # this rank's device
    config: str  # the text of config.yaml
    #: Content of plan.json apart from the predictions: ``world_size``, ``mesh``, ``parallel``, ``batch``
    plan: dict[str, Any]
    model: str  # the text of ``sw.summary``
    lines: Sequence[str]  # the first lines of output
    predicted: dict[str, Any]  # the content of predicted.json
    predicted_bytes: dict[str, int]  # bytes by category on the rank with the most
    units: list[dict[str, Any]]  # name, class and elements of each unit, and how many elements each rank owns
    predicted_step: PredictedStep  # the predicted time of a step, or why there is none
    #: MFU of a step that takes one second, if the devices' peak is known
    mfu_of_step: float | None = None
    data_advice: str = ""  # advice that is added if data takes much of a step's time

    @property
    def predicted_total(self) -> int:
        """Predicted bytes of the tensors that are measured: on CUDA only those on the device."""
        return sum(count for name, count in self.predicted_bytes.items() if name != "host" or self.device.type == "cpu")

    @property
    def predicted_peak(self) -> int | None:
        """The predicted peak; ``None`` if the activations cannot be predicted."""
        return self.predicted_total if "activations" in self.predicted_bytes else None

    def write_start(self) -> None:
        """Write config.yaml, model.txt, environment.json, predicted.json and plan.json."""
        replace_text(self.directory / CONFIG, self.config)
        replace_text(self.directory / MODEL, f"{self.model}\n")
        replace_json(self.directory / ENVIRONMENT, environment())
        replace_json(self.directory / PREDICTED, self.predicted)
        predictions = {
            "predicted_bytes_per_rank": self.predicted_bytes,
            "predicted_peak_memory_bytes": self.predicted_peak,
            "predicted_step_time_s": self.predicted_step.seconds,
            "units": self.units,
        }
        replace_json(self.directory / PLAN, self.plan | predictions)

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json, NaN as null. A full disk is ignored: the outcome of the run is already known."""
        known = {name: finite(each) if isinstance(each, float) else each for name, each in values.items()}
        with contextlib.suppress(StorageError):
            replace_json(self.directory / SUMMARY, known)

    def summary(
        self, done: Progressed, outcome: Outcome, speed: Speed, *, peak_bytes: int, failed_saves: list[str]
    ) -> dict[str, Any]:
        """Return the content of summary.json: steps, losses, predicted and measured memory and time.

        A start that makes no step, such as the resume of a finished run, keeps the earlier measurements if the plan is
        the same.
        """
        found = {
            "steps": done.step,
            "first_loss": done.first_loss,
            "final_loss": done.final_loss,
            "eval_loss_first": done.eval_loss_first,
            "eval_loss_final": done.eval_loss_final,
            "best": done.best,
            "best_step": done.best_step or None,
            "tokens_per_s": speed.tokens_per_s,
            "peak_memory_bytes": peak_bytes or None,
            "predicted_peak_memory_bytes": self.predicted_peak,
            "step_time_s": speed.step_time_s,
            "timed_steps": speed.timed_steps,
            "predicted_step_time_s": self.predicted_step.seconds,
            "world_size": self.plan["world_size"],
            "strategy": self.plan["parallel"].get("strategy"),
            "exit_code": outcome.exit_code,
            "reason": outcome.reason,
            "failed_saves": failed_saves,
            "wall_time_s": time.perf_counter() - speed.began_at,
            "steps_time_s": speed.steps_s,
            "eval_time_s": speed.eval_s,
            "checkpoint_time_s": speed.checkpoint_s,
        }
        return found if speed.made_steps else found | self._measured_before(found)

    def _measured_before(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the measurements in summary.json if they are of as many steps under the same plan."""
        with contextlib.suppress(OSError, ValueError):
            before = read_json(self.directory / SUMMARY)
            if isinstance(before, dict) and all(before.get(name) == found[name] for name in _SAME):
                return {name: before[name] for name in _MEASURED if name in before}
        return {}

    def write_memory(
        self, step: int, history: Sequence[tuple[float, int]], held_bytes: Mapping[str, int], by_unit: Mapping[str, int]
    ) -> None:
        """Write memory.json: this rank's tensor bytes over one step, at its end, and at its peak by unit."""
        begin = history[0][0]
        points = thin([moment - begin for moment, _ in history], [count for _, count in history], columns=150)
        drawn = [point for point in points if point is not None]
        values = {
            "step": step,
            "held_bytes": dict(held_bytes),
            "peak_by_unit": dict(sorted(by_unit.items(), key=lambda item: -item[1])),
            "seconds": [round(moment, 6) for moment, _ in drawn],
            "bytes": [int(count) for _, count in drawn],
        }
        with contextlib.suppress(StorageError):
            replace_json(self.directory / MEMORY, values)

    def write_page(self) -> None:
        """Write report.html from the run's files. An error here does not change the outcome of the run."""
        try:
            replace_text(self.directory / REPORT, run_page(read_run(self.directory)))
        except Exception as error:  # noqa: BLE001
            sys.stderr.write(f"{REPORT} was not written: {printable(error, is_block=True)}\n")

    def conclude(self, progress: Progress, done: Progressed, speed: Speed, *, peak_bytes: int, reason: str) -> None:
        """Print speed, reason of the end, final loss, and predicted and measured peak memory."""
        pace = speed.tokens_per_s
        why = "" if reason == FINISHED else f": {reason}"
        progress.say(f"finished {done.step} steps" + (f", {pace:,.0f} tokens/s" if pace else "") + why)
        if done.eval_loss_first and done.eval_loss_final is not None:
            fall = 100 * (done.eval_loss_first - done.eval_loss_final) / abs(done.eval_loss_first)
            losses = f"{done.eval_loss_first:.4f} -> {done.eval_loss_final:.4f}"
            progress.say(f"held-out loss {losses} ({abs(fall):.0f}% {'lower' if fall >= 0 else 'higher'})")
        names = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in self.predicted_bytes.items() if num_bytes)
        total = self.predicted_total
        ratio = f"{peak_bytes / total:.2f} of the prediction" if total and peak_bytes else ""
        if self.predicted_peak is None and total:
            names += "; activations of this model are not known beforehand"
            ratio = "activations included"
        progress.say("peak memory of tensors, per rank")
        progress.say(f"  predicted  {size(total):>9}  {names}" if total else "  predicted        n/a")
        progress.say(f"  measured   {size(peak_bytes) if peak_bytes else 'n/a':>9}  {ratio}".rstrip())
        largest = sorted(speed.peak_by_unit.items(), key=lambda item: -item[1])[:_LARGEST]
        if largest:
            names = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in largest if num_bytes)
            progress.say(f"  largest at the peak, by what made it: {names}")
        self._say_time(progress, speed)

    def _say_time(self, progress: Progress, speed: Speed) -> None:
        """Print the predicted and the measured time of a step."""
        found = self.predicted_step
        progress.say("time of a step")
        if found.seconds is None:
            progress.say(f"  predicted        n/a  {found.reason}")
        else:
            progress.say(f"  predicted  {found.seconds * 1e3:>6,.0f} ms  {found.reason}")
        for text in odd_sizes(found.estimate) if found.estimate is not None else ():
            progress.say(f"  {text}")
        if speed.step_time_s is not None:
            ratio = "" if not found.seconds else f"  {speed.step_time_s / found.seconds:.2f} of the prediction"
            progress.say(f"  measured   {speed.step_time_s * 1e3:>6,.0f} ms{ratio}")
        if speed.data_s > _MUCH_DATA * speed.seconds:
            progress.say(f"  of it {speed.data_s / speed.seconds:.0%} was spent on data{self.data_advice}")


def owned_units(model: nn.Module, mesh: Mesh, control: Control) -> list[dict[str, Any]]:
    """Return each unit with its elements and how many of them each rank stores between steps, in the model's order.

    ``owned`` is 0 on ranks of other pipeline stages. Elements replicated over ``tp`` count on several ranks. Every
    stage of a pipeline has a root. One all-gather of small JSON.
    """
    mine = [
        (
            unit.name,
            unit.type_name,
            sum(math.prod(shape) for group in unit.groups for _, shape, _ in group.parameters),
            sum(num_owned for group in unit.groups for _, _, num_owned in group.parameters),
        )
        for unit in sw.summary(model).units
    ]
    found: dict[str, dict[str, Any]] = {}
    for rank, units in enumerate(control.all_json(mine)):
        stage = mesh.coordinate(rank)["pp"]
        for name, kind, numel, num_owned in units:
            title = f"{name}, stage {stage}" if mesh.pp > 1 and name == "root" else name
            new = {"name": title, "class": kind, "numel": numel, "owned": [0] * control.size}
            found.setdefault(title, new)["owned"][rank] = num_owned
    return list(found.values())
