"""DeepSpeed's ZeRO, set up for a comparison: torch's AdamW, no offload, its defaults otherwise.

DeepSpeed joins the process group that exists. On CPU it compiles a small shared-memory extension at first use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.compare.trainee import LEARNING_RATE, Trainee


def load() -> None:
    """Import the package, which takes seconds and tens of megabytes."""
    import deepspeed  # noqa: F401  # pyrefly: ignore[missing-import]


def zero(stage: int) -> Callable[[nn.Module, list[nn.Module], torch.device], Trainee]:
    """ZeRO of that stage over the whole world."""

    def build(model: nn.Module, _units: list[nn.Module], device: torch.device) -> Trainee:
        import deepspeed  # pyrefly: ignore[missing-import]

        backend = "nccl" if device.type == "cuda" else "gloo"
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        settings = {
            "train_micro_batch_size_per_gpu": 1,  # only its ratio to the global batch matters, for its own counters
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,  # it clips to 1 where nothing is said
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)

        def backward(loss: Tensor) -> None:
            engine.backward(loss)

        return Trainee(engine, backward=backward, update=engine.step)

    return build
