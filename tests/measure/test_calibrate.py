"""What ``shardwise calibrate`` measures: with small sizes here, so that it takes seconds."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch

from shardwise.cli.calibrate import _format_table
from shardwise.cost.hardware import find_gpu
from shardwise.measure import calibrate
from shardwise.spec.errors import ConfigError
from shardwise.testing import run_on_ranks

SMALL = {
    "_ROWS": (64,),
    "_WIDTHS": (64, 128),
    "_ATTENTION": ((16, 2, 2, 16),),
    "_NUMELS": (1 << 12, 1 << 14),
    "_UPDATES": (1 << 12, 1 << 14),
    "_LINK_BYTES": (1 << 10, 1 << 14),
    "_COLD_BYTES": 1 << 16,
}


def measure() -> dict:
    with mock.patch.multiple(calibrate, **SMALL), mock.patch.object(calibrate.Clock, "budget_s", 0.002):
        return calibrate.calibrate(torch.device("cpu"))


def test_a_machine_of_two_ranks_becomes_a_file_that_plan_takes(tmp_path):
    found = run_on_ranks(measure, 2, timeout_s=60)[0]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(found))
    gpu = find_gpu(str(path))
    tables = gpu.measured
    assert tables is not None
    assert (gpu.device_type, tables.num_ranks) == ("cpu", 2)
    assert {kind: [row.num_bytes for row in rows] for kind, rows in tables.links.items()} == {
        kind: [1 << 10, 1 << 14] for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_out", "message")
    }
    assert [(row.rows, row.inner, row.columns) for row in tables.products] == [
        (64, inner, columns) for inner in (64, 128) for columns in (64, 128)
    ]
    assert set(tables.operations) == {"norm", "activation", "add", "loss", "copy"}
    rows = [*tables.products, *tables.attention, *(row for rows in tables.operations.values() for row in rows)]
    assert all(row.forward_s > 0 and row.backward_s > 0 for row in rows)
    assert 0 <= tables.shared <= 1
    assert gpu.peaks["fp32"] == max(2 * p.rows * p.inner * p.columns / p.forward_s for p in tables.products)
    shown = _format_table(found, path)
    assert "2 ranks of 1 thread" in shown
    assert f"shardwise plan MODEL --gpu {path}" in shown


def test_one_rank_alone_measures_no_links_and_plans_that_need_them_say_so(tmp_path):
    found = measure()
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(found))
    tables = find_gpu(str(path)).measured
    assert tables is not None
    assert tables.links == {}
    with pytest.raises(ConfigError, match="it was made by one rank"):
        tables.link_s("all_reduce", 2, 1000)


class Gpu:
    """A clock, and a device that is given work: 5 us to give it, 10 us of work, 20 us to wait for the end."""

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def time(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += 5e-6
        self.done = max(self.done, self.now) + 10e-6

    def synchronize(self, _device: object) -> None:
        self.now = max(self.now, self.done) + 20e-6


def test_on_a_gpu_neither_the_wait_for_the_end_nor_giving_work_ahead_counts():
    gpu = Gpu()
    with (
        mock.patch.object(calibrate.time, "perf_counter", gpu.time),
        mock.patch.object(torch.cuda, "synchronize", gpu.synchronize),
    ):
        clock = calibrate.Clock(torch.device("cuda"), lambda: None)
        assert clock.seconds(gpu.call) == pytest.approx(10e-6, rel=0.15)
        times = clock.both(gpu.call, lambda _: (gpu.call(), gpu.call()))
        assert times == pytest.approx((10e-6, 20e-6), rel=0.15)


def test_what_disturbs_a_measurement_for_a_moment_does_not_count():
    clock = calibrate.Clock(torch.device("cpu"), lambda: None, budget_s=0.0)
    assert calibrate.low([5.0, 1.0, 1.1, 9.0, 1.2]) == 1.1
    calls = []
    clock.seconds(lambda: calls.append(1), least=5)
    assert len(calls) == 1 + 5
