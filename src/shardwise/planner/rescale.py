"""Adjustment of a machine's constants to measured runs, one constant for each run, so that the runs are predicted.

A constant is the speed of products, links, the network or launches. A run adjusts the constant that most likely
explains its difference: the one with the largest product of influence on the predicted step and uncertainty. Two runs
adjust the pair of constants that they distinguish best.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from shardwise.cost.hardware import Gpu
from shardwise.cost.kernels import product_share
from shardwise.cost.software import LAUNCH_S, find_software
from shardwise.planner.estimate import Estimate
from shardwise.planner.explain import seconds, title
from shardwise.planner.memory import num_microbatches
from shardwise.planner.time import estimate_time
from shardwise.spec.errors import ConfigError, ShardwiseError

#: Each constant's description; the standard deviation of its logarithm before any run (of products and links as in
#: ``bench/fit.py``); and the least plausible factor: ZeRO-3 on Azure reached a fifth of its network's bandwidth.
_CONSTANTS = {
    "products": ("products and attention", 0.1, 1 / 3),
    "link": ("collectives inside a node", 0.15, 1 / 5),
    "network": ("collectives between nodes", 0.3, 1 / 5),
    "launch": ("launches of kernels", 0.3, 1 / 3),
}

#: Largest plausible ratio of a product's share of the peak, without losses by its shape, to the best measured share.
_OVER_BEST = 1.15


def rescale(*runs: tuple[Estimate, float]) -> tuple[Gpu, list[str]]:
    """Adjust one constant of a GPU for each run.

    Args:
        *runs: One or two runs: the estimate of the plan that ran, and the tokens per second of all GPUs together.

    Returns:
        The GPU for ``Cluster(gpu=...)``, and sentences that report each change, and the most informative second run.

    Raises:
        ConfigError: No plausible value of a constant explains a run, or two runs depend on the same constants.
    """
    if not 1 <= len(runs) <= 2 or min(speed for _, speed in runs) <= 0:
        raise ConfigError("measured: expected one run or two, and tokens/s above 0.\n  Each run moves one constant.")
    gpu = runs[0][0].cluster.device
    took = [(made, made.workload.global_batch * made.workload.seq_len / speed) for made, speed in runs]
    table = [_dependence(*run) for run in took]
    names, known = _told_apart(table)
    if len(runs) > 1 and known < 0.05 * max(table[0].values()) * max(table[1].values()):
        raise ConfigError(f"the two measured runs depend on the same constants.\n  Give one. {_next(runs[0][0])}")
    slower = dict.fromkeys(names, 1.0)
    for _ in range(30):  # Newton's method: a step's time is convex in how slow a constant is
        if all(abs(_step_s(made, slower) / spent - 1) < 1e-6 for made, spent in took):
            break
        for (made, spent), name in zip(took, names, strict=True):
            now, old, (value, most, _) = _step_s(made, slower), slower[name], _stated(gpu, name)
            slope = (_step_s(made, {**slower, name: 1.01 * old}) - now) / (0.01 * old)
            moved = max(old + (spent - now) / (slope or 1e-12), min(value / most, 1.0))
            slower[name] = min(moved, 1 / _CONSTANTS[name][2])
    after, lines = replace(gpu, speeds=_speeds(gpu, slower)), []
    for (made, spent), name in zip(took, names, strict=True):
        run = f"{seconds(spent)} a step of {_words(made)}, predicted {seconds(made.step_time_s)}"
        (old, _, unit), (new, _, _) = _stated(gpu, name), _stated(after, name)
        if spent > 3 * made.step_time_s or abs(_step_s(made, slower) / spent - 1) > 1e-3:
            raise ConfigError(
                f"measured: {run}; {_CONSTANTS[name][0]} at {new:.3g} {unit} do not explain that.\n"
                "  Check that the run had this plan, model and batch, that its tokens/s are those of all GPUs without\n"
                "  its first steps, that data was there in time and nobody else on the GPUs, and --network."
            )
        lines.append(f"Measured: {run}. {_CONSTANTS[name][0].capitalize()}: {new:.3g} {unit}, before {old:.3g}.")
    return after, lines if len(runs) > 1 else [*lines, _next(runs[0][0])]


def ranking(before: Estimate, after: Estimate) -> str:
    """A sentence on how the adjustment changes a search's first plan, and why."""
    old, new = seconds(before.step_time_s), seconds(after.step_time_s)
    if (before.plan, before.workload) == (after.plan, after.workload):
        return f"Plan 1 stays {_words(after)}: {new} a step, before {old}."
    again = before.again(cluster=after.cluster)
    return (
        f"Plan 1 was {_words(before)}: {old} a step. It would take {seconds(again.step_time_s)}, as {again.reason};"
        f" {_words(after)} takes {new}."
    )


