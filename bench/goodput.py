"""How much of the work of a run counts that loses a random rank again and again: ``python -m bench.goodput``.

A rank is killed once in every ten save intervals; the launcher starts all ranks again (``--max-restarts``), and the run
goes on from the newest checkpoint. Printed are the steps that count over all steps that were made, and the time of a
run without faults over the time of this one.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardwise.launch.inject import ARMED, FAULT

_CONFIG = """
name: goodput
model: {preset: gpt-tiny}
data: {source: stdlib, seq_len: 32, max_bytes: 200000}
parallel: {strategy: zero3}
train: {micro_batch_size: 1, gradient_accumulation_steps: 1, eval_every: null}
log: {tensorboard: false}
"""


def main() -> int:
    """Run once without faults and once with them; print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints on disk")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, period = random.Random(options.seed), 10 * options.every  # noqa: S311  which rank is killed, and when
    struck = [draw.randint(first + 1, first + period) for first in range(0, options.steps - period + 1, period)]
    struck = [step for step in struck if step < options.steps]
    faults = ";".join(
        f"after_step@rank={draw.randrange(options.nproc)}@step={step}@attempt={attempt}:kill"
        for attempt, step in enumerate(struck)
    )
    with tempfile.TemporaryDirectory() as folder:
        calm_s, _ = _run(Path(folder), "calm", options, "", 0)
        struck_s, out = _run(Path(folder), "struck", options, faults, len(struck))
    resumed = [int(step) for step in re.findall(r"resumed at step (\d+)", out)]
    resumed = [0] * (len(struck) - len(resumed)) + resumed
    lost = sum(step - again for step, again in zip(struck, resumed, strict=True))
    made = options.steps + lost
    print(
        f"{options.steps} steps, a checkpoint every {options.every}, {len(struck)} kills\n"
        f"killed at steps {struck}, resumed at {resumed}\n"
        f"steps that count over steps made: {options.steps} / {made} = {options.steps / made:.1%}\n"
        f"restarts used: {out.count('shardwise: restart ')}\n"
        f"time without faults over time with them: {calm_s:.1f} s / {struck_s:.1f} s = {calm_s / struck_s:.1%},"
        f" {(struck_s - calm_s) / max(len(struck), 1):.1f} s a fault"
    )
    return 0


def _run(folder: Path, name: str, options: argparse.Namespace, faults: str, restarts: int) -> tuple[float, str]:
    config = folder / "goodput.yaml"
    config.write_text(_CONFIG)
    settings = {"train.steps": options.steps, "checkpoint.every": options.every}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    begin = time.perf_counter()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "shardwise", "train", str(config), "--nproc", str(options.nproc)),
            *("--run-dir", str(folder / name), "--max-restarts", str(restarts), *words),
        ],
        env=os.environ | {ARMED: "1", FAULT: faults},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise SystemExit(f"the run {name} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return time.perf_counter() - begin, ended.stdout + ended.stderr


if __name__ == "__main__":
    sys.exit(main())
