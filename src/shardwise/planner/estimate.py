"""The estimate of a plan, and the list of plans that a search returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.cost.hardware import Cluster
from shardwise.cost.workload import Workload
from shardwise.planner import screen
from shardwise.planner.planned import Planned
from shardwise.planner.time import timing
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.sim.step import SimulatedStep
from shardwise.spec.errors import ConfigError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.shape import ModelShape
from shardwise.spec.shown import Page, Shown

#: Families whose positions are learned, one vector each.
_LEARNED = frozenset({"gpt", "gpt2", "opt", "bert", "vit"})


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Estimate(Shown, Planned):
    """The memory and time of a step under one plan.

    Attributes:
        shape: The model.
        plan: The plan, with every degree filled in.
        cluster: The GPUs and their links.
        workload: The batch and settings of a step.
        memory: Bytes of the fullest rank.
        time: Seconds of a step.
        software: Software whose speed of kernels and overlap is assumed (``cost.software``).
    """

    def page(self) -> Page:
        """The table of the plan, its memory, and what limits its time."""
        return Plans([self]).page()

    def to_records(self) -> list[dict[str, Any]]:
        """One row with the values of the table, in bytes and seconds."""
        plain = {key: value for key, value in self.to_dict().items() if not isinstance(value, dict)}
        return [plain | {"device_bytes": self.memory.device_bytes, "host_bytes": self.memory.host_bytes}]

    def to_dict(self) -> dict[str, Any]:
        """The plan's fields, memory and time, in the form of ``shardwise plan --json``."""
        return screen.plan_as_json(self)

    def __repr__(self) -> str:
        return f"Estimate({screen.brief(self)})"


class Plans(Shown, list[Estimate]):
    """The result of ``search``: a list of at least one plan, whose text is the page of ``shardwise plan``."""

    def page(self) -> Page:
        """The page of ``shardwise plan``."""
        return screen.page_of(self)

    def to_records(self) -> list[dict[str, Any]]:
        """A row for each plan."""
        return [row for made in self for row in made.to_records()]

    def to_dict(self) -> dict[str, Any]:
        """The content of ``shardwise plan --json``."""
        return screen.as_json(self[0].shape, self[0].cluster, self[0].workload, self, ())

    def __str__(self) -> str:
        return screen.screen(self[0].shape, self[0].cluster, self[0].workload, self)

    def __repr__(self) -> str:
        return f"Plans({len(self)}, first: {self[0]!r})" if self else "Plans(0)"


def estimate(
    shape: ModelShape, plan: ParallelPlan, cluster: Cluster, workload: Workload, *, software: str = "pytorch"
) -> Estimate:
    """Memory and time of a step.

    Recomputation and compiling may be set in the plan or in the workload; the result has them in both.

    Args:
        shape: The model.
        plan: The distribution over the cluster's GPUs.
        cluster: The GPUs and their links.
        workload: The batch and settings of a step.
        software: Software whose speed of kernels and overlap is assumed, a name of ``cost.software``; by default
            PyTorch with this library.

    Raises:
        PlanError: The plan cannot run on this number of GPUs, or with this batch.
        MeshError: The product of the plan's degrees is not the number of GPUs.
        ConfigError: The model has fewer blocks than are to be recomputed.
    """
    return Estimate.of(shape, plan, cluster, workload, software)


def check_positions(shape: ModelShape, tokens: int, setting: str, option: str) -> None:
    """Refuse sequences longer than the learned positions; rotary and relative positions have no such limit.

    ``given`` is the setting with its value and ``option`` the setting up to its value, for the message.

    Raises:
        ConfigError: The model has fewer learned positions.
    """
    if getattr(shape, "family", "") in _LEARNED and tokens > shape.seq_len:
        raise ConfigError(
            f"{setting}: {shape.name} has {shape.seq_len:,} learned positions.\n  Set {option}{shape.seq_len} or less."
        )


# -- drawings

#: Microbatches of a pipeline that are simulated for a drawing.
MOST_MICROBATCHES = 32


def simulated(made: Estimate) -> SimulatedStep | SimulatedPipeline:
    """The simulated step of an estimate; a pipeline has at most :data:`MOST_MICROBATCHES` microbatches."""
    step = timing(made.shape, made.plan, made.cluster, made.workload, made.software)
    return step.step() if made.plan.pp == 1 else step.pipeline(MOST_MICROBATCHES)


class Span(NamedTuple):
    """An operation on a stream with its start and end, in seconds."""

    stream: str
    begin_s: float
    end_s: float
    label: str


def simulated_spans(step: SimulatedStep) -> tuple[list[Span], str]:
    """The spans of a step's last microbatch and the optimizer, and a caption that names the microbatch."""
    timeline, _ = step.microbatches[-1]
    found = [
        Span(span.task.stream, span.begin_s, span.end_s, span.task.label)
        for span in timeline.spans
        if span.end_s > span.begin_s
    ]
    if step.optimizer_s:
        found.append(Span("optimizer", timeline.end_s, timeline.end_s + step.optimizer_s, "optimizer"))
    total = sum(count for _, count in step.microbatches)
    return found, f"Drawn is the last of {total} microbatches, with the optimizer's step." if total > 1 else ""
