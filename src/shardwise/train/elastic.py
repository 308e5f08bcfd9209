"""Runs that torchrun or Slurm start again, perhaps on a different number of machines: recognized, and checked.

torchrun's restart count does not identify the run. Each agent has a separate count, which stays 0 if another machine
was lost or came back, and is above 0 after a first attempt that was refused. Therefore a run's folder stores the names
of the agents that last started the run; if one of them takes part in a new world, the run continues. The global batch
of the run and the microbatch size stay the same; the number of microbatches follows from the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.launch import process
from shardwise.launch.world import World
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.spec.run_files import CONFIG, LOGS
from shardwise.spec.text import printable
from shardwise.train import folder
from shardwise.train.config.resolve import batch_in
from shardwise.train.config.sections import RawConfig, read_config

LAUNCHERS_FILE = "starters.json"
#: Folders of the runs that this process has made: a further call is a further run, and starts none of them again.
_made: list[Path] = []
#: Maximum number of machines that is tried for an error message.
_MOST_MACHINES = 64


def _run_name(world: World) -> str | None:
    """Return the launcher's name of the job, which a later job may reuse; ``None`` for launchers without names."""
    if world.source == "torchrun":
        return f"torchrun {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    if world.source == "slurm" and "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ.get('SLURM_CLUSTER_NAME', '')} {os.environ['SLURM_JOB_ID']}"
    return None


def launcher_identity(world: World) -> str | None:
    """Return a unique name of the process that restarts this one: torchrun's agent on this machine, or a Slurm job.

    Unlike :func:`_run_name`, it is never reused. ``None`` if the launcher's restart count is sufficient.
    """
    name = _run_name(world)
    if world.source != "torchrun":
        return name
    pid = _agent()
    return f"{name}: process {pid} of {process.boot_id()}, begun at {process.start_time(pid)}"


def _agent() -> int:
    """Return the process id of the agent: the nearest ancestor without the agent's environment variables.

    It is the parent, unless a script is between the two.
    """
    pid = os.getppid()
    with contextlib.suppress(OSError):
        while pid > 1 and b"TORCHELASTIC_RUN_ID=" in Path(f"/proc/{pid}/environ").read_bytes():
            pid = process.parent_of(pid)
    return pid


def save_launchers(directory: Path, launchers: Collection[str | None]) -> None:
    """Store which agents or jobs started the run in ``directory``, by their :func:`launcher_identity`.

    The run's number among those of its program is stored too: a program may make several runs of one name.
    """
    made = [*_made, directory.resolve()]
    starters = sorted({name for name in launchers if name})
    folder.replace_json(directory / LOGS / LAUNCHERS_FILE, {"starters": starters, "number": made.index(made[-1])})


def count_run(directory: Path) -> None:
    """Remember that this process makes the run in ``directory``."""
    if directory.resolve() not in _made:
        _made.append(directory.resolve())


def begun_run(name: str, run_dir: Path | None) -> Path | None:
    """Return the folder of the run that this call continues if the program was started again; ``None`` for a new run.

    Without ``run_dir`` it is the newest folder of this name whose run has the number of this call in its program.
    """
    for each in folder.newest_first(name) if run_dir is None else [run_dir]:
        number = None if run_dir is not None else _read_launchers(each).get("number")
        if (number is None or number == len(_made)) and each.resolve() not in _made:
            return each
    return None


def is_restarted(directory: Path, launchers: Collection[str | None], world: World) -> bool:
    """Return whether one of ``launchers`` started the run in ``directory``, so that the run continues."""
    if world.source == "torchrun":
        return not set(_load_launchers(directory)).isdisjoint(launchers)
    if world.source == "slurm":
        return world.restart_count > 0 and not set(_load_launchers(directory)).isdisjoint(launchers)
    return world.restart_count > 0


def _load_launchers(directory: Path) -> list[str]:
    found = _read_launchers(directory).get("starters")
    return [str(name) for name in found] if isinstance(found, list) else []


def _read_launchers(directory: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / LOGS / LAUNCHERS_FILE).read_text())
        return found if isinstance(found, dict) else {}
    return {}


def keep_batch(raw: RawConfig, directory: Path | None, world: World) -> RawConfig:
    """Return the configuration with the batch of the run in ``directory`` if torchrun may be restarting that run.

    Whether it is that run is known only after the ranks have joined; otherwise the folder is refused then.
    """
    name = _run_name(world)
    if world.source != "torchrun" or name is None or directory is None or not (directory / CONFIG).is_file():
        return raw
    if not any(launcher.startswith(f"{name}:") for launcher in _load_launchers(directory)):
        return raw
    try:
        train = read_config(directory / CONFIG).config.train
    except ShardwiseError:
        return raw
    of_run = {name: getattr(train, name) for name in ("micro_batch_size", "global_batch_size")}
    section = raw.config.train.model_copy(update={**of_run, "gradient_accumulation_steps": None})
    adapted = replace(raw, config=raw.config.model_copy(update={"train": section}), mistakes=dict(raw.mistakes))
    batch, problems = batch_in(adapted, world.size, world.ranks_per_machine)
    if batch is None:
        raise ConfigError(
            f"the run in {printable(directory)} does not continue in a world of {world.size}"
            f" rank{'s' if world.size > 1 else ''}: {'; '.join(problems)}.\n  {_advice(adapted, world)}"
        )
    return adapted


def _advice(raw: RawConfig, world: World) -> str:
    sizes = [world.local_size * machines for machines in range(1, _MOST_MACHINES + 1)]
    fitting = [size for size in sizes if batch_in(raw, size, world.local_size)[0] is not None]
    if not fitting:
        return "No number of machines like this one fits. Continue with --resume and another parallel section."
    near = sorted(sorted(fitting, key=lambda size: abs(size - world.size))[:4])
    return f"It continues with {_join_words(near)} ranks: continue with --resume on as many, or let --nnodes name them."


def _join_words(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
