"""What a checkpoint costs training: our saves, synchronous and asynchronous, beside those of torch's DCP with FSDP2.

Processes with one thread each train the same blocks under zero3 and under FSDP2 with AdamW, and save parameters and
optimizer state into a temporary folder, the ways in turns in one run. Time lost is what the steps from the call of a
save on take (ten, or as many as it takes until the checkpoint is complete) beyond as many steps without a save, whose
time is the median of the steps before. So it includes the call, what the writing takes away from the steps after it,
and nothing that training does not wait for.

    python -m bench.saves [--rounds 5] [--layers 8] [--ranks 2] [--folder DIR]

The extra memory is the most resident memory during a save above that before it, without pages of mapped files.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

STEPS_AFTER, STEPS_BEFORE = 10, 6
WIDTH, SAMPLES = 1024, 32
WAYS = ("ours", "ours, asynchronous", "DCP", "DCP, async_save")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2, help="1 leaves a core of two free, as a machine with GPUs does")
    parser.add_argument("--folder", type=Path, help="where to save (default: a temporary folder)")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        _run(arguments.rounds, arguments.layers, arguments.folder)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        own = ["--rounds", str(arguments.rounds), "--layers", str(arguments.layers), "--folder", folder]
        words = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(arguments.ranks),
            "-m",
            "bench.saves",
        ]
        subprocess.run([sys.executable, *words, *own], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def _blocks(layers: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(layers)
        )
    )  # fmt: skip


class Ours:
    """Blocks under zero3."""

    def __init__(self, layers: int) -> None:
        import torch

        import shardwise as sw

        self.model = sw.parallelize(_blocks(layers), sw.ParallelPlan(strategy="zero3"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def save(self, path: Path, *, is_async: bool) -> Callable[[], bool]:
        import shardwise as sw

        (sw.save_async if is_async else sw.save)(path, self.model, self.optimizer)
        return path.is_dir

    def finish(self) -> None:
        import shardwise as sw

        sw.finish_save(self.model)

    def load(self, path: Path) -> None:
        import shardwise as sw

        sw.load(path, self.model, self.optimizer)


class Theirs:
    """Blocks under FSDP2."""

    def __init__(self, layers: int) -> None:
        import torch
        from torch import distributed as dist
        from torch.distributed.fsdp import fully_shard

        self.model = _blocks(layers)
        for block in self.model:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._group = dist.new_group(backend="gloo")
        self._future: Any = None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, path: Path, *, is_async: bool) -> Callable[[], bool]:
        from torch.distributed import checkpoint as dcp

        if not is_async:
            dcp.save(self._state(), checkpoint_id=path)
            return lambda: True
        self._future = dcp.async_save(self._state(), checkpoint_id=path, process_group=self._group)
        return self._future.done

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None

    def load(self, path: Path) -> None:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Peak:
    """The most resident anonymous and shared memory of this process while it is open, above that before; in bytes."""

    def __enter__(self) -> Self:
        self._before = self.bytes = self._held()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.bytes -= self._before

    def _look(self) -> None:
        while not self._ends.wait(0.005):
            self.bytes = max(self.bytes, self._held())

    @staticmethod
    def _held() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        kinds = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))}
        return 1024 * sum(kinds.values())


class Runs:
    """This rank's part of all rounds.

    Attributes:
        found: Seconds, bytes and counts of every round, by way and name.
    """

    def __init__(self, layers: int, folder: Path) -> None:
        import torch

        self.engines: dict[str, Any] = {"ours": Ours(layers), "DCP": Theirs(layers)}
        self.found: dict[str, list[float]] = defaultdict(list)
        self._folder, self._batch = folder, torch.randn(SAMPLES, WIDTH)

    def round(self, number: int) -> None:
        """Every way once; round 0 is a warm-up."""
        from torch import distributed as dist

        for way in WAYS if number % 2 else reversed(WAYS):
            path = self._folder / f"step-{number:08d}-{WAYS.index(way)}"
            seen = self._save(way, path)
            if "async" not in way:
                begin = time.perf_counter()
                self.engines[way].load(path)
                dist.barrier()
                seen["load"] = time.perf_counter() - begin
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            dist.barrier()
            for name, value in seen.items() if number else ():
                self.found[f"{way}: {name}"].append(value)

    def _save(self, way: str, path: Path) -> dict[str, float]:
        from torch import distributed as dist

        engine = self.engines[way.split(",", maxsplit=1)[0]]
        usual = statistics.median(self._step(engine) for _ in range(STEPS_BEFORE))
        with Peak() as peak:
            dist.barrier()
            begin = time.perf_counter()
            is_done = engine.save(path, is_async="async" in way)
            call = time.perf_counter() - begin
            steps = 0
            while steps < STEPS_AFTER or not _on_all(is_done):
                self._step(engine)
                steps += 1
            lost = time.perf_counter() - begin - steps * usual
        engine.finish()
        dist.barrier()
        return {"lost": lost, "call": call, "steps": steps, "step": usual, "extra": peak.bytes}

    def _step(self, engine: Any) -> float:
        from torch import distributed as dist

        dist.barrier()
        begin = time.perf_counter()
        engine.model(self._batch).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return time.perf_counter() - begin


def _on_all(is_done: Callable[[], bool]) -> bool:
    import torch
    from torch import distributed as dist

    flag = torch.tensor(float(is_done()))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def _run(rounds: int, layers: int, folder: Path) -> None:
    import torch
    from torch import distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    runs = Runs(layers, folder)
    for number in range(rounds + 1):
        runs.round(number)
    if dist.get_rank() == 0:
        _print(runs.found, runs.engines["ours"])
    dist.destroy_process_group()


def _print(found: dict[str, list[float]], ours: Ours) -> None:
    middle = {name: statistics.median(values) for name, values in found.items()}
    owned = sum(parameter.numel() for parameter in ours.model.parameters())
    lines = [f"a rank saves {12 * owned / 1e6:.0f} MB; medians of {len(found['ours: lost'])} rounds, seconds"]
    lines.append(f"{'':22}{'step':>8}{'call':>8}{'lost':>8}{'steps':>7}{'load':>8}{'extra MB':>10}")
    for way in WAYS:
        cells = [middle.get(f"{way}: {name}") for name in ("step", "call", "lost", "steps", "load", "extra")]
        step, call, lost, steps, load, extra = cells
        shown_load = "" if load is None else f"{load:.3f}"
        lines.append(f"{way:22}{step:8.3f}{call:8.3f}{lost:8.3f}{steps:7.0f}{shown_load:>8}{(extra or 0) / 1e6:10.0f}")
    pairs = (
        ("save, ours / DCP", "ours: call", "DCP: call"),
        ("load, ours / DCP", "ours: load", "DCP: load"),
        ("lost, asynchronous / synchronous, ours", "ours, asynchronous: lost", "ours: call"),
        ("lost, ours / DCP, asynchronous", "ours, asynchronous: lost", "DCP, async_save: lost"),
    )
    for name, left, right in pairs:
        ratios = [a / b for a, b in zip(found[left], found[right], strict=True)]
        lines.append(f"{name:42}{statistics.median(ratios):7.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
