"""``launch``: write the job file with which a scheduler runs a configuration. Starts nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import show, write
from shardwise.spec.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.launch.jobs.job import Job
    from shardwise.train.config.sections import RawConfig

#: The options that name a scheduler, and the command that starts a job there.
_START = {"--slurm": "sbatch", "--kubernetes": "kubectl apply -f", "--skypilot": "sky jobs launch"}


def launch(
    config: Annotated[Path, typer.Argument(help="YAML or JSON file.")],
    slurm: Annotated[bool, typer.Option("--slurm", help="A batch script for sbatch.")] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="A PyTorchJob for Kubeflow's training operator.")
    ] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="A task for `sky jobs launch`.")] = False,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs in all; by default as many as the configuration's parallel section fixes.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of one node.")] = 8,
    cpu: Annotated[bool, typer.Option("--cpu", help="Processes on CPUs, as many as --gpus says.")] = False,
    time: Annotated[
        str | None,
        typer.Option(help="Slurm's time limit, 24:00:00 by default; the run continues when the job is requeued."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Container image with shardwise installed; for Slurm with pyxis only."),
    ] = None,
    volume: Annotated[
        str | None,
        typer.Option(
            metavar="NAME:/path",
            help="Kubernetes, SkyPilot: the shared volume that holds the run's folder. Slurm with --image: a folder of"
            " the nodes, and its path in the container.",
        ),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="SkyPilot: the GPU's name there, such as H100.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Start all ranks again this often after one was lost.")] = 3,
    run_dir: Annotated[str | None, typer.Option(help="The run's folder, on a disk that all nodes share.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="section.field=value, repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="The file to write; by default the job is printed.")] = None,
) -> None:
    """Write the job with which a scheduler runs and restarts CONFIG. Starts nothing itself.

    The job restarts the run after a preemption, at the time limit, and after the loss of a rank or a node.

    Examples:

      shardwise launch --slurm run.yaml --gpus 16 --time 12:00:00 --out run.sbatch && sbatch run.sbatch

      shardwise launch --kubernetes run.yaml --gpus 16 --image registry/shardwise --volume runs:/runs | kubectl apply -f
    -

      shardwise launch --skypilot run.yaml --gpus 16 --gpu H100 --image registry/shardwise --volume runs:/runs >
    job.yaml
    """
    from shardwise.launch.jobs.job import GRACE_S, Job, machines
    from shardwise.train.config.sections import read_config

    chosen = [name for name, is_named in zip(_START, (slurm, kubernetes, skypilot), strict=True) if is_named]
    if len(chosen) != 1:
        got, advice = (" and ".join(chosen), "Keep") if chosen else ("none", "Add")
        raise ConfigError(
            f"launch: expected one scheduler, got {got}.\n  {advice} one of {', '.join(chosen or _START)}."
        )
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts {max_restarts}: expected 0 or more.\n  Set --max-restarts 0.")
    _check_options(chosen[0], is_in_container=image is not None, cpu=cpu, time=time, volume=volume, gpu=gpu)
    settings = list(overrides or [])
    raw = read_config(config, settings)
    if "grace_s" not in raw.given_keys("train"):
        settings.append(f"train.grace_s={GRACE_S}")
        raw = read_config(config, settings)
    num_nodes, each = machines(num_ranks_of(raw, gpus), gpus_per_node)
    _check(raw, num_nodes, each, reads_model=slurm)
    job = Job(
        name=raw.config.name,
        config=str(config),
        num_nodes=num_nodes,
        ranks_per_node=each,
        has_gpus=not cpu,
        max_restarts=max_restarts,
        grace_s=math.ceil(raw.config.train.grace_s),
        run_dir=run_dir,
        overrides=tuple(settings),
        content={"name": raw.config.name, **raw.document.values},
    )
    text = _render_job(job, chosen[0], time=time, image=image, volume=volume, gpu=gpu)
    if out is None:
        show(text.rstrip())
    else:
        write(out, text)
        show(f"written to {out}; start it with\n  {_START[chosen[0]]} {out}")


def _check_options(
    scheduler: str, *, is_in_container: bool, cpu: bool, time: str | None, volume: str | None, gpu: str | None
) -> None:
    """Refuse options without an effect on the job."""
    without = {
        "--time": time is not None and scheduler != "--slurm",
        "--gpu": gpu is not None and (scheduler != "--skypilot" or cpu),
        "--volume": volume is not None and scheduler == "--slurm" and not is_in_container,
    }
    unused = [name for name, is_unused in without.items() if is_unused]
    if unused:
        more = f"{scheduler}{' --cpu' if cpu else ''}"
        raise ConfigError(f"launch {more}: {' and '.join(unused)} would change nothing.\n  Leave it out.")


def _render_job(
    job: Job, scheduler: str, *, time: str | None, image: str | None, volume: str | None, gpu: str | None
) -> str:
    from shardwise.launch.jobs.job import Volume, kubernetes, skypilot, slurm

    if scheduler == "--slurm":
        mount = Volume.parse(volume) if volume is not None else None
        return slurm(job, folder=str(Path.cwd()), time=time or "24:00:00", image=image, volume=mount)
    missing = {"--image registry/shardwise": image is None, "--volume runs:/runs": volume is None}
    missing["--gpu H100"] = scheduler == "--skypilot" and gpu is None and job.has_gpus
    if image is None or volume is None or any(missing.values()):
        words = " ".join(word for word, is_missing in missing.items() if is_missing)
        raise ConfigError(f"launch {scheduler}: something of the cluster is not known.\n  Set for example {words}.")
    if scheduler == "--kubernetes":
        return kubernetes(job, image=image, volume=Volume.parse(volume))
    return skypilot(job, gpu=gpu if job.has_gpus else None, image=image, volume=Volume.parse(volume))


def num_ranks_of(raw: RawConfig, gpus: int | None) -> int:
    """Return the number of ranks: ``gpus``, or the product of the degrees if the configuration sets all of them."""
    if gpus is not None:
        return gpus
    raw.raise_if_any()
    parallel = raw.config.parallel
    if parallel.dp_shard == -1:
        raise ConfigError(
            "launch: how many GPUs? The configuration leaves parallel.dp_shard open, so that it fits many worlds.\n"
            "  Set for example --gpus 16."
        )
    return parallel.pp * parallel.dp_replicate * parallel.dp_shard * parallel.cp * parallel.tp


def _check(raw: RawConfig, num_nodes: int, ranks_per_node: int, *, reads_model: bool) -> None:
    """Check, before a job waits in a queue, what ``train`` would check on every rank.

    Without ``reads_model`` only plan and batch are checked: the model and the data are in the job's image or volume.
    """
    from shardwise.train.config.resolve import batch_in, resolve
    from shardwise.train.launcher import rehearse

    num_ranks = num_nodes * ranks_per_node
    if reads_model:
        rehearse(resolve(raw, num_ranks, ranks_per_node, checks_data=False), num_ranks, ranks_per_node)
        return
    raw.raise_if_any()
    _, problems = batch_in(raw, num_ranks, ranks_per_node)
    if problems:
        raise ConfigError(
            f"the configuration does not fit {num_ranks} ranks: {'; '.join(problems)}.\n"
            "  Change it, or the number of ranks with --gpus."
        )
