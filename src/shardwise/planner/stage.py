"""The units of a model on a pipeline rank, and the number of microbatches in flight."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.spec.chain import balance
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.schedule.actions import Kind, folded_ranks, looped_ranks
from shardwise.spec.schedule.builders import computations
from shardwise.spec.schedule.closed import peak_held


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model on one rank of a pipeline.

    Attributes:
        rank: Coordinate on ``pp``.
        blocks: Number of blocks from each run of equal blocks.
        has_embedding: The rank has the embedding.
        has_head: The rank has the last norm and the head.
        num_stages: Stages of the pipeline on the rank.
        held: Peak number of microbatches with stored activations; each of several stages counts as a fraction.
        passes: The passes of a split backward at which the peak may be (:func:`split_passes`).
    """

    rank: int
    blocks: tuple[int, ...]
    has_embedding: bool
    has_head: bool
    num_stages: int
    held: float
    passes: tuple[tuple[bool, float, float, bool], ...] = ()


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
    """The part of the model on each pipeline rank; without a policy there is one rank."""
    if policy is None:
        return (Stage(0, chain.counts, has_embedding=True, has_head=True, num_stages=1, held=1.0),)
    virtual = policy.virtual_stages
    num_stages = pp * virtual
    ranks = folded_ranks(pp) if policy.schedule == "zb-v" else looped_ranks(pp, virtual)
    split = (divide or stage_blocks)(chain, num_stages)
    found = []
    for rank in range(pp):
        own = [stage for stage, owner in enumerate(ranks) if owner == rank]
        blocks = tuple(sum(split[stage][run] for stage in own) for run in range(len(chain.counts)))
        held = peak_held(policy.schedule, pp, num_microbatches, virtual, rank).in_flight / virtual
        is_last = num_stages - 1 in own
        passes = split_passes(policy, pp, num_microbatches, rank) if policy.is_split else ()
        found.append(Stage(rank, blocks, 0 in own, is_last, num_stages=virtual, held=held, passes=passes))
    return tuple(found)


def split_passes(
    policy: PipelinePolicy, pp: int, num_microbatches: int, rank: int
) -> tuple[tuple[bool, float, float, bool], ...]:
    """The passes of a split backward on a rank, without those at which no more is stored than at another one.

    Each is (is a weight pass, microbatches between forward and input pass, microbatches between input and weight pass,
    whether sums of gradients exist). Both numbers include the microbatch of the pass. At most 3 pp microbatches are
    counted, because more repeat the middle of the step.
    """
    held, waiting, has_sums, virtual = 0, 0, False, policy.virtual_stages
    found = set()
    for action in computations(policy.schedule, pp, min(num_microbatches, 3 * pp), virtual).actions[rank]:
        is_weight, is_input = action.kind is Kind.BACKWARD_WEIGHT, action.kind is Kind.BACKWARD_INPUT
        if is_weight or is_input:
            found.add((is_weight, held / virtual, waiting / virtual, has_sums))
        held += (action.kind is Kind.FORWARD) - is_input
        waiting += is_input - is_weight
        has_sums = has_sums or is_input  # an input pass also computes gradients of norms, in the full buffers
    return tuple(
        one
        for one in sorted(found)
        if not any(
            one != more and one[0] == more[0] and all(a <= b for a, b in zip(one, more, strict=True)) for more in found
        )
    )


@functools.lru_cache(maxsize=1024)
def stage_blocks(chain: Chain, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """For each stage the number of blocks from each run, balanced by ``spec.chain.balance`` with embedding and head."""
    if len(chain.counts) == 1 and not chain.embedding_cost:
        return tuple((n,) for n in _even(chain.counts[0], chain.costs[0], chain.head_cost, num_stages))
    runs = [run for run, count in enumerate(chain.counts) for _ in range(count)]
    ends = [chain.head_cost] if chain.head_cost else []
    starts = balance([chain.embedding_cost, *(chain.costs[run] for run in runs), *ends], num_stages)
    found = []
    for start, stop in itertools.pairwise([*starts, len(runs) + 1]):
        held = runs[max(start - 1, 0) : max(stop - 1, 0)]
        found.append(tuple(held.count(run) for run in range(len(chain.counts))))
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
