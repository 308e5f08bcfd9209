"""The script that measures a server: what it makes of the times of streams."""

from __future__ import annotations

from bench.serving import LAYOUTS, Stream, row


def test_a_line_has_the_first_token_each_further_one_and_the_rate():
    rounds = [
        (2.0, [Stream("a", [0.1, 0.2, 0.4]), Stream("b", [0.3, 0.5, 0.7])]),
        (4.0, [Stream("a", [0.1, 0.3, 0.5]), Stream("b", [0.5, 0.7, 0.9])]),
    ]
    assert row("tp=2", rounds, 3) == "| tp=2 | 2 | 200 | 500 | 200.0 | 2 |"
    assert set(LAYOUTS) == {"one process", "tp=2", "pp=2"}
