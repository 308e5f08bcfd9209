"""Run every model of the matrix and write the table ``bench/results/models.md``. ``make models`` calls this.

    python -m bench.models [--only NAME]...

Takes about a quarter of an hour on two cores. With ``--only`` the table is printed, not written.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.testing import RankFailure, run_on_ranks
from tests.common import matrix
from tests.common.families import FAMILIES, PRELOAD_ALL, Family
from tests.generation import test_generation

TARGET = Path("bench/results/models.md")

INTRO = """\
# Models

Model classes of others, unchanged from their packages, under every strategy. Each is a small random model made from its
configuration alone (five layers where the family has layers, dropout on where it has dropout). On each number of ranks
it is trained for {steps} steps of AdamW beside one plain process that adds up the same samples, and every loss,
gradient, parameter and optimizer state is compared after every backward and step: **bitwise** means that there was no
difference in any bit, on any rank.

Strategies: {strategies}; {hybrid} as two groups of two ranks. Ranks: {worlds}, over Gloo, in fp32 on the CPU.

`auto` is what `sw.parallelize(model)` does without being told (neighbouring small units travel together); by class,
every block is a unit of its own. The root unit, which every model has, holds what is left and is not counted.

Made by `make models`, which runs all of this. Matrix {fingerprint}.
"""

GENERATE = """\
## `generate()` between training steps

Greedy, sampled and by beam search (Whisper: greedy and sampled), before each of two training steps, each rank to a
length of its own: the tokens are the plain model's.
"""


def rows(names: list[str]) -> Iterator[str]:
    yield "| model | class | package | parameters | units by `auto` | units by class | strategies | ranks | parity |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name in names:
        family = FAMILIES[name]
        cells = {(way, world): matrix.run(name, way, world) for way in family.wrappings for world in matrix.WORLDS}
        print(f"{name}: {_parity(cells)}", file=sys.stderr, flush=True)
        automatic, by_class = (cells[way, 2] for way in family.wrappings)
        yield " | ".join(
            [
                f"| {name}",
                f"`{family.model}`{_note(family)}",
                f"{family.package} {family.version}",
                f"{automatic.num_parameters:,}",
                _found(automatic),
                _found(by_class),
                ", ".join(matrix.strategies(4)),
                f"{matrix.WORLDS[0]}-{matrix.WORLDS[-1]}",
                f"{_parity(cells)} |",
            ]
        )


def _note(family: Family) -> str:
    ignored = family.options.get("ignored")
    return f", `ignored={ignored}`" if ignored else ""


def _found(cell: matrix.Cell) -> str:
    if not cell.found:
        return "the root alone"
    shown = ", ".join(f"{count} `{kind}`" for kind, count in cell.found.items())
    merged = cell.num_units - 1 < sum(cell.found.values())
    return f"{shown}, as {cell.num_units - 1} units" if merged else shown


def _parity(cells: dict[tuple[str, int], matrix.Cell]) -> str:
    problems = [
        f"{strategy}, {way}, {world} ranks: {what}"
        for (way, world), cell in cells.items()
        for strategy, what in cell.failures.items()
    ]
    return "bitwise" if not problems else "; ".join(problems).replace("|", "/")


def generation() -> Iterator[str]:
    yield "| model | strategies | ranks | tokens |"
    yield "|---|---|---|---|"
    presets = test_generation.STRATEGIES
    for name in test_generation.GENERATORS:
        problems = []
        for world in (2, 3, 4):
            try:
                run_on_ranks(test_generation.generate, world, name, presets, *test_generation.hows(name), timeout_s=500)
            except RankFailure as failure:
                problems.append(f"{world} ranks: {failure.causes[failure.rank].splitlines()[0]}")
        print(f"{name}, generate: {problems or 'equal'}", file=sys.stderr, flush=True)
        yield f"| {name} | {', '.join(presets)} | 2-4 | {'; '.join(problems) or 'equal'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(FAMILIES), help="this model only; may be repeated")
    os.environ["SHARDWISE_TESTING_MODULES"] = " ".join(PRELOAD_ALL.args)
    only = parser.parse_args().only
    table = "\n".join(rows(only or list(FAMILIES)))
    if only:
        print(table)
        return
    intro = INTRO.format(
        steps=matrix.STEPS,
        strategies=", ".join(f"`{name}`" for name in matrix.strategies(2)),
        hybrid=" and ".join(f"`{name}`" for name in matrix.HYBRID),
        worlds=", ".join(map(str, matrix.WORLDS)),
        fingerprint=matrix.fingerprint(),
    )
    TARGET.write_text("\n".join([intro, table, "", GENERATE, *generation()]) + "\n")


if __name__ == "__main__":
    main()
