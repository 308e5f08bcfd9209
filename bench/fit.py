"""How the constants of ``cost.software`` and ``cost.kernels`` were fitted: ``python -m bench.fit``, half a minute.

The most likely values: each constant has a prior with a source, stated below; errors are logarithms of predicted over
measured step times of the sources of ``bench.predictions.FITTED`` alone, each row weighted by one over the square root
of its source's number of rows, and large errors count linearly (Huber), so that one odd row decides nothing. They are
found by Gauss-Newton from the priors, printed, and copied into the two files by hand. ``--loso`` prints instead, for
each source but our own, its errors by constants fitted on all others, and writes ``data/left_out.csv`` (some minutes).
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch

from bench.predictions import EXCLUDED, FITTED, LEFT_OUT, Errors, resolved
from bench.published import PublishedRow, published_rows
from shardwise.cost import kernels, software
from shardwise.planner import time

#: Least and largest value of each kind of constant.
BOUNDS = {
    "products": (0.3, 0.92),
    "attention": (0.1, 0.75),
    "elementwise": (0.6, 2.0),
    "elementwise_eager": (0.6, 2.0),
    "scores": (3.0, 20.0),
    "fp8": (1.1, 1.9),
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

#: Means, and standard deviations of logarithms, of what is known before any fit. Products: the best that was measured
#: (``BEST_PRODUCT``), less the clocks of sustained power. Attention: FlashAttention-2 (arXiv 2307.08691) reaches
#: 0.5 to 0.7 of an A100's peak and 0.35 of an H100's; FlashAttention-3 and cuDNN 0.5 to 0.75 of it (arXiv 2407.08608).
PRODUCTS = {"Ampere": (0.8, 0.1), "Hopper": (0.68, 0.1), "Blackwell": (0.62, 0.1), "Volta": (0.75, 0.1)}
ATTENTION = {
    (True, "Ampere"): (0.5, 0.25),
    (True, "Hopper"): (0.33, 0.25),
    (True, "Blackwell"): (0.3, 0.25),
    (False, "Ampere"): (0.5, 0.25),
    (False, "Hopper"): (0.55, 0.25),
    (False, "Blackwell"): (0.45, 0.25),
}
#: Our own runs, whose kernels are the priors below, so that they are never left out.
OWN = "shardwise"
#: Today's PyTorch on Hopper: kernels of a step, each kind by itself (bench/results/2026-11-27-gpu-3.md).
OWN_PRODUCTS, OWN_ATTENTION, OWN_ELEMENTWISE = (0.835, 0.05), (0.55, 0.05), (1.46, 0.05)
#: The same of constants that all generations share: Galvatron (arXiv 2211.13878), nccl-tests and vTrain (planner.md).
SHARED = {"slowdown": (1.15, 0.06), "link": (0.7, 0.15), "network": (0.75, 0.15), "fp8": (1.5, 0.15)}

#: Generations with the same numbers, and those whose attention is FlashAttention-2.
FAMILIES = (
    ("megatron-core", "megatron-core-plain"),
    ("pytorch-2024", "torchtitan", "torchtitan-async-tp", "nanotron"),
    ("pytorch-2023", "pytorch-2022"),
)
FLASH = ("pytorch-2024", "torchtitan", "torchtitan-async-tp", "nanotron", "pytorch-2023")

#: The error that a row without a mistake is expected to have, from where on errors count linearly (Huber), and the
#: step of slopes.
NOISE, LARGE, STEP = 0.04, 0.10, 0.03


@dataclasses.dataclass
class Constant:
    """One number that is fitted.

    Attributes:
        field: Name of the field.
        generations: The generations of software that have it.
        key: Architecture, or place in ``aligned``; ``None`` for plain numbers.
        prior: Mean, and standard deviation of the logarithm.
    """

    field: str
    generations: tuple[str, ...]
    key: str | int | None = None
    prior: tuple[float, float] = (1.0, 0.3)

    def touches(self, row: PublishedRow) -> bool:
        """Whether it can matter to a row."""
        if self.generations and row.software not in self.generations:
            return False
        return not isinstance(self.key, str) or row.cluster.device.arch == self.key

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
        for name in self.generations:
            old = getattr(software.SOFTWARE[name], self.field)
            new = value if self.key is None else {**old, self.key: value}
            software.SOFTWARE[name] = dataclasses.replace(software.SOFTWARE[name], **{self.field: new})

    def __str__(self) -> str:
        place = "" if self.key is None else f"[{self.key}]"
        who = "all" if len(self.generations) == len(software.SOFTWARE) else ", ".join(self.generations) or "shape"
        return f"{who}: {self.field}{place} = {self.get():.4g}"


def constants(rows: Sequence[PublishedRow]) -> list[Constant]:
    """Everything that these rows can fit."""
    seen = sorted({(family(row.software), row.cluster.device.arch) for row in rows})
    own = ("pytorch", "Hopper")
    found = [
        Constant("products", names, arch, OWN_PRODUCTS if (names[0], arch) == own else PRODUCTS[arch])
        for names, arch in seen
    ]
    kernels_of = sorted({(kernel(names), arch) for names, arch in seen if software.SOFTWARE[names[0]].attention})
    priors = ATTENTION | {own: OWN_ATTENTION}
    found += [
        Constant("attention", names, arch, priors.get((names[0], arch)) or priors[names == FLASH, arch])
        for names, arch in kernels_of
    ]
    groups = sorted({names for names, _ in seen})
    found += [Constant("elementwise", names, None, (1.0, 0.3)) for names in groups]
    found += [
        Constant("elementwise_eager", names, arch, OWN_ELEMENTWISE) for names, arch in seen if (names[0], arch) == own
    ]
    plain = tuple(name for name, known in software.SOFTWARE.items() if not known.attention)
    found.append(Constant("scores", plain, None, (8.0, 0.3)))  # products written; softmax, dropout, read and written
    every = tuple(software.SOFTWARE)
    found += [Constant(name, every, None, prior) for name, prior in SHARED.items()]
    found += [Constant("wave", (), None, (0.8, 0.3)), Constant("short", (), None, (100.0, 0.3))]
    return found


def family(name: str) -> tuple[str, ...]:
    """The generations that share a generation's numbers."""
    return next((names for names in FAMILIES if name in names), (name,))


