"""Workers of a ``DataLoader`` end at the exit of their rank, not at a signal that all processes get."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import multiprocessing
import subprocess
from torch.utils.data import DataLoader
from shardwise.train.data.workers import exit_with_this_rank

class Programs:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        return program.wait(20)

def begin(worker):
    print("begins", worker, flush=True)

if __name__ == "__main__":
    loader = DataLoader(Programs(), num_workers=1, worker_init_fn=begin, multiprocessing_context={context!r})
    exit_with_this_rank(loader)
    exit_with_this_rank(loader)
    items = iter(loader)
    print(next(items).tolist())
    for worker in multiprocessing.active_children():
        subprocess.run(["kill", "-TERM", str(worker.pid)])
    print([next(items).tolist() for _ in range(4)])
"""


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_workers_outlive_a_scheduler_s_signal_end_their_programs_and_end_with_the_rank(
    tmp_path: Path, context: str
) -> None:
    (tmp_path / "rank.py").write_text(RANK.replace("{context!r}", repr(context)))
    words = [sys.executable, str(tmp_path / "rank.py")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert (done.returncode, done.stdout) == (0, "begins 0\n[-15]\n[[-15], [-15], [-15], [-15]]\n"), done.stderr


LOOP = """
import os
import signal
import sys
import torch
from torch.utils.data import DataLoader
import shardwise as sw

class OwnEpochs(DataLoader):
    def __iter__(self):  # as torchdata's StatefulDataLoader
        return self._get_iterator()

model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = {kind}(torch.arange(9.0), num_workers=1)
with sw.Run(sys.argv[1], model=model, optimizer=optimizer, steps=5) as run:
    for step in run.steps():
        feed = iter(loader)
        next(feed)
        if step == 2:
            for process in [*(worker.pid for worker in feed._workers), os.getpid()]:
                os.kill(process, signal.{number})
        loss = sum(model(x).square().mean() for x in feed)
        run.log(loss=loss.detach())
"""


@pytest.mark.parametrize(
    ("kind", "number", "code"),
    [("DataLoader", "SIGTERM", 75), ("OwnEpochs", "SIGTERM", 75), ("DataLoader", "SIGINT", 130)],
)
def test_a_loop_of_one_s_own_makes_its_step_and_saves_when_all_processes_get_a_signal(
    tmp_path: Path, kind: str, number: str, code: int
) -> None:
    """torchrun sends it to the process group of each rank, to which the workers of its loader belong."""
    (tmp_path / "loop.py").write_text(LOOP.replace("{kind}", kind).replace("{number}", number))
    words = [sys.executable, str(tmp_path / "loop.py"), str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == code, done.stderr
    reason = json.loads((tmp_path / "run" / "summary.json").read_text())["reason"]
    assert reason == "stop requested, saved step 3, start the same command again to continue"
