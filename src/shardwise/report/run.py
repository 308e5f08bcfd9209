"""The readable files of a run's folder: a run that died may have missing files, or lines that are cut short."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.report.numbers import finite, numbers_of, seconds
from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import CONFIG, ENVIRONMENT, MEMORY, METRICS, MODEL, PLAN, PREDICTED, SUMMARY
from shardwise.spec.shown import Page, Shown, vars_of
from shardwise.spec.text import printable, size

#: Number of slow steps at the start of a process, in which tensors are counted on a CPU.
SLOW_STEPS = 3


@dataclass(frozen=True, slots=True, repr=False)
class Run(Shown):
    """A run's files; displayed in a notebook as its newest records.

    Attributes:
        directory: Its folder.
        config: ``config.yaml``.
        plan: ``plan.json``.
        summary: ``summary.json``; empty if the run has not ended, or died.
        environment: ``environment.json``.
        memory: ``memory.json``.
        predicted: ``predicted.json``: the planner's prediction of a step.
        records: The lines of ``metrics.jsonl``.
        model: ``model.txt``.
        problems: Descriptions of unreadable files.
    """

    directory: Path
    config: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    predicted: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    model: str = ""
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.directory.resolve().name

    def page(self) -> Page:
        """Return the newest steps, and the problems, as readable text."""
        columns = [key for key in _SHOWN if self.has(key)]
        newest = [[_cell(record.get(key)) for key in columns] for record in self.records[-10:]]
        return Page([f"{self.name}: {len(self.records):,} steps"], [columns or ["step"], *newest], self.problems, ())

    def to_records(self) -> list[dict[str, Any]]:
        """Return a record for each step."""
        return self.records

    def to_dict(self) -> dict[str, Any]:
        """Return the content of all files that could be read."""
        return vars_of(self) | {"directory": str(self.directory)}

    @property
    def steps(self) -> list[int]:
        """The step of each record."""
        return [record["step"] for record in self.records]

    @property
    def predicted_bytes(self) -> dict[str, float]:
        """Predicted bytes of the fullest rank by category, without empty categories."""
        return numbers_of(self.plan.get("predicted_bytes_per_rank"))

    def values(self, key: str) -> list[float | None]:
        """Return a number of each record; ``None`` if it is missing or not finite."""
        return [finite(record.get(key)) for record in self.records]

    def has(self, key: str) -> bool:
        """Return whether any record has that number."""
        return any(value is not None for value in self.values(key))

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The records without the first, slow steps, unless there are no others.

        With a summary these are the steps that it timed; in a resumed run, steps since the resume.
        """
        timed = self.summary.get("timed_steps")
        if isinstance(timed, int) and 0 < timed <= len(self.records):
            return self.records[-timed:]
        return self.records[SLOW_STEPS:] or self.records

    def median(self, key: str) -> float | None:
        """Return the median of a number over the steady steps."""
        return statistics.median(found) if (found := self._steady(key)) else None

    def mean(self, key: str) -> float | None:
        """Return the mean of a number over the steady steps."""
        found = self._steady(key)
        return sum(value / len(found) for value in found) if found else None  # a sum could overflow

    def _steady(self, key: str) -> list[float]:
        return [value for record in self.steady if (value := finite(record.get(key))) is not None]

    def last(self, key: str) -> float | None:
        """Return the newest value of a number."""
        return next((value for value in reversed(self.values(key)) if value is not None), None)

    def predicted_number(self, key: str) -> float | None:
        """Return a number from summary.json or, if that lacks it, from plan.json."""
        return next((value for file in (self.summary, self.plan) if (value := finite(file.get(key))) is not None), None)

    @property
    def peak_bytes(self) -> float | None:
        """Measured peak bytes of tensors on the fullest rank."""
        return finite(self.summary.get("peak_memory_bytes")) or self.last("peak_memory_bytes")

    @property
    def step_time_s(self) -> float | None:
        """Measured seconds of a step: the mean without the first steps."""
        return finite(self.summary.get("step_time_s")) or self.mean("step_time_s")

    @property
    def parallel(self) -> dict[str, Any]:
        """The plan of the run."""
        found = self.plan.get("parallel") or self.config.get("parallel")
        return found if isinstance(found, dict) else {}

    @property
    def plan_name(self) -> str:
        """The strategy, and the degrees above one of the axes that divide a model; may be empty."""
        strategy = self.summary.get("strategy") or self.parallel.get("strategy")
        degrees = ((axis, self.parallel.get(axis)) for axis in ("tp", "pp", "cp", "ep"))
        return " ".join([str(strategy or ""), *(f"{axis}={size}" for axis, size in degrees if size not in (None, 1))])

    @property
    def model_name(self) -> str:
        """The model's name; may be empty."""
        model = self.config.get("model")
        return str(model.get("preset") or model.get("hf") or "") if isinstance(model, dict) else ""

    def predicted_vs_measured(self) -> list[tuple[str, str, str, str]]:
        """Rows of quantity, predicted, measured, and measured over predicted, where at least one is known."""
        found = []
        for name, predicted, measured, format_value in (
            ("peak memory of tensors", self.predicted_number("predicted_peak_memory_bytes"), self.peak_bytes, size),
            ("time of a step", self.predicted_number("predicted_step_time_s"), self.step_time_s, seconds),
            ("bytes that rank 0 sends in a step", finite(self.predicted.get("sent_bytes")),
             self.median("collective_bytes"), size),
        ):  # fmt: skip
            if predicted is not None or measured is not None:
                before, after = ("n/a" if value is None else format_value(value) for value in (predicted, measured))
                ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "n/a"
                found.append((name, before, after, ratio))
        return found

    def warnings(self) -> list[str]:
        """Return a sentence for each problem, and for each measurement well above its prediction."""
        norms = zip(self.values("loss_scale"), self.values("grad_norm"), strict=True)
        skipped = sum(scale is not None and norm is None for scale, norm in norms)
        broken, failed, found = self.values("loss").count(None), self.summary.get("failed_saves"), []
        if skipped:
            found.append(f"Loss scaling skipped {_count(skipped, 'step')}: a gradient was not finite.")
        if broken:
            found.append(f"{_count(broken, 'step')} recorded no finite loss.")
        if isinstance(failed, list) and failed:
            found.append(f"{_count(len(failed), 'checkpoint')} could not be saved: {'; '.join(map(str, failed))}.")
        for words, measured, key, most in (
            ("Peak memory was {:.2f} times the prediction.", self.peak_bytes, "predicted_peak_memory_bytes", 1.05),
            ("A step took {:.2f} times the predicted time.", self.step_time_s, "predicted_step_time_s", 1.25),
        ):
            predicted = self.predicted_number(key)
            if measured and predicted and measured > most * predicted:
                found.append(words.format(measured / predicted))
        return found + [f"{problem[0].upper()}{problem[1:]}." for problem in self.problems]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


