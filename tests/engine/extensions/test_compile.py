"""``compile=True``: units compiled one by one with inductor train as uncompiled ones do, within rounding."""

from __future__ import annotations

import gc
import shutil
import warnings
import weakref

import pytest
import torch
from torch import distributed, nn

import shardwise as sw
from shardwise.testing import run_on_ranks
from tests.common import models
from tests.common.ranks import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU"),
]

STEPS = 4
#: Relative; a loss of a compiled and of an uncompiled model after some steps of SGD in fp32.
LOSS_TOLERANCE = 1e-5


def quietly() -> None:
    """Inductor imports deprecated parts of torch, and would start a pool of compilers."""
    warnings.simplefilter("ignore")
    torch._inductor.config.compile_threads = 1


def train(preset: str, *, is_compiled: bool, checkpointing: str = "none") -> tuple[list[float], dict]:
    quietly()
    plan = sw.ParallelPlan(strategy=preset, compile=is_compiled, activation_checkpointing=checkpointing)
    model = sw.parallelize(models.build("gpt"), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, graphs = [], []
    for step in range(STEPS):
        loss = model(*models.batch(step, 0, distributed.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    counts = torch._dynamo.utils.counters
    return losses, {"graphs": graphs, "breaks": dict(counts["graph_break"]), "names": names(model)}


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("preset", "checkpointing"),
    [
        ("zero3", "none"),
        pytest.param("zero3", "full", marks=pytest.mark.long),
        pytest.param("ddp", "none", marks=pytest.mark.long),
    ],
)
@on_ranks(2, timeout_s=200)
def test_compiled_units_train_as_uncompiled_ones(preset: str, checkpointing: str) -> None:
    eager, _ = train(preset, is_compiled=False, checkpointing=checkpointing)
    compiled, seen = train(preset, is_compiled=True, checkpointing=checkpointing)
    found = {"eager": eager, "compiled": compiled, **seen}
    assert found["compiled"] == pytest.approx(found["eager"], rel=LOSS_TOLERANCE)
    assert found["compiled"][0] != found["compiled"][-1]
    # All blocks are one graph, and later steps compile nothing more.
    assert found["graphs"] == [1] * STEPS
    assert found["breaks"] == {}
    assert found["names"] == names(models.build("gpt"))


@pytest.mark.long
@on_ranks(1, timeout_s=100)
def test_a_compiled_model_is_freed_at_once() -> None:
    quietly()
    model = sw.parallelize(models.build("gpt"), sw.ParallelPlan(compile=True))
    model(*models.batch(0, 0, 0)).backward()
    gone = weakref.ref(model.blocks[0])
    gc.disable()
    del model
    assert gone() is None


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, x):
        return self.inner(x).relu()


def compiled_modules(policy) -> list[str]:
    quietly()
    model = nn.Sequential(Deep(), Deep())
    sw.parallelize(model, sw.ParallelPlan(compile=True, auto_wrap_policy=policy))
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def test_the_innermost_units_are_compiled_and_the_root_where_it_is_alone():
    assert run_on_ranks(compiled_modules, 1, sw.wrap_by_name("*", "*.inner")) == [["0.inner", "1.inner"]]
    assert run_on_ranks(compiled_modules, 1, "none") == [[""]]


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(sw.PlanError, match="operators whose outputs are kept"):
        sw.ParallelPlan(compile=True, activation_checkpointing="selective")
    with pytest.raises(sw.PlanError, match="expected True or False"):
        sw.ParallelPlan(compile="max-autotune")


@pytest.mark.long
@pytest.mark.parametrize("pipeline", ["1f1b", "zb-v"])
@on_ranks(2, timeout_s=250)
def test_compiled_stages_train_as_uncompiled_ones(pipeline: str) -> None:
    quietly()
    found = []
    for is_compiled in (False, True):
        model = sw.parallelize(models.build("gpt"), sw.ParallelPlan(pp=2, pipeline=pipeline, compile=is_compiled))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens, targets = models.batch(0, 0, 0)
        batch = torch.cat([tokens, tokens]), torch.cat([targets, targets])
        losses = []
        for _ in range(STEPS):
            losses.append(sw.train_step(model, batch, num_microbatches=2).item())
            optimizer.step()
            optimizer.zero_grad()
        found.append((losses, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    (eager, no_graphs), (compiled, graphs) = found
    assert no_graphs == 0 < graphs
    assert compiled == pytest.approx(eager, rel=LOSS_TOLERANCE)
