"""Parameters whose memory was replaced (``p.data = ...``, ``model.to("cpu:0")``): nothing that is loaded is lost."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.common.oracle import Chain, sample
from tests.common.own import own
from tests.common.ranks import on_ranks

STRATEGIES = ("ddp", "zero1", "zero3")


def by_clone(model):
    for p in model.parameters():
        p.data = p.data.clone()


MOVES = {"clone": by_clone, "to": lambda model: model.to("cpu:0")}


def trained(strategy):
    torch.manual_seed(0)
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(sample(dist.get_rank(), 0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("move", MOVES)
@on_ranks(2)
def test_what_is_loaded_after_parameters_were_moved_stays(strategy, move, tmp_path):
    path = tmp_path / "checkpoint"
    model, optimizer = trained(strategy)
    wanted = sw.full_state_dict(model)
    sw.save(path, model, optimizer)
    step(model, optimizer)
    for load in (lambda: sw.load(path, model), lambda: sw.load_full_state_dict(model, wanted)):
        step(model, optimizer)
        MOVES[move](model)
        load()
        same(sw.full_state_dict(model), wanted)
        with torch.no_grad():
            model(sample(0, 0))
        same(sw.full_state_dict(model), wanted)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_values_put_in_by_data_are_what_is_read_saved_and_averaged(strategy, tmp_path):
    path = tmp_path / "checkpoint"
    model, optimizer = trained(strategy)
    average = sw.ExponentialMovingAverage(model, decay=0.0)
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    assert all(not t.any() for t in sw.full_state_dict(model).values())
    for p in model.parameters():
        p.data = torch.ones_like(p)
    with sw.full_parameters(model):
        assert all(bool((p == 1).all()) for p in model.parameters())
    for p in model.parameters():
        p.data = torch.full_like(p, 2.0)
    sw.save(path, model, optimizer)
    for p in model.parameters():
        p.data = torch.full_like(p, 3.0)
    average.update()
    with average.swapped_in():
        assert all(bool((t == 3).all()) for t in sw.full_state_dict(model).values())
    for p in model.parameters():
        p.data = torch.full_like(p, 4.0)
    flats = [p for group in sw.flat_parameters(model) for p in group["params"]]
    assert all(bool((own(p) == 4).all()) for p in model.parameters())
    for flat, stands_for in ((flat, getattr(flat, "shards", ())) for flat in flats):
        assert all(bool((part == 4).all()) for part in (flat.views_in(flat) if stands_for else ()))
    sw.load(path, model)
    assert all(bool((t == 2).all()) for t in sw.full_state_dict(model).values())


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_a_view_of_values_that_are_swapped_out_by_data_is_warned_of_and_a_copy_is_not(strategy):
    model, optimizer = trained(strategy)
    for save, warns in ((lambda p: p.data.clone(), False), (lambda p: p.data, True)):
        step(model, optimizer)
        expected = sw.full_state_dict(model)
        saved = [save(p) for p in model.parameters()]
        for p in model.parameters():
            p.data = torch.zeros_like(p.data)
        with mock.patch("shardwise.engine.group.log_once") as warn, torch.no_grad():
            model(sample(0, 0))
        assert warn.called is warns
        for p, values in zip(model.parameters(), saved, strict=True):
            p.data = values
        if not warns:
            same(sw.full_state_dict(model), expected)
