"""What it costs a step that gradients and parameters know that they are parts (docs/adr/0027).

    OMP_NUM_THREADS=1 python -m bench.parts [--case host] [--steps 25]

One model under zero3 on two ranks, in the same processes in turns, A B, A B: with plain Parameters between steps, and
as it is. Processor time of rank 0, which other programs disturb less than the clock; a ratio is the median over the
pairs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import torch

import shardwise as sw
from bench.compare.request import CASES
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.part import set_shard_class, unset_shard_class
from shardwise.testing import run_on_ranks

WARM_UP = 4
PHASES = ("zero_grad", "forward and backward", "clip", "optimizer", "step")


def measure(name: str, steps: int, is_flat: bool) -> list[tuple[float, float, float]]:  # noqa: FBT001
    """Milliseconds of each phase with plain Parameters and as it is, and the ratio."""
    case = CASES[name]
    torch.manual_seed(0)
    model = sw.parallelize(sw.models.gpt("gpt-tiny", **case.model), sw.ParallelPlan(strategy="zero3"))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model) if is_flat else model.parameters(), lr=1e-4)
    tokens = torch.randint(0, case.model["vocab_size"], (case.batch, case.seq_len + 1))
    engine = engine_of(model, "bench")
    times: tuple[list[list[float]], list[list[float]]] = [], []
    for step in range(2 * (WARM_UP + steps)):
        for group in engine.groups:
            unset_shard_class(group)
        if step % 2:
            set_shard_class(engine.groups)
        at = [time.process_time()]
        optimizer.zero_grad()
        at.append(time.process_time())
        model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        at.append(time.process_time())
        sw.clip_grad_norm(model, 1.0)
        at.append(time.process_time())
        optimizer.step()
        at.append(time.process_time())
        if step >= 2 * WARM_UP:
            times[step % 2].append([b - a for a, b in itertools.pairwise(at)] + [at[-1] - at[0]])
    found = []
    for plain, part in zip(zip(*times[0], strict=True), zip(*times[1], strict=True), strict=True):
        ratio = statistics.median(b / a for a, b in zip(plain, part, strict=True))
        found.append((1e3 * statistics.median(plain), 1e3 * statistics.median(part), ratio))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="host", choices=CASES)
    parser.add_argument("--steps", type=int, default=25, help="of each kind")
    given = parser.parse_args()
    for is_flat in (False, True):
        found = run_on_ranks(measure, 2, given.case, given.steps, is_flat, timeout_s=1800)[0]
        print("sw.flat_parameters" if is_flat else "model.parameters()")
        for phase, (plain, part, ratio) in zip(PHASES, found, strict=True):
            print(f"  {phase}: {plain:.2f} ms, {part:.2f} ms, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
