"""What the probe says of an engine: it is what happens, and it agrees with arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import optimizer_state, part_of, probe, run_on_ranks
from tests.common import models

PLANS = {
    "ddp": sw.ParallelPlan(strategy="ddp"),
    "zero1": sw.ParallelPlan(strategy="zero1"),
    "zero2": sw.ParallelPlan(strategy="zero2"),
    "shard_grad_op": sw.ParallelPlan(strategy="shard_grad_op"),
    "zero3": sw.ParallelPlan(strategy="zero3"),
    "bf16": sw.ParallelPlan(strategy="zero3", mp_policy=sw.PrecisionPolicy(param_dtype="bf16")),
    "offload": sw.ParallelPlan(strategy="zero3", offload_policy="cpu"),
    "ignored": sw.ParallelPlan(strategy="zero3", ignored=["blocks.*.mlp"]),
}


def look(name: str) -> dict[str, object]:
    """Two steps and a backward, and what is seen then."""
    rank = distributed.get_rank()
    plain = models.build("tied")
    whole = {key: value.detach().clone() for key, value in plain.named_parameters()}
    model = sw.parallelize(plain, PLANS[name])
    seen = probe(model)
    values = all(torch.equal(shard.values, shard.part_of(whole[shard.name])) for shard in seen.shards)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        with sw.record_collectives(model) as events:
            model(*models.batch(step, 0, rank)).backward()
        if step < 2:
            optimizer.step()
    states = optimizer_state(optimizer)
    return {
        "values": values,
        "collectives": [tuple(event)[:3] for event in seen.predicted_collectives()]
        == [(event.kind, event.unit, event.sent_bytes) for event in events],
        "bytes": (seen.held_bytes(optimizer), seen.predicted_bytes()),
        "gathered": seen.gathered,
        "open": seen.num_open_forwards,
        "updates": seen.num_updates,
        "orders": seen.agreed_orders,
        "states": all(set(states[shard.parameter]) >= {"exp_avg", "step"} for shard in seen.shards if shard.numel),
        "grads": all((0 if shard.grad is None else shard.grad.numel()) == shard.numel for shard in seen.shards),
        "ranges": [(shard.name, shard.start, shard.stop, whole[shard.name].numel()) for shard in seen.shards],
    }


@pytest.mark.parametrize("name", PLANS)
def test_what_a_probe_sees_is_what_happened_and_what_is_predicted(name: str) -> None:
    ranks = run_on_ranks(look, 2, name)
    for found in ranks:
        assert found["values"]
        assert found["states"]
        assert found["grads"]
        assert found["collectives"]
        measured, predicted = found["bytes"]
        assert measured.keys() == predicted.keys()
        assert measured == predicted
        assert found["open"] == 0
        assert found["updates"] == 2
        assert set(found["orders"]) == {"forward", "evaluation", "other", "backward"}
        assert found["gathered"] == () or name in {"ddp", "zero1", "zero2"}
    if name == "zero3":
        first, second = (found["ranges"] for found in ranks)
        owned = {
            key: (stop - start) + (other[2] - other[1])
            for (key, start, stop, _), other in zip(first, second, strict=True)
        }
        assert owned == {key: numel for key, _, _, numel in first}


def look_at_extents() -> bool:
    plain = models.build("gpt")
    whole = {key: value.detach().clone() for key, value in plain.named_parameters()}
    extents = probe(sw.parallelize(plain, sw.ParallelPlan(tp=2))).extents()
    assert any(extent.cuts for extent, _ in extents)
    return all(torch.equal(part_of(extent, whole[extent.name]), values) for extent, values in extents)


def test_the_part_of_an_extent_is_what_a_rank_holds_of_it():
    assert run_on_ranks(look_at_extents, 2) == [True, True]


def accumulate() -> tuple[bool, bool, bool]:
    """Whether all units wait within a step, and none after it; whether the engine goes with its model."""
    model = sw.parallelize(models.build("gpt"), sw.ParallelPlan(strategy="ddp"))
    seen, waits = probe(model), []
    for is_last in (False, True):
        with sw.gradient_sync(model, is_last):
            model(*models.batch(0, 0, distributed.get_rank())).backward()
        waits.append(seen.waiting)
        assert seen.reducing == ()
        assert {(shard.waits, shard.grad is None) for shard in seen.shards} == {(not is_last, not is_last)}
    names, engine = tuple(unit.name for unit in seen.units), seen.weak_references()
    assert all(reference() is not None for reference in engine)
    del model, seen
    return waits[0] == names, waits[1] == (), all(reference() is None for reference in engine)


def test_sums_wait_until_they_are_reduced_and_the_engine_goes_with_its_model():
    assert run_on_ranks(accumulate, 2) == [(True, True, True)] * 2


def test_a_plain_module_has_no_inside() -> None:
    with pytest.raises(StateError, match="not parallelized"):
        probe(torch.nn.Linear(2, 2))
