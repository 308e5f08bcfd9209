"""Muon beside AdamW under zero3: time of a step, Newton-Schulz, bytes exchanged, state of a rank.

    OMP_NUM_THREADS=1 python -m bench.muon [--case compute] [--worlds 2,4] [--microbatches 1,8] [--rounds 3]
    python -m bench.muon --worlds "" --dry 64            # counts alone, nothing is timed

Both train the model of a case of ``bench.compare`` in the same processes, in turns: A B, A B. The time of a step is
the longest of the ranks; a ratio is the median over the rounds of Muon's median step over AdamW's, by the clock and by
the processor's time, which other programs disturb less. Newton-Schulz is timed by itself inside of the step; what Muon
takes besides is the exchange, and other element-wise work.

Newton-Schulz takes as long whatever the number of tokens: 5 (4 s² l + 2 s³) operations in each step for a matrix of s
rows and l columns, on all ranks together, where forward and backward take 6 s l for each token. So its share falls with
the tokens of a step: ``--microbatches`` adds up gradients of several.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from bench.compare.request import CASES, SEED, Case
from shardwise import torch_private
from shardwise.spec.text import size
from shardwise.testing import probe, run_on_ranks

WARM_UP = 2
ADAMW, MUON = "AdamW", "Muon"
#: A step of Muon over one of AdamW.
LIMIT = 1.035
HEAD = (
    *("ranks", "tokens of a rank's step", "AdamW's step", "Muon's over AdamW's", "of it Newton-Schulz"),
    *("processor time, Muon's over AdamW's", "of it Newton-Schulz", f"≤ {LIMIT}", "orthogonalized in a step"),
    *("sent by a rank for it", "state of the fullest rank, of AdamW's"),
)


class Trained:
    """A model under zero3 with its optimizer."""

    def __init__(self, case: Case, name: str, microbatches: int) -> None:
        torch.manual_seed(SEED)
        self.model = sw.parallelize(sw.models.gpt("gpt-tiny", **case.model), sw.ParallelPlan(strategy="zero3"))
        self.optimizer = optimizer_of(name, self.model)
        generator = torch.Generator().manual_seed(SEED)
        shape = microbatches * case.batch, case.seq_len
        self._ids = torch.randint(0, case.model["vocab_size"], shape, generator=generator)
        self._microbatches = microbatches

    def step(self) -> tuple[float, float]:
        """Seconds of a step by the clock and of the processor."""
        torch.distributed.barrier()
        start, used = time.perf_counter(), time.process_time()
        sw.train_step(self.model, (self._ids, self._ids), num_microbatches=self._microbatches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start, time.process_time() - used


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == ADAMW:
        return torch.optim.AdamW(model.parameters(), lr=3e-4)
    return sw.Muon(sw.muon_groups(model))


class Orthogonalizations:
    """Counts the calls of Newton-Schulz from now on, and their seconds by the clock and of the processor."""

    def __init__(self) -> None:
        self.count, self.seconds, self.used_s = 0, 0.0, 0.0
        self._plain = torch_private.orthogonalized
        torch_private.orthogonalized = self._counted

    def _counted(self, matrix: Tensor, *settings: Any) -> Tensor:
        start, used = time.perf_counter(), time.process_time()
        found = self._plain(matrix, *settings)
        self.count += 1
        self.seconds += time.perf_counter() - start
        self.used_s += time.process_time() - used
        return found

    def close(self) -> None:
        torch_private.orthogonalized = self._plain


def measure(case_name: str, microbatches: int, rounds: int, steps: int) -> dict[str, Any]:
    """On a rank: seconds of the steps of both by rounds, and what Muon does in one step."""
    torch.set_num_threads(1)
    both = {name: Trained(CASES[case_name], name, microbatches) for name in (ADAMW, MUON)}
    for each in both.values():
        for _ in range(WARM_UP):
            each.step()
    calls = Orthogonalizations()
    times = [{name: [each.step() for _ in range(steps)] for name, each in both.items()} for _ in range(rounds)]
    calls.close()
    num_steps = rounds * steps
    with sw.record_collectives(both[MUON].model) as events:
        both[MUON].step()
    return {
        "times": times,
        "calls": calls.count / num_steps,
        "orthogonal_s": calls.seconds / num_steps,
        "orthogonal_used_s": calls.used_s / num_steps,
        "sent": sum(event.sent_bytes for event in events if event.unit == "matrices"),
        "state": {name: probe(each.model).held_bytes(each.optimizer)["optimizer"] for name, each in both.items()},
    }


def timed_row(case: Case, microbatches: int, ranks: list[dict[str, Any]]) -> str:
    """The row of a number of ranks, from what each of them measured."""
    numbers = range(len(ranks[0]["times"]))
    seconds, used = (
        {
            name: [statistics.median(map(max, zip(*by_rank(ranks, n, name, place), strict=True))) for n in numbers]
            for name in (ADAMW, MUON)
        }
        for place in (0, 1)
    )
    ratios = [muon / adamw for muon, adamw in zip(seconds[MUON], seconds[ADAMW], strict=True)]
    ratio, adamw = statistics.median(ratios), statistics.median(seconds[ADAMW])
    used_ratio = statistics.median(muon / adamw for muon, adamw in zip(used[MUON], used[ADAMW], strict=True))
    share = max(rank["orthogonal_s"] for rank in ranks) / adamw
    used_share = max(rank["orthogonal_used_s"] for rank in ranks) / statistics.median(used[ADAMW])
    sent = int(statistics.mean(rank["sent"] for rank in ranks))
    calls = sum(rank["calls"] for rank in ranks)
    state = {name: max(rank["state"][name] for rank in ranks) for name in (ADAMW, MUON)}
    cells = [
        str(len(ranks)),
        f"{case.batch * case.seq_len * microbatches:,}",
        f"{adamw * 1e3:,.0f} ms",
        f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{share:.3f}",
        f"{used_ratio:.3f}",
        f"{used_share:.3f}",
        "met" if ratio <= LIMIT else "MISSED",
        f"{calls:g}",
        size(sent),
        f"{size(state[MUON])} of {size(state[ADAMW])}",
    ]
    return f"| {' | '.join(cells)} |"


def by_rank(ranks: list[dict[str, Any]], number: int, name: str, place: int) -> Iterator[list[float]]:
    """The times of the steps of a round, rank by rank."""
    for rank in ranks:
        yield [step[place] for step in rank["times"][number][name]]


def dry_row(case: str, world: int) -> str:
    """Counts of rank 0 of ``world``, and the fullest state of some ranks."""
    config = sw.models.gpt_config("gpt-tiny", **CASES[case].model)
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built[:] = [sw.models.gpt(config)]
        return built[0]

    def run(rank: int, name: str) -> sw.DryRun:
        def optimizer(_parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            return optimizer_of(name, built[0])

        plan = sw.ParallelPlan(strategy="zero3")
        return sw.dry_run(build, plan, world_size=world, rank=rank, optimizer=optimizer, backend="nccl")

    calls = Orthogonalizations()
    runs = [run(rank, MUON) for rank in sorted({0, world // 2, world - 1})]
    calls.close()
    state = {MUON: max(each.bytes_by_category["optimizer"] for each in runs)}
    state[ADAMW] = run(0, ADAMW).bytes_by_category["optimizer"]
    sent = statistics.mean(sum(e.sent_bytes for e in each.events if e.unit == "matrices") for each in runs)
    cells = [f"{world} (dry run)", *["-"] * 8, size(int(sent)), f"{size(state[MUON])} of {size(state[ADAMW])}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="compute", choices=CASES)
    parser.add_argument("--worlds", default="2,4", help="numbers of ranks that are timed")
    parser.add_argument("--dry", default="64", help="numbers of ranks of which one is run without values")
    parser.add_argument("--microbatches", default="1,8", help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="of each optimizer in a round")
    given = parser.parse_args()
    print(f"{CASES[given.case]}; zero3, fp32, one thread a rank, {given.rounds} rounds of {given.steps} steps\n")
    print(f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    for microbatches in map(int, given.microbatches.split(",")):
        for world in filter(None, given.worlds.split(",")):
            asked = given.case, microbatches, given.rounds, given.steps
            ranks = run_on_ranks(measure, int(world), *asked, timeout_s=1800)
            print(timed_row(CASES[given.case], microbatches, ranks), flush=True)
    for world in filter(None, given.dry.split(",")):
        print(dry_row(given.case, int(world)))


if __name__ == "__main__":
    main()
