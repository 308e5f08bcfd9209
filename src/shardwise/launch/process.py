"""Facts of the system about processes, and names that are used only once, because process numbers are used again."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

#: What drivers put into /dev: NVIDIA's, the one of WSL 2, and AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def num_gpus() -> int:
    """GPUs that torch sees on this machine. torch, which takes seconds to load, is asked only where a driver is."""
    if not any(Path(name).exists() for name in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def boot() -> str:
    """This machine since it was switched on: other machines, also of the same name, and later boots have another."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def began(pid: int) -> str:
    """When a process began, in clock ticks of this boot; empty where there is none, or it has ended."""
    fields = stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def parent(pid: int) -> int:
    """The process number of a process's parent; 0 where there is no such process."""
    fields = stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on; none where there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def peak_rss_bytes() -> int:
    """The most memory of the host that this process has held; 0 where the system does not say.

    Not ``ru_maxrss``, which a process inherits from the one that has started it.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
