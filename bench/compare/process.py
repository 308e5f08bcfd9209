"""One engine on one rank: ``python -m bench.compare.process REQUEST ENTRANT``.

Takes orders as lines on stdin and answers each with a line of JSON on stdout:

=============  =======================================================================================
``build``      imports, joins its world, makes the inputs, notes memory, builds the engine, warms up
``turn``       one turn of timed steps: seconds of each
``finish``     losses of all steps so far and the most memory that was resident
``check``      afterwards, on a model built anew: bytes of tensors, collectives, losses to compare
=============  =======================================================================================
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.compare.audit import AUDIT_STEPS, audit
from bench.compare.engine import Engine, Workload
from bench.compare.peer import load_deepspeed
from bench.compare.request import OURS, SINGLE, WARM_UP_STEPS, Entrant, Request, parse
from shardwise.launch.worker import die_with_parent
from shardwise.launch.world import join, own_device, read_world, shutdown
from shardwise.spec.errors import ShardwiseError

#: Peers of a rank that is still at another engine's turn are waited for.
TIMEOUT_S = 1800.0
#: Steps that one plain process makes with the batches of all ranks.
_ONE_PROCESS_STEPS = 5


class Process:
    """The engine's side of the conversation."""

    def __init__(self, request: Request, entrant: Entrant) -> None:
        """Nothing is done before the first order."""
        self.request = request
        self.entrant = entrant
        self.losses: list[Tensor] = []
        self.start_bytes = 0
        self.engine: Engine | None = None
        self.rank = read_world().rank
        self.orders: dict[str, Callable[[], dict[str, Any]]] = {
            "build": self.build,
            "turn": self.turn,
            "finish": self.finish,
            "check": self.check,
        }

    def build(self) -> dict[str, Any]:
        """Make the engine and take the first steps."""
        world = read_world()
        torch.set_num_threads(1)
        self.device = own_device(world) if self.entrant.engine == SINGLE else join(world, timeout_s=TIMEOUT_S)
        self.workload = Workload(self.request, self.device)
        num_steps = max(WARM_UP_STEPS + self.request.rounds * self.request.case.steps, AUDIT_STEPS)
        is_threaded, batch = self.entrant.is_threaded, self.workload.batch
        self.batches = [
            self.workload.whole_batch(step) if is_threaded else batch(step, self.rank) for step in range(num_steps)
        ]
        _load_what_is_loaded_late(self.device)
        if self.entrant.engine.startswith("deepspeed"):
            load_deepspeed()
        self.start_bytes = self._begin_peak()
        self.engine = Engine(self.entrant, self.workload)
        self._steps(WARM_UP_STEPS)
        return {}

    def turn(self) -> dict[str, Any]:
        """One turn."""
        if self.entrant.engine != SINGLE:
            torch.distributed.barrier()
        return {"seconds": self._steps(self.request.case.steps)}

    def finish(self) -> dict[str, Any]:
        """What the timed steps have left."""
        return {
            "losses": [loss.item() for loss in self.losses],
            "start_rss_bytes": self.start_bytes,
            "peak_rss_bytes": _status_bytes("VmHWM"),
        }

    def check(self) -> dict[str, Any]:
        """Count bytes and collectives over a few steps of a model built anew."""
        self.engine = None
        gc.collect()
        result = audit(self.entrant, self.workload, self.batches)
        if self.entrant.engine == OURS and not self.entrant.is_threaded:
            result["group_size"] = self._group_size(self.entrant)
        if self.entrant.engine == SINGLE:
            result["losses"] = self._one_process()
        return result

    def close(self) -> None:
        """Leave the world."""
        self.engine = None
        shutdown()

    # -- parts

    def _steps(self, count: int) -> list[float]:
        assert self.engine is not None
        seconds = []
        self._synchronize()
        for _ in range(count):
            batch = self.batches[len(self.losses)]
            start = time.perf_counter()
            loss = self.engine.step(batch)
            self._synchronize()
            seconds.append(time.perf_counter() - start)
            self.losses.append(loss)
        return seconds

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _begin_peak(self) -> int:
        """Bytes resident now; the kernel's peak begins anew."""
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")

    def _group_size(self, entrant: Entrant) -> int:
        """How many ranks add up gradients among themselves before they do over groups, if there are several."""
        plan = parse(entrant.strategy).applied_to(self.workload.plan)
        return plan.mesh(self.request.num_ranks, self.request.num_ranks).dp_shard

    def _one_process(self) -> dict[int, list[list[float]]]:
        """Losses by step and rank of one process that takes every rank's batch, for every grouping of our sums."""
        ours = [each for each in self.request.entrants if each.engine == OURS and not each.is_threaded]
        sizes = {self._group_size(entrant) for entrant in ours}
        found: dict[int, list[list[float]]] = {}
        for size in sizes or {self.request.num_ranks}:
            engine = Engine(self.entrant, self.workload)
            losses = found[size] = []
            for step in range(min(_ONE_PROCESS_STEPS, len(self.batches))):
                batches = [self.workload.batch(step, rank) for rank in range(self.request.num_ranks)]
                losses.append([loss.item() for loss in engine.step_for_all(batches, size)])
        return found


def _load_what_is_loaded_late(device: torch.device) -> None:
    """Train a few numbers: kernels' libraries and the optimizer's imports come at first use, 40 MB for every engine."""
    layer = torch.nn.Linear(8, 8, device=device)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.nn.functional.cross_entropy(
        layer(torch.ones(2, 8, device=device)), torch.zeros(2, 8, device=device)
    ).backward()
    optimizer.step()


def _status_bytes(name: str) -> int:
    """A field of /proc/self/status; 0 where there is none.

    Not ``ru_maxrss``, which a process inherits from the one that it was forked from.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def main(arguments: list[str]) -> int:
    """Obey until stdin ends. Returns the exit code."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints is no answer
    request = Request.from_dict(json.loads(Path(arguments[0]).read_text("utf-8")))
    process = Process(request, request.entrants[int(arguments[1])])
    try:
        for line in sys.stdin:
            answers.write(json.dumps(process.orders[line.strip()]()) + "\n")
        process.close()
    except BaseException as error:  # noqa: BLE001  whatever it is, the rank is to know
        traceback.print_exc()
        code = error.exit_code if isinstance(error, ShardwiseError) else 1
        with contextlib.suppress(OSError):
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}", "exit_code": code}) + "\n")
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
