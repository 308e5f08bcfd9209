"""The units of a model on a pipeline rank, and the number of microbatches in flight."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.spec.module_chain import balance
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.schedule.actions import Kind, folded_ranks, looped_ranks
from shardwise.spec.schedule.builders import computations


class Pass(NamedTuple):
    """A backward of one microbatch through a stage, or one of its two parts.

    Attributes:
        kind: The full backward, or its input or weight pass.
        stage: Number of the stage among the stages of its rank.
        num_stored: For each stage of the rank, microbatches with stored activations.
        waiting: For each stage of the rank, microbatches between their input pass and the end of their weight pass.
        has_sums: Gradients of earlier microbatches exist. An input pass allocates the buffers of all gradients.
        is_middle: The microbatch is not the last, and adds its gradients to sums: those of a weight pass, or of another
            microbatch.
    """

    kind: Kind
    stage: int
    num_stored: tuple[int, ...]
    waiting: tuple[int, ...]
    has_sums: bool
    is_middle: bool

    def is_below(self, other: Pass) -> bool:
        """Whether no memory is larger than during ``other``."""
        mine, others = ((*at.num_stored, *at.waiting, at.has_sums, at.is_middle) for at in (self, other))
        return self[:2] == other[:2] and all(map(operator.le, mine, others))


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model on one rank of a pipeline.

    Attributes:
        rank: Coordinate on ``pp``.
        shares: For each stage of the pipeline on the rank, the number of blocks from each run of equal blocks.
        has_embedding: The rank has the embedding.
        has_head: The rank has the last norm and the head.
        passes: The passes that may have the peak.
    """

    rank: int
    shares: tuple[tuple[int, ...], ...]
    has_embedding: bool
    has_head: bool
    passes: tuple[Pass, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        """Number of blocks on the rank from each run of equal blocks."""
        return tuple(map(sum, zip(*self.shares, strict=True)))


@dataclass(frozen=True, slots=True)
class Chain:
    """The costs by which stages are balanced.

    Attributes:
        counts: Number of blocks in each run of equal blocks.
        costs: Elements of a block's matrices, for each run.
        head_cost: Elements of the head's matrices.
        embedding_cost: Cost of the embedding; 0 for our engine, because an embedding only looks up rows.
    """

    counts: tuple[int, ...]
    costs: tuple[int, ...]
    head_cost: int
    embedding_cost: int = 0


#: Function of a chain and a number of stages that returns, for each stage, the number of blocks from each run.
Divide = Callable[[Chain, int], tuple[tuple[int, ...], ...]]


@functools.lru_cache(maxsize=4096)
def stages(
    chain: Chain, pp: int, policy: PipelinePolicy | None, num_microbatches: int, divide: Divide | None = None
) -> tuple[Stage, ...]:
    """The pipeline ranks that may be the fullest, the first two and the last two; without a policy the only rank."""
    if policy is None:
        several = num_microbatches > 1
        alone = Pass(Kind.BACKWARD, 0, (1,), (0,), has_sums=several, is_middle=several)
        return (Stage(0, (chain.counts,), has_embedding=True, has_head=True, passes=(alone,)),)
    virtual = policy.virtual_stages
    num_stages = pp * virtual
    ranks = folded_ranks(pp) if policy.schedule == "zb-v" else looped_ranks(pp, virtual)
    split = (divide or stage_blocks)(chain, num_stages)
    found = []
    for rank in sorted({0, 1, pp - 2, pp - 1}):
        own = [stage for stage, owner in enumerate(ranks) if owner == rank]
        shares = tuple(split[stage] for stage in own)
        passes = fullest_passes(policy.schedule, pp, num_microbatches, virtual, rank)
        found.append(Stage(rank, shares, has_embedding=0 in own, has_head=num_stages - 1 in own, passes=passes))
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def fullest_passes(schedule: str, pp: int, num_microbatches: int, virtual: int, rank: int) -> tuple[Pass, ...]:
    """The passes of a rank that may have the peak. After 3 pp microbatches the middle of a step repeats."""
    walked = min(num_microbatches, 3 * pp)
    plan = computations(schedule, pp, walked, virtual)
    own = plan.stages(rank)
    num_stored = [num_microbatches - walked if schedule == "gpipe" else 0] * virtual
    waiting, has_sums = [0] * virtual, False
    found: dict[Pass, None] = {}
    for action in plan.actions[rank]:
        stage, kind = own.index(action.stage), action.kind
        if kind is Kind.FORWARD:
            num_stored[stage] += 1
            continue
        is_middle = action.microbatch < walked - 1 and (action.microbatch > 0 or kind is Kind.BACKWARD_WEIGHT)
        found[Pass(kind, stage, tuple(num_stored), tuple(waiting), has_sums, is_middle)] = None
        num_stored[stage] -= kind.gives_input_gradient
        waiting[stage] += (kind is Kind.BACKWARD_INPUT) - (kind is Kind.BACKWARD_WEIGHT)
        has_sums = True
    return tuple(one for one in found if not any(one is not more and one.is_below(more) for more in found))


@functools.lru_cache(maxsize=1024)
def stage_blocks(chain: Chain, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """For each stage the number of blocks from each run, balanced by ``balance`` with embedding and head."""
    if len(chain.counts) == 1 and not chain.embedding_cost:
        return tuple((n,) for n in _even(chain.counts[0], chain.costs[0], chain.head_cost, num_stages))
    runs = [run for run, count in enumerate(chain.counts) for _ in range(count)]
    ends = [chain.head_cost] if chain.head_cost else []
    starts = balance([chain.embedding_cost, *(chain.costs[run] for run in runs), *ends], num_stages)
    found = []
    for start, stop in itertools.pairwise([*starts, len(runs) + 1]):
        blocks = runs[max(start - 1, 0) : max(stop - 1, 0)]
        found.append(tuple(blocks.count(run) for run in range(len(chain.counts))))
    return tuple(found)


def _even(count: int, cost: int, head_cost: int, num_stages: int) -> list[int]:
    """Blocks of each stage if all blocks are equal. The last stage has fewer because of the head, then the earliest."""
    others = num_stages - 1
    best: tuple[int, int, int] | None = None
    for last in range(count - others + 1):
        if not (last or head_cost):
            continue
        each, more = divmod(count - last, others)
        end = last * cost + head_cost
        squares = cost * cost * (more * (each + 1) ** 2 + (others - more) * each**2) + end * end
        key = (max((each + bool(more)) * cost, end), squares, -last)
        if best is None or key < best:
            best = key
    if best is None:  # fewer blocks than stages; the engine refuses such a plan
        return [1] * count + [0] * (num_stages - count)
    each, more = divmod(count + best[2], others)
    return [each] * (others - more) + [each + 1] * more + [-best[2]]
