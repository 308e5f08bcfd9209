"""Facts about the machine that a measurement needs beside it. No names of hosts or users."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any


def machine_facts() -> dict[str, Any]:
    """Processor, cores, memory, devices, system and versions."""
    import torch

    devices = [torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count())]
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "devices": ", ".join(devices) or "cpu",
        "backend": "nccl" if devices else "gloo",
        "threads_per_rank": 1,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shardwise": metadata.version("shardwise"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
