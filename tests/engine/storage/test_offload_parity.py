"""What is kept on the host changes no bit: every strategy, accumulation and clipping, mixed precision, checkpoints.

On a machine without a GPU both sides are host memory, but they are two: masters and gradients are copied to and from
what stands for the device.
"""

from __future__ import annotations

from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.comm.base import Handle
from shardwise.engine.storage.host import OnHost, Transfers
from shardwise.testing import RankFailure, probe, run_on_ranks
from tests.common import models
from tests.common.oracle import PRESETS, descend, presets
from tests.common.ranks import on_ranks
from tests.common.training import VARIANTS, train, train_each

POLICIES: dict[str, str | sw.OffloadPolicy] = {
    "cpu": "cpu",
    "half": sw.OffloadPolicy(ratio=0.5),
    "shard stays": sw.OffloadPolicy(parameters=False),
}


def train_every_way(name: str, presets: tuple[str, ...], policies: tuple[str, ...]) -> None:
    for turn, variant in enumerate(VARIANTS):
        for place, policy in enumerate(policies):
            is_debugging = (turn + place + distributed.get_world_size()) % 2 == 0
            train_each(name, presets, variant, is_debugging=is_debugging, offload_policy=POLICIES[policy])


def compare(world: int, name: str, presets: tuple[str, ...], policies: tuple[str, ...]) -> None:
    run_on_ranks(train_every_way, world, name, presets, policies, timeout_s=200)


def test_every_strategy_with_its_state_on_the_host_equals_one_process():
    compare(2, "frozen", presets(), ("cpu",))


@pytest.mark.parametrize(("world", "name"), [(1, "tied"), (3, "odd")])
def test_odd_models_and_worlds_with_half_of_the_units_on_the_host_equal_one_process(world, name):
    compare(world, name, ("zero1", "zero3"), ("half", "shard stays"))


@pytest.mark.long
@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_policy_strategy_and_model_equals_one_process(world, name):
    compare(world, name, PRESETS, tuple(POLICIES))


# -- negative controls


def skip_a_direction(direction: str, preset: str) -> None:
    """Masters are never brought, or gradients never sent."""

    if direction == "up":
        patch = mock.patch.object(OnHost, "_on_device", lambda _form, group: group.own_slice)
    else:
        patch = mock.patch.object(Transfers, "send", lambda _self, _source, _target, after, _packed: after)
    with patch:
        train("gpt", preset, VARIANTS[0], offload_policy="cpu")


@pytest.mark.parametrize(("preset", "step"), [("ddp", 1), ("zero1", 1), ("zero3", 0)])
def test_without_masters_the_first_loss_that_needs_them_differs(preset, step):
    """Where parameters are held whole on the device, they are right until the first update."""
    with pytest.raises(RankFailure, match=f"step {step}, backward 0: value 0 is"):
        run_on_ranks(skip_a_direction, 2, "up", preset)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_without_gradients_on_the_host_all_of_them_differ(preset):
    with pytest.raises(RankFailure, match="step 0, backward 0: gradients are off") as caught:
        run_on_ranks(skip_a_direction, 2, "down", preset)
    trained = [name for name, _ in models.build("gpt").named_parameters() if "blocks." in name]
    assert [name for name in trained if f"'{name}'" not in str(caught.value)] == []


class _Late(Handle):
    """A gradient that has left the device when it is waited for, and reaches the host when the host waits."""

    pending: ClassVar[list[tuple[Tensor, Tensor]]] = []

    def __init__(self, source: Tensor, target: Tensor, after) -> None:
        self._copy = source, target, after

    def start_next_phase(self) -> bool:
        return self._copy[2].start_next_phase()

    def wait(self) -> None:
        source, target, after = self._copy
        after.wait()
        _Late.pending.append((target, source.clone()))
        source.fill_(torch.nan)
        target.fill_(torch.nan)

    def wait_on_host(self) -> None:
        _Late.arrive(None)

    @staticmethod
    def arrive(_transfers: Transfers) -> None:
        for target, content in _Late.pending:
            target.copy_(content)
        _Late.pending.clear()


@on_ranks(2, timeout_s=120)
def test_the_host_reads_no_gradient_before_it_has_waited_for_it() -> None:
    with (
        mock.patch.object(
            Transfers, "send", lambda _self, source, target, after, _packed: _Late(source, target, after)
        ),
        mock.patch.object(Transfers, "synchronise", _Late.arrive),
    ):
        for variant in VARIANTS:
            train_each("odd", ("ddp", "zero1", "zero3"), variant, offload_policy="cpu")


