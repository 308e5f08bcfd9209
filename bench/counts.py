"""Counting runs: what every preset holds and sends on 2, 3 and 4 ranks, beside the formulas. Nothing is timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from bench.compare.request import CASES, OURS, PEERS, Entrant, Request
from shardwise.testing import run_on_ranks

WORLDS = (2, 3, 4)
PRESETS = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3")
#: On four ranks, as two groups of two.
HYBRID = ("hsdp+dp_replicate=2", "hybrid_shard_grad_op+dp_replicate=2")


@dataclass(frozen=True)
class Count:
    """One preset of one case on one world: of all ranks the least and the most, over the formula."""

    case: str
    world: int
    strategy: str
    held_bytes: int
    held_ratios: tuple[float, float]
    sent_bytes: int
    sent_ratios: tuple[float, float]
    trace_is_predicted: bool


def strategies(world: int) -> tuple[str, ...]:
    return (*PRESETS, "zero3+merge_units=false", *(HYBRID if world == 4 else ()))


def count(case: str, world: int) -> list[Count]:
    """Every preset of a case on so many ranks, one after the other in the same processes."""
    names = strategies(world)
    ranks = run_on_ranks(audit_all, world, case, names, timeout_s=200.0 * len(names))
    return [_merged(case, world, name, [found[index] for found in ranks]) for index, name in enumerate(names)]


def audit_all(case: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """On a rank."""
    # Here, as the peers' imports warn and take seconds.
    from bench.compare.audit import AUDIT_STEPS, audit
    from bench.compare.engine import Workload

    torch.set_num_threads(1)
    entrants = tuple(Entrant(name, PEERS[name]) if name in PEERS else Entrant(OURS, name) for name in names)
    world, rank = distributed.get_world_size(), distributed.get_rank()
    workload = Workload(Request(CASES[case], entrants, world, rounds=1), torch.device("cpu"))
    batches = [workload.batch(step, rank) for step in range(AUDIT_STEPS)]
    found = []
    for entrant in entrants:
        found.append(audit(entrant, workload, batches))
        gc.collect()
        if rank == 0:
            sys.stderr.write(f"counted: {case}, {world} ranks, {entrant.strategy}\n")
    return found


@dataclass(frozen=True)
class Live:
    """The peak of live tensors of one of our variants and of a peer on two ranks, each that of the fullest rank."""

    case: str
    strategy: str
    peer: str
    held_bytes: int
    peer_bytes: int

    @property
    def line(self) -> str:
        """Its row of the table of targets."""
        ratio = self.held_bytes / self.peer_bytes
        shown = f"{ratio:.3f} ({self.held_bytes / 1e6:,.1f} MB of {self.peer_bytes / 1e6:,.1f} MB)"
        verdict = "met" if ratio <= LIVE_LIMIT else "MISSED"
        return (
            f"| live tensors, {self.strategy} / {self.peer} | {self.case} | ≤ {LIVE_LIMIT:.2f} | {shown} | {verdict} |"
        )


#: The peak of live tensors beside FSDP2's.
LIVE_LIMIT = 1.0


def live(case: str) -> Live:
    """What zero3 holds, beside FSDP2."""
    names = ("zero3", "torch-fsdp2")
    ranks = run_on_ranks(audit_all, 2, case, names, timeout_s=400.0)
    ours, theirs = (max(found[place]["peak_tensor_bytes"] for found in ranks) for place in (0, 1))
    return Live(case, *names, ours, theirs)


def _merged(case: str, world: int, name: str, ranks: list[dict[str, Any]]) -> Count:
    share = [each["peak_tensor_bytes"] / (sum(each["predicted"].values()) + each["activation_bytes"]) for each in ranks]
    sent = [_sent(each["collectives"]) / _sent(each["predicted_collectives"]) for each in ranks]
    return Count(
        case,
        world,
        name,
        max(each["peak_tensor_bytes"] for each in ranks),
        (min(share), max(share)),
        max(_sent(each["collectives"]) for each in ranks),
        (min(sent), max(sent)),
        all(each["trace_is_predicted"] for each in ranks),
    )


def _sent(by_kind: dict[str, dict[str, int]]) -> int:
    return sum(entry["sent_bytes"] for entry in by_kind.values())


def target_lines(counts: list[Count]) -> Iterator[str]:
    """Their rows of the table of targets."""
    covered = _covered(counts)
    low, high = min(each.held_ratios[0] for each in counts), max(each.held_ratios[1] for each in counts)
    verdict = "met" if low >= 0.98 and high <= 1.02 else "MISSED"
    shown = f"{low:.3f} to {high:.3f}"
    yield f"| peak bytes in tensors / the formula's | counts: {covered} | 0.98 to 1.02 | {shown} | {verdict} |"
    low, high = min(each.sent_ratios[0] for each in counts), max(each.sent_ratios[1] for each in counts)
    is_met = low == high == 1 and all(each.trace_is_predicted for each in counts)
    shown = "1 exactly" if low == high == 1 else f"{low:.6f} to {high:.6f}"
    shown += "" if all(each.trace_is_predicted for each in counts) else ", not collective by collective"
    yield f"| bytes sent / the formula's | counts: {covered} | 1 exactly | {shown} | {'met' if is_met else 'MISSED'} |"


def _covered(counts: list[Count]) -> str:
    """Cases, and of each number of ranks how many presets."""
    presets: dict[int, set[str]] = {}
    for each in counts:
        presets.setdefault(each.world, set()).add(each.strategy.partition("+")[0])
    shown = ", ".join(f"{len(names)} presets on {world}" for world, names in sorted(presets.items()))
    return f"{', '.join(dict.fromkeys(each.case for each in counts))}; {shown} ranks; {len(counts)} runs"


def tables(counts: list[Count]) -> str:
    """Everything that was counted."""
    lines = [
        "## counts",
        "",
        "Every rank of every run, over what follows from the layout (lowest to highest of the ranks).",
        "",
    ]
    header = (
        "case",
        "ranks",
        "strategy",
        "peak tensors",
        "/ formula",
        "sent in a step",
        "/ formula",
        "each collective",
    )
    lines += [f"| {' | '.join(header)} |", "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |"]
    for each in counts:
        ratio, sent = (
            "1 exactly" if low == high == 1 else f"{low:.4f} to {high:.4f}"
            for low, high in (each.held_ratios, each.sent_ratios)
        )
        lines.append(
            f"| {each.case} | {each.world} | {each.strategy} | {each.held_bytes / 1e6:,.1f} MB | {ratio} "
            f"| {each.sent_bytes / 1e6:,.1f} MB | {sent} | {'as predicted' if each.trace_is_predicted else 'DIFFERS'} |"
        )
    return "\n".join(lines) + "\n"
