"""Long proofs: ``python -m tests.reliability.soak [kills|mutations] [--seed N]`` (``make soak``).

``kills``: runs of two ranks in which one rank after the other is killed at a random point, 200 times in all. The
launcher starts the ranks again, each kill uses one restart, and in the end losses and weights are those of a run
that nothing has happened to, bit for bit. In half of the runs saves are asynchronous.

``mutations``: 10,000 random changes each of a configuration, a manifest and a shard's header.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.launch import inject
from tests.reliability import mutations
from tests.train.job import command, content, environment
from tests.train.train_here import losses, sets

RANKS, EVERY, KILLS_A_RUN = 2, 2, 10
_RANK_0_ALONE = {
    *("before_manifest", "after_manifest", "before_rename", "after_rename", "before_latest", "after_latest"),
    *("gc_before_delete", "gc_mid_delete"),
}
_IN_EVERY_STEP = {"step_begin", "before_backward", "before_update", "after_step"}
_LOADING = {"load_begin", "load_mid_shard", "after_load"}
_PUBLISHED = {"after_rename", "before_latest", "after_latest", "gc_before_delete", "gc_mid_delete"}
#: Points that a writing process comes by where saves are asynchronous: killing it ends no rank.
_OF_A_WRITER = {"mid_shard_write", "after_shard_fsync", *_RANK_0_ALONE}


@dataclass
class Plan:
    """Faults of one run: each strikes in the attempt that the one before it has started.

    Attributes:
        steps: A step that no attempt so far has come beyond.
        is_saved: Whether a checkpoint is certain to be published by the end of the last attempt.
        faults: As ``SHARDWISE_FAULT`` has them.
        points: Their points.
    """

    steps: int = 0
    is_saved: bool = False
    faults: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)

    def add(self, draw: random.Random, points: list[str]) -> None:
        """One more kill, at a step that this attempt will come to."""
        point = draw.choice([each for each in points if self.is_saved or each not in _LOADING])
        rank = 0 if point in _RANK_0_ALONE else draw.randrange(RANKS)
        where = f"{point}@rank={rank}@attempt={len(self.faults)}"
        if point in _IN_EVERY_STEP:
            self.steps += draw.randint(1, EVERY + 1)
            where += f"@step={self.steps}"
            self.is_saved = self.is_saved or self.steps > 2 * EVERY  # the second save has waited for the first
        elif point not in _LOADING:
            # A save or a removal: the next one that comes. The third save is the first that removes one.
            self.steps = max(self.steps + 2 * EVERY, 4 * EVERY)
            self.is_saved = self.is_saved or point in _PUBLISHED
        self.faults.append(f"{where}:kill")
        self.points.append(point)


def kills(seed: int, count: int, folder: Path) -> Counter[str]:
    """Kill ranks at ``count`` random points.

    Args:
        seed: Of the draws.
        count: Kills in all.
        folder: An empty folder.

    Returns:
        How often each point was struck.

    Raises:
        AssertionError: A run did not end, used another number of restarts than ranks were killed, or has other losses
            or weights than a run without kills.
    """
    struck = Counter[str]()
    for number in range(-(-count // KILLS_A_RUN)):
        draw, is_async = random.Random(f"{seed} {number}"), number % 2 == 1
        plan = Plan()
        points = [point for point in inject.POINTS if not (is_async and point in _OF_A_WRITER)]
        while len(plan.faults) < min(KILLS_A_RUN, count - struck.total()):
            plan.add(draw, points)
        begin, steps = time.perf_counter(), plan.steps + 2 * EVERY
        settings = {
            "train.steps": steps,
            "checkpoint.every": EVERY,
            "checkpoint.keep": 2,
            "checkpoint.asynchronous": is_async,
        }
        ended = train(folder, "struck", settings, ";".join(plan.faults), restarts=len(plan.faults))
        shown = f"seed {seed}, run {number}: {';'.join(plan.faults)}\n{ended.stdout[-3000:]}{ended.stderr[-6000:]}"
        assert ended.returncode == 0, f"exit code {ended.returncode}\n{shown}"
        used = (ended.stdout + ended.stderr).count("shardwise: restart ")
        assert used == len(plan.faults), f"{used} restarts for {len(plan.faults)} kills\n{shown}"
        whole = train(folder, "whole", settings)
        assert whole.returncode == 0, whole.stderr
        assert losses(folder / "struck") == losses(folder / "whole"), f"other losses\n{shown}"
        assert content(folder / "struck", steps) == content(folder / "whole", steps), f"other weights\n{shown}"
        for name in ("struck", "whole"):
            shutil.rmtree(folder / name)
        struck.update(plan.points)
        print(
            f"run {number}: {used} kills, {steps} steps{', asynchronous saves' * is_async},"
            f" {time.perf_counter() - begin:.0f} s; {struck.total()} of {count}",
            flush=True,
        )
    return struck


def train(
    folder: Path, name: str, settings: dict[str, object], faults: str = "", *, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    """``shardwise train`` of two ranks in the folder, into the run folder ``name``."""
    values = sets(*(f"{key}={str(value).lower()}" for key, value in settings.items()))
    options = ("--run-dir", name, "--nproc", str(RANKS), "--max-restarts", str(restarts))
    return subprocess.run(
        command(folder, *options, *values),
        cwd=folder,
        env=environment() | ({inject.ARMED: "1", inject.FAULT: faults} if faults else {}),
        capture_output=True,
        text=True,
        timeout=300 * (1 + restarts),
        check=False,
    )


def main() -> int:
    """Run what is asked for; print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["mutations", "kills"], choices=["mutations", "kills"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--mutations", type=int, default=30_000)
    asked = parser.parse_args()
    if "mutations" in asked.what:
        for kind in mutations.KINDS:
            with tempfile.TemporaryDirectory() as folder:
                found = mutations.run(kind, asked.mutations // len(mutations.KINDS), asked.seed, Path(folder))
            print(f"{kind}: {found['refused']} of {found.total()} changed files refused, the rest as meant", flush=True)
        print(f"peak memory {mutations.peak_memory() >> 20} MiB")
    if "kills" in asked.what:
        with tempfile.TemporaryDirectory() as folder:
            struck = kills(asked.seed, asked.kills, Path(folder))
        print(f"{struck.total()} of {asked.kills} kills survived, one restart each:")
        for point in inject.POINTS:
            print(f"  {point:20} {struck[point]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
