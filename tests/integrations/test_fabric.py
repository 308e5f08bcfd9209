"""``ShardwiseFabricStrategy`` on two ranks beside Fabric in one process: the same loop, losses, norms and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.spec.errors import CheckpointError, PlanError, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def loader(fabric: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    return fabric.setup_dataloaders(DataLoader(data, batch_size=8 // fabric.world_size))


def epoch(fabric: Any, model: Any, optimizer: Any, scheduler: Any) -> list[tuple[float, float]]:
    """A loop as Fabric's own examples have it: the losses and norms of an epoch."""
    told = []
    for place, (inputs, targets) in enumerate(loader(fabric)):
        is_accumulating = place % 2 == 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = F.mse_loss(model(inputs), targets) / 2
            fabric.backward(loss)
        if not is_accumulating:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
            fabric.clip_gradients(model, optimizer, clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            told.append((float(fabric.all_reduce(loss.detach())), float(norm)))
    return told


def train(fabric: Any, folder: str, resume: str | None, state_of: Any) -> tuple[list[Any], dict[str, Tensor], int]:
    fabric.launch()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "epochs": 0}
    if resume is not None:
        assert fabric.load(resume, state) == {}
    told = epoch(fabric, model, optimizer, scheduler)
    state["epochs"] += 1
    fabric.save(folder, state)
    fabric.save(folder, state)  # over the one before
    return told, state_of(model.module), state["epochs"]


def fabric(**options: Any) -> Any:
    import lightning

    return lightning.Fabric(accelerator="cpu", **options)


def plain(folder: str, resume: str | None = None) -> Any:
    return train(fabric(devices=1), folder, resume, nn.Module.state_dict)


def sharded(world: int, plan: str, folder: str, resume: str | None = None) -> Any:
    from shardwise.integrations.fabric import ShardwiseFabricStrategy

    return train(fabric(strategy=ShardwiseFabricStrategy(plan), devices=world), folder, resume, sw.full_state_dict)


def compare(found: Any, expected: Any) -> None:
    told, state, epochs = found
    assert torch.tensor(told).flatten().tolist() == pytest.approx(
        torch.tensor(expected[0]).flatten().tolist(), rel=1e-5
    )
    assert epochs == expected[2]
    for name, value in expected[1].items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", ["zero3", "zero1"])
def test_the_loop_gives_the_plain_losses_norms_and_weights_and_goes_on_under_another_plan(
    tmp_path: Path, plan: str
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    expected = run_on_ranks(plain, 1, first, timeout_s=60)[0]
    later = run_on_ranks(plain, 1, second, first, timeout_s=60)[0]
    compare(run_on_ranks(sharded, 2, 2, plan, f"{first}-{plan}", timeout_s=60)[0], expected)
    compare(run_on_ranks(sharded, 1, 1, "ddp", f"{second}-{plan}", f"{first}-{plan}", timeout_s=60)[0], later)


def other_ways(folder: str) -> None:
    """Built on meta, flat parameters, bf16, a plain file, and what is refused."""
    from shardwise.integrations.fabric import ShardwiseFabricStrategy

    here = fabric(strategy=ShardwiseFabricStrategy("zero2"), devices=2, precision="bf16-mixed")
    here.launch()
    with here.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    assert model[0].weight.is_meta
    model = here.setup_module(model)
    optimizer = here.setup_optimizers(torch.optim.AdamW(sw.flat_parameters(model.module), lr=1e-2))
    weights = {name: torch.ones(sw.logical_shape(value)) for name, value in model.module.named_parameters()}
    if here.is_global_zero:
        torch.save(weights, f"{folder}/plain.pt")
    here.barrier()
    here.load_raw(f"{folder}/plain.pt", model)
    output = model(torch.ones(2, 8))
    here.backward(output.mean())
    optimizer.step()
    here.save(f"{folder}/flat", {"model": model, "optimizer": optimizer, "note": "kept"})
    stepped = sw.full_state_dict(model.module)
    here.load_raw(f"{folder}/plain.pt", model)
    assert here.load(f"{folder}/flat", {"model": model, "optimizer": optimizer}) == {"note": "kept"}
    for name, value in sw.full_state_dict(model.module).items():
        assert torch.equal(value, stepped[name])
        assert not torch.equal(value, weights[name])

    other = here.setup_module(nn.Linear(4, 4))
    before = sw.full_state_dict(other.module)
    here.save(f"{folder}/two", {"model": model, "optimizer": optimizer, "other": other})
    with torch.no_grad():
        other.module.weight.zero_()
    here.load(f"{folder}/two", {"other": other})
    assert all(torch.equal(value, before[name]) for name, value in sw.full_state_dict(other.module).items())

    here.backward(other(torch.ones(2, 4)).sum())
    bias = torch.optim.SGD([other.module.bias], lr=1.0)
    assert here.clip_gradients(other, bias, max_norm=9.0).item() == 4  # without the gradients of the weight

    both = {"model": model, "optimizer": optimizer}
    assert "Its '_forward_module' is; pass that" in refusal(StateError, sw.full_state_dict, model)
    here.backward(model(torch.full((2, 8), torch.inf)).mean())
    assert "error_if_nonfinite" in refusal(StateError, here.clip_gradients, model, optimizer, max_norm=1.0)
    assert "fabric.save" in refusal(StateError, optimizer.state_dict)
    assert "is inf" in refusal(StateError, here.clip_gradients, model, optimizer, max_norm=1.0, norm_type=torch.inf)
    assert "of no model" in refusal(CheckpointError, here.save, f"{folder}/half", {"optimizer": optimizer})
    keep_all = {"model": lambda *_: True}
    assert "Filter other values" in refusal(CheckpointError, here.save, f"{folder}/half", both, filter=keep_all)
    assert "but not extra" in refusal(CheckpointError, here.load, f"{folder}/flat", {**both, "extra": 1})
    assert "not a folder of fabric.save" in refusal(CheckpointError, here.load, f"{folder}/plain.pt", both)


def test_models_on_meta_flat_parameters_and_plain_files_work_and_the_rest_is_refused(tmp_path: Path) -> None:
    run_on_ranks(other_ways, 2, str(tmp_path), timeout_s=60)


def test_plans_and_options_that_the_strategy_cannot_do_are_refused() -> None:
    from shardwise.integrations.fabric import ShardwiseFabricStrategy

    assert "tp=2: ShardwiseFabricStrategy gives" in refusal(PlanError, ShardwiseFabricStrategy, sw.ParallelPlan(tp=2))
    assert "static_graph" in refusal(PlanError, ShardwiseFabricStrategy, static_graph=True)
    text = refusal(PlanError, fabric, strategy=ShardwiseFabricStrategy(), devices=1, precision="bf16-true")
    assert "bf16-true" in text
