"""From measurements to rows, and rows to tables."""

from __future__ import annotations

import json
import math

import pytest

from bench.compare import table
from bench.compare.request import make_requests
from bench.compare.result import judge, make_result, merge_rounds, predicted_bytes, ratios

SENT = {"all_gather": {"count": 4, "sent_bytes": 2048}, "reduce_scatter": {"count": 2, "sent_bytes": 1000}}


def found(rounds, *, losses=(1.0, 0.5), peak=3_000_000, is_ours=False, check_losses=None):
    check = {
        "peak_tensor_bytes": 990,
        "collectives": SENT if is_ours else None,
        "predicted": {"parameters": 600, "gradients": 300} if is_ours else None,
        "activation_bytes": 100 if is_ours else None,
        "trace_is_predicted": True,
    }
    if check_losses is not None:
        check["losses"] = {"2": check_losses}
    if is_ours:
        check["group_size"] = 2
    return {
        "rounds": rounds,
        "losses": list(losses),
        "start_rss_bytes": 1_000_000,
        "peak_rss_bytes": peak,
        "check": check,
    }


def result(case="compute", peers=("single", "torch-ddp"), single_losses=((1.0, 1.5), (0.5, 0.75)), ddp_loss=0.5):
    (request,) = make_requests(cases=[case], peers=list(peers), num_ranks=2, rounds=2, steps=3)
    ranks = [
        {
            0: found([[4.0, 2.0, 3.0], [6.0, 6.0, 6.0]], is_ours=True),
            1: found([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], check_losses=[list(step) for step in single_losses]),
            2: found([[2.0, 2.0, 2.0], [2.0, 3.0, 4.0]], losses=(1.0, ddp_loss)),
        },
        {
            0: found([[3.0, 3.0, 3.0], [5.0, 7.0, 5.0]], losses=(1.5, 0.75), peak=4_000_000, is_ours=True),
            2: found([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], losses=(1.5, 0.75)),
        },
    ]
    return make_result(request, {"cores": 2, "memory_bytes": 2**34, "processor": "a|b"}, ranks)


def test_a_step_takes_as_long_as_on_the_slowest_rank():
    assert merge_rounds([[[1.0, 5.0]], [[2.0, 3.0]]]) == [[2.0, 5.0]]


