"""Facts of the system about processes, and unique identities for them, because process numbers are reused."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

#: Files that drivers create in /dev: NVIDIA's, WSL 2's, and AMD's.
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def num_gpus() -> int:
    """Return the number of GPUs that torch sees on this machine. torch is imported only if a driver is installed."""
    if not any(Path(name).exists() for name in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def boot_id() -> str:
    """Return an identity of this machine's current boot, different for other machines and for later boots."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def start_time(pid: int) -> str:
    """Return a process's start time in clock ticks of this boot; empty if it does not exist or has ended."""
    fields = stat(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def parent_of(pid: int) -> int:
    """Return the process number of a process's parent; 0 if there is no such process."""
    fields = stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return []


def peak_rss_bytes() -> int:
    """Return the peak host memory of this process; 0 if the system does not report it.

    ``ru_maxrss`` is not used, because a process inherits it from the process that started it.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
