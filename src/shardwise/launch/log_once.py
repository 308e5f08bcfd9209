"""Messages to the user, printed once per process, only on rank 0."""

from __future__ import annotations

import os
import sys

_printed: set[str] = set()


def cpu_warning(device_type: str, num_gpus: int) -> str | None:
    """Return the warning for a model on the CPU of a machine with GPUs; ``None`` otherwise."""
    if device_type != "cpu" or num_gpus == 0:
        return None
    return (
        f"the model is on the CPU, but this machine has {num_gpus} GPU{'s' if num_gpus > 1 else ''}: it is trained"
        " on the CPU. Move it to this rank's GPU before: model.to(torch.device('cuda', int(os.environ['LOCAL_RANK'])))"
    )


def log_once(text: str) -> None:
    """Print ``text`` on rank 0, unless it was printed before."""
    if text in _printed:
        return
    _printed.add(text)
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID", "0")) == "0":
        sys.stderr.write(f"shardwise: {text}\n")
