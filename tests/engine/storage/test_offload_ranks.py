"""Offload beside other things that one does with a model: units by hand, frozen parts, changes, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.host import Transfers
from shardwise.testing import probe, run_on_ranks
from tests.common import models
from tests.common.late_copies import late_copies
from tests.common.oracle import Block, Chain, compare, compare_each, plain_loss, presets, sample
from tests.common.own import own
from tests.common.ranks import on_ranks
from tests.engine.test_dry_run import check_bytes


def shard_by_hand(model: nn.Module) -> nn.Module:
    """Every second block is on the host, of one its optimizer's part alone."""
    policies: list[sw.OffloadPolicy | str] = ["cpu", "none", sw.OffloadPolicy(parameters=False), "none", "cpu"]
    for block, policy in zip(model.blocks, policies, strict=True):
        sw.fully_shard(block, offload_policy=policy)
    return sw.fully_shard(model)


@on_ranks(1, 2)
def test_fully_shard_offloads_unit_by_unit():
    trained = compare(Chain, plain_loss, parallelize=shard_by_hand)
    groups = [group for unit in sw.summary(trained.model).units for group in unit.groups]
    assert [group.is_offloaded for group in groups] == [False, True, False, True, False, True]
    shown = str(sw.summary(trained.model))
    assert shown.count(", on the host") == 3
    assert "before activations; " in shown
    assert engine_of(trained.model, "test").extras.find(Transfers) is not None


class Adapted(Chain):
    """Three frozen blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:3].requires_grad_(requires_grad=False)


@on_ranks(2)
def test_frozen_shards_can_be_on_the_host_alone():
    policy = sw.OffloadPolicy(gradients=False, optimizer=False)
    trained = compare(Adapted, plain_loss, "zero3", offload_policy=policy)
    groups = [group for unit in sw.summary(trained.model).units for group in unit.groups]
    assert [group.is_offloaded for group in groups] == [False, True, True, True, False, False]
    with pytest.raises(sw.PlanError, match="nothing to offload: there are no frozen parameters"):
        sw.parallelize(Chain(), sw.ParallelPlan(offload_policy=policy))


def double(model: nn.Module, _step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


def look_then_train(model: nn.Module, rank: int, step: int) -> Tensor:
    """An evaluation between steps, and two forwards before one backward."""
    with torch.no_grad():
        model(sample(rank, step, salt=7))
    return (model(sample(rank, step)) * model(sample(rank, step, salt=1))).mean()


@on_ranks(2)
def test_changes_of_masters_on_the_host_are_seen_at_the_next_forward():
    for policy in ("cpu", sw.OffloadPolicy(parameters=False)):
        compare_each(Chain, look_then_train, presets(), steps=3, between=double, offload_policy=policy)


@on_ranks(2)
def test_a_gradient_scaler_works_on_gradients_on_the_host() -> None:
    """With fp16 and a scaler, which reads gradients where they are."""
    found = []
    for policy in ("none", "cpu"):
        precision = sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="fp16")
        model = sw.parallelize(models.build("tied"), sw.ParallelPlan(mp_policy=precision, offload_policy=policy))
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), sw.GradScaler("cpu", growth_interval=2)
        for step in range(4):
            scaler.scale(model(*models.batch(step, 0, 0))).backward()
            scaler.unscale_(optimizer)
            sw.clip_grad_norm(model, 0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append([*sw.full_state_dict(model).values(), torch.tensor(scaler.get_scale())])
    plain, offloaded = found
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


@on_ranks(1)
def test_what_means_nothing_is_refused():
    with pytest.raises(sw.PlanError, match=r"parameters=True\) needs sharded parameters"):
        sw.parallelize(
            Chain(), sw.ParallelPlan(strategy="zero2", offload_policy=sw.OffloadPolicy(parameters=True, ratio=0.5))
        )
    with pytest.raises(sw.PlanError, match=r"ratio=0\.5: a ratio chooses among the units of a model"):
        sw.fully_shard(Block(), offload_policy=sw.OffloadPolicy(ratio=0.5))
    with pytest.raises(sw.PlanError, match="offload_policy='disk'"):
        sw.fully_shard(Block(), offload_policy="disk")
    with pytest.raises(sw.PlanError, match="nothing to offload: there are no parameters"):
        sw.parallelize(nn.Sequential(nn.GELU()), sw.ParallelPlan(offload_policy="cpu"))


def _raise(_grad: Tensor) -> None:
    raise RuntimeError("in backward")


@on_ranks(2)
def test_an_interrupted_backward_can_be_repeated():
    """A backward that raises on every rank leaves nothing under way."""
    model = sw.parallelize(Chain(), sw.ParallelPlan(offload_policy="cpu"))
    states = []
    for fails in (True, False):
        output = model(sample(0, 0))
        if fails:
            model.zero_grad()
            hook = output.register_hook(_raise)
            with pytest.raises(RuntimeError, match="in backward"):
                (output * 1.0).sum().backward()
            hook.remove()
        else:
            output.sum().backward()
            states = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    fresh = sw.parallelize(Chain(), sw.ParallelPlan(offload_policy="cpu"))
    fresh(sample(0, 0)).sum().backward()
    grads = [parameter.grad for parameter in fresh.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(states, grads, strict=True))


#: Other fields of the plan, on two ranks and on four.
BESIDE = {
    2: (
        {"quantized_gather": "int8", "quantized_reduce": "int8", "mp_policy": sw.PrecisionPolicy()},
        {"quantized_gather": "int8"},
        {"quantize_frozen": "int8"},
        {"granularity": "tensor"},
        {"granularity": "row", "merge_units": 1 << 16},
        {"strategy": "shard_grad_op", "activation_checkpointing": "full", "compile": False},
    ),
    4: (
        {"strategy": "hsdp", "dp_replicate": 2},
        {"strategy": "hsdp", "dp_replicate": 2, "accumulation": "defer_replicate", "mp_policy": sw.PrecisionPolicy()},
        {"strategy": "zero2", "dp_replicate": 2, "accumulation": "defer_replicate"},
        {"strategy": "ddp", "dp_replicate": 2},
        {"strategy": "zero1", "dp_replicate": 2},
        {"reshard_after_forward": 2, "mp_policy": sw.PrecisionPolicy()},
    ),
}


HOST = ("cpu", sw.OffloadPolicy(ratio=0.5), sw.OffloadPolicy(parameters=False))


def model_for(options: dict) -> nn.Module:
    return models.build("frozen" if "quantize_frozen" in options else "tied")


def train_beside(options: dict, policy: str | sw.OffloadPolicy) -> tuple[list, list[Tensor], dict[str, int]]:
    """Losses, norms and messages; the weights; the bytes that are predicted."""
    model = sw.parallelize(model_for(options), sw.ParallelPlan(**options, offload_policy=policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = sw.ExponentialMovingAverage(model, decay=0.5)
    found: list = []
    for step in range(2):
        for microbatch in range(2):
            with sw.gradient_sync(model, microbatch == 1), sw.record_collectives(model) as events:
                loss = model(*models.batch(step, microbatch, dist.get_rank()))
                loss.backward()
            found += [loss.item(), [(event.kind, event.axis, event.unit, event.sent_bytes) for event in events]]
        found.append(sw.clip_grad_norm(model, 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        with average.swapped_in(), torch.no_grad():
            found.append(model(*models.batch(step, 3, dist.get_rank())).item())
    # Without accumulation, as the dry run is that they are compared with.
    predicted = probe(model).predicted_bytes(num_microbatches=1)
    return found, list(sw.full_state_dict(model).values()), predicted


def combine() -> list[list[dict[str, int]]]:
    """The predictions, by options and policy."""
    predictions = []
    for options in BESIDE[dist.get_world_size()]:
        expected, state, _ = train_beside(options, "none")
        results = [train_beside(options, policy) for policy in HOST]
        for policy, (found, other, _) in zip(HOST, results, strict=True):
            assert found == expected, (options, policy)
            assert all(torch.equal(a, b) for a, b in zip(state, other, strict=True)), (options, policy)
        predictions.append([predicted for _, _, predicted in results])
    return predictions


@pytest.mark.parametrize("world", [2, 4])
def test_beside_other_fields_of_the_plan_numbers_and_messages_stay_and_bytes_are_predicted(world):
    """The bytes are compared with the engine's own buffers, in a dry run."""
    last = run_on_ranks(combine, world, timeout_s=200)[-1]
    for options, predictions in zip(BESIDE[world], last, strict=True):
        if options.get("accumulation") == "defer_replicate":
            continue  # sums wait where a step without accumulation has none
        for policy, predicted in zip(HOST, predictions, strict=True):
            dry = sw.dry_run(
                lambda options=options: model_for(options),
                sw.ParallelPlan(**options, offload_policy=policy),
                world_size=world,
                rank=world - 1,
                batch=models.batch(0, 0, 0),
                backend="gloo",
            )
            check_bytes(dry, predicted, (options, policy))
            assert predicted["host"] > 0


