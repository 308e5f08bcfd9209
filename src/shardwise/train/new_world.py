"""A run that torchrun or Slurm starts again, perhaps on fewer or more machines: is it that run, and does the world fit?

The folder of a run holds who has started it last (``launch.starter``). The global batch stays that of the run, and so
does what each rank computes at once; how many microbatches a step has follows from the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.launch.starter import run_name
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
    name = run_name(world)
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
