"""How a plan says what pipeline it wants, and the choice of the builder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwise.spec.errors import PlanError
from shardwise.spec.schedule.action import Schedule, check_positive, looped_ranks
from shardwise.spec.schedule.message import with_messages
from shardwise.spec.schedule.plain import gpipe, one_forward_one_backward

#: Names of schedules.
SCHEDULES = ("gpipe", "1f1b")

_PLAIN = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """How microbatches go through the stages of a pipeline.

    Attributes:
        schedule: ``"gpipe"`` or ``"1f1b"``.
        num_microbatches: Into how many microbatches a step is cut; ``None``: as many as there are ranks in a pipeline.
        num_virtual_stages: Stages of each rank; ``None``: as the schedule says.

    Raises:
        PlanError: A value is out of range, or does not go with the schedule.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"schedule={self.schedule!r}: there is no such pipeline schedule.\n  Use one of {', '.join(SCHEDULES)}."
            )
        for name in ("num_microbatches", "num_virtual_stages"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        _ = self.virtual_stages

    @property
    def virtual_stages(self) -> int:
        """Stages of each rank."""
        given = self.num_virtual_stages
        if given not in (None, 1):
            raise PlanError(
                f"schedule={self.schedule!r} has one stage per rank, but num_virtual_stages={given}.\n"
                "  Leave num_virtual_stages out."
            )
        return 1

    def microbatches(self, pp: int) -> int:
        """Microbatches of a step in a pipeline of ``pp`` ranks."""
        return pp if self.num_microbatches is None else self.num_microbatches

    def check(self, pp: int) -> None:
        """Refuse numbers that do not go together in a pipeline of ``pp`` ranks.

        Raises:
            PlanError: They do not.
        """
        check_positive("pp", pp)

    def build(self, pp: int) -> Schedule:
        """The schedule for a pipeline of ``pp`` ranks.

        Raises:
            PlanError: The number of microbatches does not go with the schedule and ``pp``.
        """
        return build(self.schedule, pp, self.microbatches(pp), self.virtual_stages)


def build(schedule: str, pp: int, num_microbatches: int, num_virtual_stages: int | None = None) -> Schedule:
    """The actions of every rank in one step.

    Args:
        schedule: One of ``SCHEDULES``.
        pp: Ranks of the pipeline.
        num_microbatches: Microbatches of the step.
        num_virtual_stages: Stages of each rank; ``None``: as the schedule says.

    Raises:
        PlanError: The numbers do not go together.
    """
    policy = PipelinePolicy(schedule, num_microbatches, num_virtual_stages)
    policy.check(pp)
    virtual = policy.virtual_stages
    orders = _PLAIN[schedule](pp, num_microbatches)
    return with_messages(schedule, orders, num_microbatches, looped_ranks(pp, virtual))


def pipeline_policy(value: object) -> PipelinePolicy:
    """The policy that ``pipeline`` means: ``None``, the name of a schedule, a policy, or a mapping of its fields.

    Raises:
        PlanError: The value means none.
    """
    if value is None:
        return PipelinePolicy()
    if isinstance(value, PipelinePolicy):
        return value
    if isinstance(value, str):
        return PipelinePolicy(schedule=value)
    known = tuple(field.name for field in fields(PipelinePolicy))
    if not isinstance(value, Mapping):
        raise PlanError(
            f"pipeline={value!r}: expected the name of a schedule, or a PipelinePolicy (in a file a mapping of its"
            f" fields).\n  Its fields are: {', '.join(known)}."
        )
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise PlanError(f"pipeline has no field {', '.join(unknown)}.\n  Its fields are: {', '.join(known)}.")
    return PipelinePolicy(**value)
