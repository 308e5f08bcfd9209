"""A pipeline reduces a stage's gradients within its last backward: in order, to the last bit, and nothing is left."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
from collections.abc import Collection, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.engine import Engine
from shardwise.engine.extensions.pipeline_step import PipelineStep
from shardwise.parallel.pipeline.runner import ScheduleRunner
from shardwise.spec.errors import StateError
from shardwise.testing import probe, run_on_ranks
from shardwise.testing.transports import TRANSPORT
from tests.common.ranks import on_ranks

LAYERS, SEQ, M = 8, 6, 4
REDUCTIONS = frozenset({"reduce_scatter", "all_reduce"})
#: Of two stages, or two times two, and two replicas.
PLANS: tuple[dict[str, Any], ...] = (
    {},
    {"strategy": "ddp", "pipeline": "interleaved-1f1b"},
    {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 1, "pipeline": "zb-v"},
    {"pipeline": "interleaved-1f1b", "reshard_after_forward": True},
)
MORE: tuple[dict[str, Any], ...] = (
    {"strategy": "zero1", "pipeline": "gpipe", "activation_checkpointing": "full"},
    {"strategy": "zero2", "pipeline": "zb-h1"},
    {"pipeline": "zb-v", "reshard_after_forward": True},
    {"pipeline": "zb-h1", "mp_policy": sw.PrecisionPolicy(param_dtype="bf16"), "offload_policy": "cpu"},
    {"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 1, "pipeline": "interleaved-1f1b"},
)


def build(*, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    shape = {"num_layers": LAYERS, "hidden": 24, "num_heads": 2, "vocab_size": 31, "seq_len": SEQ}
    return sw.models.gpt("gpt-tiny", tied=tied, **shape)


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    seed = 10 * step + torch.distributed.get_rank() % 2  # another one for each replica
    return tuple(torch.randint(0, 31, (2 * M, SEQ), generator=torch.Generator().manual_seed(seed)) for _ in range(2))


def pipeline(options: dict[str, Any], *, tied: bool = False) -> nn.Module:
    return sw.parallelize(build(tied=tied), sw.ParallelPlan(pp=2, merge_units=False, **options))


@contextlib.contextmanager
def at_the_end() -> Iterator[None]:
    """Every reduction after every backward."""
    with mock.patch.object(PipelineStep, "_of_stage", side_effect=lambda _stage: collections.deque()):
        yield


def gradients(model: nn.Module) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def equal(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    pairs = list(zip(some, others, strict=True))
    assert any(one is not None for one, _ in pairs)
    return all((a is None) is (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)


# -- the same numbers, in the same bytes


def steps(model: nn.Module, least: int) -> list[list[Tensor | None]]:
    """Gradients of steps of several kinds."""
    found = []
    for count in (M, least, M):
        sw.train_step(model, batch(count), num_microbatches=count)
        found.append(gradients(model))
    with sw.gradient_sync(model, False):
        sw.train_step(model, batch(1), num_microbatches=M)
    sw.eval_step(model, batch(2), num_microbatches=M)
    sw.train_step(model, batch(3), num_microbatches=M)
    sw.train_step(model, batch(4), num_microbatches=M)  # added to what is there
    found.append(gradients(model))
    return found


def compare(plans: tuple[dict[str, Any], ...]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for options in plans:
        for tied in (False, True) if not options else (False,):
            model = pipeline(options, tied=tied)
            seen = probe(model)
            for step in range(2):
                with sw.record_collectives(model) as events:
                    sw.train_step(model, batch(step), num_microbatches=M)
                model.zero_grad()
            checks = {}
            if TRANSPORT not in os.environ:  # where sums are received is the plain transport's
                received = (buffer for buffer in seen.receive_buffers if buffer.dtype is torch.float32)
                held_bytes = sum(buffer.nbytes for buffer in (*seen.gradient_buffers, *received))  # losses: in float64
                checks["bytes"] = held_bytes == seen.predicted_bytes(num_microbatches=M)["reduce"]
            if "reshard_after_forward" not in options:  # else units are gathered again and again
                predicted = by_axis(seen.predicted_collectives())
                checks["trace"] = by_axis(events) == predicted != {}
            least = 2 if options.get("pipeline") == "interleaved-1f1b" else 1
            with at_the_end():
                expected = steps(model, least)
            found = steps(model, least)
            checks["gradients"] = all(equal(a, b) for a, b in zip(expected, found, strict=True))
            wrong += [f"{what} of {options}" for what, is_right in checks.items() if not is_right]
    return wrong


def by_axis(events: Any) -> dict[str, list[tuple[str, str, int]]]:
    """Of the data-parallel axes."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    for event in events:
        if event.axis.startswith("dp_") and event.unit != "loss":
            found.setdefault(event.axis, []).append((event.kind, event.unit, event.sent_bytes))
    return found


