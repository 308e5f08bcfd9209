"""``schedule``: the drawing to the letter, the numbers below it, JSON, mistakes."""

from __future__ import annotations

import json

import pytest

from shardwise.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["schedule", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_zb_h1_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--pp", "3", "--microbatches", "4", "--schedule", "zb-h1")
    assert code == 0
    assert out.splitlines() == [
        "zb-h1: 3 ranks, 1 stage per rank, 4 microbatches",
        "",
        "rank 0 F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "rank 1 .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "rank 2 .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
        "",
        "time         14, of which each rank computes 12",
        "bubble       14.3% of the step, 16.7% of ideal time (1/6 simulated, closed form 1/6)",
        "in flight    3 on each rank of 4, at most",
        "activations  3 2 1, until the input's gradient is there",
        "messages     4 8 4 sent, 16 in all",
    ]


def test_longer_actions_take_more_columns_and_letters_tell_stages_apart(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--pp", "2", "--forward", "0.5", "--backward-input", "0.5", "--backward-weight", "1/2")
    assert out.splitlines()[2:4] == ["rank 0 F0 F1 .  .  B0--- .  B1---", "rank 1 .  F0 B0--- F1 B1--- .  ."]
    assert "bubble       33.3% of the step, 50.0% of ideal time (1/2 simulated, closed form 1/2)" in out
    _, out, _ = run(capsys, "--pp", "2", "--microbatches", "3", "--schedule", "zb-v")
    assert out.splitlines()[2].startswith("rank 0 F0a F1a F2a F0b B0b W0b F1b")
    assert "inner bubble 0.0% of ideal time (0 simulated, closed form 0)" in out


def test_times_without_a_closed_form_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--pp", "2", "--communication", "0.25")
    assert "no closed form for these times" in out
    _, out, _ = run(capsys, "--pp", "2", "--communication", "0.0001")
    assert "(not drawn: 90002 columns of time 0.0001)" in out


def test_json_has_every_action(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--pp", "2", "--microbatches", "2", "--schedule", "zb-h1", "--json")
    facts = json.loads(out)
    assert (facts["bubble"], facts["closed_bubble"], facts["time"]) == (1 / 6, 1 / 6, 7.0)
    first, second = facts["ranks"]
    assert (first["stages"], first["sent_messages"], second["in_flight"], second["activations"]) == ([0], 2, 2, 1)
    assert first["actions"][0] == {"kind": "forward", "stage": 0, "microbatch": 0, "start": 0.0, "end": 1.0}
    assert first["actions"][1] == {"kind": "send_activation", "stage": 0, "microbatch": 0, "peer": 1}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--pp", "4", "--schedule", "zb"], 78, "--schedule 'zb': there is no such pipeline schedule"),
        (["--pp", "0"], 78, "--pp 0: expected a whole number of at least 1"),
        (["--pp", "4", "--microbatches", "0"], 78, "--microbatches 0: expected a whole number of at least 1"),
        (["--pp", "4", "--microbatches", "6", "--schedule", "interleaved-1f1b"], 78, "--microbatches 6 = 1 x 4 + 2"),
        (["--pp", "4", "--virtual-stages", "2"], 78, "Leave --virtual-stages out"),
        (["--pp", "4", "--forward", "fast"], 78, "--forward 'fast': expected a number"),
        (["--pp", "4", "--backward-weight", "0"], 78, "duration backward_weight=0: expected a number above 0"),
        ([], 2, "Missing option '--pp'"),
    ],
)
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str) -> None:
    found, _, err = run(capsys, *arguments)
    assert (found, message in err) == (code, True), err
