"""This machine and installation: versions, devices, cores, memory, communication backends."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("numpy", "pydantic", "safetensors", "transformers", "tensorboard", "wandb")


def environment() -> dict[str, Any]:
    """Return facts by name; values are text, numbers, booleans or lists of text."""
    import torch
    from torch import distributed

    backends = [
        name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(distributed, f"is_{name}_available", lambda: False)()
    ]
    devices = [
        f"cuda:{i} {p.name}, {p.total_memory / 2**30:.1f} GiB, bf16 {'yes' if p.major >= 8 else 'no'}"
        for i, p in ((i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    ]
    return {
        "shardwise": _version("shardwise"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in _PACKAGES},
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _memory(),
        "devices": devices or ["cpu"],
        "backends": ", ".join(backends),
        "bf16": "cuda" if devices and torch.cuda.is_bf16_supported() else _cpu_bf16(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB"
    except (ValueError, OSError, AttributeError):
        return "unknown"


def _cpu_bf16() -> str:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu computes in it ({capability}), by conversion where the processor has no instructions for it"


@functools.cache
def code_versions() -> dict[str, str]:
    """Return facts about the running program to compare over ranks, because different versions give different results.

    These are the versions of Python and torch, and a hash of shardwise's source files, which includes its version.
    """
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "code of shardwise": _source_hash(Path(__file__).parents[1]),
    }


def _source_hash(package: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()