def test_gradients_are_those_of_a_reduction_at_the_end_and_bytes_and_order_are_predicted():
    assert run_on_ranks(compare, 4, PLANS, timeout_s=200) == [[]] * 4


@pytest.mark.long
def test_so_it_is_under_further_plans():
    assert run_on_ranks(compare, 4, MORE, timeout_s=200) == [[]] * 4


# -- when


def watch(
    options: dict[str, Any], tied: bool = False, kinds: Collection[str] = REDUCTIONS, accumulates: bool = False
) -> list[str]:
    """What a rank begins in the third step: computations, units that backward enters, collectives of these kinds.

    ``accumulates``: the second step sends no gradients, so that the third one uses the same parameters.
    """
    model = pipeline(options, tied=tied)
    events: list[Any] = []

    def note(owner: type, name: str, text: Any) -> Any:
        method = getattr(owner, name)

        def call(self: Any, *arguments: Any) -> Any:
            events.append(text(*arguments))
            return method(self, *arguments)

        return mock.patch.object(owner, name, call)

    for step in range(3):
        with contextlib.ExitStack() as stack:
            if step == 2:
                events = stack.enter_context(sw.record_collectives(model))
                stack.enter_context(note(ScheduleRunner, "execute", str))
                stack.enter_context(note(Engine, "pre_backward", lambda _call, unit: f"enter {unit.name}"))
            stack.enter_context(sw.gradient_sync(model, not (accumulates and step == 1)))
            sw.train_step(model, batch(), num_microbatches=M)
    return [
        event if isinstance(event, str) else f"{'reduce' if event.kind in REDUCTIONS else 'gather'} {event.unit}"
        for event in events
        if isinstance(event, str) or (event.kind in kinds and event.axis.startswith("dp_"))
    ]


def watch_all() -> dict[str, list[str]]:
    names = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    return {name: watch({"pipeline": name}) for name in names} | {"tied": watch({}, tied=True)}


def watch_gathers() -> dict[str, list[str]]:
    """What a rank gathers before it computes or communicates with another stage, and what it gathers later."""
    found = {}
    for name, options in GATHERED.items():
        events = watch(options, kinds=("all_gather",), accumulates=name == "second of a window")
        first = next(place for place, event in enumerate(events) if not event.startswith("gather "))
        later = [event for event in events[first:] if event.startswith("gather ")]
        found[name] = [event.removeprefix("gather ") for event in events[:first]] + [f"later {each}" for each in later]
    return found


GATHERED: dict[str, dict[str, Any]] = {
    "zero1": {"strategy": "zero1", "pipeline": "interleaved-1f1b"},
    "zero3": {"pipeline": "zb-v"},
    "second of a window": {"pipeline": "zb-v"},
    "no prefetch": {"strategy": "zero1", "forward_prefetch": 0},
    "released": {"reshard_after_forward": True},
    "packed": {"pipeline": "zb-v", "quantized_gather": "int8"},
}


def test_every_stage_is_gathered_from_the_beginning_of_a_step_on():
    for rank, found in enumerate(run_on_ranks(watch_gathers, 4, timeout_s=120)):
        first = rank // 2 * 2
        assert found["zero1"] == ["root", *(f"blocks.{first + n}" for n in (0, 1, 4, 5))]
        ends = ("root", "blocks.0", "blocks.1", "blocks.6", "blocks.7")
        assert found["zero3"] == list(ends if rank < 2 else [f"blocks.{n}" for n in (2, 3, 4, 5)])
        assert found["second of a window"] == found["zero3"]
        for name in ("no prefetch", "released", "packed"):
            assert found[name][0].startswith("later gather ")


def after(events: list[str], event: str) -> list[str]:
    return events[events.index(event) + 1 :]


