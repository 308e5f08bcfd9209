"""The job of `shardwise launch --slurm` in a real Slurm, on this machine: preempted, requeued, and a node lost."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.launch import inject
from tests.launch.slurm_cluster import MISSING, SlurmCluster
from tests.train.job import content, num_steps, wait_until
from tests.train.train_here import losses

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: no {', '.join(MISSING)} (Debian: slurm-wlm)"),
]

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, dropout: 0.1}
data: {source: stdlib, max_bytes: 100000}
parallel: {strategy: zero3}
train: {steps: 60, micro_batch_size: 2, global_batch_size: 8, eval_batches: 2}
optimizer: {lr: 1e-3}
checkpoint: {every: 10}
log: {tensorboard: false}
"""
#: Each step takes long enough to be struck.
SLOW = "step_begin@attempt=any:sleep=0.15"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of the configuration."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    (folder / "run.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path / "slurm", *getattr(request, "param", ())) as cluster:
        yield cluster


def write_job(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Path:
    monkeypatch.chdir(folder)
    assert main(["launch", "--slurm", "run.yaml", "--cpu", "--gpus", "2", "--out", "job.sbatch", *words]) == 0
    return folder / "job.sbatch"


def faults(*texts: str) -> dict[str, str]:
    return {inject.ARMED: "1", inject.FAULT: ";".join(texts)}


def text_of(folder: Path, job: str) -> str:
    return (folder / f"run-{job}.out").read_text()


def reaches(folder: Path, job: str, step: int) -> None:
    assert wait_until(lambda: num_steps(folder / "runs" / f"run-{job}") >= step, 200), text_of(folder, job)


def equal(folder: Path, job: str, whole: str) -> None:
    """The runs of two jobs have the same losses and the same last checkpoint, to the last bit."""
    one, other = (folder / "runs" / f"run-{number}" for number in (job, whole))
    assert len(losses(one)) == 60
    assert losses(one) == losses(other)
    assert content(one, 60)
    assert content(one, 60) == content(other, 60)


def urgent_script(folder: Path) -> Path:
    """A job that preempts the others. Its script starts no step, and says of which world it takes itself to be."""
    script = folder / "urgent.sbatch"
    code = "from shardwise.launch.world import read_world; print(read_world().source)"
    options = ["chdir='" + str(folder) + "'", "partition=urgent", "exclusive", "ntasks=2", "output=urgent.out"]
    head = "".join(f"#SBATCH --{option}\n" for option in options)
    script.write_text(f"#!/bin/bash\n{head}python -c '{code}' > world\n")
    return script


def test_a_job_that_is_preempted_and_loses_a_rank_goes_on_with_the_bits_of_an_uninterrupted_one(
    cluster: SlurmCluster, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_job(run, monkeypatch)
    whole = cluster.submit(script)
    assert cluster.ends(whole)["JobState"] == "COMPLETED", text_of(run, whole)

    job = cluster.submit(script, **faults(SLOW, "before_backward@rank=1@step=47@attempt=2:kill"))
    reaches(run, job, 13)
    cluster.ask("scancel", "--signal=USR1", job)  # as Slurm's --signal before the time limit
    reaches(run, job, 27)
    urgent = cluster.submit(urgent_script(run))
    assert cluster.ends(urgent)["JobState"] == "COMPLETED"
    state = cluster.ends(job)
    text = text_of(run, job)

    assert (run / "world").read_text() == "alone\n"
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2"), text
    assert re.search(
        rf"^shardwise: the run was asked to stop and has saved; job {job} is requeued$", text, re.MULTILINE
    )
    assert re.search(r"^shardwise: the ranks ended with code 137: restart 1/3$", text, re.MULTILINE)
    assert len(re.findall(r"^resumed at step \d+$", text, re.MULTILINE)) == 3
    assert "resumed at step 40\n" in text
    equal(run, job, whole)


def test_a_job_that_is_cancelled_saves_and_is_not_requeued(
    cluster: SlurmCluster, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_job(run, monkeypatch)
    job = cluster.submit(script, **faults(SLOW))
    reaches(run, job, 13)
    cluster.ask("scancel", job)
    state = cluster.ends(job)
    assert (state["JobState"], state["Restarts"]) == ("CANCELLED", "0"), text_of(run, job)
    assert "requeued" not in text_of(run, job)

    whole = cluster.submit(script)
    again = cluster.submit(script, "--resume", "--run-dir", f"runs/run-{job}")
    assert cluster.ends(whole)["JobState"] == "COMPLETED", text_of(run, whole)
    assert cluster.ends(again)["JobState"] == "COMPLETED", text_of(run, again)
    assert "resumed at step 1" in text_of(run, again)  # 13 or a little later
    equal(run, job, whole)


@pytest.mark.parametrize("cluster", [(2, 1)], indirect=True)
def test_a_job_whose_node_is_lost_goes_on_when_there_are_enough_nodes_again(
    cluster: SlurmCluster, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_job(run, monkeypatch, "--gpus-per-node", "1")
    whole = cluster.submit(script)
    assert cluster.ends(whole)["JobState"] == "COMPLETED", text_of(run, whole)

    job = cluster.submit(script, **faults(SLOW))
    reaches(run, job, 13)
    cluster.lose_node("n2")
    assert wait_until(lambda: cluster.state(job)["JobState"] == "PENDING", 120), cluster.state(job)
    cluster.start_node("n2")
    state = cluster.ends(job)
    text = text_of(run, job)

    assert state["JobState"] == "COMPLETED", text
    assert int(state["Restarts"]) >= 1, text
    assert "resumed at step 10\n" in text
    equal(run, job, whole)


def test_a_configuration_error_ends_the_job_with_its_code(
    cluster: SlurmCluster, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write_job(run, monkeypatch)
    (run / "run.yaml").write_text(CONFIG.replace("zero3", "zero9"))
    job = cluster.submit(script)
    state = cluster.ends(job)
    assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("FAILED", "78:0", "0"), text_of(run, job)
