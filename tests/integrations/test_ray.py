"""``TorchTrainer`` with two workers, one of which fails, beside the same loop in one process: losses and weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.spec.errors import CheckpointError
from tests.common.ranks import refusal

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, runtime_env=environment)
    yield
    ray.shutdown()


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 1, generator=generator)


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    import ray.train

    from shardwise.integrations.contrib.ray import report, restore

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = sw.parallelize(build(), config["plan"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = restore(model, optimizer, config.get("checkpoint")) or {"step": 0}
    if config.get("scratch") is not None:
        assert "Pass scratch" in refusal(CheckpointError, report, {}, model, optimizer)
    failed = Path(config["folder"], "failed")
    for step in range(state["step"], config["steps"]):
        if step == config.get("fails_at") and not failed.exists() and rank == 1:
            failed.touch()
            raise RuntimeError("this worker has failed")
        inputs, targets = (part.chunk(world)[rank] for part in batch(step))
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        sw.clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        parts: list[Any] = [None] * world
        torch.distributed.all_gather_object(parts, float(loss.detach()))
        mean = sum(parts) / world
        if rank == 0:
            with Path(config["folder"], "losses").open("a") as file:
                file.write(f"{step} {mean}\n")
        report({"step": step, "loss": mean}, model, optimizer, state={"step": step + 1}, scratch=config.get("scratch"))


def fit(folder: Path, name: str, storage: Mapping[str, Any], **config: Any) -> Any:
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    checkpoints, failures = CheckpointConfig(num_to_keep=2), FailureConfig(max_failures=1)
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, checkpoint_config=checkpoints, failure_config=failures, **storage),
    )
    return trainer.fit()


def plain(steps: int) -> tuple[list[float], nn.Module]:
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        inputs, targets = batch(step)
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


def weights_in(checkpoint: Any) -> dict[str, Tensor]:
    model = build()
    sw.parallelize(model, "ddp")
    with checkpoint.as_directory() as folder:
        sw.load(folder, model)
    found = sw.full_state_dict(model)
    torch.distributed.destroy_process_group()
    return found


@pytest.mark.timeout(600)  # Ray starts a cluster, and three groups of workers
@pytest.mark.usefixtures("cluster")
def test_two_workers_have_the_losses_and_weights_of_one_process_although_one_fails(tmp_path: Path) -> None:
    """The first run keeps its checkpoints in a folder; another goes on from there, and has a store that is none."""
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

    first = fit(tmp_path, "first", {"storage_path": str(tmp_path)}, plan="zero3", steps=4, fails_at=2)
    assert (tmp_path / "failed").exists()
    assert first.metrics["step"] == 3
    assert len([entry for entry in (tmp_path / "first").iterdir() if entry.name.startswith("checkpoint_20")]) == 2
    (tmp_path / "remote").mkdir()
    store = {
        "storage_path": "runs",
        "storage_filesystem": SubTreeFileSystem(str(tmp_path / "remote"), LocalFileSystem()),
    }
    scratch = tmp_path / "scratch"
    then = fit(tmp_path, "then", store, plan="zero1", steps=6, checkpoint=first.checkpoint, scratch=str(scratch))
    assert list(scratch.iterdir()) == []

    losses, model = plain(6)
    told = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert [int(step) for step, _ in told] == [0, 1, 2, 3, 4, 5]
    assert [float(loss) for _, loss in told] == pytest.approx(losses, rel=1e-5)
    for name, value in weights_in(then.checkpoint).items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-4, atol=1e-6)
