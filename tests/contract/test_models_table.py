"""The committed table of models is the matrix's, as it is now."""

from __future__ import annotations

import re
from pathlib import Path

from tests.parity import matrix
from tests.parity.families import FAMILIES
from tests.ranks.test_generation import GENERATORS

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]


TRAINED, GENERATED = (table(part)[1:] for part in TEXT.split("## `generate()`"))


def test_every_family_has_its_row() -> None:
    assert [row[0] for row in TRAINED] == list(FAMILIES)
    assert [row[0] for row in GENERATED] == list(GENERATORS)


def test_the_rows_are_of_the_packages_and_the_matrix_of_today() -> None:
    stale = "docs/models.md is older than the matrix; run `make models`"
    for row in TRAINED:
        family = FAMILIES[row[0]]
        assert row[1].startswith(f"`{family.model}`"), stale
        assert row[2] == f"{family.package} {family.version}", stale
        assert row[6] == ", ".join(matrix.strategies(4)), stale
        assert all(f"`{name}`" in row[5] for name in family.classes), stale
    assert f"Matrix {matrix.fingerprint()}." in TEXT, stale


def test_every_row_is_bitwise_or_says_why_not() -> None:
    for row in TRAINED:
        assert re.fullmatch(r"bitwise|.*\d ranks: .{20,}", row[-1]), row
    for row in GENERATED:
        assert re.fullmatch(r"equal|.*\d ranks: .{20,}", row[-1]), row
