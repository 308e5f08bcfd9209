"""The table of Muon beside AdamW: what it makes of measurements, and its counts, without timing anything."""

from __future__ import annotations

import pytest

from bench import muon
from bench.compare.request import CASES


def rank(muon_s: float, used_s: float) -> dict:
    times = {muon.ADAMW: [(1.0, 0.5)] * 3, muon.MUON: [(muon_s, used_s)] * 3}
    return {
        "times": [times] * 2,
        "calls": 4,
        "orthogonal_s": 0.02,
        "orthogonal_used_s": 0.01,
        "sent": 3_000_000,
        "state": {muon.ADAMW: 8_000_000, muon.MUON: 4_000_000},
    }


@pytest.mark.parametrize(("second", "verdict"), [(1.03, "met"), (1.25, "MISSED")])
def test_a_row_has_the_slowest_ranks_ratio_and_all_ranks_matrices(second, verdict):
    row = muon.timed_row(CASES["compute"], 2, [rank(1.0, 0.5), rank(second, 0.55)])
    assert row == (
        f"| 2 | 1,024 | 1,000 ms | {second:.3f} ({second:.3f} to {second:.3f}) | 0.020 | 1.100 | 0.020 | {verdict} |"
        " 8 | 3.0 MB | 4.0 MB of 8.0 MB |"
    )
    assert row.count("|") == len(muon.HEAD) + 1


def test_a_dry_row_counts_bytes_of_the_real_engine():
    row = muon.dry_row("wide", 4)
    assert row.count("|") == len(muon.HEAD) + 1
    *_, sent, state, _ = (cell.strip() for cell in row.split("|"))
    held, _, adamw = state.partition(" of ")
    assert sent.endswith("MB")
    assert 0.5 < float(held.split()[0]) / float(adamw.split()[0]) < 0.6  # a twelfth of the model is no hidden matrix
