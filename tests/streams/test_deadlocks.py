"""Whether the collectives of all ranks can end: programs by hand, runs on the pretended device, large worlds."""

from __future__ import annotations

import re

import pytest
import torch

import shardwise as sw
from shardwise.testing import streams
from shardwise.testing.streams import Collective, DeadlockError, refuse_deadlocks

BOTH = (0, 1)
A, B, SEND, RECEIVE = "a", "b", "send", "receive"


def program(*issued: tuple, ranks: tuple[int, ...] = BOTH, own: int = 0) -> list[Collective]:
    """Collectives ``(what, stream)``: of communicator ``a`` or ``b``, or messages to or from the other rank.

    A stream has seen what was before on itself, and what its third entry says: places of other collectives.
    """
    found, times = [], {}
    for what, stream, *seen in issued:
        clock = {found[place].agent: found[place].clock[found[place].agent] for place in seen}
        clock[stream] = times[stream] = times.get(stream, 0) + 1
        other = 1 - own
        pairs = {SEND: ((own, other),), RECEIVE: ((other, own),), "both": ((own, other), (other, own))}.get(what, ())
        kind, group = ("message", "messages") if pairs else ("all_reduce", what)
        found.append(Collective(kind, "unit", group, ranks, 8, pairs, stream, clock, ()))
    return found


def refused(*traces: list[Collective], order: str) -> str:
    with pytest.raises(DeadlockError) as caught:
        refuse_deadlocks(traces, [order])
    return str(caught.value)


def test_two_communicators_in_opposite_orders_are_a_deadlock_unless_each_has_its_stream():
    on_one = program((A, 0), (B, 0)), program((B, 0), (A, 0))
    for order in ("one queue", "streams"):
        text = refused(*on_one, order=order)
        assert text.startswith(f"deadlock in the order of {order}: ranks wait for each other in a circle")
        assert "rank 0 waits in all_reduce of 'unit' over a for rank 1" in text
        assert "rank 1 waits in all_reduce of 'unit' over b for rank 0" in text
    on_two = program((A, 0), (B, 1)), program((B, 1), (A, 0))
    assert refuse_deadlocks(on_two, ["streams"]) == 2
    assert "in a circle" in refused(*on_two, order="one queue")


def test_a_wait_between_streams_makes_a_circle():
    waits = program((A, 0), (B, 1, 0)), program((B, 1), (A, 0, 0))
    assert "in a circle" in refused(*waits, order="streams")
    assert refuse_deadlocks([program((A, 0), (B, 1, 0)), program((A, 0), (B, 1))]) == 2


def test_ranks_that_all_send_first_wait_for_ever_and_those_that_exchange_do_not():
    first, second = program((SEND, 0), (RECEIVE, 0)), program((SEND, 0), (RECEIVE, 0), own=1)
    assert "message of 'unit' (0 to 1) for rank 1" in refused(first, second, order="streams")
    assert refuse_deadlocks([first, program((RECEIVE, 0), (SEND, 0), own=1)]) == 2
    assert refuse_deadlocks([program(("both", 0)), program(("both", 0), own=1)]) == 2
    assert refuse_deadlocks([first, program((RECEIVE, 1), (SEND, 2), own=1)], ["streams"]) == 2


def test_ranks_that_do_not_issue_the_same_are_told():
    short = refused(program((A, 0), (A, 0)), program((A, 0)), order="one queue")
    assert re.search(r"rank 1 has issued all that it does\n  rank 0 waits in all_reduce .* over a for rank 1", short)
    other = program((A, 0))
    other[0] = Collective("all_gather", "unit", A, BOTH, 8, (), 0, {0: 1}, ())
    assert "rank 0 issues all_reduce of 'unit' (8 elements)" in refused(program((A, 0)), other, order="one queue")


