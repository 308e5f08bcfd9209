"""Context parallelism against one plain process that reads whole sequences."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.context import ring, root
from shardwise.context.root import Division
from shardwise.testing import part_of, probe, run_on_ranks
from tests.common.bits import worst
from tests.tensor.test_tensor import (
    SEQ,
    STEPS,
    TOLERANCES,
    Case,
    batch,
    check,
    differences,
    optimizer_of,
    train_plain,
)
from tests.tensor.test_tensor_families import Family

pytestmark = pytest.mark.preload("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama")

RECOMPUTED, BY_POSITIONS = ("activation_checkpointing", "full"), ("sequence_parallel", True)
assert SEQ % 4  # sequences come out even on 3 ranks only: elsewhere there is padding


def divided(cp: int = 2, *plan: tuple[str, Any], tp: int = 1, kind: type[Case] = Case, **fields: Any) -> Any:
    return kind(tp=tp, plan=(("cp", cp), *plan), **fields)


def test_two_ranks_equal_one_process():
    check(
        2,
        divided(),
        divided(dtype=torch.float32, max_norm=0.3),
        divided(strategy="ddp", num_microbatches=2, max_norm=0.3, model=(("tied", True),)),
        divided(2, RECOMPUTED, num_microbatches=2, accumulation="unsharded"),
        divided(2, ("activation_checkpointing", "selective"), model=(("num_experts", 3), ("bias", False))),
        divided(kind=Family, name="gpt2"),
        divided(kind=Family, name="llama", num_microbatches=2, max_norm=0.3),
        divided(kind=Family, name="qwen3", has_labels=True, dtype=torch.float32),
    )


def test_four_ranks_equal_one_process():
    check(
        4,
        divided(4),
        divided(4, dtype=torch.float32),
        divided(max_norm=0.3, num_microbatches=2),
        divided(tp=2, max_norm=0.3, model=(("tied", True),)),
        divided(2, BY_POSITIONS, RECOMPUTED, tp=2),
        divided(2, ("dp_replicate", 2), strategy="hsdp"),
        divided(2, ("ep", 2), model=(("num_experts", 4),), num_microbatches=2, max_norm=0.3),
        divided(kind=Family, name="qwen3", tp=2, has_labels=True, dtype=torch.float32),
    )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp"])
def test_every_strategy_equals_one_process(strategy):
    plan = (("dp_replicate", 2),) if strategy == "hsdp" else ()
    dtypes = (torch.float64, torch.float32)
    check(4, *(divided(2, *plan, strategy=strategy, dtype=d, num_microbatches=2, max_norm=0.3) for d in dtypes))


class BegunAnew(Division):
    """Positions of each rank from 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places_T = self.positions_T
        self.positions_T = torch.arange(len(self.places_T))

    def own(self, whole_BT: Tensor) -> Tensor:
        return whole_BT.index_select(1, self.places_T)


def wrong_ways() -> list[dict[str, float]]:
    """What differs where only a rank's own keys are looked at, positions begin anew, or means are not weighted."""
    ways = (
        mock.patch.object(ring, "_join", return_value=None),
        mock.patch.object(root, "Division", BegunAnew),
        mock.patch.object(Division, "mean_loss", lambda _self, loss, *_: loss),
    )
    found = []
    for way in ways:
        with way:
            found.append(differences(divided()))
    return found


def test_what_is_computed_wrongly_is_seen():
    relative, absolute = TOLERANCES[torch.float64]
    for found in run_on_ranks(wrong_ways, 2)[0]:
        assert found["loss"] > 1e4 * relative
        assert found["parameter"] > 1e4 * absolute


def in_stages(cases: tuple[Case, ...]) -> list[tuple[float, float, float]]:
    """Of pipelines whose sequences are divided, the largest differences of losses, norms and parameters."""
    found = []
    for case in cases:
        count = case.num_microbatches
        plain, losses, norms = train_plain(case, 1)
        model = sw.parallelize(case.build(), sw.ParallelPlan(tp=case.tp, strategy=case.strategy, **dict(case.plan)))
        optimizer, largest = optimizer_of(model), [0.0, 0.0]
        for number in range(STEPS):
            parts = [batch(number, place, 0) for place in range(count)]
            whole = tuple(torch.cat(each) for each in zip(*parts, strict=True))
            loss = sw.train_step(model, whole, num_microbatches=count).item()
            norm = sw.clip_grad_norm(model, math.inf).item()
            expected = sum(losses[number * count : (number + 1) * count])
            seen = abs(loss / expected - 1), abs(norm / norms[number] - 1)
            largest = [worst(*pair) for pair in zip(largest, seen, strict=True)]
            optimizer.step()
            optimizer.zero_grad()
        whole, errors = dict(plain.named_parameters()), [0.0]
        for extent, values in probe(model).extents():
            expected = part_of(extent, whole[extent.name])
            errors += [(expected - values).abs().max().item()] if values.numel() else []
        found.append((*largest, worst(*errors)))
    return found


def check_stages(world: int, *cases: Case) -> None:
    for results in run_on_ranks(in_stages, world, cases, timeout_s=250):
        for loss, norm, parameter in results:
            assert max(loss, norm) < TOLERANCES[torch.float64][0]
            assert parameter < TOLERANCES[torch.float64][1]


@pytest.mark.transports
def test_stages_of_divided_sequences_equal_one_process():
    check_stages(
        4,
        divided(2, ("pp", 2), num_microbatches=2),
        divided(2, ("pp", 2), ("pipeline", "zb-h1"), RECOMPUTED, strategy="zero1", num_microbatches=4),
    )


@pytest.mark.long
def test_all_axes_together_equal_one_process():
    check_stages(8, divided(2, ("pp", 2), tp=2, num_microbatches=2), divided(4, ("pp", 2), num_microbatches=2))
    check(8, divided(tp=2, num_microbatches=2, max_norm=0.3), divided(2, RECOMPUTED, tp=2, dtype=torch.float32))
