"""A run that torchrun or Slurm starts again, perhaps on fewer or more machines: is it that run, and does the world fit?

torchrun's count of restarts does not say so. Each agent has its own count, which stays 0 where a machine was lost or
came back, and is above 0 after a first attempt that was refused. So a run's folder holds the names of the agents that
have started the run last: a world that one of them has a part in goes on with that run. The global batch stays that of
the run, and so does what each rank computes at once; how many microbatches a step has follows from the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.launch import process
from shardwise.launch.world import World
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.run_files import CONFIG, LOGS
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.config.resolve import batch_in
from shardwise.train.config.sections import RawConfig, read_config

STARTERS = "starters.json"
#: Worlds of so many machines are tried for a message.
_MOST_MACHINES = 64


def _run_name(world: World) -> str | None:
    """The launcher's name of the job, which a later job may have too; ``None`` for launchers without names."""
    if world.source == "torchrun":
        return f"torchrun {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    if world.source == "slurm" and "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '')} {os.environ['SLURM_JOB_ID']}"
    return None


def starter(world: World) -> str | None:
    """The name of what starts this process again: torchrun's agent on this machine, or a Slurm job.

    Unlike :func:`_run_name` no other run ever has it. ``None`` where the launcher's count of restarts says enough.
    """
    name = _run_name(world)
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


def note_starters(directory: Path, names: Collection[str | None]) -> None:
    """Keep who has started the run in ``directory``."""
    folder.replace_json(directory / LOGS / STARTERS, {"starters": sorted({name for name in names if name})})


def is_started_again(directory: Path, names: Collection[str | None], world: World) -> bool:
    """Whether those who start the run now have started the one in ``directory``, so that it goes on."""
    if world.source == "torchrun":
        return not set(_starters(directory)).isdisjoint(names)
    if world.source == "slurm":
        return world.restart_count > 0 and not set(_starters(directory)).isdisjoint(names)
    return world.restart_count > 0


def _starters(directory: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return [str(name) for name in json.loads((directory / LOGS / STARTERS).read_text())["starters"]]
    return []


def keep_batch(raw: RawConfig, directory: Path | None, world: World) -> RawConfig:
    """The configuration with the batch of the run in ``directory``, where torchrun may be starting that run again.

    Whether it does is known when the ranks have joined; if it does not, the folder is refused then.
    """
    name = _run_name(world)
    if world.source != "torchrun" or name is None or directory is None or not (directory / CONFIG).is_file():
        return raw
    if not any(held.startswith(f"{name}:") for held in _starters(directory)):
        return raw
    try:
        train = read_config(directory / CONFIG).config.train
    except ShardwiseError:
        return raw
    of_run = {name: getattr(train, name) for name in ("micro_batch_size", "global_batch_size")}
    section = raw.config.train.model_copy(update={**of_run, "gradient_accumulation_steps": None})
    kept = replace(raw, config=raw.config.model_copy(update={"train": section}), mistakes=dict(raw.mistakes))
    batch, problems = batch_in(kept, world.size, world.ranks_per_machine)
    if batch is None:
        raise ConfigError(
            f"the run in {printable(directory)} does not go on in a world of {world.size}"
            f" rank{'s' if world.size > 1 else ''}: {'; '.join(problems)}.\n  {_advice(kept, world)}"
        )
    return kept


def _advice(raw: RawConfig, world: World) -> str:
    sizes = [world.local_size * machines for machines in range(1, _MOST_MACHINES + 1)]
    fitting = [size for size in sizes if batch_in(raw, size, world.local_size)[0] is not None]
    if not fitting:
        return "No number of machines like this one fits. Continue with --resume and another parallel section."
    near = sorted(sorted(fitting, key=lambda size: abs(size - world.size))[:4])
    return f"It goes on with {_listed(near)} ranks: continue with --resume on as many, or let --nnodes name them."


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
