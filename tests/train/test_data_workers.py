"""Workers of a ``DataLoader`` end at the exit of their rank, not at a signal that all processes get."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import multiprocessing
import subprocess
from torch.utils.data import DataLoader
from shardwise.train.data.workers import obey_this_rank

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
    obey_this_rank(loader)
    obey_this_rank(loader)
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
