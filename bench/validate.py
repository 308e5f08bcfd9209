"""Published measurements beside predictions: ``make validate``. Nothing is fitted here; it takes some seconds.

Times: errors by regime, each row by constants fitted without its source; errors by source with the constants that are
used; pairs, ranking and regret in groups that differ in plan alone; two baselines. Memory: ``bench.validate_memory``.
"""

from __future__ import annotations

import statistics

from bench import validate_memory
from bench.predictions import (
    EXCLUDED,
    FITTED,
    Compared,
    Errors,
    by_regime,
    by_source,
    choices,
    compare_times,
    constant_rate,
    held_out,
    left_out,
    summary,
)
from shardwise.planner.explain import BANDS
from shardwise.spec.text import aligned


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _errors(name: str, kind: str, errors: Errors) -> list[str]:
    shown = [_percent(share) for share in (errors.median, errors.mean, errors.p90, errors.worst)]
    return [name, kind, str(errors.count), *shown]


def time_table(compared: list[Compared]) -> list[str]:
    """Errors of the time of a step, by source."""
    rows = [["source", "", "rows", "median", "mean", "p90", "worst"]]
    for source, errors in summary(compared).items():
        kind = "fitted" if source in FITTED else "left out" if source in EXCLUDED else "held out"
        rows.append(_errors(source, "" if source.startswith("all ") else kind, errors))
    baseline = constant_rate(compared)
    rows.append(_errors("baseline: one rate per GPU and dtype, fitted on all", "", Errors.of(baseline)))
    unseen = constant_rate(held_out(compared))
    rows.append(_errors("the same on held-out rows, fitted on them", "", Errors.of(unseen)))
    return aligned(rows, words=(0, 1))


def left_out_table(compared: list[Compared]) -> list[str]:
    """Errors by regime and by source, of predictions by constants that were fitted without the row's source."""
    rows = [["regime, then source", "rows", "median", "mean", "8 of 10", "p90", "worst", "band"]]
    groups = {**by_regime(compared), **by_source(compared), "all": compared}
    for name, group in groups.items():
        errors = Errors.of(each.error for each in group)
        shown = (errors.median, errors.mean, errors.p80, errors.p90, errors.worst)
        band = _percent(BANDS[name]) if name in BANDS else ""
        rows.append([name, str(errors.count), *map(_percent, shown), band])
    return aligned(rows, words=(0,))


def ranking_table(compared: list[Compared]) -> list[str]:
    """Kendall's tau and regret of groups from which a planner could have chosen."""
    groups = [group for rows in by_source(compared).values() for group in choices(rows)]
    rows = [["group", "", "rows", "tau", "regret", "pairs", "right"]]
    for group in groups:
        kind = "fitted" if group.rows[0].row.source in FITTED else "held out"
        rows.append([group.name, kind, str(len(group.rows)), f"{group.tau:.2f}", _percent(group.regret)])
        far, right = group.pairs
        rows[-1] += [str(far), _percent(right / far) if far else ""]
    unseen = [group for group in groups if group.rows[0].row.source not in FITTED]
    for name, chosen in (("mean", groups), ("mean of held out", unseen)):
        if chosen:
            tau = statistics.fmean(group.tau for group in chosen)
            far, right = (sum(counts) for counts in zip(*(group.pairs for group in chosen), strict=True))
            regret = _percent(statistics.fmean(group.regret for group in chosen))
            rows.append([name, "", "", f"{tau:.2f}", regret, str(far), _percent(right / far)])
    return aligned(rows, words=(0, 1))


def main() -> None:
    """Print all tables."""
    print("Time of a step, every source predicted by constants fitted without it (python -m bench.fit --loso)\n")
    print("\n".join(left_out_table(left_out())))
    print("No published row of this kind is in the table: LoRA, mixtures of experts, cards without links\n")
    compared = compare_times()
    print("Time of a step, rows whose configuration is known entirely\n")
    print("\n".join(time_table(compared)))
    for source, reason in EXCLUDED.items():
        print(f"left out of the errors: {source}: {reason}")
    print("\nThe same, all rows with a time\n")
    print("\n".join(time_table(compare_times(core_only=False))))
    print("\nRanking: plans of one model, cluster and batch; pairs that differ by more than 10%\n")
    print("\n".join(ranking_table(compare_times(core_only=False))))
    print()
    validate_memory.main()


if __name__ == "__main__":
    main()
