"""A step of a pipeline as one rank of a dry run makes it: what a failure leaves behind, and what can be recorded."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.api.dry_run import record_comms
from shardwise.api.parallelize import apply_plan
from shardwise.api.preparation import prepare
from shardwise.comm.axes import DATA_PARALLEL
from shardwise.comm.record import RecordComm
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.ignored import ignored_of
from shardwise.parallel.pipeline.batch import call_model
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import PlanError, StateError


def one_rank_of_two(rank: int = 0, frozen: str = "", **fields):
    with torch.device("meta"):
        model = sw.models.gpt("gpt-tiny", num_layers=5)
    if frozen:
        model.get_submodule(frozen).requires_grad_(False)
    plan = sw.ParallelPlan(pp=2, pipeline="gpipe", **fields)
    comms = record_comms(plan.mesh(2), rank, receives=True)
    samples = RecordComm(DATA_PARALLEL, rank=0, size=1, device="meta")
    apply_plan(model, prepare(model, plan), comms, lambda: samples)
    return model


def test_a_step_that_fails_leaves_the_shards_in_the_modules():
    model = one_rank_of_two()
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


#: What a plan names: modules of the second stage alone, or every third block of the whole model.
NAMED = {
    "recompute": {"activation_checkpointing": sw.RecomputePolicy(modules=sw.wrap_by_name("blocks.4"))},
    "every": {"activation_checkpointing": sw.RecomputePolicy(every=3)},
    "offload": {"offload_activations": sw.ActivationOffloadPolicy(modules=sw.wrap_by_name("blocks.4"))},
    "precision": {"mp_policy": sw.PrecisionPolicy(overrides={"blocks.4.attention": sw.PrecisionPolicy("fp32")})},
    "ignored": {"ignored": ["blocks.4.mlp_norm"]},
}


@pytest.mark.parametrize("named", NAMED)
def test_what_a_plan_names_concerns_the_rank_that_holds_it_and_no_other(named):
    found = []
    for rank in (0, 1):
        model = one_rank_of_two(rank, **NAMED[named])
        engine, seen = engine_of(model, "test"), sw.summary(model)
        wide = [unit.name for unit in engine.units if any(g.compute_dtype is torch.float32 for g in unit.groups)]
        ignored = list(ignored_of(engine).parameters)
        found.append([*seen.recomputed, *seen.offloaded, *(wide if named == "precision" else []), *ignored])
    first, second = [], ["blocks.4"]
    if named == "every":
        first, second = ["blocks.0"], ["blocks.3"]
    elif named == "ignored":
        second = ["blocks.4.mlp_norm.weight", "blocks.4.mlp_norm.bias"]
    assert found == [first, second]


@pytest.mark.parametrize(
    "fields", [{"quantize_frozen": "int8"}, {"offload_policy": sw.OffloadPolicy(optimizer=False, gradients=False)}]
)
def test_a_stage_without_frozen_weights_takes_a_plan_for_frozen_weights(fields):
    found = [
        [
            group.facts.stored_as or group.facts.is_offloaded
            for unit in engine_of(model, "test").units
            for group in unit.groups
        ]
        for model in (one_rank_of_two(rank, "blocks.4", **fields) for rank in (0, 1))
    ]
    assert not any(found[0])
    assert any(found[1])
    with pytest.raises(PlanError, match=r"no frozen weight|no frozen parameters"):
        one_rank_of_two(**fields)


def test_only_a_pipeline_is_recorded():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(StateError, match="whole on every rank"), sw.record_pipeline(model):
        pass
