"""The starter of this process. A run that its launcher starts again, perhaps on other machines, stays in its folder.

torchrun's count of restarts does not say so. Each agent has its own count, which stays 0 where a machine was lost or
came back, and is above 0 after a first attempt that was refused. So a run's folder holds the names of the agents that
have started the run last: a world that one of them has a part in goes on with that run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from shardwise.launch import process
from shardwise.launch.world import World


def run_name(world: World, environ: Mapping[str, str] = os.environ) -> str | None:
    """The launcher's name of the job, which a later job may have too; ``None`` for launchers without names."""
    if world.source == "torchrun":
        return f"torchrun {environ.get('TORCHELASTIC_RUN_ID', '')}"
    if world.source == "slurm" and "SLURM_JOB_ID" in environ:
        return f"slurm {environ.get('SLURM_CLUSTER_NAME', '')} {environ['SLURM_JOB_ID']}"
    return None


def starter(world: World, environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of what starts this process again: torchrun's agent on this machine, or a Slurm job.

    Unlike :func:`run_name` no other run ever has it. ``None`` where the launcher's count of restarts says enough.
    """
    name = run_name(world, environ)
    if world.source != "torchrun":
        return name
    pid = _agent()
    return f"{name}: process {pid} of {process.boot()}, begun at {process.began(pid)}"


def _agent() -> int:
    """The process number of the agent: the nearest ancestor that has not got the agent's variables.

    It is the parent, unless a script stands between the two.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid > 1 and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = process.parent(pid)
    return pid
