"""The script of the benchmarks: what it makes of results, without running anything."""

from __future__ import annotations

import json

import pytest

from bench import counts, generation, targets
from bench.compare import run
from bench.compare.__main__ import main as compare
from bench.compare.request import PEERS
from shardwise.spec.errors import ConfigError

MB = 1_000_000


def row(engine: str, strategy: str, seconds: float) -> dict:
    is_ours = engine == "shardwise"
    parts = {"parameters": 100, "gradients": 100, "optimizer": 200, "gathered": 30, "reduce": 40, "activations": 30}
    return {
        "engine": engine,
        "strategy": strategy,
        "step_time_s": {"all": [seconds, 2 * seconds] * 3},
        "peak_rss_above_start_bytes": (700 if is_ours else 1000) * MB,
        "peak_tensor_bytes": 500 * MB,
        "predicted_bytes": {name: value * MB for name, value in parts.items()} if is_ours else None,
        "num_units": (48 if "merge" in strategy else 8) if is_ours else None,
        "ratio_to": {peer: {"all": [0.5, 0.3, 2.0]} for peer in PEERS if peer != engine},
    }


@pytest.fixture
def found() -> dict:
    """Every run, in three rounds of two steps."""
    results = {}
    for name, (_, _, strategies, peers) in targets.RUNS.items():
        rows = [row("shardwise", strategy, 2.0) for strategy in strategies.split(",")]
        rows += [row(peer, PEERS[peer], 1.0 if peer == "single" else 9.0) for peer in peers.split(",")]
        losses = {"differences": {"torch-ddp": 1e-8}, "ours_bitwise": True}
        results[name] = {"machine": {"cores": 2}, "rounds": 3, "rows": rows, "losses": losses}
    return results


@pytest.fixture
def counted() -> list[counts.Count]:
    return [
        counts.Count("host", world, strategy, 2 * MB, (1.0, 1.01), MB, (1.0, 1.0), trace_is_predicted=True)
        for world in counts.WORLDS
        for strategy in counts.strategies(world)
    ]


def test_each_run_is_a_request_that_the_comparison_takes(monkeypatch, tmp_path):
    started = []

    def stop(request):
        started.append(request.case.name)
        raise ConfigError("not measured here")

    def start(words, check):
        assert (words[1:3], check) == (["-m", "bench.compare"], True)
        raise LookupError(compare(words[3:]))

    monkeypatch.setattr(run, "run", stop)
    monkeypatch.setattr(targets.subprocess, "run", start)
    names = [name for name, (*_, peers) in targets.RUNS.items() if "deepspeed" not in peers]
    for name in names:
        with pytest.raises(LookupError, match=str(ConfigError.exit_code)):
            targets.measure(name, 1, tmp_path)
    assert started == [targets.RUNS[name][0] for name in names]


def test_every_target_has_its_line_and_a_missed_one_is_said_to_be(found, counted):
    lines = targets.target_lines(found, counted)
    assert len(lines) == 2 + len(targets.TARGETS) + 3
    assert "| host unit cost, zero3 / FSDP2 (world 1) | host-1 | ≤ 0.10 | 0.125 (3: 0.12 to 0.12) | MISSED |" in lines
    assert "| step, zero3 / FSDP2 | compute | ≤ 0.80 | 0.500 (3: 0.30 to 2.00) | met |" in lines
    assert "| resident above start, zero3 / FSDP2 | wide | ≤ 0.75 | 0.700 | met |" in lines
    covered = "counts: host; 5 presets on 2, 5 presets on 3, 7 presets on 4 ranks; 20 runs"
    assert lines[-2] == f"| bytes sent / the formula's | {covered} | 1 exactly | 1 exactly | met |"
    assert lines[-1].endswith("| 1e-6, ours bitwise | peers within 1.0e-08, ours bitwise | met |")


