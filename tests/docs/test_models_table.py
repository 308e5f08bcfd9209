"""The committed table of models is the matrix's, as it is now."""

from __future__ import annotations

from pathlib import Path

from tests.common import matrix
from tests.common.families import FAMILIES
from tests.generation.test_generation import GENERATORS, STRATEGIES

TEXT = (Path(__file__).parents[2] / "bench" / "results" / "models.md").read_text()


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]


TRAINED, GENERATED = (table(part)[1:] for part in TEXT.split("## `generate()`"))


def test_every_family_has_its_row() -> None:
    assert [row[0] for row in TRAINED] == list(FAMILIES)
    assert [row[0] for row in GENERATED] == list(GENERATORS)


def test_the_rows_are_of_the_packages_and_the_matrix_of_today() -> None:
    stale = "bench/results/models.md is older than the matrix; run `make models`"
    for row in TRAINED:
        family = FAMILIES[row[0]]
        assert row[1].startswith(f"`{family.model}`"), stale
        package, _, version = row[2].partition(" ")
        assert (package, version.split(".")[0]) == (family.package, family.version.split(".")[0]), stale
        assert row[6] == ", ".join(matrix.strategies(4)), stale
        assert all(f"`{name}`" in row[5] for name in family.classes), stale
    assert f"Matrix {matrix.fingerprint()}." in TEXT, stale


#: Rows whose last cell may say something else, and why: by table ("trained", "generated") and model, the cell's text.
#: A failure that a run of `make models` wrote into the table is none of these until it is understood.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def test_every_row_is_bitwise_but_for_the_exceptions_that_are_named_here() -> None:
    rows = [("trained", "bitwise", row) for row in TRAINED] + [("generated", "equal", row) for row in GENERATED]
    found = {(part, row[0]): row[-1] for part, good, row in rows if row[-1] != good}
    assert found == EXCEPTIONS


def test_every_row_is_of_every_world_and_strategy() -> None:
    for row in TRAINED:
        assert row[-2] == f"{matrix.WORLDS[0]}-{matrix.WORLDS[-1]}", row
    for row in GENERATED:
        assert row[1:3] == [", ".join(STRATEGIES), "2-4"], row