def test_a_circle_of_three_ranks_leaves_out_who_only_waits_for_it():
    pairs = {"ab": (0, 1), "bc": (1, 2), "ca": (0, 2), "all": (0, 1, 2, 3)}

    def rank(*names: str) -> list[Collective]:
        return [Collective("all_reduce", "u", n, pairs[n], 8, (), 0, {0: at}, ()) for at, n in enumerate(names)]

    traces = [rank("ab", "ca", "all"), rank("bc", "ab", "all"), rank("ca", "bc", "all"), rank("all")]
    with pytest.raises(DeadlockError) as caught:
        refuse_deadlocks(traces)
    assert {entry[0] for entry in caught.value.circle} == {0, 1, 2}


SMALL = {
    "hsdp of 8": ({"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 4}, 8, 1),
    "inner groups of 8": ({"strategy": "zero3", "reshard_after_forward": 2}, 8, 1),
    "tp, pp and dp of 8": ({"strategy": "zero3", "tp": 2, "pp": 2}, 8, 4),
    "cp and dp of 8": ({"strategy": "zero2", "cp": 4}, 8, 1),
    "zero bubble of 8": ({"strategy": "zero1", "pp": 4, "pipeline": {"schedule": "zb-v", "num_microbatches": 8}}, 8, 8),
}


def model(**sizes: int) -> torch.nn.Module:
    return sw.models.gpt("gpt-nano", **{"num_layers": 8, "num_heads": 4, **sizes})


def traces_of(options: dict, world_size: int, count: int) -> list:
    plan, tokens = sw.ParallelPlan(**options), torch.empty(1, 32, dtype=torch.int64, device="meta")
    return streams.world_traces(
        lambda: model(seq_len=32), plan, world_size=world_size, batch=(tokens, tokens), num_microbatches=count
    )


@pytest.mark.parametrize("name", SMALL)
def test_every_rank_of_a_world_issues_in_one_order_over_all_communicators(name):
    traces = traces_of(*SMALL[name])
    assert refuse_deadlocks(traces, ["one queue"]) > 20
    # A rank that issues one collective earlier than the others do is found.
    group = next(each for each in traces[0].collectives if not each.messages).group
    moved = list(traces[0].collectives)
    places = [place for place, each in enumerate(moved) if each.group == group and not each.messages]
    moved.append(moved.pop(places[len(places) // 2]))
    with pytest.raises(DeadlockError):
        refuse_deadlocks([traces[0]._replace(collectives=moved), *traces[1:]], ["one queue"])


LARGE = {
    "gpt-1t, tp 8, pp 8, dp 16": ("gpt-1t", {"strategy": "zero1", "tp": 8, "pp": 8}, 1024, 8),
    "gpt-1t, tp 8, pp 4, zero3 of 32": ("gpt-1t", {"strategy": "zero3", "tp": 8, "pp": 4}, 1024, 4),
    "gpt-175b, hsdp of 16 x 64": ("gpt-175b", {"strategy": "hsdp", "dp_replicate": 16, "dp_shard": 64}, 1024, 2),
    "gpt-175b, zero3 of 512, cp 2": ("gpt-175b", {"strategy": "zero3", "cp": 2}, 1024, 1),
    "gpt-175b, interleaved": (
        "gpt-175b",
        {"strategy": "zero2", "tp": 8, "pp": 8, "pipeline": {"schedule": "interleaved-1f1b", "num_virtual_stages": 2}},
        1024,
        16,
    ),
}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LARGE)
def test_every_rank_of_a_large_world_issues_in_one_order(name):
    preset, options, world_size, count = LARGE[name]
    plan, tokens = sw.ParallelPlan(**options), torch.empty(1, 2048, dtype=torch.int64, device="meta")
    traces = streams.world_traces(
        lambda: sw.models.gpt(preset),
        plan,
        world_size=world_size,
        batch=(tokens, tokens),
        num_microbatches=count,
        ranks_per_machine=8,
    )
    assert refuse_deadlocks(traces, ["one queue"]) > 1000
