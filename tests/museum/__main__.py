"""Plants the bugs of the museum and writes bench/results/museum.md and bench/results/museum.json.

    python -m tests.museum [NAME ...] [--as-it-is]

    python -m tests.museum --clean [COUNT] | --peers | --page

A name may be a part of a bug's name. ``--as-it-is`` runs the programs without their bugs, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.museum import page
from tests.museum.catalogue import BUGS
from tests.museum.programs import TRANSFORMERS
from tests.museum.run import run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="bugs, by a part of their names; all where none is given")
    parser.add_argument("--as-it-is", action="store_true", help="run the programs without their bugs")
    parser.add_argument("--clean", type=int, nargs="?", const=500, help="count false alarms on so many programs")
    parser.add_argument("--peers", action="store_true", help="plant bugs in other engines")
    parser.add_argument("--page", action="store_true", help="only write the page from the results that there are")
    options = parser.parse_args()
    os.environ["SHARDWISE_TESTING_MODULES"] = " ".join(TRANSFORMERS)
    if options.page:
        page.merge()
        return 0
    if options.clean is not None:
        from tests.museum import clean

        page.merge(clean=clean.run(options.clean))
        return 0
    if options.peers:
        from tests.museum import peers

        page.merge(peers=peers.run())
        return 0
    names = [name for name in BUGS if not options.names or any(part in name for part in options.names)]
    begin, results = time.monotonic(), {}
    for name, result in run(names, is_planted=not options.as_it_is):
        results[name] = result
        where = {None: "", True: "  at its module", False: "  not at its module"}[result.is_located(BUGS[name])]
        print(f"{result.seconds:5.1f} s  {name}: {len(result.findings)} found it{where}", flush=True)
        for each in result.findings:
            print(f"         - {each.tool}{'' if each.module is None else f' at {each.module!r}'}: {each.text}")
        if not options.as_it_is:
            page.merge(bugs={name: result.as_json()})
    print(f"{page.score(results)} {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
