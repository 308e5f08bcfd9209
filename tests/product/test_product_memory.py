"""Bytes that ranks of a pipeline, data- and tensor-parallel mesh hold are those of the closed forms."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.parallel.pipeline.runner import ScheduleRunner
from shardwise.spec.schedule import Kind, Schedule
from shardwise.spec.schedule import build as build_schedule
from shardwise.testing import Probe, StorageCount, probe, run_on_ranks
from tests.common.pipelines import peak_stored_pairs
from tests.engine.test_memory import Storages
from tests.product.step import gpt_stages

pytestmark = pytest.mark.slow

LAYERS, HIDDEN, HEADS, VOCAB, SEQ, MICRO_BATCH = 8, 64, 4, 128, 16, 2
STATES = ("parameters", "gradients", "optimizer")


def build() -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt(
        "gpt-tiny", num_layers=LAYERS, hidden=HIDDEN, num_heads=HEADS, vocab_size=VOCAB, seq_len=SEQ, tied=False
    )


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(rows * SEQ).view(rows, SEQ) % VOCAB
    return ids, ids


# -- parameters, gradients, optimizer state

THREE = {"pp": 2, "dp_shard": 2, "tp": 2}
PLANS: tuple[dict[str, Any], ...] = (
    THREE,
    THREE | {"strategy": "zero1", "pipeline": "zb-v"},
)
MORE: dict[int, tuple[dict[str, Any], ...]] = {
    4: ({"pp": 2, "tp": 2}, {"pp": 4, "strategy": "ddp"}, {"tp": 2, "dp_shard": 2, "strategy": "zero2"}),
    8: (
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "strategy": "hsdp"},
        THREE | {"strategy": "ddp"},
        THREE | {"strategy": "zero2"},
        {"pp": 4, "dp_shard": 2},
        {"tp": 4, "dp_shard": 2},
    ),
}


def measure(plans: tuple[dict[str, Any], ...]) -> list[dict[str, dict[str, int]]]:
    """Of each plan what is held after the third backward: as an onlooker meets it, and as the closed form says."""
    results = []
    for options in plans:
        plan = sw.ParallelPlan(**options)
        model = sw.parallelize(build(), plan)
        optimizer = torch.optim.AdamW(model.parameters())
        count = max(1, plan.pp)
        for step in range(3):
            sw.train_step(model, tokens(MICRO_BATCH * count), num_microbatches=count)
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
        gradients = Storages().see(parameter.grad for parameter in model.parameters())
        gradients.see(probe(model).waiting_sums)
        held = {
            "parameters": Storages().see(model.parameters()).num_bytes,
            "gradients": gradients.num_bytes,
            "optimizer": Storages().see(v for state in optimizer.state.values() for v in state.values()).num_bytes,
        }
        found = (gradient.untyped_storage() for p in model.parameters() if (gradient := p.grad) is not None)
        units = list({storage.data_ptr(): storage.nbytes() for storage in found}.values())
        results.append({"held": held, "predicted": probe(model).predicted_bytes(), "gradients of units": units})
    return results


def own_numel(plan: sw.ParallelPlan, world: int, rank: int) -> int:
    """Parameters of a rank's stages and slices, before data parallelism: by hand."""
    at = plan.mesh(world).coordinate(rank)
    virtual = 2 if plan.pipeline == "zb-v" else 1
    stages = gpt_stages(LAYERS, 12 * HIDDEN**2, VOCAB * HIDDEN, plan.pp * virtual)
    ranks = build_schedule(plan.pipeline, plan.pp, plan.pp, virtual).ranks if virtual > 1 else range(plan.pp)
    t, h = plan.tp, HIDDEN
    sizes = {"token_embedding": VOCAB * h // t, "position_embedding": SEQ * h, "final_norm": 2 * h}
    sizes["lm_head"] = VOCAB * h // t
    block = 12 * h * h // t + 7 * h // t + 6 * h  # matrices, divided biases; biases after a sum, norms
    names = [name for stage, names in enumerate(stages) if ranks[stage] == at["pp"] for name in names]
    return sum(sizes.get(name, block) for name in names)


def check_states(world: int, plans: tuple[dict[str, Any], ...]) -> None:
    by_rank = run_on_ranks(measure, world, plans, timeout_s=200)
    for place, options in enumerate(plans):
        plan = sw.ParallelPlan(**options)
        shards = plan.mesh(world).dp_shard
        sharded = {"ddp": (), "zero1": ("optimizer",), "zero2": ("gradients", "optimizer")}.get(plan.strategy, STATES)
        for rank, results in enumerate(by_rank):
            held, predicted = results[place]["held"], results[place]["predicted"]
            assert held == {category: predicted[category] for category in STATES}, (options, rank)
            for category, tensors in zip(STATES, (1, 1, 2), strict=True):
                wanted = 4 * tensors * own_numel(plan, world, rank) / (shards if category in sharded else 1)
                assert held[category] == pytest.approx(wanted, rel=0.03), (options, rank, category)
        for rank in (1, world - 2):
            batch = tokens(MICRO_BATCH)
            dry = sw.dry_run(build, plan, world_size=world, rank=rank, batch=batch, backend="gloo").bytes_by_category
            held = by_rank[rank][place]["held"]
            assert all(dry[category] == held[category] for category in ("parameters", "optimizer")), (options, rank)
            # The peak may come before the first of them, or when those of the last units are there.
            units = reversed(by_rank[rank][place]["gradients of units"])
            assert dry["gradients"] in {0, *itertools.accumulate(units), held["gradients"]}, (options, rank)


def test_parameters_gradients_and_optimizer_state_of_products_equal_the_closed_form():
    check_states(8, PLANS)


@pytest.mark.long
@pytest.mark.parametrize("world", [4, 8])
def test_those_of_further_products_equal_the_closed_form(world):
    check_states(world, MORE[world])


# -- activations

PP, M = 4, 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "zb-h1": 1, "zb-v": 2}