def kernel(names: tuple[str, ...]) -> tuple[str, ...]:
    """The generations that share a generation's kernel of attention."""
    return FLASH if names[0] in FLASH else names


def error(row: PublishedRow) -> float:
    """Logarithm of predicted over measured."""
    made = time.estimate_time(row.shape, resolved(row), row.cluster, row.workload, row.software)
    return math.log(made.step_time_s / (row.step_time_s or 1.0))


def fit(rows: Sequence[PublishedRow], *, rounds: int = 5) -> list[Constant]:
    """The most likely constants, which begin at their priors."""
    found = constants(rows)
    at = torch.tensor([math.log(each.prior[0]) for each in found], dtype=torch.float64)
    for _ in range(rounds):
        set_all(found, at)
        errors = errors_of(rows)
        at = stepped(at, found, rows, errors, slopes_of(rows, found, errors))
    set_all(found, at)
    return found


def errors_of(rows: Sequence[PublishedRow]) -> torch.Tensor:
    """The error of each row."""
    return torch.tensor([error(row) for row in rows], dtype=torch.float64)


def slopes_of(rows: Sequence[PublishedRow], found: Sequence[Constant], errors: torch.Tensor) -> torch.Tensor:
    """Change of each row's error by the logarithm of each constant, where they are now."""
    slopes = torch.zeros(len(rows), len(found), dtype=torch.float64)
    for column, constant in enumerate(found):
        value = constant.get()
        constant.set(value * math.exp(STEP))
        for place, row in enumerate(rows):
            if constant.touches(row):
                slopes[place, column] = (error(row) - errors[place]) / STEP
        constant.set(value)
    return slopes


