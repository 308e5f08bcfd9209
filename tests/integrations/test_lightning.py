"""``ShardwiseStrategy`` on two ranks beside Lightning's own single process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise as sw
from shardwise.spec.errors import PlanError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]  # Lightning says much, at its own times


def build() -> Any:
    import lightning

    class Regressor(lightning.LightningModule):
        """As its users write them: layers of its own, called outside of forward."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
            self.head = nn.Linear(16, 1)
            self.losses: list[float] = []

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.body(inputs))

        def training_step(self, batch: list[Tensor], _index: int) -> Tensor:
            loss = F.mse_loss(self.head(self.body(batch[0])), batch[1])
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: list[Tensor], _index: int) -> None:
            self.log("held_out", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Regressor()


def loader(world: int, batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(data, world, rank, shuffle=False) if world > 1 else None
    return DataLoader(data, batch_size=batch_size // world, sampler=sampler)


def fit(folder: str, world: int, strategy: Any, resume: str | None, epochs: int) -> tuple[Any, float]:
    import lightning

    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=world, strategy=strategy, max_epochs=epochs,
        accumulate_grad_batches=2, gradient_clip_val=0.3, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = build()
    trainer.fit(module, loader(world, 8), loader(world, 16), ckpt_path=resume)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    return module, float(trainer.callback_metrics["held_out"])


def fit_on_rank(folder: str, plan: str, resume: str | None, epochs: int) -> tuple[list[float], float, dict[str, Any]]:
    from shardwise.integrations.lightning import ShardwiseStrategy

    module, held_out = fit(folder, 2, ShardwiseStrategy(plan), resume, epochs)
    return module.losses, held_out, sw.full_state_dict(module)


def test_losses_and_weights_are_those_of_one_process_and_a_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    plain, held_out = fit(str(tmp_path / "plain"), 1, "auto", None, 2)
    expected = plain.state_dict()

    def check(ranks: list[Any]) -> None:
        losses = [(a + b) / 2 for a, b in zip(ranks[0][0], ranks[1][0], strict=True)]
        assert losses == pytest.approx(plain.losses[-len(losses) :], rel=1e-5)
        assert ranks[0][1] == pytest.approx(held_out, rel=1e-6)
        for name, value in expected.items():
            torch.testing.assert_close(ranks[0][2][name], value, rtol=1e-5, atol=1e-6)

    first = str(tmp_path / "first")
    check(run_on_ranks(fit_on_rank, 2, str(tmp_path / "whole"), "zero3", None, 2, timeout_s=100))
    run_on_ranks(fit_on_rank, 2, first, "zero3", None, 1, timeout_s=100)
    check(run_on_ranks(fit_on_rank, 2, str(tmp_path / "later"), "ddp", f"{first}/last.ckpt", 2, timeout_s=100))
    saved = torch.load(tmp_path / "whole" / "last.ckpt", weights_only=False)["state_dict"]
    assert saved.keys() == expected.keys()


def test_what_the_strategy_cannot_do_is_refused() -> None:
    import lightning

    from shardwise.integrations.lightning import ShardwiseStrategy

    assert "tp=2: ShardwiseStrategy gives" in refusal(PlanError, ShardwiseStrategy, sw.ParallelPlan(tp=2))
    text = refusal(PlanError, ShardwiseStrategy, ddp_comm_hook=print, find_unused_parameters=True)
    assert "got ddp_comm_hook, find_unused_parameters: DistributedDataParallel is not used" in text
    given = {"accelerator": "cpu", "devices": 1, "logger": False}
    text = refusal(PlanError, lightning.Trainer, strategy=ShardwiseStrategy(), precision="bf16-true", **given)
    assert "bf16-true" in text
    trainer = lightning.Trainer(strategy=ShardwiseStrategy(), precision="bf16-mixed", **given)
    assert trainer.precision == "bf16-mixed"


def alternate(world: int, strategy: Any) -> Any:
    """Fit two parts in turns, each with its optimizer, which clips its own gradients; the other part has some too."""
    import lightning

    class Turns(type(build())):
        automatic_optimization = False

        def training_step(self, batch: list[Tensor], _index: int) -> None:
            for optimizer in self.optimizers():
                self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
                self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), lr=1.0) for part in (self.body, self.head)]

    module = Turns()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, loader(world, 8))
    return module


def alternate_on_rank() -> dict[str, Tensor]:
    from shardwise.integrations.lightning import ShardwiseStrategy

    return sw.full_state_dict(alternate(2, ShardwiseStrategy("zero3")))


def test_an_optimizer_clips_its_own_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_on_ranks(alternate_on_rank, 2, timeout_s=100)[0]
    for name, value in alternate(1, "auto").state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def normalize(folder: str, world: int, strategy: Any, **given: Any) -> Any:
    """Fit a module with a batch norm, whose last checkpoint is a link."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = build()
    module.body[1] = nn.BatchNorm1d(16)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=1, use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ModelCheckpoint(folder, save_last="link")],
        sync_batchnorm=world > 1,
    )  # fmt: skip
    trainer.fit(module, loader(world, 8), **given)
    return module


def normalize_on_rank(folder: str) -> list[Any]:
    from shardwise.integrations.lightning import ShardwiseStrategy

    module = normalize(folder, 2, ShardwiseStrategy("zero3"))
    resumed = normalize(folder, 2, ShardwiseStrategy("zero3"), ckpt_path=f"{folder}/last.ckpt")
    return [module.losses, sw.full_state_dict(module), sw.full_state_dict(resumed)]


def test_batch_norms_are_synchronized_and_a_linked_checkpoint_is_resumed(tmp_path: Path) -> None:
    plain = normalize(str(tmp_path / "plain"), 1, "auto")
    ranks = run_on_ranks(normalize_on_rank, 2, str(tmp_path / "shards"), timeout_s=100)
    assert [(a + b) / 2 for a, b in zip(ranks[0][0], ranks[1][0], strict=True)] == pytest.approx(plain.losses, rel=1e-5)
    assert (tmp_path / "shards" / "last.ckpt").is_symlink()
    variance = "body.1.running_var"
    torch.testing.assert_close(ranks[0][1][variance], plain.state_dict()[variance], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(ranks[0][2][name], value) for name, value in ranks[0][1].items())
