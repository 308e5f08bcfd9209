"""What goes wrong around tensor parallelism without a wrong shape: refused on all ranks, or right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.comm.axes import open_comms
from shardwise.parallel.tensor.loss import Vocabulary
from shardwise.spec.errors import RankDisagreement, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks, refusal

SIZES = {"num_layers": 1, "hidden": 16, "num_heads": 2, "vocab_size": 9, "seq_len": 4}


def cut(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    plan = {name: changes.pop(name) for name in ("strategy", "granularity") if name in changes}
    return sw.parallelize(sw.models.gpt("gpt-tiny", **(SIZES | changes)), sw.ParallelPlan(tp=2, **plan))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values or (1, 2, 3, 8)])


def ask() -> dict[str, str]:
    rank, found = distributed.get_rank(), {}
    other = cut()
    found["batch"] = refusal(RankDisagreement, lambda: other(ids(1, 2, 3, rank)))
    dropping = cut(dropout=0.1)
    torch.manual_seed(rank)
    dropping.eval()(ids())  # drops nothing yet
    found["random state"] = refusal(RankDisagreement, lambda: dropping.train()(ids()))
    torch.manual_seed(0)
    model = cut()
    found["id"] = refusal(IndexError, lambda: model(ids(1, 2, 3, 9)))
    found["target"] = refusal(IndexError, lambda: model(ids(), ids(1, 2, 3, -1)))
    model(ids(), ids(1, 2, 3, -100)).backward()
    found["whole"] = refusal(StateError, lambda: sw.full_parameters(model).__enter__())
    for name, plan in (("ddp", {"strategy": "ddp"}), ("tensor", {"granularity": "tensor"})):
        matrices = cut(**plan)
        matrices(ids(), ids()).backward()
        muon = torch.optim.Muon([p for n, p in matrices.named_parameters() if n.endswith("up.weight")])
        found[f"Muon, {name}"] = refusal(StateError, muon.step)
    return found


def test_every_rank_is_told():
    first, second = run_on_ranks(ask, 2)
    assert "got different batches" in first["batch"]
    assert "sw.data_parallel_rank(model)" in first["batch"]
    assert "different random states" in first["random state"]
    assert "'token_embedding': an id is 9, expected 0 to 8" in first["id"]
    assert "'loss': a target is -1, expected 0 to 8" in first["target"]
    assert "sw.full_parameters() under tp" in first["whole"]
    for kind in ("Muon, ddp", "Muon, tensor"):
        assert "needs every parameter whole on one rank, but of parameter 'blocks.0.mlp.up.weight'" in first[kind]
        assert "Set tp=1" in first[kind]
    assert second == first


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


@on_ranks(2)
def test_what_is_unusual_is_right():
    found: dict[str, Any] = {}
    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    plan = sw.ParallelPlan(tp=2, tp_plan={"0": "colwise", "1": "rowwise"})
    found["subclass"] = refusal(sw.PlanError, lambda: sw.parallelize(model, plan))

    comm, _ = open_comms(torch.device("cpu"))
    whole = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole[:, 4:] = float("-inf")
    own = whole.narrow(1, 4 * comm.rank, 4).clone().requires_grad_()
    reference, targets = whole.clone().requires_grad_(), torch.tensor([0, 3, 1])
    loss, expected = Vocabulary((4, 4), comm).cross_entropy(own, targets, "test"), F.cross_entropy(reference, targets)
    loss.backward()
    expected.backward()
    assert own.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own.grad, reference.grad.narrow(1, 4 * comm.rank, 4))

    interrupted = cut()
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt

    interrupted.get_submodule("blocks.0.attention.out").register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted(ids(), ids())
    torch.manual_seed(0)
    found["plain"] = sw.models.gpt("gpt-tiny", **SIZES)(ids(), ids()).item()
    found["loss"] = interrupted(ids(), ids()).item()
    found["reader"] = sw.data_parallel_rank(interrupted), sw.data_parallel_size(interrupted)
    assert "Scaled has a forward of its own" in found["subclass"]
    assert found["loss"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["reader"] == (0, 1)


class Learned(nn.Module):
    """A block whose activation learns its slope between the layers that are cut."""

    def __init__(self, num_slopes: int = 1) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(4), nn.Linear(4, 8), nn.PReLU(num_slopes)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


LAYERS = {"*.up": "colwise", "*.down": "rowwise"}
SHARED = LAYERS | {"*.act": "replicated_with_grad_allreduce"}
DIVIDED = LAYERS | {"*.act.weight": "colwise"}


def learned(num_slopes: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Learned(num_slopes), Learned(num_slopes)).double()


def trained(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def use_own_features() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plans: dict[str, dict[str, Any]] = {
        "ddp": {"strategy": "ddp"},
        "zero3": {},
        "recomputed": {"activation_checkpointing": "full"},
        "16 bit": {"mp_policy": sw.PrecisionPolicy(param_dtype="bf16")},
    }
    for name, plan in plans.items():
        model = sw.parallelize(learned().float(), sw.ParallelPlan(tp=2, tp_plan=LAYERS, **plan))
        found[name] = refusal(RankDisagreement, lambda model=model: model(torch.ones(3, 4)).sum().backward())
    table = {"0.up": "colwise", "0.down": "rowwise", "*.act": "replicated_with_grad_allreduce"}
    counted = sw.parallelize(learned(), sw.ParallelPlan(tp=2, tp_plan=table))
    found["counted"] = refusal(RankDisagreement, lambda: counted(torch.ones(3, 4).double()).sum().backward())
    for name, slopes, table in (("one", 1, SHARED), ("each", 8, DIVIDED)):
        model = trained(sw.parallelize(learned(slopes), sw.ParallelPlan(tp=2, tp_plan=table)))
        state, plain = sw.full_state_dict(model), trained(learned(slopes)).state_dict()
        found[name] = max([0.0, *((state[key] - plain[key]).abs().max().item() for key in state)])
    return found


def test_parameters_that_are_used_with_own_features_are_refused_or_right():
    first, second = run_on_ranks(use_own_features, 2)
    for name in ("ddp", "zero3", "recomputed", "16 bit"):
        assert first[name] == second[name]
        assert "hold '1.act.weight' and 1 more whole, but got different gradients" in first[name]
        assert "tp_plan={'*.act': 'replicated_with_grad_allreduce'}" in first[name]
        assert "tp_plan={'*.act.weight': 'colwise'}" in first[name]
    assert first["counted"] == second["counted"]
    assert "use '1.act.weight' with the same values" in first["counted"]
    assert "it would count 2 times.\n  Take the style from it: tp_plan={'*.act': 'replicate'}" in first["counted"]
    assert first["one"] < 1e-12
    assert first["each"] < 1e-12
