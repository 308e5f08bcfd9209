"""A batch script for ``sbatch``: one task for each rank, saved and requeued before its time is over.

The script knows three ends of the ranks. Code 75 says that they were asked to stop and have saved: by ``--signal``
before the time limit, or by ``scancel --signal=USR1``; the job is requeued. After a code of ``cause.RESTARTABLE``, or a
signal, all ranks are started again in the same allocation. Anything else ends the job with that code. Where Slurm ends
the job itself (``scancel``, preemption), ranks and script have SIGTERM; the ranks save within Slurm's ``KillWait``, and
the script requeues nothing, as Slurm does so by itself after a preemption or the loss of a node.
A node that does not answer is looked for before a restart: the job is requeued, and gets others.

A requeued job keeps its number, by which it knows the run in the folder as its own (``launch.starter``). So the run
goes on from its newest checkpoint without ``--resume``.
"""

from __future__ import annotations

import shlex

from shardwise.launch.cause import RESTARTABLE
from shardwise.launch.jobs.job import Job
from shardwise.launch.stop_request import INTERRUPTED, STOPPED

#: Seconds before the time limit at which the ranks are asked to save: a step, a save, and Slurm's minute of inaccuracy.
_SAVES_S = 300
#: Seconds within which every node of the allocation has to start a task.
_ANSWERS_S = 120


def script(job: Job, *, time: str) -> str:
    """The batch script.

    Args:
        job: What runs.
        time: Slurm's time limit of one stay in the cluster, such as ``24:00:00``.
    """
    each = job.ranks_per_node
    folder = shlex.quote(job.run_dir) if job.run_dir else f"runs/{job.name}-$SLURM_JOB_ID"
    options = [
        f"job-name={job.name}",
        f"nodes={job.num_nodes}",
        f"ntasks-per-node={each}",
        *([f"gpus-per-node={each}"] if job.has_gpus else []),
        "exclusive",
        "mem=0",
        f"time={time}",
        f"signal=USR1@{_SAVES_S}",
        "requeue",
        "open-mode=append",
        "output=%x-%j.out",
    ]
    head = "\n".join(f"#SBATCH --{option}" for option in options)
    again = "|".join(str(code) for code in sorted(RESTARTABLE))
    return f"""#!/bin/bash
{head}

# {job}, written by `shardwise launch --slurm`.
# Submit it where `shardwise` is found, in a folder that all nodes share and from which the paths are right:
#   sbatch --partition=NAME THIS_FILE      options of sbatch in front replace those above
#   sbatch THIS_FILE --resume --run-dir F  words behind it go to `shardwise train`

run_dir={folder}

export PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$(( SLURM_CPUS_ON_NODE > {each} ? SLURM_CPUS_ON_NODE / {each} : 1 ))}}
{_network(job)}
command -v shardwise > /dev/null ||
    {{ echo "shardwise is not found: activate its environment, then sbatch." >&2; exit 2; }}

requeue() {{
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
        shardwise {job.training()} "$@"
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


def _node_check(job: Job) -> str:
    """A dead node is noticed by Slurm after minutes: restarts on it would be used up by then."""
    if job.num_nodes == 1:
        return ""
    count = job.num_nodes
    return f"""    timeout {_ANSWERS_S} srun --nodes={count} --ntasks={count} --ntasks-per-node=1 true ||
        {{ [ -z "$is_ending" ] || exit "$code"; requeue "a node does not answer"; }}
"""


def _network(job: Job) -> str:
    if not job.has_gpus:
        return ""
    lines = ["export NCCL_DEBUG=${NCCL_DEBUG:-WARN}"]
    if job.num_nodes > 1:
        lines += [
            "# Where the nodes have several networks, name the one between them:",
            "# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0",
        ]
    return "\n".join(lines) + "\n"
