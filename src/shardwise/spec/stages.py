"""Dividing a chain into pipeline stages of nearly equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardwise.spec.errors import PlanError

#: For the elements from one on, in the stages that are left: (largest cost, sum of squares, start of the second stage).
_Best = tuple[int, int, int]


def balance(costs: Sequence[int], num_stages: int) -> list[int]:
    """Where each stage begins, so that the most expensive one costs as little as possible.

    Among divisions equal in that, one with the most even costs (by the sum of their squares) of those compared.
    Elements without cost stay with the element behind them where possible.

    Args:
        costs: Costs of the elements, in order.
        num_stages: Stages; each gets at least one element with a cost.

    Raises:
        PlanError: There are fewer elements with a cost than stages.
    """
    num_costly = sum(cost > 0 for cost in costs)
    if num_costly < num_stages:
        raise PlanError(
            f"a chain of {num_costly} elements that compute cannot be divided into {num_stages} pipeline stages.\n"
            "  Use fewer stages (pp, or virtual stages per rank)."
        )
    total = [0, *itertools.accumulate(costs)]
    count = len(costs)
    tails = [total[count] - total[i] for i in range(count)]
    tables: list[list[_Best | None]] = [[(cost, cost * cost, count) if cost else None for cost in tails]]
    for _ in range(num_stages - 1):
        after, best = tables[-1], []
        for i in range(count):
            found: _Best | None = None
            for j in range(i + 1, count):
                rest, cost = after[j], total[j] - total[i]
                if rest is None or not cost:
                    continue
                candidate = (max(cost, rest[0]), cost * cost + rest[1], j)
                if found is None or candidate[:2] < found[:2]:
                    found = candidate
            best.append(found)
        tables.append(best)
    starts, place = [0], 0
    for table in reversed(tables[1:]):
        entry = table[place]
        assert entry is not None
        place = entry[2]
        starts.append(place)
    return starts


def gpt_elements(num_layers: int) -> list[str]:
    """The modules with parameters that our GPT's forward calls, in order."""
    blocks = [f"blocks.{index}" for index in range(num_layers)]
    return ["token_embedding", "position_embedding", *blocks, "final_norm", "lm_head"]


def gpt_stages(num_layers: int, block_cost: int, head_cost: int, num_stages: int) -> list[list[str]]:
    """The elements of each balanced stage of our GPT with an untied output projection.

    Args:
        num_layers: Blocks.
        block_cost: Elements of the matrices of one block: multiplications per token.
        head_cost: Elements of the output projection.
        num_stages: Stages.

    Raises:
        PlanError: There are fewer elements that compute than stages.
    """
    elements = gpt_elements(num_layers)
    starts = balance([0, 0, *[block_cost] * num_layers, 0, head_cost], num_stages)
    return [elements[start:stop] for start, stop in itertools.pairwise([*starts, len(elements)])]
