"""How a plan says what pipeline it wants, and the choice of the builder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from shardwise.spec.errors import PlanError
from shardwise.spec.schedule.action import Schedule, check_positive, folded_ranks, looped_ranks
from shardwise.spec.schedule.interleaved import interleaved
from shardwise.spec.schedule.message import with_messages
from shardwise.spec.schedule.plain import gpipe, one_forward_one_backward
from shardwise.spec.schedule.zero_bubble import zb_h1, zb_v

#: Names of schedules.
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")

_ONE_STAGE_PER_RANK = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "zb-h1": zb_h1}


@dataclass(frozen=True, slots=True)
class PipelinePolicy:
    """How microbatches go through the stages of a pipeline.

    Attributes:
        schedule: ``"gpipe"``: all forwards, then all backwards. ``"1f1b"``: the same bubble, and activations of at most
            ``pp`` microbatches. ``"interleaved-1f1b"``: several stages per rank, a smaller bubble for more messages.
            ``"zb-h1"``: 1F1B with backward in two parts and a third of its bubble where forward and both parts take
            the same time. ``"zb-v"``: two stages per rank in the shape of a V, then no bubble from ``2 pp - 1``
            microbatches on.
        num_microbatches: Into how many microbatches a step is cut; ``None``: as many as there are ranks in a pipeline.
            ``interleaved-1f1b`` takes multiples of that number.
        num_virtual_stages: Stages of each rank; ``None``: 2 for ``interleaved-1f1b`` (where it may be more) and
            ``zb-v``, 1 for the others.
        first_of_stage: The module with which each stage but the first begins: the name of a block, or of a module
            beside the blocks, such as a head. Empty: stages are balanced by the matrix products of a token.

    Raises:
        PlanError: A value is out of range, or does not go with the schedule.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None
    first_of_stage: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"schedule={self.schedule!r}: there is no such pipeline schedule.\n  Use one of {', '.join(SCHEDULES)}."
            )
        for name in ("num_microbatches", "num_virtual_stages"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        _ = self.virtual_stages
        object.__setattr__(self, "first_of_stage", tuple(self.first_of_stage))

    @property
    def virtual_stages(self) -> int:
        """Stages of each rank."""
        usual = 1 if self.schedule in _ONE_STAGE_PER_RANK else 2
        given = usual if self.num_virtual_stages is None else self.num_virtual_stages
        if self.schedule == "interleaved-1f1b":
            if given < 2:
                raise PlanError(
                    f"schedule='interleaved-1f1b' interleaves the stages of a rank, but num_virtual_stages={given}.\n"
                    "  Set num_virtual_stages=2 or more, or use schedule='1f1b'."
                )
        elif given != usual:
            has = "one stage" if usual == 1 else "two stages"
            raise PlanError(
                f"schedule={self.schedule!r} has {has} per rank, but num_virtual_stages={given}.\n"
                "  Leave num_virtual_stages out, or use schedule='interleaved-1f1b'."
            )
        return given

    def microbatches(self, pp: int) -> int:
        """Microbatches of a step in a pipeline of ``pp`` ranks."""
        return pp if self.num_microbatches is None else self.num_microbatches

    def check(self, pp: int) -> None:
        """Refuse numbers that do not go together in a pipeline of ``pp`` ranks.

        Raises:
            PlanError: They do not.
        """
        check_positive("pp", pp)
        m = self.microbatches(pp)
        if self.schedule == "interleaved-1f1b" and m % pp:
            below = m // pp * pp
            use = f"{below} or {below + pp}" if below else f"{pp}"
            raise PlanError(
                f"schedule='interleaved-1f1b' takes microbatches in groups of pp={pp}, but num_microbatches={m} ="
                f" {m // pp} x {pp} + {m % pp}.\n"
                f"  Set num_microbatches={use}, or use schedule='1f1b'."
            )

    def build(self, pp: int) -> Schedule:
        """The schedule for a pipeline of ``pp`` ranks.

        Raises:
            PlanError: The number of microbatches does not go with the schedule and ``pp``.
        """
        check_positive("pp", pp)
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
    if schedule == "zb-v":
        return with_messages(schedule, zb_v(pp, num_microbatches), num_microbatches, folded_ranks(pp))
    if schedule == "interleaved-1f1b":
        orders = interleaved(pp, num_microbatches, virtual)
    else:
        orders = _ONE_STAGE_PER_RANK[schedule](pp, num_microbatches)
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
