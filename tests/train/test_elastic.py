"""Under torchrun a run goes on with the machines that are left, and with those that come back."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.launch.world import World
from shardwise.spec.errors import ConfigError
from shardwise.train.config.sections import RawConfig, read_config
from shardwise.train.elastic import keep_batch, launcher_identity, save_launchers
from tests.train.train_here import CONFIG, losses, sets, train_well


def raw(*settings: str) -> RawConfig:
    return read_config(None, ["data.source=random", "train.steps=1", *settings])


def world(size: int, local_size: int = 1) -> World:
    return World(size=size, local_size=local_size, num_nodes=size // local_size, source="torchrun")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of job 7 with a global batch of 8, of microbatches of 2."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    (tmp_path / "logs").mkdir()
    save_launchers(tmp_path, ["torchrun 7: an agent"])
    (tmp_path / "config.yaml").write_text(
        "train: {micro_batch_size: 2, global_batch_size: 8, gradient_accumulation_steps: 2}\n"
    )
    return tmp_path


def test_the_batch_of_the_run_is_kept_whatever_the_configuration_derives_it_from(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep_batch(
        raw("train.micro_batch_size=2", "train.gradient_accumulation_steps=2"), run, world(1)
    ).config.train
    assert (kept.micro_batch_size, kept.global_batch_size, kept.gradient_accumulation_steps) == (2, 8, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "8")
    assert keep_batch(given := raw(), run, world(1)) is given
    assert keep_batch(given, None, world(1)) is given
    assert keep_batch(given, run, World(source="launcher")) is given


@pytest.mark.parametrize(
    ("settings", "local_size", "size", "text"),
    [
        ((), 1, 3, "multiple of micro_batch_size=2 * 3 ranks = 6; use 6 or 12.\n  It continues with 1, 2 or 4 ranks: "),
        (("parallel.tp=2",), 1, 3, "It continues with 2, 4 or 8 ranks: continue with --resume on as many"),
        (("parallel.tp=2", "parallel.dp_shard=2"), 1, 2, "It continues with 4 ranks: "),
        (("parallel.tp=3",), 2, 2, "It continues with 6 or 12 ranks: "),
        (("parallel.pp=7", "parallel.dp_shard=3"), 2, 2, "No number of machines like this one fits."),
    ],
)
def test_a_world_that_the_plan_or_the_batch_does_not_fit_is_refused_with_those_that_fit(
    run: Path, settings: tuple[str, ...], local_size: int, size: int, text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        keep_batch(raw(*settings), run, world(size, local_size))
    assert f"the run in {run} does not continue in a world of {size} ranks: " in str(caught.value)
    assert text in str(caught.value)
    assert caught.value.exit_code == 78


def test_an_agent_has_one_name_also_for_workers_below_a_script() -> None:
    code = "from shardwise.train.elastic import launcher_identity; from shardwise.launch.world import World\n"
    code += "print(launcher_identity(World(source='torchrun')))"
    environ = os.environ | {"TORCHELASTIC_RUN_ID": "7"}
    ask = [sys.executable, "-c", code]
    names = [
        subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout.strip()
        for words in (ask, ["sh", "-c", '"$@"; true', "sh", *ask])
    ]
    assert names[0] == names[1]
    assert names[0].startswith(f"torchrun 7: process {os.getpid()} of ")
    assert launcher_identity(World(source="launcher")) is None


class Agents:
    """Agents of torchrun on this machine, as if on one machine each."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.all: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
        words += ["--max-restarts", "3", "--local-addr", "127.0.0.1", "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        words += ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-conf", "last_call_timeout=10"]
        words += ["-m", "shardwise", "train", "run.yaml", "--run-dir", "run", *arguments]
        environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("w") as log:
            self.all[name] = subprocess.Popen(words, cwd=self.folder, env=environ, stdout=log, stderr=log)

    def can_meet(self) -> bool:
        """Whether the agent that started first holds the store in which all of them meet."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def workers(self, name: str) -> list[int]:
        listed = Path(f"/proc/{self.all[name].pid}/task").glob("*/children")
        return [int(pid) for path in listed for pid in path.read_text().split()]

    def kill(self, name: str) -> None:
        for pid in [self.all[name].pid, *self.workers(name)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.all[name].wait(30)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 250
        while not condition():
            assert time.monotonic() < end, {name: self.log(name) for name in self.all}
            time.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_goes_on_without_a_lost_machine_and_with_it_when_it_comes_back(tmp_path: Path) -> None:
    """Two agents with a worker each; one is lost with its worker, then a new one comes in its place.

    The losses of all steps are those of a run on one rank, so that each global batch had the same samples.
    """
    config = CONFIG.replace("steps: 20", "steps: 1000").replace("dropout: 0.1", "dropout: 0.0")
    (tmp_path / "run.yaml").write_text(f"{config}\nschedule: {{name: constant}}\n")
    agents, quiet = Agents(tmp_path), sets("train.eval_every=null", "log.tensorboard=false")

    def steps() -> int:
        with contextlib.suppress(OSError):
            return len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
        return 0

    def starts(number: int) -> bool:
        return agents.log("stays").count("resumed at step") >= number

    try:
        agents.start("stays", *quiet)
        agents.wait_until(agents.can_meet)
        agents.start("goes", *quiet)
        agents.wait_until(lambda: steps() >= 12)
        agents.kill("goes")
        agents.wait_until(lambda: starts(1) and steps() >= 17)
        (alone,) = agents.workers("stays")
        os.kill(alone, signal.SIGSTOP)  # it would be far ahead before the other one has started
        agents.start("comes", *quiet)
        agents.wait_until(lambda: "closing signal SIGTERM" in agents.log("stays"))
        os.kill(alone, signal.SIGCONT)
        agents.wait_until(lambda: starts(2))
        before = steps()
        agents.wait_until(lambda: steps() >= before + 5)
    finally:
        for name in agents.all:
            agents.kill(name)
    text = agents.log("stays")
    assert re.search(
        r"resumed at step 1\d\n  train.gradient_accumulation_steps: 2 -> 4\n  resharded: dp_shard=2 -> one", text
    )
    assert re.search(r"stop requested, saved step (\d+)(.*\n)+?resumed at step \1\n.* 4 -> 2\n  resharded: one", text)
    found = losses(tmp_path / "run")
    length = ("train.steps=" + str(len(found)), "schedule.name=constant")
    train_well(tmp_path, 1, ("--run-dir", "whole", *quiet, *sets(*length)), config=config)
    assert found == pytest.approx(losses(tmp_path / "whole"), abs=1e-6)
