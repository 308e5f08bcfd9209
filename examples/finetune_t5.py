"""Fine-tune T5 on pairs of texts, one T5Block per unit.

    torchrun --nproc-per-node 2 examples/finetune_t5.py [--model FOLDER]

FOLDER is a Hugging Face folder with a T5 model; without one a small model is drawn. Texts are bytes here, so that no
tokenizer has to be downloaded; with a real checkpoint use its own. Each rank reads different pairs.
"""

import argparse
import os

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import shardwise as sw

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
PAIRS = [(f"say {n}", WORDS[n // 10] + " " + WORDS[n % 10]) for n in range(100)]
PAD, END, LENGTH = 0, 1, 16
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(DEVICE)


def encode(text: str) -> list[int]:
    return ([2 + byte for byte in text.encode()] + [END])[:LENGTH]


def collate(pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    def block(texts: list[str], fill: int) -> torch.Tensor:
        rows = [encode(text) for text in texts]
        return torch.tensor([row + [fill] * (LENGTH - len(row)) for row in rows])

    inputs = block([source for source, _ in pairs], PAD)
    labels = block([target for _, target in pairs], -100)
    batch = {"input_ids": inputs, "attention_mask": (inputs != PAD).long(), "labels": labels}
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def build(folder: str | None) -> T5ForConditionalGeneration:
    if folder is not None:
        return T5ForConditionalGeneration.from_pretrained(folder, local_files_only=True)
    torch.manual_seed(0)
    shape = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=2 + 256, decoder_start_token_id=PAD, **shape))


def show_answers(when: str, model: T5ForConditionalGeneration) -> None:
    """generate() gathers unit by unit; all ranks take part."""
    model.eval()
    asked = collate(PAIRS[40:42])
    told = model.generate(input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=LENGTH)
    model.train()
    if torch.distributed.get_rank() == 0:
        for (source, _), row in zip(PAIRS[40:42], told.tolist(), strict=True):
            print(f"{when}: {source} -> {bytes(token - 2 for token in row if token > END).decode(errors='replace')}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--strategy", default="zero3")
    options = parser.parse_args()

    plan = sw.ParallelPlan(strategy=options.strategy, auto_wrap_policy=sw.wrap_by_class({T5Block}))
    model = sw.parallelize(build(options.model).to(DEVICE), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    is_first = torch.distributed.get_rank() == 0
    rank, size = sw.data_parallel_rank(model), sw.data_parallel_size(model)
    sampler = DistributedSampler(PAIRS, num_replicas=size, rank=rank)
    loader = DataLoader(PAIRS, batch_size=10, sampler=sampler, collate_fn=collate)
    show_answers("before", model)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            sw.clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        if is_first:
            print(f"epoch {epoch}  loss {total / len(loader):.3f}")

    show_answers("after", model)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
