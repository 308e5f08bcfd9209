"""The run without a configuration file: a small GPT on the source text of Python's own standard library."""

from __future__ import annotations

from typing import Any

#: About a minute on two slow CPU cores; held-out loss falls from 5.4 to about 2.1 nats per byte.
DEMO: dict[str, Any] = {
    "name": "demo",
    "model": {"preset": "gpt-demo"},
    "data": {"source": "stdlib", "seq_len": 128},
    "parallel": {"strategy": "zero3"},
    "optimizer": {"name": "adamw", "lr": 2e-3},
    "schedule": {"name": "cosine", "warmup_steps": 20, "min_lr_ratio": 0.1},
    "train": {
        "steps": 300,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "eval_every": 100,
        "eval_batches": 8,
    },
    "checkpoint": {"every": 100},
    "log": {"every": 10},
}

#: Steps over which the demo compares its strategy with one process, after training.
PARITY_STEPS = 3
