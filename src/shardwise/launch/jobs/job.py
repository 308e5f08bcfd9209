"""What every scheduler is told: how many machines, how many ranks on each, and what each of them runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import CONFIG
from shardwise.spec.text import printable

__all__ = ["GRACE_S", "Job", "Volume", "goes_on", "machines", "text_of_yaml"]

#: ``train.grace_s`` of a job whose configuration leaves it open: what a large checkpoint takes.
GRACE_S = 120


@dataclass(frozen=True, slots=True)
class Volume:
    """Storage that outlives machines and is shared by all of them.

    Attributes:
        name: The cluster's name for it.
        path: Where the machines find it.
    """

    name: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Volume:
        """``NAME:/path``.

        Raises:
            ConfigError: It is not of that form.
        """
        name, _, path = text.partition(":")
        if not name or not path.startswith("/") or path == "/":
            raise ConfigError(
                f"--volume {printable(text)}: expected NAME:/path.\n  Set for example --volume runs:/runs."
            )
        return cls(name, path.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run as a scheduler sees it.

    Attributes:
        name: Name of the run.
        config: Path of its configuration, as it was given.
        num_nodes: Machines.
        ranks_per_node: Processes on each of them.
        has_gpus: Whether each process has a GPU; otherwise it computes on CPUs.
        max_restarts: How often all ranks are started again in the same job after one was lost.
        grace_s: Seconds that the ranks have to save after they were asked to stop.
        run_dir: The run's folder; ``None``: chosen by the writer of the job.
        overrides: What ``--set`` gave.
        content: The configuration with what it extends and the overrides, for jobs that carry it.
    """

    name: str
    config: str
    num_nodes: int
    ranks_per_node: int
    has_gpus: bool = True
    max_restarts: int = 3
    grace_s: int = GRACE_S
    run_dir: str | None = None
    overrides: tuple[str, ...] = ()
    content: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """What runs where, for a comment."""
        each = f"{self.ranks_per_node} {'GPU' if self.has_gpus else 'process'}"
        plural = ("s" if self.has_gpus else "es") if self.ranks_per_node > 1 else ""
        return f"{self.config} on {self.num_nodes} node{'s' if self.num_nodes > 1 else ''} with {each}{plural} each"

    def training(self, config: str | None = None) -> str:
        """The words behind ``shardwise`` or ``-m shardwise``.

        Args:
            config: Where the job has put the configuration, in which the overrides are; ``None``: it is read from where
                it lies, with the overrides beside it.

        Returns:
            For the shell, whose variable ``run_dir`` holds the run's folder.
        """
        sets = () if config is not None else self.overrides
        words = ["train", config or self.config, *(word for each in sets for word in ("--set", each))]
        return f'{shlex.join(words)} --run-dir "$run_dir"'

    def folder_in(self, volume: Volume) -> str:
        """The run's folder.

        Raises:
            ConfigError: It does not lie on the volume.
        """
        if self.run_dir is None:
            return f"{volume.path}/{self.name}"
        if not self.run_dir.startswith(f"{volume.path}/"):
            raise ConfigError(
                f"--run-dir {printable(self.run_dir)} does not lie on the volume at {printable(volume.path)}, and would"
                f" be lost with the machine.\n  Set --run-dir {printable(volume.path)}/{self.name}."
            )
        return self.run_dir

    def variables(self) -> dict[str, str]:
        """Environment variables of torchrun's agents and their ranks."""
        return {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/launching.md: machines that come back
            "PYTHONSAFEPATH": "1",  # no code from the folder in which the container starts
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace_s),
            **({"NCCL_DEBUG": "WARN"} if self.has_gpus else {"OMP_NUM_THREADS": "1"}),
        }


def goes_on(folder: str) -> str:
    """Lines for the shell: ``run_dir``, and ``again`` with what continues the run that is there already, if one is."""
    return (
        f"run_dir={shlex.quote(folder)}\n"
        "again=\n"
        f'[ ! -e "$run_dir/{CONFIG}" ] || again="--resume --take-over"  # started again: the run goes on\n'
    )


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are written as such."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def text_of_yaml(content: Mapping[str, Any]) -> str:
    """One document, keys in the order in which they are given."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def machines(num_ranks: int, most_on_one: int) -> tuple[int, int]:
    """How many machines, and ranks on each.

    Raises:
        ConfigError: The ranks do not fill the machines.
    """
    if num_ranks < 1 or most_on_one < 1:
        raise ConfigError(
            f"--gpus {num_ranks}, --gpus-per-node {most_on_one}: expected numbers of at least 1.\n  Set --gpus 8."
        )
    if num_ranks <= most_on_one:
        return 1, num_ranks
    if num_ranks % most_on_one:
        below = num_ranks // most_on_one * most_on_one
        raise ConfigError(
            f"--gpus {num_ranks}: {num_ranks} do not fill nodes of {most_on_one}.\n"
            f"  Set --gpus {below} or {below + most_on_one}, or --gpus-per-node to a divisor of {num_ranks}."
        )
    return num_ranks // most_on_one, most_on_one
