"""One Llama folder, its tokenizer and one file of conversations, fine-tuned by LoRA in each trainer, and by ours.

Each trainer on two ranks gives the losses of its own single process; the adapter is in every one the same few weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from shardwise.testing import run_on_ranks
from shardwise.train.data.chat import Chat
from tests.common.tokenizers import MARKED, save_model, save_tokenizer

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]  # the trainers warn at their own times

LENGTH, BATCH, STEPS = 64, 8, 4


def save_folder(folder: Path) -> Path:
    save_model(save_tokenizer(folder / "llama", template=MARKED, pad_token="<pad>"), vocab_size=300, seq_len=256)
    turns = [(f"number_{i}?", "One hundred and " * (i % 4) + f"{i}") for i in range(BATCH * STEPS)]
    rows = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": tell}]} for ask, tell in turns
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def build(folder: str) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/llama", local_files_only=True)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def rows(folder: str) -> Any:
    from datasets import load_dataset

    return load_dataset("json", data_files=f"{folder}/chat.jsonl", split="train")


def samples(folder: str) -> list[dict[str, Tensor]]:
    """The conversations as ids and labels of one length."""
    from transformers import AutoTokenizer

    found = []
    for ids, spans in Chat(AutoTokenizer.from_pretrained(f"{folder}/llama"), "messages", "assistant").encode(
        [("chat.jsonl", row) for row in rows(folder)]
    ):
        inputs, labels = torch.zeros(LENGTH, dtype=torch.int64), torch.full((LENGTH,), -100)
        inputs[: len(ids)] = torch.tensor(ids)[:LENGTH]
        for first, last in spans:
            labels[first:last] = inputs[first:last]
        found.append({"input_ids": inputs, "labels": labels})
    return found


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """By a number of tokens that is the same everywhere: the mean over ranks is then that of one process."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    total = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
    return total / (len(batch["labels"]) * 10)


def by_transformers(folder: str, world: int, plan: str | None) -> list[float]:
    from transformers import Trainer, TrainingArguments

    from shardwise.integrations.transformers import ShardwiseTrainer

    args = TrainingArguments(
        output_dir=f"{folder}/out-{world}", per_device_train_batch_size=BATCH // world, max_steps=STEPS,
        logging_steps=1, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, seed=1, save_strategy="no",
    )  # fmt: skip
    kind, given = (Trainer, {}) if plan is None else (ShardwiseTrainer, {"plan": plan})
    trainer = kind(model=build(folder), args=args, train_dataset=samples(folder), **given)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def by_trl(folder: str, world: int, plan: str | None) -> list[float]:
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from shardwise.integrations.transformers import ShardwiseTrainerMixin

    args = SFTConfig(
        output_dir=f"{folder}/out-{world}", per_device_train_batch_size=BATCH // world, max_steps=STEPS,
        logging_steps=1, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True, seed=1, save_strategy="no",
        bf16=False, assistant_only_loss=True, max_length=LENGTH,
    )  # fmt: skip
    kind = SFTTrainer if plan is None else type("Tuner", (ShardwiseTrainerMixin, SFTTrainer), {})
    given = {} if plan is None else {"plan": plan}
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/llama")
    trainer = kind(model=build(folder), args=args, train_dataset=rows(folder), processing_class=tokenizer, **given)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def by_accelerate(folder: str, world: int, plan: str | None) -> list[float]:
    from accelerate import Accelerator, DataLoaderConfiguration

    from shardwise.integrations.accelerate import ShardwiseAccelerator

    options = {"cpu": True, "dataloader_config": DataLoaderConfiguration(split_batches=True)}
    accelerator = Accelerator(**options) if plan is None else ShardwiseAccelerator(plan=plan, **options)
    model = build(folder)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(folder), batch_size=BATCH))
    told = []
    for batch in loader:
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        told.append(float(accelerator.gather(loss.detach()[None]).mean()))
    return told


def by_lightning(folder: str, world: int, plan: str | None) -> list[float]:
    import lightning

    from shardwise.integrations.lightning import ShardwiseStrategy

    class Tuned(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(folder)
            self.told: list[float] = []

        def training_step(self, batch: dict[str, Tensor], _index: int) -> Tensor:
            loss = loss_of(self.model, batch)
            self.told.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    data = samples(folder)
    rank = int(os.environ.get("RANK", "0"))
    sampler = DistributedSampler(data, world, rank, shuffle=False) if world > 1 else None
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=world, max_epochs=1, gradient_clip_val=1.0,
        strategy="auto" if plan is None else ShardwiseStrategy(plan), use_distributed_sampler=False, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    module = Tuned()
    trainer.fit(module, DataLoader(data, batch_size=BATCH // world, sampler=sampler))
    return module.told


@pytest.mark.parametrize("trained", [by_transformers, by_trl, by_accelerate, by_lightning])
def test_a_trainer_gives_the_losses_of_its_own_single_process(
    tmp_path: Path, trained: Callable[[str, int, str | None], list[float]]
) -> None:
    folder = str(save_folder(tmp_path))
    (plain,) = run_on_ranks(trained, 1, folder, 1, None, timeout_s=120)
    ranks = run_on_ranks(trained, 2, folder, 2, "zero3", timeout_s=120)
    found = [sum(values) / 2 for values in zip(*ranks, strict=True)]
    assert len(plain) == STEPS
    assert found == pytest.approx(plain, rel=1e-5)
