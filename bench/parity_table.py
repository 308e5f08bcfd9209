"""Writes bench/results/parity.md: products of parallel degrees compared with one process (tests/product).

Ends with 1 where a row does not hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from tests.product import product

TARGET = Path(__file__).resolve().parent / "results" / "parity.md"

INTRO = """\
# Parity: products of parallel degrees

One GPT of {layers} layers, trained for {steps} steps of AdamW (lr {lr}) on meshes of up to {world} processes over
Gloo on the CPU, beside one plain process that reads the same samples. Losses and gradient norms of every step are
compared on every rank, and every element of every parameter at the end; what several ranks hold must be the same bits.

- **bitwise**: no difference in any bit, which is demanded wherever no sum is split: data parallelism adds in the order
  of ranks and pipelines add in the order of microbatches, as the one process does.
- Where sums are split (over `tp`, `cp` and `ep`, or over the stages that hold one tied parameter): the largest relative
  difference of losses and of norms, and the largest absolute difference of a parameter's element, with what is allowed
  of each. In bf16 that is an epsilon for losses, and twice the distance of one process in bf16 from one in fp32 for
  gradients (as vectors, which bounds norms) and for parameters.
- **beside pp 1**: the same mesh without its pipeline, in as many microbatches. A pipeline divides no sum, so it must
  change no bit of what tensor parallelism gives, in bf16 neither.

`accumulates`: two calls of `sw.train_step` before the optimizer's step; `clips`: to a norm of 0.3; `recomputes`: every
block in backward; `tied`: the head is the embedding. Pipelines have 4 microbatches; bf16 has fp32 masters. `ep` divides
the ranks of `dp_shard` and `cp`; its model has 4 experts in every block.

Made by `make parity`, which runs all of this and fails where a row fails.
"""


def rows(cases: tuple[product.Case, ...]) -> tuple[list[str], int]:
    """The lines of the table, and how many rows do not hold. Ranks are started once for each size of world."""
    lines = [
        "| mesh | ranks | strategy | schedule | step | dtype | losses | norms | parameters | allowed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    num_failures = 0
    for world in sorted({case.world for case in cases}):
        chosen = tuple(case for case in cases if case.world == world)
        start = time.monotonic()
        results = product.run(chosen, timeout_s=900)
        print(f"{world} ranks: {len(chosen)} rows in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        for case in chosen:
            found = product.measure(case, results)
            holds = product.judge(case, found)
            num_failures += not holds
            lines.append(line(case, found, holds=holds))
    return lines, num_failures


def line(case: product.Case, found: product.Distance, *, holds: bool) -> str:
    """One row."""
    limits = product.tolerance(case)
    allowed = "bitwise" if limits is None else ", ".join(f"{limit:.1g}" for limit in limits)
    values = (found.loss, found.norm, found.parameter)
    measured = ["bitwise" if value == 0 and not found.faults else f"{value:.1e}" for value in values]
    mesh, *others = case.shown
    verdict = allowed if holds else f"**FAILS** ({allowed}) {'; '.join(found.faults[:3])}".rstrip()
    return " | ".join([f"| {mesh}", str(case.world), *others, *measured, f"{verdict} |"])


def merged(lines: list[str]) -> list[str]:
    """The rows of the file, where these have been measured anew."""
    anew = {_key(row): row for row in lines}
    rows = [row for row in TARGET.read_text().splitlines() if row.startswith("|")]
    return [anew.get(_key(row), row) for row in rows]


def _key(row: str) -> tuple[str, ...]:
    return tuple(row.split("|")[1:7])


def main() -> int:
    """Run everything, or what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="rows whose text has this in it, which are shown")
    parser.add_argument("--merge", action="store_true", help="also write them into the file, beside the others")
    options = parser.parse_args()
    torch.set_num_threads(1)  # kernels cut sums by threads, and the ranks have one
    every = product.cases()
    cases = tuple(case for case in every if options.only is None or options.only in " | ".join(case.shown))
    lines, num_failures = rows(cases)
    if options.only is not None:
        print("\n".join(lines))
    if options.only is None or options.merge:
        intro = INTRO.format(
            layers=product.NUM_LAYERS, steps=product.STEPS, lr=product.LR, world=max(case.world for case in every)
        )
        TARGET.write_text("\n".join([intro, *(lines if options.only is None else merged(lines))]) + "\n")
    print(f"{len(cases)} rows, {num_failures} do not hold", file=sys.stderr)
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
