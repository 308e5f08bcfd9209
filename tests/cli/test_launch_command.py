"""`launch`: what it writes for each scheduler; Slurm's script runs under stubs of srun and scontrol."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli import main

CONFIG = """
model: {preset: gpt-nano}
data: {source: random}
parallel: {strategy: zero3}
train: {steps: 10, micro_batch_size: 2, global_batch_size: 64}
"""
CLUSTER = ("--image", "registry/shardwise:1", "--volume", "runs:/shared")


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(CONFIG)


@pytest.fixture
def launch(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*words: str) -> str:
        assert main(["launch", "first.yaml", *words]) == 0
        return capsys.readouterr().out

    return call


# -- Slurm


def test_a_slurm_job_has_a_task_for_each_gpu(launch: Callable[..., str], tmp_path: Path) -> None:
    text = launch("--slurm", "--gpus", "16", "--time", "2:00:00", "--set", "optimizer.lr=1e-4")
    options = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "job-name=first", f"chdir={tmp_path}", "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "exclusive",
        "mem=0", "time=2:00:00", "signal=USR1@300", "requeue", "open-mode=append", "output=%x-%j.out",
    ]  # fmt: skip
    words = "--set optimizer.lr=1e-4 --set train.grace_s=120"
    assert f'shardwise train first.yaml {words} --run-dir "$run_dir" "$@"' in text
    assert "run_dir=runs/first-$SLURM_JOB_ID\n" in text
    assert "NCCL_SOCKET_IFNAME" in text


def test_the_grace_time_of_the_configuration_is_what_the_ranks_get(launch: Callable[..., str]) -> None:
    words = ("--gpus", "8", "--set", "train.grace_s=400")
    assert "#SBATCH --signal=USR1@460\n" in launch("--slurm", *words)
    _, job = yaml.safe_load_all(launch("--kubernetes", *words, *CLUSTER))
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": "400"} in pod["containers"][0]["env"]
    assert pod["terminationGracePeriodSeconds"] > 400


def test_the_ranks_of_a_slurm_job_run_in_a_container(launch: Callable[..., str], tmp_path: Path) -> None:
    text = launch("--slurm", "--gpus", "8", "--image", "nvcr.io#x:1", "--volume", "/raid/data:/data")
    (step,) = [line for line in text.replace("\\\n", "").splitlines() if "srun --kill" in line]
    mounts = f"--container-mounts={tmp_path}:{tmp_path},/raid/data:/data"
    assert shlex.split(step)[4:8] == [
        "--container-image=nvcr.io#x:1", mounts, f"--container-workdir={tmp_path}", "shardwise",
    ]  # fmt: skip
    assert "command -v shardwise" not in text  # it need not be outside


def test_a_slurm_job_on_cpus_asks_for_no_gpus(launch: Callable[..., str]) -> None:
    text = launch("--slurm", "--gpus", "2", "--cpu", "--run-dir", "/shared/runs/my run")
    assert "gpus-per-node" not in text
    assert "NCCL" not in text
    assert "run_dir='/shared/runs/my run'\n" in text


def test_the_degrees_of_the_configuration_say_how_many_gpus(launch: Callable[..., str]) -> None:
    text = launch("--slurm", *("--set", "parallel.dp_shard=4"), *("--set", "parallel.tp=2"))
    assert "#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=8\n" in text


#: Exits with the next of the codes that a file lists, and writes down how it was called. A code above 1000: it sends
#: SIGTERM to the script first, as Slurm does to a job that it ends.
SRUN = """#!/bin/bash
echo "srun restart=$SLURM_RESTART_COUNT $*" >> calls
code=$(head -n1 codes); sed -i 1d codes
[ "$code" -lt 1000 ] || { kill -TERM $PPID; code=$((code - 1000)); }
exit "$code"
"""


def run_script(
    launch: Callable[..., str], folder: Path, codes: list[int], *words: str, gpus: str = "2", age_s: int = 600
) -> tuple[int, str]:
    """The exit code of a script of this age, and the calls that it has made, where the steps end with ``codes``."""
    script = f"SECONDS={age_s}\n" + launch("--slurm", "--gpus", gpus, "--gpus-per-node", "2", "--cpu", *words)
    (folder / "bin").mkdir()
    for name, text in {
        "srun": SRUN,
        "shardwise": "",
        "scontrol": 'echo "scontrol $*" >> calls; exit "${SCONTROL:-0}"',
    }.items():
        path = folder / "bin" / name
        path.write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    environ = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    environ["SLURM_CPUS_ON_NODE"] = "2"
    done = subprocess.run(
        ["bash", "-s"], input=script, env=environ, cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    assert (folder / "codes").read_text() == "", "a step was not made"
    calls = (folder / "calls").read_text().splitlines()
    return done.returncode, "; ".join(f"{call.split()[0]} {call.split()[1]}" for call in calls)


@pytest.mark.parametrize(
    ("codes", "code", "calls"),
    [
        ([0], 0, "srun restart="),
        ([75], 0, "srun restart=; scontrol requeue"),  # saved before the time limit
        ([1075], 75, "srun restart="),  # cancelled, or preempted: Slurm requeues by itself
        ([1137], 137, "srun restart="),
        ([78], 78, "srun restart="),
        ([84], 84, "srun restart="),
        ([130], 130, "srun restart="),
        ([137, 0], 0, "srun restart=; srun restart=1"),
        ([81, 82, 75], 0, "srun restart=; srun restart=1; srun restart=2; scontrol requeue"),
        ([1, 139, 143, 81], 81, "srun restart=; srun restart=1; srun restart=2; srun restart=3"),
    ],
)
def test_the_slurm_script_requeues_what_was_saved_and_restarts_what_was_lost(
    launch: Callable[..., str], tmp_path: Path, codes: list[int], code: int, calls: str
) -> None:
    assert run_script(launch, tmp_path, codes) == (code, calls)


def test_on_several_nodes_a_restart_needs_an_answer_of_all(launch: Callable[..., str], tmp_path: Path) -> None:
    calls = "srun restart=; srun restart=; srun restart=1; srun restart=1; scontrol requeue"
    assert run_script(launch, tmp_path, [81, 0, 81, 1], gpus="4") == (0, calls)


def test_a_job_whose_steps_cannot_be_made_is_not_requeued_for_ever(launch: Callable[..., str], tmp_path: Path) -> None:
    assert run_script(launch, tmp_path, [1, 1], gpus="4", age_s=0) == (1, "srun restart=; srun restart=")


def test_no_restarts_means_none(launch: Callable[..., str], tmp_path: Path) -> None:
    assert run_script(launch, tmp_path, [81], "--max-restarts", "0") == (81, "srun restart=")


# -- Kubernetes and SkyPilot: fields and types as they are published

#: Of ``PyTorchJob`` (kubeflow.org/v1, training operator 1.9) and Kubernetes' ``PodTemplateSpec``: the fields in use.
#: tests/integrations/test_kubeflow.py asks Kubeflow's own package.
_NAME = {"name": str}
PYTORCHJOB = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "metadata": _NAME,
    "spec": {
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int},
        "elasticPolicy": {
            "rdzvBackend": {"c10d", "etcd", "etcd-v2"},
            "minReplicas": int,
            "maxReplicas": int,
            "maxRestarts": int,
        },
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": int,
                "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
                "template": {
                    "spec": {
                        "terminationGracePeriodSeconds": int,
                        "containers": [
                            {
                                "name": {"pytorch"},
                                "image": str,
                                "command": [str],
                                "env": [{"name": str, "value": str}],
                                "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
                                "resources": {"limits": {"nvidia.com/gpu": str}},
                            }
                        ],
                        "tolerations": [{"key": str, "operator": {"Exists", "Equal"}}],
                        "volumes": [
                            {
                                "name": str,
                                "configMap": _NAME,
                                "persistentVolumeClaim": {"claimName": str},
                                "emptyDir": {"medium": {"", "Memory"}},
                            }
                        ],
                    }
                },
            }
        },
    },
}  # fmt: skip

#: Of SkyPilot 0.14's schema of a task: the fields in use. ``None``: any key.
TASK = {
    "name": str,
    "num_nodes": int,
    "resources": {"image_id": str, "accelerators": str, "job_recovery": {"max_restarts_on_errors": int}},
    "volumes": {None: str},
    "envs": {None: str},
    "run": str,
}


def conforms(content: Any, wanted: Any, place: str = "") -> None:
    """Raise where ``content`` has a field or a type that ``wanted`` has not."""
    if isinstance(wanted, dict):
        assert isinstance(content, dict), place
        for key, value in content.items():
            assert key in wanted or None in wanted, f"{place}.{key}"
            conforms(value, wanted.get(key, wanted.get(None)), f"{place}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(content, list), place
        for value in content:
            conforms(value, wanted[0], f"{place}[]")
    elif isinstance(wanted, set):
        assert content in wanted, f"{place}: {content}"
    else:
        assert type(content) is wanted, f"{place}: {content!r}"


def test_a_kubernetes_job_has_the_fields_of_a_pytorchjob(launch: Callable[..., str]) -> None:
    held, job = yaml.safe_load_all(launch("--kubernetes", "--gpus", "16", *CLUSTER, "--set", "optimizer.lr=1e-4"))
    conforms(job, PYTORCHJOB)
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = spec["template"]["spec"]
    container = pod["containers"][0]
    assert spec["replicas"] == job["spec"]["elasticPolicy"]["maxReplicas"] == 2
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert held["metadata"] == job["metadata"] == {"name": "first"}
    assert yaml.safe_load(held["data"]["run.yaml"]) == yaml.safe_load(CONFIG) | {
        "name": "first",
        "optimizer": {"lr": 1e-4},
        "train": yaml.safe_load(CONFIG)["train"] | {"grace_s": 120},
    }


def test_a_mistake_in_a_field_would_be_seen() -> None:
    with pytest.raises(AssertionError, match=r"spec\.runpolicy"):
        conforms({"spec": {"runpolicy": {}}}, PYTORCHJOB)
    with pytest.raises(AssertionError, match="backoffLimit: '3'"):
        conforms({"spec": {"runPolicy": {"backoffLimit": "3"}}}, PYTORCHJOB)


def test_a_skypilot_task_has_the_fields_of_its_schema(launch: Callable[..., str]) -> None:
    task = yaml.safe_load(launch("--skypilot", "--gpus", "16", "--gpu", "H100", *CLUSTER))
    conforms(task, TASK)
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "H100:8"
    assert task["volumes"] == {"/shared": "runs"}


TORCHRUN = """#!/bin/bash
printf '%s\\n' "$*" >> "$CALLS"
"""


@pytest.mark.parametrize("scheduler", ["--kubernetes", "--skypilot"])
def test_a_command_that_runs_again_goes_on_with_the_run(
    launch: Callable[..., str], tmp_path: Path, scheduler: str
) -> None:
    """What the container runs, with a stub of torchrun: the configuration that it names is there and reads back."""
    text = launch(scheduler, "--gpus", "2", "--cpu", "--image", "x", "--volume", f"runs:{tmp_path}")
    *_, job = yaml.safe_load_all(text)
    if scheduler == "--skypilot":
        command = job["run"].replace("/tmp/run.yaml", f"{tmp_path}/run.yaml")
    else:
        command = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"][2]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(TORCHRUN)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    environ = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls")}
    environ |= {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    for _ in range(2):
        subprocess.run(["sh", "-c", command], env=environ, check=True, timeout=30)
        (tmp_path / "first").mkdir(exist_ok=True)
        (tmp_path / "first" / "config.yaml").touch()
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith(f"--run-dir {tmp_path}/first")
    assert second == f"{first} --resume --take-over"
    if scheduler == "--skypilot":
        assert "--rdzv-endpoint 10.0.0.1:29500 -m shardwise train" in first
        assert yaml.safe_load((tmp_path / "run.yaml").read_text())["name"] == "first"


# -- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected one scheduler, got none"),
        (("--slurm", "--kubernetes"), "got --slurm and --kubernetes.\n  Keep one of --slurm, --kubernetes."),
        (("--slurm",), "leaves parallel.dp_shard open"),
        (("--slurm", "--gpus", "12"), "Set --gpus 8 or 16"),
        (("--slurm", "--gpus", "0"), "at least 1"),
        (("--slurm", "--gpus", "24"), "samples are not a multiple of"),
        (("--slurm", "--gpus", "8", "--set", "parallel.tp=3"), "tp=3"),
        (("--slurm", "--gpus", "8", "--max-restarts", "-1"), "--max-restarts -1"),
        (("--slurm", "--gpus", "8", "--time", "24h"), "--time 24h: expected minutes"),
        (("--slurm", "--gpus", "8", "--time", "5:00"), "asked to save 300 s before the limit"),
        (("--slurm", "--gpus", "8", "--volume", "/a:/b", "--gpu", "H100"), "--gpu and --volume would change nothing"),
        (("--slurm", "--gpus", "8", "--image", "x", "--run-dir", "/elsewhere"), "is not in the container"),
        (("--kubernetes", "--gpus", "8", *CLUSTER, "--time", "5"), "--time would change nothing"),
        (("--kubernetes", "--gpus", "8"), "--image registry/shardwise --volume runs:/runs"),
        (("--skypilot", "--gpus", "8", *CLUSTER), "Set for example --gpu H100"),
        (("--kubernetes", "--gpus", "24", *CLUSTER), "does not fit 24 ranks"),
        (("--kubernetes", "--gpus", "8", *CLUSTER, "--run-dir", "/elsewhere"), "does not lie on the volume"),
        (("--kubernetes", "--gpus", "8", "--image", "x", "--volume", "runs"), "expected NAME:/path"),
        (("--kubernetes", "--gpus", "8", *CLUSTER, "--set", "name=2nd"), "not a name for Kubernetes"),
    ],
)
def test_a_job_that_cannot_run_is_not_written(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert main(["launch", "first.yaml", *words, "--out", "job"]) == 78
    assert said in capsys.readouterr().err
    assert not Path("job").exists()
