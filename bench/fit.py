"""How the constants of ``cost.software`` and ``cost.kernels`` were fitted: ``python -m bench.fit``, some minutes.

Coordinate descent on the mean of ``|log(predicted / measured)|`` of step times, each row weighted by one over the
square root of its source's number of rows, over the sources of ``planner.validate.FITTED`` alone. Prints the constants;
they are copied into the two files by hand. ``--without SOURCE`` leaves one more source out, and then prints its errors:
leave-one-source-out.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

from shardwise.cost import kernels, software
from shardwise.planner import time
from shardwise.planner.published import PublishedRow, published_rows
from shardwise.planner.validate import FITTED, resolved

#: Least and largest value of each kind of constant.
BOUNDS = {
    "products": (0.3, 0.92),
    "attention": (0.1, 0.75),
    "elementwise": (0.8, 1.6),
    "scores": (3.0, 14.0),
    "fp8": (1.1, 1.9),
    "launch_s": (2e-6, 6e-5),
    "tp_hidden": (0.0, 0.9),
    "slowdown": (1.1, 1.3),  # Galvatron, arXiv 2211.13878
    "link": (0.4, 0.9),
    "network": (0.4, 0.95),
    "wave": (0.3, 1.0),
    "short": (30.0, 300.0),
    "aligned": (0.3, 1.0),
}

#: The best share of the peak that was measured for any product, by architecture (hardware.csv, ``mamf_pct``).
BEST_PRODUCT = {"Ampere": 0.869, "Hopper": 0.803, "Blackwell": 0.776}

#: Generations of which too few rows say too little: their products alone are fitted, all else are priors.
PRIORS = frozenset({"pytorch"})


@dataclasses.dataclass
class Constant:
    """One number that is fitted.

    Attributes:
        field: Name of the field.
        generations: The generations of software that have it.
        key: Architecture, or place in ``aligned``; ``None`` for plain numbers.
    """

    field: str
    generations: tuple[str, ...]
    key: str | int | None = None

    def get(self) -> float:
        """Its value now."""
        if not self.generations:
            value = getattr(kernels.SHAPE_FACTORS, self.field)
            return value if self.key is None else value[self.key]
        value = getattr(software.SOFTWARE[self.generations[0]], self.field)
        return value if self.key is None else value[self.key]

    def set(self, value: float) -> None:
        """Give it another one."""
        if not self.generations:
            old = getattr(kernels.SHAPE_FACTORS, self.field)
            new = value if self.key is None else (*old[: self.key], value, *old[self.key + 1 :])
            kernels.SHAPE_FACTORS = dataclasses.replace(kernels.SHAPE_FACTORS, **{self.field: new})
            return
        names = self.generations
        if names == ("megatron-core",):  # the same kernels, without overlap
            names = ("megatron-core", "megatron-core-plain")
        for name in names:
            old = getattr(software.SOFTWARE[name], self.field)
            new = value if self.key is None else {**old, self.key: value}
            software.SOFTWARE[name] = dataclasses.replace(software.SOFTWARE[name], **{self.field: new})

    def __str__(self) -> str:
        place = "" if self.key is None else f"[{self.key}]"
        return f"{', '.join(self.generations) or 'shape'}: {self.field}{place} = {self.get():.4g}"


def constants(rows: Sequence[PublishedRow]) -> list[Constant]:
    """Everything that these rows can fit."""
    seen = Counter((row.software, row.cluster.device.arch) for row in rows)
    names = sorted({name for name, _ in seen})
    found = [Constant("products", (name,), arch) for name, arch in sorted(seen)]
    several = {name for name in names if name not in PRIORS}
    found += [Constant("attention", (name,), arch) for name, arch in sorted(seen) if software.SOFTWARE[name].attention]
    found += [Constant("elementwise", (name,)) for name in names]
    found = [each for each in found if each.field == "products" or each.generations[0] in several]
    found += [Constant("scores", (name,)) for name in names if not software.SOFTWARE[name].attention]
    every = tuple(software.SOFTWARE)
    found += [Constant(field, every) for field in ("slowdown", "link", "network", "fp8")]
    found += [Constant("wave", ()), Constant("short", ())]
    return found


def distance(rows: Sequence[PublishedRow]) -> Callable[[], float]:
    """The mean error of rows, as a function of the constants."""
    counts = Counter(row.source for row in rows)
    weights = [1 / math.sqrt(counts[row.source]) for row in rows]
    plans = [resolved(row) for row in rows]

    def mean() -> float:
        total = 0.0
        for row, plan, weight in zip(rows, plans, weights, strict=True):
            made = time.estimate_time(row.shape, plan, row.cluster, row.workload, row.software)
            total += weight * min(abs(math.log(made.step_time_s / (row.step_time_s or 1.0))), 0.7)
        return total

    return mean


def fit(rows: Sequence[PublishedRow], *, rounds: int = 6) -> list[Constant]:
    """Fit all constants to rows."""
    found = constants(rows)
    steps = [0.15] * len(found)
    for turn in range(rounds):
        for place, constant in enumerate(found):
            touched = [row for row in rows if not constant.generations or row.software in constant.generations]
            if isinstance(constant.key, str):
                touched = [row for row in touched if row.cluster.device.arch == constant.key]
            error = distance(touched)
            best, value = error(), constant.get()
            low, high = BOUNDS[constant.field]
            if constant.field == "products":
                high = BEST_PRODUCT.get(str(constant.key), high)
            for factor in (1 + steps[place], 1 / (1 + steps[place])):
                constant.set(min(max(value * factor, low), high))
                tried = error()
                if tried < best - 1e-6:
                    break
            else:
                constant.set(value)
                steps[place] /= 2
        print(f"round {turn + 1}: {distance(rows)() / len(rows):.4f}", flush=True)
    return found


def main() -> None:
    """Fit, and print the constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without", default="", help="a source to leave out")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    rows = [
        row
        for row in published_rows()
        if row.source in FITTED
        and row.source != given.without
        and row.step_time_s is not None
        and (row.is_core or row.source == "fms-fsdp")
    ]
    print(f"{len(rows)} rows of {', '.join(sorted({row.source for row in rows}))}")
    for constant in fit(rows, rounds=given.rounds):
        print(constant)


if __name__ == "__main__":
    main()
