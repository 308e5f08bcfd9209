"""``shardwise train --check-streams N``: a short run of the trainer on a pretended GPU."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from shardwise.cli import main
from shardwise.testing import run_on_ranks
from tests.streams.planted import BUGS

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, num_layers: 2, dropout: 0.1}
data: {source: stdlib, max_bytes: 20000}
train: {steps: 40, micro_batch_size: 2, global_batch_size: 4, eval_batches: 1}
parallel: {mp_policy: bf16}
schedule: {warmup_steps: 10}
checkpoint: {every: 2}
"""


def run(folder: str, bug: str | None) -> tuple[int, str, str, list[str]]:
    """Exit code, what is printed, and the files of the run."""
    os.chdir(folder)
    Path("run.yaml").write_text(CONFIG)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.ExitStack() as stack:
        if bug is not None:
            stack.enter_context(BUGS[bug].planted())
        code = main(["train", "run.yaml", "--check-streams", "2", "--run-dir", f"run-{bug is None}"])
    return code, out.getvalue(), err.getvalue(), sorted(path.name for path in Path(f"run-{bug is None}").iterdir())


def run_both(folder: str) -> list[tuple[int, str, str, list[str]]]:
    return [run(folder, bug) for bug in (None, "a reduction is not waited for")]


def test_a_run_under_the_detector_makes_the_steps_and_tells_what_is_wrong(tmp_path):
    ((good, bad),) = run_on_ranks(run_both, 1, str(tmp_path), process_group=False, timeout_s=120)
    code, out, err, files = good
    assert code == 0, out + err
    assert "step 2/2" in out + err
    assert "rank 0: no race and no early free on the pretended GPU: " in out
    assert " x aten::" in out  # where the host waits
    assert "report.html" in files
    code, out, err, _ = bad
    assert code == 1
    assert "where a missing wait can change the result" in err
    assert "must wait for an event that a stream of nccl.py" in err