def test_ratios_are_taken_round_by_round():
    assert ratios([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == {"median": 2.0, "all": [2.0, 3.0, 1.0]}


def test_rows_hold_what_the_contract_names():
    values = json.loads(json.dumps(result().as_dict()))
    assert {"machine", "case", "rows"} <= set(values)
    assert values["case"] == "compute"
    ours, single, ddp = values["rows"]
    for row in values["rows"]:
        assert {
            "engine",
            "strategy",
            "world_size",
            "step_time_s",
            "ratio_to",
            "peak_rss_bytes",
            "peak_tensor_bytes",
            "predicted_peak_tensor_bytes",
            "collectives",
            "loss",
        } <= set(row)
        assert set(row["step_time_s"]) == {"median", "min", "all"}
    assert (ours["engine"], ours["strategy"], ours["world_size"]) == ("shardwise", "zero3", 2)
    assert (single["world_size"], ddp["world_size"]) == (1, 2)
    assert ours["step_time_s"] == {"median": 5.0, "min": 3.0, "all": [4.0, 3.0, 3.0, 6.0, 7.0, 6.0]}
    assert ours["ratio_to"]["torch-ddp"] == {"median": 1.75, "all": [1.5, 2.0]}
    assert ours["over_single_s"] == {"median": 3.0, "all": [2.0, 4.0]}
    assert set(single["ratio_to"]) == {"torch-ddp"}
    assert ours["peak_rss_bytes"] == 4_000_000
    assert ours["peak_rss_above_start_bytes"] == 3_000_000
    assert ours["predicted_peak_tensor_bytes"] == 1000
    assert ours["predicted_bytes"] == {"parameters": 600, "gradients": 300, "activations": 100}
    assert ours["collectives"] == SENT
    assert ddp["predicted_peak_tensor_bytes"] is None
    assert ddp["collectives"] is None
    assert ours["loss"] == [1.25, 0.625]
    assert single["loss"] == [1.25, 0.625]
    assert values["losses"] == {"ours_bitwise": True, "differences": {"single": 0.0, "torch-ddp": 0.0}}


def test_short_steps_are_compared_by_their_shortest():
    ours = result("host").rows[0]
    assert ours["ratio_to"]["torch-ddp"]["all"] == [1.5, 3.0]


def test_another_last_bit_in_one_process_is_seen():
    verdict = result(single_losses=((1.0, 1.5), (0.5, math.nextafter(0.75, 1)))).verdict
    assert not verdict.is_bitwise
    assert not verdict.is_equal


@pytest.mark.parametrize(("loss", "is_equal"), [(0.5, True), (0.5 + 1e-6, True), (0.51, False), (math.nan, False)])
def test_a_peer_may_differ_a_little(loss, is_equal):
    verdict = result(ddp_loss=loss).verdict
    assert verdict.is_bitwise
    assert verdict.is_equal == is_equal


def test_losses_are_compared_over_the_steps_that_both_made():
    entrants = make_requests(cases=["host"], peers=["single"], num_ranks=1)[0].entrants
    alone = [[3.0], [2.0]]
    assert judge(entrants, [[[3.0], [2.0], [1.0]], alone], [1], {1: alone}).is_equal


def test_each_strategy_is_held_against_one_process_that_adds_in_the_same_groups():
    request = make_requests(cases=["host"], strategies=["zero3", "hsdp", "ddp"], peers=["single"], num_ranks=4)[0]
    ungrouped, grouped = [[3.0] * 4, [2.0] * 4], [[3.0] * 4, [math.nextafter(2.0, 3)] * 4]
    alone = {4: ungrouped, 2: grouped}
    losses = [ungrouped, grouped, ungrouped, ungrouped]
    assert judge(request.entrants, losses, [4, 2, 4], alone).is_bitwise
    assert not judge(request.entrants, losses, [4, 4, 4], alone).is_bitwise
    assert not judge(request.entrants, losses, [4, 2, 4], alone | {2: ungrouped}).is_bitwise
    assert not judge(request.entrants, [ungrouped, grouped, grouped, ungrouped], [4, 2, 4], alone).is_bitwise


def test_a_prediction_needs_every_rank():
    known = {"predicted": {"parameters": 5}, "activation_bytes": 2}
    assert predicted_bytes([known, known | {"activation_bytes": 4}]) == 9
    assert predicted_bytes([known, {"predicted": None, "activation_bytes": None}]) is None


def test_the_text_shows_times_memory_traffic_and_losses():
    shown = table.text(result())
    assert "990 B" in shown
    assert "1.0 kB (0.990)" in shown
    assert "3.0 kB in 6" in shown
    assert "1.75 (1.50 to 2.00)" in shown
    assert "equal to the last bit" in shown
    assert "largest difference to ours: 0" in shown
    lines = str(table.engines(result())).splitlines()
    assert lines[0].startswith("engine")
    assert len({len(line) for line in lines}) == 1 or all(line == line.rstrip() for line in lines)


def test_differing_losses_are_shouted():
    shown = table.text(result(ddp_loss=0.9))
    assert "MORE than 1e-06" in shown


def test_the_cost_above_one_process_is_shown_at_a_world_of_one():
    (request,) = make_requests(cases=["host"], peers=["single", "torch-fsdp2"], num_ranks=1, rounds=1)
    measured = {
        0: found([[0.003]], is_ours=True),
        1: found([[0.002]], check_losses=[[1.0], [0.5]]),
        2: found([[0.012]]),
    }
    costs = table.unit_costs(make_result(request, {}, [measured]))
    assert costs == pytest.approx({"shardwise zero3": 0.001, "torch-fsdp2": 0.010})
    assert not table.unit_costs(result())


def test_the_markdown_file_says_how_it_was_made():
    page = table.markdown([result(), result("wide")], date="2026-01-31", command="python -m bench.compare --case a|b")
    assert page.startswith("# Comparison of 2026-01-31\n")
    assert "Command: `python -m bench.compare --case a|b`" in page
    assert "| memory_bytes | 16.0 GiB |" in page
    assert "## compute" in page
    assert "## wide" in page
    assert "| shardwise zero3 | " in page
    header = next(line for line in page.splitlines() if line.startswith("| engine"))
    rows = [line for line in page.splitlines() if line.startswith(("| shardwise |", "| torch-ddp |"))]
    assert {line.count("|") for line in rows} == {header.count("|")}