#: Numbers of a record that a notebook shows.
_SHOWN = ("step", "loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "step_time_s", "mfu", "peak_memory_bytes")


def _cell(value: object) -> str:
    return "" if finite(value) is None else f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def read_run(directory: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: It is not a run's folder.
    """
    if not any((directory / name).is_file() for name in (CONFIG, PLAN, METRICS, SUMMARY)):
        what = "holds no run" if directory.is_dir() else "is no folder"
        raise ConfigError(f"{printable(directory)} {what}.\n  Name a folder that `shardwise train` wrote.")
    problems: list[str] = []
    return Run(
        directory,
        config=_read_mapping(directory / CONFIG, problems),
        plan=_read_mapping(directory / PLAN, problems),
        summary=_read_mapping(directory / SUMMARY, problems),
        environment=_read_mapping(directory / ENVIRONMENT, problems),
        memory=_read_mapping(directory / MEMORY, problems),
        predicted=_read_mapping(directory / PREDICTED, problems),
        records=_records(directory / METRICS, problems),
        model=_text(directory / MODEL, problems),
        problems=tuple(problems),
    )


def _text(path: Path, problems: list[str]) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
        return ""


def _read_mapping(path: Path, problems: list[str]) -> dict[str, Any]:
    text = _text(path, problems)
    if not text.strip():
        return {}
    try:
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (ValueError, yaml.YAMLError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} is damaged, and left out")
        return {}
    return found


def _records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """Return the records in order of their steps; of several records of a step the newest."""
    found: dict[int, dict[str, Any]] = {}
    num_bad = 0
    for line in _text(path, problems).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(record, dict) and isinstance(step, int) and not isinstance(step, bool):
            found[step] = record
        elif line.strip():
            num_bad += 1
    if num_bad:
        problems.append(f"{num_bad} damaged line{'s' if num_bad > 1 else ''} of {path.name} left out")
    return [found[step] for step in sorted(found)]
