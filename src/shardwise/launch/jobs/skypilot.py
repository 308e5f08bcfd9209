"""A task for ``sky jobs launch``: every node runs torchrun, and the agents meet at the first node.

A managed job of SkyPilot that loses its machines gets others, in whatever cloud has them, and its command is run again:
the run then goes on in its folder, which lies on a volume that outlives the machines.

SkyPilot's page on the fields: https://docs.skypilot.co/en/latest/reference/yaml-spec.html
"""

from __future__ import annotations

from typing import Any

from shardwise.launch.jobs.job import Job, Volume, goes_on, text_of_yaml

_PORT = 29500


def task(job: Job, *, gpu: str | None, image: str, volume: Volume) -> str:
    """The task's YAML.

    Args:
        job: What runs.
        gpu: SkyPilot's name of the GPU, such as ``H100``; ``None`` for CPUs.
        image: The container image; shardwise is installed in it.
        volume: A volume of SkyPilot, and where the nodes find it.
    """
    resources: dict[str, Any] = {"image_id": f"docker:{image}"}
    if gpu is not None:
        resources["accelerators"] = f"{gpu}:{job.ranks_per_node}"
    resources["job_recovery"] = {"max_restarts_on_errors": job.max_restarts}
    content = text_of_yaml(job.content)
    run = (
        f"cat > /tmp/run.yaml <<'END_OF_CONFIGURATION'\n{content}END_OF_CONFIGURATION\n"
        f"{goes_on(job.folder_in(volume))}"
        f"torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node {job.ranks_per_node} \\\n"
        f"  --max-restarts {job.max_restarts} --rdzv-backend c10d --rdzv-id {job.name} \\\n"
        f'  --rdzv-endpoint $(echo "$SKYPILOT_NODE_IPS" | head -n1):{_PORT} \\\n'
        f"  -m shardwise {job.training('/tmp/run.yaml')} $again\n"  # noqa: S108  a machine of this job alone
    )
    content_of_task = {
        "name": job.name,
        "num_nodes": job.num_nodes,
        "resources": resources,
        "volumes": {volume.path: volume.name},
        "envs": job.variables(),
        "run": run,
    }
    head = f"# {job}, written by `shardwise launch --skypilot`.\n# Start it: sky jobs launch [--use-spot] THIS_FILE\n"
    return head + text_of_yaml(content_of_task)
