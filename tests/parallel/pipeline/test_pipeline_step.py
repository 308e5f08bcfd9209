"""A step of a pipeline as one rank of a dry run makes it: what a failure leaves behind, and what can be recorded."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.api.dry_run import record_comms
from shardwise.api.parallelize import apply_plan
from shardwise.comm.axes import DATA_PARALLEL
from shardwise.comm.record import RecordComm
from shardwise.engine.extensions.wrap import find_units
from shardwise.engine.storage.attachment import engine_of
from shardwise.parallel.pipeline.batch import call_model
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import StateError


def first_rank_of_two():
    with torch.device("meta"):
        model = sw.models.gpt("gpt-tiny", num_layers=5)
    plan = sw.ParallelPlan(pp=2, pipeline="gpipe")
    comms = record_comms(plan.mesh(2), 0, receives=True)
    samples = RecordComm(DATA_PARALLEL, rank=0, size=1, device="meta")
    apply_plan(model, plan, find_units(model, "auto"), comms, lambda: samples)
    return model


def test_a_step_that_fails_leaves_the_shards_in_the_modules():
    model = first_rank_of_two()
    engine, pipelined = engine_of(model, "test"), pipelined_of(model)
    assert pipelined is not None
    seen = []

    def call(model, part):
        seen.append(part)  # the first is the trace
        if len(seen) > 2:
            assert all(unit.uses_unsharded for unit in engine.units if unit.groups), "they stay between passes"
        if len(seen) == 4:
            raise OSError("the device is gone")
        return call_model(model, part)

    parts = [torch.zeros(1, 8, dtype=torch.int64, device="meta")] * 4
    with pytest.raises(OSError, match="the device is gone"):
        pipelined.losses(model, parts, call, call)
    assert len(seen) == 4
    assert not any(unit.uses_unsharded for unit in engine.units)


def test_only_a_pipeline_is_recorded():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StateError, match="whole on every rank"), sw.record_pipeline(model):
        pass