@on_ranks(2)
def test_a_deferred_model_goes_to_the_host_unit_by_unit() -> None:
    """A model that never was whole on any device."""
    found = []
    for policy in ("none", "cpu"):
        model = sw.parallelize(sw.deferred_init(lambda: models.build("gpt")), sw.ParallelPlan(offload_policy=policy))
        found.append(list(sw.full_state_dict(model).values()))
    plain, offloaded = found
    assert len(plain) == len(offloaded)
    assert len(plain) > 0 or dist.get_rank()
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


@on_ranks(2)
def test_flags_on_the_host_are_read_when_their_copy_has_been_waited_for():
    """Each rank has gradients of the parameter that the other owns; a later reduction adds to an earlier one."""
    rank = dist.get_rank()
    module = nn.Module()
    module.first, module.second = (nn.Parameter(torch.ones(64)) for _ in range(2))
    with late_copies():
        model = sw.parallelize(module, sw.ParallelPlan(offload_policy="cpu"))
        engine = engine_of(model, "test")
        (group,) = engine.groups
        for _ in range(2):
            group.unsharded[1 - rank].grad = torch.ones(64)
            group.gradient.collect(engine.gradients)
            group.gradient.reduce(engine.gradients).wait()
            group.gradient.finish(engine.gradients)
        engine.drain()
    grad = group.shards[rank].grad
    assert grad is not None
    assert own(grad).flatten().tolist() == [1.0] * 64  # twice the mean over two ranks
