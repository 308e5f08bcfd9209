"""Replays runs and shows the first difference from the file of record.

    python -m tests.replay [--quick] [--write] [NAME ...]

``--write`` puts the runs on record instead: for a change that is meant to change them, whose message says why.
"""

from __future__ import annotations

import argparse
import time

from tests.replay.cases import CASES
from tests.replay.record import PATH, Record
from tests.replay.run import probe, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only cases whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="only those of `make test`")
    parser.add_argument("--write", action="store_true", help="put the runs on record")
    options = parser.parse_args()
    record = Record.read() if PATH.exists() else Record(probe(), {}, {})
    has_values = record.probe == probe()
    if not has_values and options.write:
        record.probe = probe()
    if not has_values and not options.write:
        print("numbers are not compared: one plain process computes other bits here than where the record was written")
    chosen = [
        case
        for case in CASES
        if (case.is_quick or not options.quick)
        and (not options.names or any(name in case.name for name in options.names))
    ]
    num_different, begin = 0, time.monotonic()
    for case in chosen:
        found = run(case)
        difference = None if options.write else record.first_difference(case.name, found, has_values=has_values)
        if options.write:
            record.put(case.name, found)
        if difference is not None:
            num_different += 1
            print(difference, flush=True)
    if options.write:
        record.cases = {case.name: record.cases[case.name] for case in CASES if case.name in record.cases}
        record.drop_unused_traces()
        record.write()
    what = "written down" if options.write else f"replayed, {num_different} differ from the record"
    print(f"{len(chosen)} of {len(CASES)} runs {what}, {time.monotonic() - begin:.0f} s")
    return int(num_different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
