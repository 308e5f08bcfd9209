"""A manifest for ``kubectl apply``: the configuration as a ConfigMap, and a PyTorchJob of Kubeflow's training operator.

A pod for each machine runs torchrun, whose agents meet at the first pod (``elasticPolicy``; the operator gives them its
address in variables ``PET_*``). They start the ranks again after a failure. A pod that fails or is evicted is started
again by Kubernetes (``OnFailure``); the run then goes on in its folder, which all pods share through a claim on a
volume.

The PyTorchJob of the operator's version 1 is written, not the newer TrainJob: a TrainJob refers to a runtime that the
cluster's administrator has installed, so that no manifest can run by itself.

Kubernetes' page on the kind: https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch/
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.launch.jobs.job import Job, Volume, goes_on, text_of_yaml
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable

#: Where a pod finds its configuration.
_FOLDER = "/etc/shardwise"
#: The longest name of a pod's host is 63 characters, and the operator adds ``-worker-`` and a number.
_LONGEST_NAME = 48
#: Seconds that torchrun has to end after its ranks.
_LATER_S = 30


def manifest(job: Job, *, image: str, volume: Volume) -> str:
    """Two documents of YAML.

    Args:
        job: What runs.
        image: The container image; shardwise is installed in it.
        volume: A persistent volume claim that many pods can write (ReadWriteMany), and where pods find it.

    Raises:
        ConfigError: The run's name cannot be made one of Kubernetes.
    """
    name = _name(job.name)
    command = (
        f"{goes_on(job.folder_in(volume))}"
        f"exec torchrun --nproc-per-node {job.ranks_per_node} --rdzv-id {name} \\\n"
        f"  -m shardwise {job.training(f'{_FOLDER}/run.yaml')} $again\n"
    )
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "command": ["/bin/sh", "-c", command],
        "env": [{"name": key, "value": value} for key, value in job.variables().items()],
        "volumeMounts": [
            {"name": "configuration", "mountPath": _FOLDER, "readOnly": True},
            {"name": "runs", "mountPath": volume.path},
            {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108  NCCL's place, not a file of ours
        ],
    }
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": job.grace_s + _LATER_S,
        "containers": [container],
        "volumes": [
            {"name": "configuration", "configMap": {"name": name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": volume.name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if job.has_gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(job.ranks_per_node)}}
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]  # such nodes often take no other pods
    spec = {
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": job.num_nodes * job.max_restarts},
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": job.num_nodes,
            "maxReplicas": job.num_nodes,
            "maxRestarts": job.max_restarts,
        },
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": job.num_nodes,
                "restartPolicy": "OnFailure" if job.max_restarts else "Never",
                "template": {"spec": pod},
            }
        },
    }
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {"run.yaml": text_of_yaml(job.content)},
        },
        {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": name}, "spec": spec},
    ]
    head = (
        f"# {job}, written by `shardwise launch --kubernetes`.\n"
        "# Needs Kubeflow's training operator (v1) in the cluster. Start it: kubectl apply -f THIS_FILE\n"
        "# Once more, when it is over: kubectl delete -f THIS_FILE, then apply; the run in the volume goes on.\n"
    )
    return head + "---\n".join(text_of_yaml(document) for document in documents)


def _name(name: str) -> str:
    """A run's name as one that Kubernetes takes."""
    found = re.sub(r"[._]", "-", name.lower()).strip("-")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", found) or len(found) > _LONGEST_NAME:
        raise ConfigError(
            f"name={printable(name)} is no name for Kubernetes: expected a letter, then letters, digits and dashes, at"
            f" most {_LONGEST_NAME}.\n  Add --set name=run-1."
        )
    return found
