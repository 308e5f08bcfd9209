"""Plays the scenarios of the board with the real command and scores them.

    python -m tests.reliability [A1 B3 C ...] [--baseline] [--write]

    python -m tests.reliability --page

A letter means its whole section. ``--baseline`` plays them for torchrun with FSDP2 and DCP instead. ``--write`` merges
the results into bench/results/reliability.json and writes bench/results/reliability.md from it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tests.reliability import page
from tests.reliability.all import BASELINES, SCENARIOS
from tests.reliability.board import IDS, Result, play, summary
from tests.reliability.box import Oracles


def chosen(names: list[str], there: tuple[str, ...]) -> list[str]:
    """The ids that are named, or of the sections that are named; all where none is."""
    wanted = [name for name in there if not names or name in names or name[0] in names]
    unknown = [name for name in names if name not in IDS and name not in {held[0] for held in IDS}]
    if unknown:
        sys.exit(f"no such scenario: {', '.join(unknown)}")
    return wanted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="ids or sections; all where none is given")
    parser.add_argument("--baseline", action="store_true", help="torchrun with FSDP2 and DCP instead")
    parser.add_argument("--write", action="store_true", help="merge the results into bench/results/reliability")
    parser.add_argument("--oracles", type=Path, help="keep the uninterrupted runs here for the next board of this code")
    parser.add_argument("--page", action="store_true", help="only write the page from the results there are")
    options = parser.parse_args()
    if options.page:
        page.merge({})
        return 0
    runs = BASELINES if options.baseline else {name: held.run for name, held in SCENARIOS.items()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    results: dict[str, Result] = {}
    oracles = Oracles(options.oracles)
    try:
        for name in chosen(options.names, tuple(name for name in IDS if name in runs and name in SCENARIOS)):
            result = results[name] = play(SCENARIOS[name], runs[name], oracles)
            print(f"{name:4} {result.score:2}  {result.seconds:6.1f} s  exit {result.code}  {result.seen}", flush=True)
            for line in result.failed:
                print(f"         - {line}", flush=True)
            if options.write:
                page.merge({name: result}, is_baseline=options.baseline)
    finally:
        oracles.close()
    print(summary(results))
    return 0 if all(result.score == 2 for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