class Onlooker:
    """Notes after each action of a step what is held besides what travels and what was there before."""

    def __init__(self, seen: Probe) -> None:
        self.held: list[tuple[Kind, int, int]] = []
        self.most_in_flight = 0
        self._seen = seen
        self._count = StorageCount("cpu")

    def watch(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        do = ScheduleRunner.execute
        self._seen.free_gradients()
        gc.collect()
        self._count.see_all_objects()
        self._before = {key for key, size in self._count._sizes.items() if size}
        base = self._count.live_bytes

        def see(step: Any, action: Any) -> None:
            do(step, action)
            self.held.append((action.kind, action.stage, self._count.live_bytes - base - self._apart(step)))
            self.most_in_flight = max(self.most_in_flight, len(step._saved) + len(step._store._terms))

        with mock.patch.object(ScheduleRunner, "execute", see), self._count:
            sw.train_step(model, batch, num_microbatches=M)
        self._count.forget()

    def _apart(self, step: Any) -> int:
        """Messages on their way, gradients of inputs that wait to be sent, gradients of parameters."""
        travels = [*step._received.values(), *step._sends]
        found = [tensor for messages in travels for _, tensor in messages]
        found += [tensor for tensors in step._input_gradients.values() for tensor in tensors]
        keys = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}
        # What is sent may also be the end of a stage's activations, or what gradients of weights are made of.
        stays = [output for tape in step._saved.values() for output in tape.outputs]
        terms = [pair for held in step._store._terms.values() for _, pairs in held.values() for pair in pairs]
        stays += [tensor for pair in terms for tensor in pair if tensor is not None]
        for tensor in stays:
            keys.pop(tensor.untyped_storage()._cdata, None)
        travelling = sum(size for key, size in keys.items() if key not in self._before)
        return travelling + self._seen.held_bytes()["gradients"]


def watch(schedules: tuple[str, ...], pp: int, tp: int = 1) -> dict[str, tuple[list[tuple[str, int, int]], int]]:
    """By schedule what was held after each action, and the most microbatches between forward and backward(s)."""
    found = {}
    for name in schedules:
        model = sw.parallelize(build(), sw.ParallelPlan(pp=pp, tp=tp, pipeline=name))
        batch = tokens(MICRO_BATCH * M)
        for _ in range(2):
            sw.train_step(model, batch, num_microbatches=M)
            for parameter in model.parameters():
                parameter.grad = None
        onlooker = Onlooker(probe(model))
        onlooker.watch(model, batch)
        held = [(str(kind), stage, size) for kind, stage, size in onlooker.held]
        found[name] = held, onlooker.most_in_flight
    return found