# -- other parts of the plan


def train_mixed(preset: str, policy: str | sw.OffloadPolicy, dtypes: tuple[str, str], *, is_flat: bool) -> list:
    plan = sw.ParallelPlan(
        strategy=preset,
        offload_policy=policy,
        activation_checkpointing="full" if is_flat else "none",
        mp_policy=sw.PrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1]),
    )
    model = sw.parallelize(models.build("tied"), plan)
    parameters = sw.flat_parameters(model, lambda _name, p: p.dim() >= 2) if is_flat else model.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    rank, numbers = distributed.get_rank(), []
    for step in range(3):
        for microbatch in range(2):
            with sw.gradient_sync(model, microbatch == 1), sw.record_collectives(model) as events:
                loss = model(*models.batch(step, microbatch, rank))
                loss.backward()
            numbers.append(loss.item())
        numbers.append(sw.clip_grad_norm(model, 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    sent = [(event.kind, event.unit, event.sent_bytes, event.axis) for event in events]
    assert sent == [tuple(event) for event in probe(model).predicted_collectives(is_first_of_window=False)]
    return [numbers, sent, list(sw.full_state_dict(model).values())]


@on_ranks(2, timeout_s=150)
def test_mixed_precision_flat_optimizers_and_recomputation_give_the_numbers_and_the_traffic_of_no_offload() -> None:
    for place, preset in enumerate(presets()):
        dtypes = (("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "bf16"))[place % 3]
        is_flat = place % 2 == 0
        plain = train_mixed(preset, "none", dtypes, is_flat=is_flat)
        for policy in POLICIES.values():
            got = train_mixed(preset, policy, dtypes, is_flat=is_flat)
            assert got[:2] == plain[:2], (preset, dtypes, policy)
            assert all(torch.equal(a, b) for a, b in zip(plain[2], got[2], strict=True)), (preset, dtypes, policy)


# -- checkpoints


PLANS = (
    sw.ParallelPlan(),
    sw.ParallelPlan(offload_policy="cpu"),
    sw.ParallelPlan(offload_policy=sw.OffloadPolicy(ratio=0.4)),
    sw.ParallelPlan(strategy="ddp", offload_policy="cpu"),
    sw.ParallelPlan(strategy="zero2", offload_policy="cpu"),
)


def begin(plan: sw.ParallelPlan) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = sw.parallelize(models.build("tied"), plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def advance(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    descend(optimizer, (model(*models.batch(step, 0, distributed.get_rank())) for step in steps))
    return sw.full_state_dict(model)


def save_each(folder) -> None:
    for place, plan in enumerate(PLANS):
        model, optimizer = begin(plan)
        advance(model, optimizer, range(2))
        sw.save(folder / str(place), model, optimizer)


def load_each(folder) -> None:
    """All of them lead to the same numbers; the first pair has nothing on the host."""
    expected: dict[str, Tensor] = {}
    for place in range(len(PLANS)):
        for plan in PLANS:
            model, optimizer = begin(plan)
            sw.load(folder / str(place), model, optimizer)
            got = advance(model, optimizer, range(2, 4))
            expected = expected or got
            assert all(torch.equal(got[key], expected[key]) for key in got), (PLANS[place], plan)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.long)])
def test_checkpoints_go_from_any_plan_to_any_other(tmp_path, saved_by, loaded_by):
    run_on_ranks(save_each, saved_by, tmp_path)
    run_on_ranks(load_each, loaded_by, tmp_path, timeout_s=120)


@on_ranks(2)
def test_whole_parameters_and_whole_state_dicts_reach_the_host_and_back() -> None:
    for preset in presets():
        states = []
        for policy in ("none", "cpu"):
            model, optimizer = begin(sw.ParallelPlan(strategy=preset, offload_policy=policy))
            advance(model, optimizer, range(1))
            with sw.full_parameters(model, writeback=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            advance(model, optimizer, range(1, 2))
            state = sw.full_state_dict(model)
            sw.load_full_state_dict(model, {name: value * 2 for name, value in state.items()})
            states.append(advance(model, optimizer, range(2, 3)))
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), preset
