"""Table 1 of ZeRO (arXiv 1910.02054), all of its 54 cells."""

from __future__ import annotations

import csv

import pytest

from bench.accounting import ZERO
from bench.published import TABLE
from shardwise.planner.model_states import Parameters, Rules
from shardwise.spec.placement import PRESETS

with (TABLE.parent / "zero_table1.csv").open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))
CELLS = [(row, strategy, column) for row in ROWS for strategy, column in (
    ("zero1", "pos_gb"), ("zero2", "pos_g_gb"), ("zero3", "pos_g_p_gb"),
)]  # fmt: skip


def test_there_are_54_cells():
    assert len(CELLS) == 54


@pytest.mark.parametrize(("row", "strategy", "column"), CELLS)
def test_model_states_are_those_of_the_table(row, strategy, column):
    rules = Rules(placements=PRESETS[strategy], shard_size=int(row["dp"]))
    billions = float(row["params_b"])
    held = ZERO(Parameters(0), ((1, Parameters(int(billions * 1e9))),), rules)[0].footprint
    assert held.on_device / 1e9 == pytest.approx(float(row[column]), rel=0.0005)  # four digits
