"""SIGKILL at every named point of a run, on each rank that comes by: resumed, it ends as if nothing had happened."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from shardwise.launch import inject
from tests.train.job import command, content, environment, processes_of
from tests.train.train_here import losses, train_well

pytestmark = pytest.mark.long

RANKS, STEPS = 2, 20
#: Points of loading, of rank 0 alone, and of removing the checkpoint of step 5 when that of step 15 is there.
LOADING = [point for point in inject.POINTS if "load" in point]
OF_RANK_0 = [
    *("before_manifest", "after_manifest", "before_rename", "after_rename", "before_latest", "after_latest"),
    *("gc_before_delete", "gc_mid_delete"),
]
#: Points of a writing process where saves are asynchronous; training goes on without it. (The save at the end
#: is not asynchronous, and would come by those of removing.)
WRITING = ["mid_shard_write", "after_shard_fsync", *(point for point in OF_RANK_0 if not point.startswith("gc_"))]
#: The checkpoint is there by then: what is lost is only what follows.
PUBLISHED = {"after_rename", "before_latest", "after_latest"}
CASES = [
    (point, rank, is_async)
    for is_async in (False, True)
    for point in (WRITING if is_async else inject.POINTS)
    for rank in range(1 if point in OF_RANK_0 else RANKS)
]


def train(folder: Path, *arguments: str, killed: str = "") -> subprocess.CompletedProcess[str]:
    env = environment() | ({inject.ARMED: "1", inject.FAULT: killed} if killed else {})
    words = command(folder, "--run-dir", "run", "--set", "checkpoint.keep=2", *arguments)
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    train_well(folder, RANKS, ("--run-dir", "run", "--set", "checkpoint.keep=2"))
    return folder / "run"


@pytest.mark.parametrize(("point", "rank", "is_async"), CASES)
def test_killed_anywhere_it_ends_as_if_nothing_had_happened(
    whole: Path, tmp_path: Path, point: str, rank: int, is_async: bool
) -> None:
    run, settings = tmp_path / "run", ("--set", f"checkpoint.asynchronous={str(is_async).lower()}")
    where = f"@step={5 if point.startswith('gc_') else 15}"
    if point in LOADING:
        shutil.copytree(whole, run)
        shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
        ended = train(tmp_path, "--resume", "latest", *settings, killed=f"{point}@rank={rank}{where}:kill")
    else:
        ended = train(tmp_path, *settings, killed=f"{point}@rank={rank}{where}:kill")
    if is_async:
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "the process that writes checkpoints has been killed" in ended.stdout + ended.stderr
        assert ("step 15 was not saved" in ended.stdout) == (point not in PUBLISHED)
    else:
        assert ended.returncode == 137, ended.stdout + ended.stderr
        assert f"rank {rank}" in "\n".join(ended.stderr.splitlines()[-25:])
    assert not processes_of(tmp_path)
    if not is_async:
        resumed = train(tmp_path, "--resume", "latest", *settings)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert losses(run) == losses(whole)
    assert content(run) == content(whole)
    left = [path.name for path in (run / "checkpoints").iterdir()]
    assert all(name.startswith("step-") and ".tmp-" not in name for name in left), left
