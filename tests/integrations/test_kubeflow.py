"""The PyTorchJob of `shardwise launch --kubernetes` beside the OpenAPI models that Kubeflow publishes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli import main

kubernetes = pytest.importorskip("kubernetes.client")
kubeflow = pytest.importorskip("kubeflow.training.models")

pytestmark = pytest.mark.integrations


@dataclass
class Response:
    """What the client's reader takes."""

    data: str


def read_back(content: dict[str, Any], kind: str) -> dict[str, Any]:
    """What the published model of ``kind`` keeps of ``content``: unknown fields are dropped, wrong values refused."""
    for name in dir(kubeflow):
        if name.startswith("KubeflowOrgV1"):
            setattr(kubernetes.models, name, getattr(kubeflow, name))  # where the reader looks for them
    client = kubernetes.ApiClient()
    return client.sanitize_for_serialization(client.deserialize(Response(json.dumps(content)), kind))


def test_the_published_models_keep_every_field_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("first.yaml").write_text("data: {source: random}\ntrain: {micro_batch_size: 1, global_batch_size: 64}\n")
    words = ["--kubernetes", "first.yaml", "--gpus", "64", "--image", "registry/shardwise", "--volume", "runs:/runs"]
    assert main(["launch", *words, "--out", "job.yaml"]) == 0
    config, job = yaml.safe_load_all(Path("job.yaml").read_text())
    assert read_back(config, "V1ConfigMap") == config
    assert read_back(job, "KubeflowOrgV1PyTorchJob") == job

    job["spec"]["elasticPolicy"]["maxRestart"] = 3
    assert read_back(job, "KubeflowOrgV1PyTorchJob") != job
    del job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(ValueError, match="name"):
        read_back(job, "KubeflowOrgV1PyTorchJob")
