"""A profile names what the engine does, by unit."""

from __future__ import annotations

import contextlib

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.engine import hooks
from tests.common.oracle import Chain, plain_loss
from tests.common.ranks import on_ranks


@on_ranks(2)
def test_a_profile_shows_gathers_waits_forwards_backwards_and_reductions_of_every_unit():
    model = sw.parallelize(Chain(num_blocks=5), sw.ParallelPlan(merge_units=False))
    for step in range(2):
        plain_loss(model, dist.get_rank(), step).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        plain_loss(model, dist.get_rank(), 2).backward()
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in found.events():
        if event.name.startswith("shardwise::"):
            spans.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    is_quiet = hooks.label("gather", "x") is hooks._NOTHING
    products = [event.time_range.start for event in found.events() if event.name == "aten::addmm"]
    units = sw.summary(model).units
    assert is_quiet
    names = {unit.name for unit in units}
    assert {"blocks.0", "blocks.4"} <= names
    for what in ("gather", "wait", "forward", "backward", "reduce"):
        assert {name for name in names if f"shardwise::{what} [{name}]" in spans} == names, what
    for name in ("blocks.0", "blocks.3"):
        ((begin, end),) = spans[f"shardwise::forward [{name}]"]
        assert any(begin <= at <= end for at in products)
        gathered = spans[f"shardwise::gather [{name}]"]
        assert gathered[0][0] < begin
        assert len(gathered) == 2  # again in backward


@on_ranks(2)
def test_a_forward_that_raised_leaves_no_open_range():
    model = sw.parallelize(Chain(num_blocks=5))
    plain_loss(model, dist.get_rank(), 0).backward()
    with profile(activities=[ProfilerActivity.CPU]) as found, contextlib.suppress(TypeError):
        model(None)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        plain_loss(model, dist.get_rank(), 1).backward()
    count = sum(event.name.startswith("shardwise::forward [") for event in found.events())
    assert count > 0


@on_ranks(2)
def test_a_message_has_no_range_of_its_own():
    model = sw.parallelize(Chain(num_blocks=5))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        plain_loss(model, dist.get_rank(), 0).backward()
    assert [event.name for event in found.events() if event.name.startswith("gloo:")] == []
