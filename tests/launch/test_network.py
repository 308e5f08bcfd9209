"""Two machines with a network between them: namespaces with addresses of their own, whose connection is cut."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.train.job import environment, num_steps, wait_until

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: stdlib, max_bytes: 100000}
parallel: {strategy: zero3}
train: {steps: 24, micro_batch_size: 2, global_batch_size: 8, eval_every: null, step_timeout_s: 6}
checkpoint: {every: 5}
log: {tensorboard: false}
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Machines:
    """Two namespaces of this machine's network, each with a host's name; a cable between them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = [f"sw{os.getpid()}{letter}" for letter in "ab"]

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                ip("netns", "add", name)
            first, second = self.names
            ip("link", "add", "cable", "netns", first, "type", "veth", "peer", "name", "cable", "netns", second)
            for number, name in enumerate(self.names, 1):
                ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", "cable")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "cable", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def set_cable(self, state: str) -> None:
        ip("-n", self.names[1], "link", "set", "cable", state)

    def start(self, run: str, *words: str) -> list[subprocess.Popen[str]]:
        """A rank on each machine, with the variables of srun."""
        ranks = []
        for rank, name in enumerate(self.names):
            host = f"node{rank}"
            variables = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
            variables |= {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}
            variables |= {"SLURM_JOB_NODELIST": "node[0-1]", "MASTER_ADDR": "10.77.0.1", "GLOO_SOCKET_IFNAME": "cable"}
            command = [sys.executable, "-m", "shardwise", "train", "run.yaml", "--run-dir", run, *words]
            place = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
            ranks.append(
                subprocess.Popen(
                    [*place, *command],
                    cwd=self.folder,
                    env=environment() | variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return ranks


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    (tmp_path / "run.yaml").write_text(CONFIG)
    with Machines(tmp_path) as machines:
        yield machines


def ends(ranks: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], "\n".join(outputs)


@pytest.mark.long
def test_a_run_whose_network_is_cut_ends_in_time_and_goes_on_when_it_is_back(machines: Machines) -> None:
    ranks = machines.start("run")
    try:
        assert wait_until(lambda: num_steps(machines.folder / "run") >= 6, 200)
        machines.set_cable("down")
        codes, text = ends(ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [82, 82], text
    assert re.search(r"rank \d \(pid \d+\) has made no progress for 6 s at step \d+, in the phase 'step'", text), text
    assert "every rank waits for others, on 2 machines: see whether these reach each other" in text
    assert re.search(r"^  safe: the checkpoint of step \d+, run/checkpoints/step-", text, re.MULTILINE)

    machines.set_cable("up")
    codes, text = ends(machines.start("run", "--resume"))
    assert codes == [0, 0], text
    assert re.search(r"^resumed at step \d+$", text, re.MULTILINE), text
    assert num_steps(machines.folder / "run") == 24