@pytest.fixture(scope="module")
def seen() -> list[dict[str, list[str]]]:
    if os.environ.get(TRANSPORT) == "early-free":
        pytest.skip("on this transport a reduction begins when it is waited for, not when it is issued")
    return run_on_ranks(watch_all, 4, timeout_s=120)


def test_a_unit_is_reduced_while_the_units_before_it_are_in_backward(seen):
    for rank, events in enumerate(seen):
        last = after(events["1f1b"], f"backward of stage {rank // 2}, microbatch {M - 1}")
        last = [event for event in last if "gradient of" not in event and event not in {"enter root", "reduce loss"}]
        own = [event.removeprefix("enter ") for event in last if event.startswith("enter ")]
        assert len(own) == LAYERS // 2
        expected = [f"enter {own[0]}"]
        for left, entered in itertools.pairwise(own):
            expected += [f"enter {entered}", f"reduce {left}"]
        assert last == [*expected, f"reduce {own[-1]}", "reduce root"]


def test_the_units_of_one_stage_are_reduced_before_the_backwards_of_another(seen):
    for name, kind, stages in (
        ("interleaved-1f1b", "backward", ((2, 0), (3, 1))),
        ("zb-v", "backward weight", ((3, 0), (2, 1))),
    ):
        for rank, events in enumerate(seen):
            later, earlier = (f"{kind} of stage {stage}, microbatch {M - 1}" for stage in stages[rank // 2])
            between = after(events[name], later)
            between = between[: between.index(earlier)]
            assert sum(event.startswith("reduce ") for event in between) >= 2, (name, rank, between)


def test_where_gradients_of_weights_come_later_a_unit_is_reduced_as_soon_as_it_has_them(seen):
    for rank, events in enumerate(seen):
        last = after(events["zb-h1"], f"backward weight of stage {rank // 2}, microbatch {M - 1}")
        assert sum(event.startswith("reduce ") for event in last) > LAYERS // 2


def test_nothing_but_tied_parameters_waits_for_another_stage(seen):
    for rank, events in enumerate(seen):
        last = after(events["tied"], f"backward of stage {rank // 2}, microbatch {M - 1}")
        reduced = [event for event in last if event.startswith("reduce ")]
        assert len(reduced) > LAYERS // 2


# -- a step that fails


#: Waits for what the step has sent: a message whose handle is dropped may never come to its peer.
FINISH = ScheduleRunner.finish


@on_ranks(4, timeout_s=60)
def test_a_step_that_fails_leaves_nothing_to_the_next():
    results = []
    for options in ({}, {"strategy": "ddp", "pipeline": "zb-v"}):
        model = pipeline(options)
        seen = probe(model)
        sw.train_step(model, batch(), num_microbatches=M)
        expected = gradients(model)

        def fail(step: Any) -> None:
            FINISH(step)
            raise OSError("at the end")

        with mock.patch.object(ScheduleRunner, "finish", fail), pytest.raises(OSError, match="at the end"):
            sw.train_step(model, batch(1), num_microbatches=M)
        results.append(bool(seen.reducing))  # else this tests nothing
        model.zero_grad()
        sw.train_step(model, batch(), num_microbatches=M)
        results += [equal(expected, gradients(model)), not seen.reducing]
        results.append(not seen.waiting)
    assert results == [True] * 8


@on_ranks(4, timeout_s=60)
def test_a_gradient_that_comes_after_its_unit_was_reduced_is_refused():
    """A gradient comes for a unit that has been reduced: it is refused, on every rank, and the next step is right."""
    model = pipeline({})
    last = probe(model).units[-1].name
    sw.train_step(model, batch(), num_microbatches=M)
    expected = gradients(model)
    full = next(shard.whole for shard in probe(model).shards if shard.unit == last)

    def bring(step: Any) -> None:
        FINISH(step)
        full.grad = torch.zeros_like(full)

    with (
        mock.patch.object(ScheduleRunner, "finish", bring),
        pytest.raises(StateError, match=rf"arrived while unit '{last}' was not gathered"),
    ):
        sw.train_step(model, batch(), num_microbatches=M)
    model.zero_grad()
    sw.train_step(model, batch(), num_microbatches=M)
    assert [full.grad is None, equal(expected, gradients(model))] == [True] * 2
