"""Chrome traces of simulated and of measured steps."""

from __future__ import annotations

import json

import torch

import shardwise as sw
from shardwise.measure import profile
from shardwise.measure.profile import StepProfile, step_range
from shardwise.sim.chrome import chrome_trace, slices_of, step_trace
from shardwise.sim.pipeline import StageSeconds, simulate_pipeline
from shardwise.sim.step import StepUnit, Transfer, simulate_step
from shardwise.spec.placement import PRESETS
from shardwise.spec.traffic.data import Collective
from shardwise.testing import run_on_ranks


def rows_of(events: list[dict], process: int = 0) -> dict[str, list[tuple[str, float, float]]]:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == process}
    found: dict[str, list[tuple[str, float, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["pid"] == process:
            found.setdefault(names[event["tid"]], []).append((event["name"], event["ts"], event["dur"]))
    return found


def test_a_simulated_step_becomes_a_row_for_each_stream():
    gathered = Collective("all_gather", "block", 4096)
    block = StepUnit("block", 2, 4, gather=(Transfer(1, gathered),), reduce=(Transfer(1),))
    (timeline, _), *_ = simulate_step([StepUnit("root", 1, 1), block], PRESETS["zero3"]).microbatches
    trace = json.loads(chrome_trace({"simulated": slices_of(timeline), "later": slices_of(timeline, offset_s=10)}))
    events = trace["traceEvents"]
    rows = rows_of(events)
    assert rows["gather"] == [("all_gather block", 0.0, 1e6)]
    assert rows["compute"][:2] == [("root", 0.0, 1e6), ("block", 1e6, 2e6)]
    assert rows_of(events, 1)["gather"] == [("all_gather block", 10e6, 1e6)]
    (event,) = [e for e in events if e.get("cat") == "gather" and e["pid"] == 0]
    assert event["args"] == {"kind": "all_gather", "unit": "block", "sent_bytes": 4096, "axis": "dp_shard"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["simulated", "later"]


def test_a_step_of_several_microbatches_and_a_pipeline_are_traces_too():
    block = StepUnit("block", 2, 4, gather=(Transfer(1),), reduce=(Transfer(1),))
    step = simulate_step([StepUnit("root", 1, 1), block], PRESETS["zero3"], num_microbatches=4, optimizer_s=3)
    rows = rows_of(json.loads(step_trace(step))["traceEvents"])
    assert [name for name, *_ in rows["steps"]] == ["microbatch 1", "microbatch 2, 2 times", "microbatch 3"]
    assert rows["compute"][-1][0] == "optimizer"
    pipeline = simulate_pipeline("1f1b", 2, 3, [StageSeconds(1, 1, 1)] * 2)
    rows = rows_of(json.loads(step_trace(pipeline))["traceEvents"])
    assert {row: len(found) for row, found in rows.items()} == {"rank 0": 6, "rank 1": 6}
    assert rows["rank 1"][:2] == [("forward 0, stage 1", 1e6, 1e6), ("backward 0, stage 1", 2e6, 2e6)]


def test_ranges_of_the_host_become_computation_gathers_reductions_and_waits():
    ranges = [
        (0.0, 20.0, "step", "7"),
        (1.0, 1.5, "gather", "b"),
        (1.6, 3.0, "wait", "b"),
        (1.7, 2.9, "arrive", "all_gather b"),
        (3.0, 5.0, "forward", "b"),
        (6.0, 6.5, "backward", "b"),
        (9.0, 9.2, "reduce", "b"),
        (10.0, 11.0, "arrive", "reduce_scatter b"),
        (12.0, 14.0, "optimizer", "7"),
    ]
    found = {each.name: (each.row, each.begin_s, each.end_s) for each in profile._of_units(ranges)}
    assert found == {
        "step 7": ("steps", 0.0, 20.0),
        "gather b": ("gather", 1.0, 3.0),
        "all_gather b": ("wait", 1.7, 2.9),
        "forward b": ("compute", 3.0, 5.0),
        "backward b": ("compute", 6.5, 9.0),
        "reduce b": ("reduce", 9.0, 11.0),
        "reduce_scatter b": ("wait", 10.0, 11.0),
        "optimizer 7": ("compute", 12.0, 14.0),
    }


def traced() -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = sw.parallelize(
        sw.models.gpt("gpt-tiny", num_layers=3, hidden=16, num_heads=2, vocab_size=31, seq_len=8),
        sw.ParallelPlan(merge_units=False),
    )
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model(ids, ids).backward()
    with StepProfile(torch.device("cpu")) as found, step_range(2):
        model(ids, ids).backward()
    assert all(0 <= each.begin_s <= each.end_s for each in found.slices)
    return [(each.row, each.name) for each in found.slices]


def test_a_measured_step_has_every_unit_on_every_row():
    for rows in run_on_ranks(traced, 2, timeout_s=60):
        units = {"root", "blocks.0", "blocks.1", "blocks.2"}
        for row, words in (("compute", ("forward", "backward")), ("gather", ("gather",)), ("reduce", ("reduce",))):
            assert {name for at, name in rows if at == row} == {f"{word} {unit}" for word in words for unit in units}
        assert {name for at, name in rows if at == "wait"} >= {f"reduce_scatter {unit}" for unit in units}
        assert rows.count(("gather", "gather blocks.0")) == 2  # again in backward
