"""A run as a job of a scheduler, and its files for Slurm, Kubernetes and SkyPilot from this folder's templates."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.launch.root_cause import RESTARTABLE
from shardwise.launch.stop_request import INTERRUPTED, STOPPED
from shardwise.spec.errors import ConfigError
from shardwise.spec.run_files import CONFIG
from shardwise.spec.text import printable

#: Default of ``train.grace_s`` in a job: seconds for saving a large checkpoint.
GRACE_S = 120
#: Maximum length of a name: a pod's host name has at most 63 characters, and Kubeflow adds ``-worker-`` and a number.
_LONGEST_NAME = 48


@dataclass(frozen=True, slots=True)
class Volume:
    """Storage that outlives machines and is shared by all of them."""

    name: str  # the cluster's name of the volume
    path: str  # where the machines mount it

    @classmethod
    def parse(cls, text: str) -> Volume:
        """Parse ``NAME:/path``."""
        name, _, path = text.partition(":")
        if not name or not path.startswith("/") or path == "/":
            raise ConfigError(
                f"--volume {printable(text)}: expected NAME:/path.\n  Set for example --volume runs:/runs."
            )
        return cls(name, path.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run as a job of a scheduler."""

    name: str
    config: str  # path of its configuration, as given
    num_nodes: int  # number of machines
    ranks_per_node: int  # processes on each machine
    has_gpus: bool = True  # whether each process has a GPU; otherwise it computes on CPUs
    max_restarts: int = 3  # how many times all ranks are restarted in the same job after one was lost
    grace_s: int = GRACE_S  # seconds that the ranks have to save after they were asked to stop
    run_dir: str | None = None  # the run's folder; ``None``: the file's writer chooses one
    overrides: tuple[str, ...] = ()  # values given by ``--set``
    #: The configuration, merged with what it extends and the overrides, for jobs that contain it.
    content: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a line for a comment that says which command runs where."""
        each = f"{self.ranks_per_node} {'GPU' if self.has_gpus else 'process'}"
        plural = ("s" if self.has_gpus else "es") if self.ranks_per_node > 1 else ""
        return f"{self.config} on {self.num_nodes} node{'s' if self.num_nodes > 1 else ''} with {each}{plural} each"

    def training(self, config: str | None = None) -> str:
        """Return the arguments of ``shardwise`` or ``-m shardwise``.

        Args:
            config: Path of the configuration in the job, which includes the overrides. ``None``: the configuration is
                read from its original path, with the overrides as arguments.

        Returns:
            Text for the shell, whose variable ``run_dir`` is the run's folder.
        """
        sets = () if config is not None else self.overrides
        words = ["train", config or self.config, *(word for each in sets for word in ("--set", each))]
        return f'{shlex.join(words)} --run-dir "$run_dir"'

    def folder_in(self, volume: Volume) -> str:
        """Return the run's folder, which must be on the volume."""
        if self.run_dir is None:
            return f"{volume.path}/{self.name}"
        if not self.run_dir.startswith(f"{volume.path}/"):
            raise ConfigError(
                f"--run-dir {printable(self.run_dir)} does not lie on the volume at {printable(volume.path)}, and would"
                f" be lost with the machine.\n  Set --run-dir {printable(volume.path)}/{self.name}."
            )
        return self.run_dir

    def variables(self) -> dict[str, str]:
        """Return environment variables for torchrun's agents and their ranks."""
        return {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # docs/launching.md: machines that come back
            "PYTHONSAFEPATH": "1",  # no code from the container's working directory
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.grace_s),
            **({"NCCL_DEBUG": "WARN"} if self.has_gpus else {"OMP_NUM_THREADS": "1"}),
        }


def slurm(job: Job, *, folder: str, time: str, image: str | None = None, volume: Volume | None = None) -> str:
    """Return a batch script for ``sbatch``.

    It runs in ``folder``, on a disk that all nodes share. With ``image`` the ranks run in a container (pyxis) that
    mounts ``volume`` in addition to ``folder``.
    """
    saves_s = max(300, job.grace_s + 60)  # before the limit: a step, a save, and a minute of inaccuracy of Slurm
    _check_time(time, saves_s)
    places = {folder: folder, **({volume.name: volume.path} if volume is not None else {})}
    mounted = tuple(f"{place.rstrip('/')}/" for place in places.values())
    if image and job.run_dir and job.run_dir.startswith("/") and not f"{job.run_dir}/".startswith(mounted):
        where = printable(job.run_dir)
        raise ConfigError(
            f"--run-dir {where} is not in the container, and would be lost with it.\n"
            f"  Name a folder in {printable(folder)}, or add --volume {where}:{where}."
        )
    codes = {"STOPPED": STOPPED, "INTERRUPTED": INTERRUPTED, "RESTARTABLE": RESTARTABLE}
    mounts = ",".join(f"{name}:{path}" for name, path in places.items())
    return _written("slurm.sh", job, folder=folder, time=time, saves_s=saves_s, image=image, mounts=mounts, **codes)


def kubernetes(job: Job, *, image: str, volume: Volume) -> str:
    """Return a manifest for ``kubectl apply``.

    ``volume`` is a persistent volume claim that many pods can write (ReadWriteMany).
    """
    name = re.sub(r"[._]", "-", job.name.lower()).strip("-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"name={printable(job.name)} is not a name for Kubernetes: expected a letter, then letters, digits and"
            f" dashes, at most {_LONGEST_NAME}.\n  Add --set name=run-1."
        )
    return _written("kubernetes.yaml", job, name=name, image=image, volume=volume, begin=_begin(job, volume))


def skypilot(job: Job, *, gpu: str | None, image: str, volume: Volume) -> str:
    """Return a task for ``sky jobs launch``."""
    return _written("skypilot.yaml", job, gpu=gpu, image=image, volume=volume, begin=_begin(job, volume))


def _written(template: str, job: Job, **facts: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701  shell scripts and YAML, not HTML: values are quoted by the two filters
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"quote": shlex.quote, "yaml": _yaml}
    return environment.get_template(f"{template}.jinja").render(job=job, **facts)


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120).removesuffix("...\n").rstrip("\n")


def _begin(job: Job, volume: Volume) -> str:
    """Return shell lines that set ``run_dir``, and ``again`` with the options that continue an existing run."""
    return (
        f"run_dir={shlex.quote(job.folder_in(volume))}\n"
        "again=\n"
        f'[ ! -e "$run_dir/{CONFIG}" ] || again="--resume --take-over"  # started again: the run continues'
    )


def _check_time(time: str, saves_s: int) -> None:
    """Refuse a time that is not in Slurm's format, or that ends before the ranks can save."""
    if time.upper() in {"INFINITE", "UNLIMITED"}:
        return
    match = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+(?::[0-9]+){0,2})", time)
    if match is None:
        raise ConfigError(
            f"--time {printable(time)}: expected minutes, hours:minutes:seconds or days-hours, as for sbatch.\n"
            "  Set for example --time 24:00:00."
        )
    days, fields = match[1], [int(field) for field in match[2].split(":")]
    if days is None and len(fields) < 3:
        fields = [0, *fields]  # minutes, or minutes and seconds
    hours, minutes, seconds = [*fields, 0, 0][:3]
    if ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds <= saves_s:
        raise ConfigError(
            f"--time {time}: the ranks are asked to save {saves_s} s before the limit, so that nothing would be"
            " trained.\n  Set for example --time 1:00:00."
        )


def machines(num_ranks: int, most_on_one: int) -> tuple[int, int]:
    """Return the number of machines, and the number of ranks on each."""
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