def stepped(
    at: torch.Tensor,
    found: Sequence[Constant],
    rows: Sequence[PublishedRow],
    errors: torch.Tensor,
    slopes: torch.Tensor,
) -> torch.Tensor:
    """One step of Gauss-Newton."""
    mean = torch.tensor([math.log(each.prior[0]) for each in found], dtype=torch.float64)
    spread = torch.tensor([each.prior[1] for each in found], dtype=torch.float64)
    counts = Counter(row.source for row in rows)
    weight = torch.tensor([counts[row.source] ** -0.5 for row in rows], dtype=torch.float64)
    huber = LARGE / errors.abs().clamp(min=LARGE) * weight / NOISE**2
    left = slopes.T @ (huber[:, None] * slopes) + torch.diag(spread**-2)
    right = slopes.T @ (huber * errors) + (at - mean) / spread**2
    return at - torch.linalg.solve(left, right).clamp(-0.3, 0.3)


def set_all(found: Sequence[Constant], at: torch.Tensor) -> None:
    """Give every constant its value, within its bounds."""
    for constant, value in zip(found, at.tolist(), strict=True):
        low, high = BOUNDS[constant.field]
        if constant.field == "products":
            high = BEST_PRODUCT.get(str(constant.key), high)
        constant.set(min(max(math.exp(value), low), high))


def usable(row: PublishedRow) -> bool:
    """Whether a row can be fitted or asked: a time, and a configuration that is known.

    fms-fsdp's rows leave nothing open but the share of blocks that are recomputed.
    """
    is_known = row.is_core or row.source == "fms-fsdp"
    return row.step_time_s is not None and is_known and row.source not in EXCLUDED and "parallel block" not in row.notes


def leave_one_out(rows: Sequence[PublishedRow]) -> None:
    """Print each source's errors by constants fitted on all other sources, and write the predictions.

    Slopes are taken once, at the constants that are used; from there two steps lead to those without the source.
    """
    found, places = constants(rows), {id(row): place for place, row in enumerate(published_rows())}
    used = torch.tensor([math.log(each.get()) for each in found], dtype=torch.float64)
    slopes = slopes_of(rows, found, errors_of(rows))
    every: list[float] = []
    lines = []
    for source in sorted({row.source for row in rows} - {OWN}):
        kept = [place for place, row in enumerate(rows) if row.source != source]
        others, at = [rows[place] for place in kept], used
        for _ in range(2):
            set_all(found, at)
            at = stepped(at, found, others, errors_of(others), slopes[kept])
        set_all(found, at)
        mine = [row for row in rows if row.source == source]
        errors = [math.expm1(error(row)) for row in mine]
        lines += [
            (places[id(row)], source, row.step_time_s, f"{(row.step_time_s or 0.0) * (1 + each):.6g}")
            for row, each in zip(mine, errors, strict=True)
        ]
        every += errors
        show(f"without {source}", errors)
    show("leave one source out", every)
    with LEFT_OUT.open("w", encoding="utf-8", newline="") as file:
        written = csv.writer(file, lineterminator="\n")
        written.writerow(("row", "source", "measured_s", "predicted_s"))
        written.writerows(lines)


def show(name: str, errors: Sequence[float]) -> None:
    """Print one line."""
    got = Errors.of(errors)
    shares = "".join(f"{share:8.1%}" for share in (got.median, got.mean, got.p90, got.worst))
    print(f"{name:28s}{got.count:4d}{shares}", flush=True)


def main() -> None:
    """Fit, and print the constants."""
    parser = argparse.ArgumentParser(description="Fit the constants of the model of time.")
    parser.add_argument("--loso", action="store_true", help="leave one source out, each in turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    every = [row for row in published_rows() if usable(row)]
    rows = [row for row in every if row.source in FITTED]
    if given.loso:
        leave_one_out(every)
        return
    print(f"{len(rows)} rows of {', '.join(sorted({row.source for row in rows}))}")
    for constant in fit(rows):
        moved = math.log(constant.get() / constant.prior[0]) / constant.prior[1]
        print(f"{constant}  ({moved:+.1f} standard deviations from {constant.prior[0]:.4g})")
    show("fitted", [math.expm1(error(row)) for row in rows])


if __name__ == "__main__":
    main()
