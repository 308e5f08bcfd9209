"""Search for programs that train otherwise than one plain process: ``python -m tests.fuzz [first] [count]``."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.program import generate
from tests.fuzz.run import search, shrink


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first seed (default: 0)")
    parser.add_argument("count", type=int, nargs="?", default=200, help="how many seeds (default: 200)")
    parser.add_argument("--world", type=int, default=None, help="number of ranks (default: as the seed says)")
    parser.add_argument("--shrink", action="store_true", help="cut down what fails")
    parser.add_argument("--may-differ", action="store_true", help="ranks may leave out different blocks")
    given = parser.parse_args()
    failures = []
    for failure in search(
        generate(seed, given.world, may_differ=given.may_differ)
        for seed in range(given.first, given.first + given.count)
    ):
        failures.append(failure)
        print(f"seed {failure.program.seed}: {failure.message}\n  FSDP2: {failure.judgement}", flush=True)
        if given.shrink:
            least = shrink(failure)
            print(f"  {least.program}\n  {least.message}\n  FSDP2: {least.judgement}", flush=True)
    print(f"{given.count} programs, {len(failures)} failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
