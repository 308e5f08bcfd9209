"""A small Llama with a tokenizer and conversations, for tests of `shardwise train` on them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.common.tokenizers import TEMPLATE, save_model, save_tokenizer


def cache_here() -> None:
    """Keep tokens in the folder that a rank runs in."""
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / "cache")


def save_chats(folder: Path, *, num_layers: int = 2) -> Path:
    """Forty conversations beside a model; returns ``folder``."""
    model = save_tokenizer(folder / "llama", template=TEMPLATE)
    save_model(model, vocab_size=300, seq_len=256, num_layers=num_layers)
    turns = [(f"number_{i}?", "One hundred and " * (i % 4) + f"{i}") for i in range(40)]
    rows = [
        {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": tell}]} for ask, tell in turns
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def all_losses(folder: Path, *names: str) -> list[list[float]]:
    """Of each run the loss of every step, and the last held-out one."""
    found = []
    for name in names:
        records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        found.append([record["loss"] for record in records] + [records[-1]["eval_loss"]])
    return found
