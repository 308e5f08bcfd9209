"""The rates of AdamW on the host: every variant steps, and a rate counts the bytes of one pass."""

from __future__ import annotations

from bench import host_adamw


def test_every_variant_is_timed_and_a_rate_is_the_bytes_of_one_pass(monkeypatch):
    monkeypatch.setattr(host_adamw, "_deepspeed", lambda *_: None)  # where it is installed, it compiles its kernel
    found = host_adamw.measure(numel=1 << 12, num_units=2, rounds=2)
    assert {"torch, fused=True", "torch, foreach=True", "copy"} <= set(found)
    assert all(len(seconds) == len(used) == 2 and min(seconds) > 0 for seconds, used in found.values())
    assert host_adamw.line("x", 2, 10**9, [2.0, 2.0], [4.0, 4.0]) == "| x | 2 | 2,000.0 ms | 14.0 | 7.0 |"
    assert host_adamw.line("copy", 2, 10**9, [2.0], [4.0]) == "| copy | 2 | 2,000.0 ms | 4.0 | 2.0 |"
