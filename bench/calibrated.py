"""Step times that the planner predicts from a calibrated file, beside measured ones, on two ranks of this machine.

    shardwise calibrate --out machine.json
    OMP_NUM_THREADS=1 python -m bench.calibrated --gpu machine.json [--case compute,wide] [--json FILE]
    python -m bench.calibrated --gpu machine.json --measured FILE        # predicts again, measures nothing

The cases are those of ``bench.compare``, in fp32 with AdamW. A row is met where the prediction is within 15% of the
median of the measured steps. ``ranked`` counts the pairs of plans of a case whose medians differ by more than 10%, and
how many of these the predictions order alike. Nothing of the cases was measured by ``calibrate``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from bench.compare.peer import LEARNING_RATE
from bench.compare.request import CASES, SEED
from shardwise.planner import Cluster, Workload, estimate
from shardwise.testing import run_on_ranks

WORLD, WARM_UP, STEPS = 2, 2, 5
#: Plans; microbatches of a pipeline's step.
PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "tp 2": {"strategy": "ddp", "tp": 2},
    "pp 2": {"strategy": "ddp", "pp": 2},
}
MICROBATCHES = 2
TOLERANCE, APART = 0.15, 0.10


def measure(case_name: str, names: list[str]) -> dict[str, list[float]]:
    """On a rank: seconds of the steps of each plan, after the first few."""
    case, found = CASES[case_name], {}
    for name in names:
        torch.manual_seed(SEED)
        model = sw.parallelize(sw.models.gpt("gpt-tiny", **case.model), sw.ParallelPlan(**PLANS[name]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        m = MICROBATCHES if "pp" in PLANS[name] else 1
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(0, case.model["vocab_size"], (m * case.batch, case.seq_len), generator=generator)
        times = []
        for _ in range(WARM_UP + STEPS):
            torch.distributed.barrier()
            start = time.perf_counter()
            if m > 1:
                sw.train_step(model, (ids, ids), num_microbatches=m)
            else:
                model(ids, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        found[name] = times[WARM_UP:]
        del model, optimizer
    return found


def predict(case_name: str, name: str, gpu: str) -> sw.planner.Estimate:
    """What the planner says of the same step."""
    case = CASES[case_name]
    fields = PLANS[name]
    m = MICROBATCHES if "pp" in fields else 1
    replicas = WORLD // (fields.get("tp", 1) * fields.get("pp", 1))
    return estimate(
        sw.ModelShape.from_config(sw.models.gpt_config("gpt-tiny", **case.model)),
        sw.ParallelPlan(**fields),
        Cluster(gpu=gpu, num_gpus=WORLD, gpus_per_node=WORLD),
        Workload(
            seq_len=case.seq_len,
            global_batch=case.batch * m * replicas,
            micro_batch=case.batch,
            precision="fp32",
            optimizer="adamw",
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True, help="file of `shardwise calibrate`")
    parser.add_argument("--case", default="compute,wide", help="cases, separated by commas")
    parser.add_argument("--plans", default=",".join(PLANS), help="plans, separated by commas")
    parser.add_argument("--json", type=Path, help="write the measured times, beside those that the file has")
    parser.add_argument("--measured", type=Path, help="times that --json wrote, instead of measuring")
    given = parser.parse_args()
    plans = given.plans.split(",")
    measured: dict[str, dict[str, list[float]]] = {}
    if given.measured:
        measured = json.loads(given.measured.read_text())
    else:
        for case in given.case.split(","):
            ranks = run_on_ranks(measure, WORLD, case, plans, timeout_s=300)
            measured[case] = {
                name: [max(both) for both in zip(*(rank[name] for rank in ranks), strict=True)] for name in plans
            }
    if given.json:
        known = json.loads(given.json.read_text()) if given.json.exists() else {}
        for case, times in measured.items():
            known[case] = known.get(case, {}) | times
        given.json.write_text(json.dumps(known, indent=1))
    for case, times in measured.items():
        show(case, times, given.gpu)


def show(case: str, times: dict[str, list[float]], gpu: str) -> None:
    medians = {name: statistics.median(steps) for name, steps in times.items()}
    made = {name: predict(case, name, gpu) for name in times}
    predicted = {name: each.step_time_s for name, each in made.items()}
    print(f"| {case} | predicted | measured (lowest to highest) | error | | where the time goes |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
    for name, median in medians.items():
        error = predicted[name] / median - 1
        spread = f"{median * 1e3:.0f} ms ({min(times[name]) * 1e3:.0f} to {max(times[name]) * 1e3:.0f})"
        verdict = "met" if abs(error) <= TOLERANCE else "MISSED"
        parts = ", ".join(f"{key} {value * 1e3:.0f}" for key, value in made[name].time.by_category.items() if value > 0)
        print(f"| {name} | {predicted[name] * 1e3:.0f} ms | {spread} | {error:+.1%} | {verdict} | {parts} |")
    pairs = [(a, b) for a, b in itertools.permutations(medians, 2) if medians[b] > (1 + APART) * medians[a]]
    right = sum(predicted[b] > predicted[a] for a, b in pairs)
    wrong = ", ".join(f"{a} / {b}" for a, b in pairs if predicted[b] <= predicted[a])
    print(f"\nranked: {right} of {len(pairs)} pairs alike" + (f"; not {wrong}" if wrong else "") + "\n")


if __name__ == "__main__":
    main()