def test_bytes_sent_are_the_formulas_exactly_or_the_target_is_missed(counted):
    other = counts.Count("host", 2, "ddp", 2 * MB, (0.97, 1.0), MB, (1.0, 1.0000001), trace_is_predicted=True)
    held, sent = counts.target_lines([*counted, other])
    assert held.endswith("| 0.98 to 1.02 | 0.970 to 1.010 | MISSED |")
    assert sent.endswith("MISSED |")
    unequal = counts.Count("host", 2, "ddp", 2 * MB, (1.0, 1.0), MB, (1.0, 1.0), trace_is_predicted=False)
    assert list(counts.target_lines([unequal]))[1].endswith("| 1 exactly, not collective by collective | MISSED |")


def test_the_remarks_say_what_is_merged_and_what_memory_is_meant(found):
    text = "\n".join(targets.remarks(found))
    assert "zero3 as it comes lets its 48 blocks travel as 8 units" in text
    assert "above the start zero3 700.0 MB, FSDP2 1,000.0 MB" in text
    assert "has gathered units (30.0 MB)" in text


def test_results_are_never_overwritten(found, counted, tmp_path):
    for expected in (1, 2, 3):
        live = [counts.Live("host", "zero3", "torch-fsdp2", 21 * MB, 20 * MB)]
        targets.write(tmp_path, found, counted, live, tables=["tables"], commands=["command"], is_profiling=False)
        assert len(list(tmp_path.glob("*.md"))) == len(list(tmp_path.glob("*.json"))) == expected
    names = sorted(path.stem[len("2000-01-01") :] for path in tmp_path.glob("*.json"))
    assert names == ["", "-2", "-3"]
    values = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert set(values) == {*targets.RUNS, "counts", "live"}
    assert len(values["counts"]) == 20
    shown = "| live tensors, zero3 / torch-fsdp2 | host | ≤ 1.00 | 1.050 (21.0 MB of 20.0 MB) | MISSED |"
    assert shown in next(tmp_path.glob("*.md")).read_text()


def test_a_missed_target_of_time_is_profiled_once_for_each_pair(found, monkeypatch):
    asked = []
    monkeypatch.setattr(targets.profiles, "profiles", lambda *how: asked.append(how) or "text")
    texts = dict(targets.profiled(found))
    # A unit cost of 0.125 and ratios of 0.5 miss these two; the resident ones that are missed have no profile.
    assert asked == [("host", 1, ("zero3", "torch-fsdp2")), ("wide", 2, ("zero3", "torch-fsdp2"))]
    assert set(texts) == {"host-1-zero3-torch-fsdp2", "wide-zero3-torch-fsdp2"}


def test_generation_is_set_beside_transformers_and_one_process():
    times = {"latency": [2.0, 4.0, 2.0], "throughput": [4.0, 4.0, 8.0]}
    twice = {case: [2 * value for value in values] for case, values in times.items()}
    tokens = {"latency": [[1, 2]], "throughput": [[1, 2]] * generation.BATCH}
    found = {
        1: {"times": {generation.ONE: times}, "tokens": {generation.ONE: tokens}},
        2: {
            "times": {generation.OURS: times, generation.THEIRS: twice, "pp=2": times},
            "tokens": {generation.OURS: tokens, generation.THEIRS: tokens, "pp=2": tokens | {"latency": [[1, 3]]}},
        },
    }
    text = generation.table(found, 2)
    assert "| one process | 1000.00 | 4 | those of one process |" in text
    assert "| pp=2 | 1000.00 | 4 | differ |" in text
    assert "- latency: **2.00** (rounds: 2.00, 2.00, 2.00), reached" in text
    found[2]["times"][generation.THEIRS] = times
    assert "- throughput: **1.00** (rounds: 1.00, 1.00, 1.00), missed" in generation.table(found, 2)


def test_the_first_token_and_further_ones_have_columns_by_length_of_the_prompt():
    times = {name: {"first 16": [0.5, 0.1, 0.1], "all 16": [0.4, 0.5, 0.4]} for name in generation.PLANS}
    lines = generation.by_length(times, 4)
    assert lines[1] == "| layout (1 row) | prompt of 16: first token, ms | each further one, ms |"
    assert lines[3] == "| one process | 100 | 100.0 |"
    assert generation.by_length({generation.ONE: {"latency": [1.0]}}, 4) == []