def changes(held: list[tuple[str, int, int]]) -> dict[tuple[str, int], int]:
    """By kind of action and stage by how much each such action changes what is held: always by as much."""
    found: dict[tuple[str, int], set[int]] = {}
    before = 0
    for kind, stage, size in held:
        found.setdefault((kind, stage), set()).add(size - before)
        before = size
    assert before <= 4 * M, "what is left of a step: its losses"
    assert all(len(sizes) == 1 for sizes in found.values()), found
    return {what: sizes.pop() for what, sizes in found.items()}


def peak_bytes(schedule: Schedule, rank: int, stage_bytes: Sequence[int], kept_bytes: Sequence[int]) -> int:
    """The most bytes of activations that a rank holds between two of its actions.

    Args:
        schedule: Any schedule.
        rank: The rank.
        stage_bytes: For each stage (of all ranks), what a microbatch holds from its forward to its (input) gradient.
        kept_bytes: What a microbatch holds from there to the weights' gradients, where backward has two parts.
    """
    now = most = 0
    for action in schedule.actions[rank]:
        whole, kept = stage_bytes[action.stage], kept_bytes[action.stage]
        change = {
            Kind.FORWARD: whole,
            Kind.BACKWARD: -whole,
            Kind.BACKWARD_INPUT: kept - whole,
            Kind.BACKWARD_WEIGHT: -kept,
        }
        now += change.get(action.kind, 0)
        most = max(most, now)
    return most


def test_activations_in_flight_are_those_that_the_schedule_says():
    num_tokens = MICRO_BATCH * SEQ
    handed_on = 4 * num_tokens * HIDDEN
    # of each token: 16 values of the residual stream's width, mean and deviation of two norms, and one for each head
    block = 4 * num_tokens * (16 * HIDDEN + 4 + HEADS)
    for rank, found in enumerate(run_on_ranks(watch, PP, tuple(SCHEDULES), PP, timeout_s=150)):
        for name, (held, most_in_flight) in found.items():
            schedule = build_schedule(name, PP, M, SCHEDULES[name])
            assert most_in_flight == peak_stored_pairs(name, PP, M, SCHEDULES[name], rank).in_flight, (name, rank)
            change = changes(held)
            assert not any(size for (kind, _), size in change.items() if "send" in kind or "receive" in kind)
            whole = [change.get(("forward", stage), 0) for stage in range(schedule.num_stages)]
            kept = [size + change.get(("backward_input", stage), 0) for stage, size in enumerate(whole)]
            most = max(size for _, _, size in held)
            assert most == pytest.approx(peak_bytes(schedule, rank, whole, kept), abs=4 * M), (name, rank)
            for stage in set(schedule.stages(rank)) - {0, schedule.num_stages - 1}:
                is_own = schedule.ranks[stage - 1] == rank  # what the stage before made is counted there
                received = 0 if is_own else handed_on
                assert whole[stage] == received + LAYERS // schedule.num_stages * block, (name, rank)


def test_between_its_two_backwards_a_stage_under_tp_keeps_what_the_gradients_of_its_weights_take():
    pp, tp = 2, 2
    for place, found in enumerate(run_on_ranks(watch, pp * tp, ("zb-h1", "zb-v"), pp, tp, timeout_s=150)):
        rank = place // tp
        for name, (held, most_in_flight) in found.items():
            schedule = build_schedule(name, pp, M, SCHEDULES[name])
            assert most_in_flight == peak_stored_pairs(name, pp, M, SCHEDULES[name], rank).in_flight, (name, rank)
            change = changes(held)
            for stage in schedule.stages(rank):
                # Of each token and block: what goes into four layers, and the gradients of what comes out of them.
                whole, divided = 4 * HIDDEN, 12 * HIDDEN // tp
                kept = 4 * MICRO_BATCH * SEQ * (whole + divided) * LAYERS // schedule.num_stages
                assert change["backward_weight", stage] == -kept, (name, rank, stage)