def _words(made: Estimate) -> str:
    work = made.workload
    saved = "" if work.recompute == "none" else f", recompute {work.recompute}"
    return f"{title(made)} ({work.micro_batch}x{num_microbatches(made.plan, work)}{saved})"


def _stated(gpu: Gpu, name: str) -> tuple[float, float, str]:
    """A constant's value, its largest plausible value, and their unit."""
    software = find_software("pytorch", gpu)
    if name == "launch":
        return 1e-3 / software.launch_s, 3e-3 / LAUNCH_S, "a ms"
    if gpu.measured is not None:
        return gpu.speeds.get(name, 1.0), 1.25, "of what was calibrated"
    if name == "products":
        return product_share(gpu, software), _OVER_BEST * gpu.best_product, "of the card's peak"
    return getattr(software, name), 1.0, "of the links" if name == "link" else "of the network"


def _speeds(gpu: Gpu, slower: Mapping[str, float]) -> dict[str, float]:
    return {**gpu.speeds, **{name: gpu.speeds.get(name, 1.0) / factor for name, factor in slower.items()}}


def _step_s(made: Estimate, slower: Mapping[str, float]) -> float:
    gpu = made.cluster.device
    cluster = replace(made.cluster, gpu=replace(gpu, speeds=_speeds(gpu, slower)))
    return estimate_time(made.shape, made.plan, cluster, made.workload, made.software).step_time_s


def _dependence(made: Estimate, spent: float) -> dict[str, float]:
    """For each constant, the relative change of the step with it, in the measured direction, times its uncertainty."""
    factor = 1.1 if spent >= made.step_time_s else 1 / 1.1
    return {
        name: spread * (_step_s(made, {name: factor}) / made.step_time_s - 1) / (factor - 1)
        for name, (_, spread, _) in _CONSTANTS.items()
    }


def _told_apart(table: Sequence[Mapping[str, float]]) -> tuple[tuple[str, ...], float]:
    """The constant that each run adjusts, such that the determinant of the dependences is largest; and determinant."""

    def determinant(names: Sequence[str]) -> float:
        first, *more = ([row[name] for name in names] for row in table)
        return first[0] * more[0][1] - first[1] * more[0][0] if more else first[0]

    names = max(itertools.permutations(_CONSTANTS, len(table)), key=determinant)
    return names, determinant(names)


def _next(made: Estimate) -> str:
    """The most informative second run: on one node, with larger microbatches, or with one microbatch a step."""
    plan, work, cluster, first = made.plan, made.workload, made.cluster, _dependence(made, made.step_time_s)
    micro, at_once = work.micro_batch, work.micro_batch * plan.dp_replicate * plan.dp_shard
    gpus = min(cluster.gpus_per_node, cluster.num_gpus)
    if plan.pipeline_policy is not None:
        plan = replace(plan, pipeline=replace(plan.pipeline_policy, num_microbatches=None))
    found = [(0.0, "no other batch")]
    for count, size, batch, words in (
        (gpus, micro, work.global_batch * gpus // cluster.num_gpus, f"gpus={gpus}"),
        (cluster.num_gpus, 2 * micro, max(work.global_batch, 2 * at_once), f"micro_batch={2 * micro}"),
        (cluster.num_gpus, micro, at_once, f"micro_batch={micro}"),
    ):
        with suppress(ShardwiseError):
            spread = plan if count == cluster.num_gpus else replace(plan, dp_replicate=1, dp_shard=-1)
            changed = replace(work, micro_batch=size, global_batch=batch)
            other = made.again(cluster=replace(cluster, num_gpus=count), plan=spread, workload=changed)
            known = _told_apart([first, _dependence(other, other.step_time_s)])[1]
            found.append((known if other.fits else 0.0, f"{words},global_batch={batch}"))
    return f"A second run of this plan would tell most with {max(found)[1]}."
