"""Context parallelism against one plain process that reads whole sequences."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardwise.parallel.context import ring, root
from shardwise.parallel.context.root import Division
from shardwise.spec.tolerances import Tolerance
from shardwise.testing import RankFailure, run_on_ranks
from tests.common.split import BLIND, SEQ, Case, check, compare
from tests.parallel.tensor.test_tensor_families import Family

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

    def own_positions(self, whole_BT: Tensor) -> Tensor:
        return whole_BT.index_select(1, self.places_T)


WRONG = {
    "only a rank's own keys": (ring, "_join", lambda *_: None),
    "positions begin anew": (root, "Division", BegunAnew),
    "means are not weighted": (Division, "mean_loss", lambda _self, loss, *_: loss),
}


def compare_wrongly(way: str, limits: Tolerance) -> None:
    with mock.patch.object(*WRONG[way]):
        compare(divided(), steps=5, limits=limits)


@pytest.mark.parametrize("limits", BLIND)
@pytest.mark.parametrize("way", WRONG)
def test_what_is_computed_wrongly_is_seen(way, limits):
    seen = "value 0 is" if math.isinf(limits.absolute) else "is off by"
    with pytest.raises(RankFailure, match=f"failed first: AssertionError: .*{seen}"):
        run_on_ranks(compare_wrongly, 2, way, limits)


@pytest.mark.transports
def test_stages_of_divided_sequences_equal_one_process():
    check(
        4,
        divided(2, ("pp", 2), num_microbatches=2),
        divided(2, ("pp", 2), ("pipeline", "zb-h1"), RECOMPUTED, strategy="zero1", num_microbatches=4),
    )


@pytest.mark.long
def test_all_axes_together_equal_one_process():
    check(
        8,
        divided(2, ("pp", 2), tp=2, num_microbatches=2),
        divided(4, ("pp", 2), num_microbatches=2),
        divided(tp=2, num_microbatches=2, max_norm=0.3),
        divided(2, RECOMPUTED, tp=2, dtype=torch.float32),
    )
