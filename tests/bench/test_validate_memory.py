"""Errors of predicted memory against published peaks that nothing was fitted on."""

from __future__ import annotations

import statistics

from bench.validate_memory import cases, predicted, role, zero_cells


def test_held_out_sources_are_predicted_within_5_percent_on_average():
    errors = [
        abs(predicted(case.estimate(), case.measures) / case.measured_bytes - 1)
        for case in cases()
        if case.measured_bytes is not None and role(case.row.source) == "held out"
    ]
    assert len(errors) == 19
    assert statistics.mean(errors) <= 0.05


def test_every_published_run_that_fitted_is_said_to_fit():
    ran = [case for case in cases() if not case.ran_out]
    assert len(ran) == 82
    assert all(case.estimate().device_bytes <= case.row.cluster.device.memory_bytes for case in ran)


def test_all_cells_of_zeros_table():
    assert zero_cells() == 54
