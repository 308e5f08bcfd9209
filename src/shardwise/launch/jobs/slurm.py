"""A batch script for ``sbatch``: one task for each rank, saved and requeued before its time is over.

The script knows three ends of the ranks. Code 75 says that they were asked to stop and have saved: by ``--signal``
before the time limit, or by ``scancel --signal=USR1``; the job is requeued. After a code of ``cause.RESTARTABLE``, or a
signal, all ranks are started again in the same allocation. Anything else ends the job with that code. Where Slurm ends
the job itself (``scancel``, preemption), ranks and script have SIGTERM; the ranks save within Slurm's ``KillWait``, and
the script requeues nothing, as Slurm does so by itself after a preemption or the loss of a node.
A node that does not answer is looked for before a restart: the job is requeued, and gets others. A job whose first
minute is not over is not: where ``srun`` itself cannot work, that would go on for ever.

The job runs in the folder in which it was written, from which its relative paths have been checked, wherever it is
submitted. A container is started by NVIDIA's pyxis around the ranks alone: in a whole script within it
(``sbatch --container-image``) there would be no ``srun``. https://github.com/NVIDIA/pyxis/wiki/Usage

A requeued job keeps its number, by which it knows the run in the folder as its own (``launch.starter``). So the run
goes on from its newest checkpoint without ``--resume``.
"""

from __future__ import annotations

import re
import shlex

from shardwise.launch.cause import RESTARTABLE
from shardwise.launch.jobs.job import Job, Volume
from shardwise.launch.stop_request import INTERRUPTED, STOPPED
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable

#: The ranks are asked to save so many seconds before the time limit, or earlier where their grace time asks for it: a
#: step, a save, and Slurm's minute of inaccuracy.
_SAVES_S, _INACCURACY_S = 300, 60
#: Seconds within which every node of the allocation has to start a task.
_ANSWERS_S = 120
#: A job that is younger is not requeued for a node that does not answer.
_BEGUN_S = 60


def script(job: Job, *, folder: str, time: str, image: str | None = None, volume: Volume | None = None) -> str:
    """The batch script.

    Args:
        job: What runs.
        folder: Where it runs, on a disk that all nodes share; relative paths begin there.
        time: Slurm's time limit of one stay in the cluster, such as ``24:00:00``.
        image: The container image of the ranks, for pyxis; shardwise is installed in it. ``None``: no container.
        volume: A folder of the nodes that the container has beside ``folder``.

    Raises:
        ConfigError: ``time`` is none of Slurm's, or too short; or the container would lose the run's folder.
    """
    saves_s = max(_SAVES_S, job.grace_s + _INACCURACY_S)
    _check_time(time, saves_s)
    each = job.ranks_per_node
    run_dir = shlex.quote(job.run_dir) if job.run_dir else f"runs/{job.name}-$SLURM_JOB_ID"
    options = [
        f"job-name={job.name}",
        f"chdir={shlex.quote(folder)}",
        f"nodes={job.num_nodes}",
        f"ntasks-per-node={each}",
        *([f"gpus-per-node={each}"] if job.has_gpus else []),
        "exclusive",
        "mem=0",
        f"time={time}",
        f"signal=USR1@{saves_s}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
    ]
    head = "\n".join(f"#SBATCH --{option}" for option in options)
    again = "|".join(str(code) for code in sorted(RESTARTABLE))
    return f"""#!/bin/bash
{head}

# {job}, written by `shardwise launch --slurm`.
# It runs in the folder of --chdir, which all nodes share. Submit it{"" if image else _IN_ENVIRONMENT}:
#   sbatch --partition=NAME --account=NAME THIS_FILE   options of sbatch in front replace those above
#   sbatch THIS_FILE --resume --run-dir FOLDER         words behind it go to `shardwise train`

run_dir={run_dir}

export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$(( SLURM_CPUS_ON_NODE > {each} ? SLURM_CPUS_ON_NODE / {each} : 1 ))}}
{_network(job)}
{"" if image else _FINDS_SHARDWISE}requeue() {{
    echo "shardwise: $1; job $SLURM_JOB_ID is requeued" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    exit "$code"
}}

# scancel and preemption: the ranks have the signal too, and save; Slurm requeues what it has preempted.
is_ending=
trap 'is_ending=1' TERM

restarts=0
while :; do
    # The end of one rank does not end the others: they save, or see by themselves who is lost.
    srun --kill-on-bad-exit=0 --wait=0 --cpu-bind=none \\
{_container(job, folder, image, volume)}        shardwise {job.training()} "$@"
    code=$?
    [ -z "$is_ending" ] || exit "$code"
    case $code in
        {STOPPED}) requeue "the run was asked to stop and has saved" ;;
        {INTERRUPTED}) exit "$code" ;;
        {again}|12[89]|1[3-9][0-9]|2[0-9][0-9]) ;; # a rank was lost, hung or raised: go on below
        *) exit "$code" ;;
    esac
{_node_check(job)}    [ "$restarts" -lt {job.max_restarts} ] || exit "$code"
    restarts=$((restarts + 1))
    export SLURM_RESTART_COUNT=$(( ${{SLURM_RESTART_COUNT:-0}} + 1 ))
    echo "shardwise: the ranks ended with code $code: restart $restarts/{job.max_restarts}" >&2
done
"""


#: Of a job without a container: where to submit it, and the lines that see whether that was so.
_IN_ENVIRONMENT = " where `shardwise` is found"
_FINDS_SHARDWISE = """command -v shardwise > /dev/null ||
    { echo "shardwise is not found: activate its environment, then sbatch." >&2; exit 2; }

"""


def _check_time(time: str, saves_s: int) -> None:
    """Refuse what is none of Slurm's times, and one that is over before the ranks can save."""
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


def _container(job: Job, folder: str, image: str | None, volume: Volume | None) -> str:
    """Options of srun: the image, and what it has of the nodes' disks.

    Raises:
        ConfigError: The run's folder is not among them.
    """
    if image is None:
        return ""
    held = tuple(f"{place.rstrip('/')}/" for place in (folder, *([volume.path] if volume is not None else [])))
    if job.run_dir is not None and job.run_dir.startswith("/") and not f"{job.run_dir}/".startswith(held):
        where = printable(job.run_dir)
        raise ConfigError(
            f"--run-dir {where} is not in the container, and would be lost with it.\n"
            f"  Name a folder in {printable(folder)}, or add --volume {where}:{where}."
        )
    mounts = [f"{folder}:{folder}", *([f"{volume.name}:{volume.path}"] if volume is not None else [])]
    words = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}", f"--container-workdir={folder}"]
    return "".join(f"        {shlex.quote(word)} \\\n" for word in words)


def _node_check(job: Job) -> str:
    """A dead node is noticed by Slurm after minutes: restarts on it would be used up by then."""
    if job.num_nodes == 1:
        return ""
    count = job.num_nodes
    return f"""    timeout {_ANSWERS_S} srun --nodes={count} --ntasks={count} --ntasks-per-node=1 true ||
        {{ [ -z "$is_ending" ] && [ "$SECONDS" -ge {_BEGUN_S} ] || exit "$code"; requeue "a node does not answer"; }}
"""


def _network(job: Job) -> str:
    lines = ["export NCCL_DEBUG=${NCCL_DEBUG:-WARN}"] if job.has_gpus else []
    if job.num_nodes > 1:
        names = " ".join(f"{name}_SOCKET_IFNAME=ib0" for name in (["NCCL"] if job.has_gpus else []) + ["GLOO"])
        lines += ["# Where the nodes have several networks, name the one between them:", f"# export {names}"]
    return "".join(f"{line}\n" for line in lines)
