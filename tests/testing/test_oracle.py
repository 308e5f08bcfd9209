"""The oracle: one plain process beside the ranks of every kind of layout, and that it sees what is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.tolerances import tolerance
from shardwise.testing import RankFailure, compare_with_one_process, run_on_ranks, train_step
from tests.common.own import own

LR = 1e-3
SIZES: dict[str, Any] = {"num_layers": 4, "hidden": 16, "num_heads": 4, "vocab_size": 32, "seq_len": 8, "tied": False}
#: World, fields of the plan, microbatches; and whether it splits sums.
LAYOUTS: dict[str, tuple[int, dict[str, Any], int, bool]] = {
    "zero3": (2, {"strategy": "zero3"}, 1, False),
    "hsdp": (4, {"strategy": "hsdp", "dp_replicate": 2}, 1, False),
    "pp": (2, {"pp": 2, "pipeline": "1f1b"}, 4, False),
    "dp x pp": (4, {"strategy": "zero3", "pp": 2, "pipeline": "zb-h1"}, 4, False),
    "tp": (2, {"tp": 2}, 1, True),
    "dp x tp": (4, {"strategy": "zero3", "tp": 2}, 1, True),
    "cp": (2, {"cp": 2}, 1, True),
    "ep": (2, {"ep": 2}, 1, True),
}


def batch(reader: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + reader)
    tokens_BT = torch.randint(0, 32, (4, 9), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def compare(name: str, fault: str = "") -> None:
    _, fields, num_microbatches, splits_sums = LAYOUTS[name]

    def build() -> nn.Module:
        torch.manual_seed(3)
        return sw.models.gpt("gpt-tiny", **SIZES, **({"num_experts": 4} if name == "ep" else {}))

    def script(model: nn.Module, reader: int, step: int) -> Any:
        is_ours = hasattr(model, "is_ours")
        if is_ours and fault == "data" and step == 1:
            reader += 1
        yield train_step(model, batch(reader, step), num_microbatches=num_microbatches)
        if is_ours and fault == "gradient" and step == 1:
            own(next(p.grad for p in model.parameters() if p.grad is not None and p.grad.shape.numel())).view(-1)[
                0
            ] += 1.0

    def parallelize(model: nn.Module) -> None:
        sw.parallelize(model, sw.ParallelPlan(**fields))
        model.is_ours = True
        if fault == "weight":
            with torch.no_grad():
                own(next(p for p in model.parameters() if p.shape.numel())).flatten()[0].add_(0.1)

    compare_with_one_process(
        build,
        script,
        parallelize,
        steps=2,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR),
        max_norm=0.3,
        tolerance=tolerance("fp32", LR) if splits_sums else None,
        where=name,
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_kind_of_layout_equals_one_process(name: str) -> None:
    run_on_ranks(compare, LAYOUTS[name][0], name)


@pytest.mark.parametrize("name", ["zero3", "pp", "tp"])
@pytest.mark.parametrize("fault", ["data", "gradient", "weight"])
def test_what_is_wrong_is_seen(name: str, fault: str) -> None:
    with pytest.raises(RankFailure, match=r"AssertionError: \w+, step \d") as caught:
        run_on_ranks(compare, LAYOUTS[name][0], name, fault)
    step = "step 0" if fault == "weight" else "step 1"
    assert f"{name}, {step}" in str(caught.value)
