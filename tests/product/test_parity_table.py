"""The committed table of parity has the rows of today, and all of them hold."""

from __future__ import annotations

from pathlib import Path

from tests.product import product

TEXT = (Path(__file__).parents[2] / "bench" / "results" / "parity.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line[:2] == "| "][1:]


def test_every_case_has_its_row() -> None:
    wanted = {(case.shown[0], str(case.world), *case.shown[1:]) for case in product.cases()}
    assert {tuple(row[:6]) for row in ROWS} == wanted, "parity.md is older than its cases; run `make parity`"
    assert len(ROWS) == len(wanted)


def test_every_row_holds() -> None:
    assert "FAILS" not in TEXT
    for case in product.cases():
        row = next(row for row in ROWS if row[:6] == [case.shown[0], str(case.world), *case.shown[1:]])
        if case.is_beside_flat or not case.splits_sums:
            assert row[6:] == ["bitwise"] * 4, row
            continue
        limits = product.tolerance(case)
        assert limits is not None
        for cell, limit in zip(row[6:9], limits, strict=True):
            assert cell == "bitwise" or float(cell) <= limit, row
