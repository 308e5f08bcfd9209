"""Errors of predicted memory against published peaks that nothing was fitted on."""

from __future__ import annotations

import statistics
from dataclasses import replace

from bench.accounting import NANOTRON
from bench.torchtitan_memory import RUNS, predicted_gib
from bench.validate_memory import cases, predicted, role, zero_cells
from shardwise.planner.planned import MARGIN
from shardwise.planner.stage import Chain


def test_held_out_sources_are_predicted_within_5_percent_on_average():
    errors = [
        abs(predicted(case.estimate(), case.measures) / case.measured_bytes - 1)
        for case in cases()
        if case.measured_bytes is not None and role(case.row.source) == "held out"
    ]
    assert len(errors) == 19
    assert statistics.mean(errors) <= 0.05


def test_no_published_run_is_said_not_to_fit_by_more_than_the_margin():
    ran = [case for case in cases() if not case.ran_out]
    assert len(ran) == 339
    needed = {case: case.estimate().device_bytes / case.row.cluster.device.memory_bytes for case in ran}
    over = {(case.row.source, case.row.cluster.num_gpus): share for case, share in needed.items() if share > 1}
    assert set(over) == {("megascale", 2240), ("megascale", 4480), ("torchtitan", 64)}
    assert max(over.values()) * (1 - MARGIN) <= 1


def test_the_gpts_of_the_fsdp_blog_fit_because_single_layers_are_their_units():
    blog = [case for case in cases() if case.row.source == "fsdp-blog"]
    assert len(blog) == 3
    assert all(case.estimate().device_bytes <= case.row.cluster.device.memory_bytes for case in blog)
    for case in blog:
        by_block = replace(case, row=replace(case.row, plan=replace(case.row.plan, auto_wrap_policy="auto")))
        assert by_block.estimate().device_bytes * (1 - MARGIN) > case.row.cluster.device.memory_bytes


def test_reserved_memory_of_torchtitans_8b_is_predicted_within_6_percent():
    runs = [run for run in RUNS if run.model == "llama-3-8b"]
    assert len(runs) == 8
    assert max(abs(predicted_gib(run) / run.reserved_gib - 1) for run in runs) <= 0.06


def test_nanotrons_stages_take_blocks_until_their_share_is_exceeded():
    assert NANOTRON.divide is not None
    blocks = NANOTRON.divide(Chain((24,), (42,), 103), 8)  # of Llama-1B; the head costs as much as 2.45 blocks
    assert blocks == ((4,), (3,), (3,), (4,), (3,), (3,), (4,), (0,))


def test_all_cells_of_zeros_table():
    assert zero_cells() == 54
