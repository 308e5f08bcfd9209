"""The optimizer's step inside backward for what is in host memory: a thread makes it while backward continues."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import probe
from tests.common.late_copies import late_copies
from tests.common.oracle import Chain, plain_loss, presets
from tests.common.ranks import on_ranks, refusal
from tests.engine.extensions.test_in_backward_ranks import FailsInBackward, adamw, train
from tests.optim.test_flat_ranks import Branching, by_rank, flat_groups, two_groups

BF16 = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")


def build(make: Callable[[], nn.Module] = Chain, **plan: object) -> nn.Module:
    return sw.parallelize(make(), sw.ParallelPlan(**{"offload_policy": "cpu", **plan}))


def trained(
    make: Callable[[], nn.Module], script: Callable, given: Callable, *, is_inside: bool, microbatches: int = 1, **plan
) -> dict[str, Tensor]:
    """The state after four steps of so many microbatches."""
    model = build(make, **plan)
    optimizer = adamw(given(model))
    if is_inside:
        sw.optimizer_in_backward(model, optimizer)
    for step in range(4):
        for microbatch in range(microbatches):
            with sw.gradient_sync(model, microbatch == microbatches - 1):
                script(model, dist.get_rank(), microbatches * step + microbatch).backward()
        assert not is_inside or all(p.grad is None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return sw.full_state_dict(model)


@on_ranks(2, timeout_s=120)
def test_numbers_are_those_of_a_step_after_backward_with_copies_as_late_as_on_a_gpu():
    """Ranks that use different parameters, whose flags come with the copy; sums in 16 bit; several microbatches."""
    cases: dict[str, tuple] = {
        "branches": (Branching, by_rank, two_groups, {}),
        "bf16": (Chain, plain_loss, flat_groups, {"mp_policy": BF16}),
        "int8": (Chain, plain_loss, flat_groups, {"quantized_reduce": "int8"}),
    }
    for place, strategy in enumerate(presets()):
        given = (flat_groups, two_groups)[place % 2]
        cases[f"2 microbatches, {strategy}"] = (Branching, by_rank, given, {"strategy": strategy, "microbatches": 2})
    wrong = {}
    with late_copies():
        for name, (make, script, given, plan) in cases.items():
            after, inside = (trained(make, script, given, is_inside=value, **plan) for value in (False, True))
            wrong[name] = [key for key, value in after.items() if not torch.equal(value, inside[key])]
    assert {name: keys for name, keys in wrong.items() if keys} == {}, wrong


class Watched(torch.optim.SGD):
    """Calls ``begins`` with the thread's number of threads before each step."""

    begins: Callable[[int], object] = staticmethod(lambda _: None)

    def step(self, closure=None):
        self.begins(torch.get_num_threads())
        return super().step(closure)


sw.declare_elementwise(Watched)


def watched(model: nn.Module, begins: Callable[[int], object]) -> Watched:
    optimizer = Watched(model.parameters(), lr=0.1)
    optimizer.begins = begins
    sw.optimizer_in_backward(model, optimizer)
    return optimizer


@on_ranks(1)
def test_backward_goes_on_while_the_host_updates_and_returns_when_it_has_done_so():
    """The first update waits until backward has come to the first module, and the last one is seen after backward."""
    model = build()
    reached, seen, threads = threading.Event(), [], set()

    def begins(_: int) -> None:
        threads.add(threading.get_ident())
        seen.append(reached.wait(timeout=30))

    watched(model, begins)
    model.stem.register_full_backward_hook(lambda *_: reached.set())
    x = torch.randn(4, 8, requires_grad=True)
    before = [p.detach().clone() for p in model.parameters()]
    model(x).sum().backward()
    assert seen == [True] * len(model.blocks) + [True] * (len(seen) - len(model.blocks))
    assert threading.get_ident() not in threads
    assert len(threads) == 1
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@on_ranks(1)
def test_updates_use_as_many_threads_as_the_thread_that_calls_backward():
    model, seen = build(), []
    watched(model, seen.append)
    for number in (2, 1):
        torch.set_num_threads(number)
        seen.clear()
        plain_loss(model, 0, 0).backward()
        assert set(seen) == {number}


@on_ranks(1)
def test_an_error_in_an_update_is_raised_by_backward_and_no_step_goes_on_from_it():
    model = build()
    left = iter([True, False])

    def begins(_: int) -> None:
        if not next(left, True):
            raise RuntimeError("on purpose")

    watched(model, begins)
    assert refusal(RuntimeError, plain_loss(model, 0, 0).backward) == "on purpose"
    assert all(p.grad is None for p in model.parameters())
    assert "the parameters are of two different steps" in refusal(sw.StateError, plain_loss, model, 0, 1)
    plain_loss(model, 0, 2).backward()  # told once


@on_ranks(1)
def test_a_backward_that_raises_leaves_no_update_under_way(tmp_path):
    """Neither the next forward nor what reads the weights sees some that are still being written."""
    for call in (lambda model: plain_loss(model, 0, 1), sw.full_state_dict, lambda model: sw.save(tmp_path, model)):
        model = build(FailsInBackward)
        go_on, made = threading.Event(), []
        watched(model, lambda _: made.append(go_on.wait(timeout=30)))  # noqa: B023
        model.fails = True
        with pytest.raises(RuntimeError, match="on purpose"):
            plain_loss(model, 0, 0).backward()
        model.fails = False
        threading.Timer(0.2, go_on.set).start()
        assert "the parameters are of two different steps" in refusal(sw.StateError, call, model)
        count = len(made)
        assert made == [True] * count
        assert count > 0
        assert all(p.grad is None for p in model.parameters())


@on_ranks(1)
def test_what_needs_all_gradients_is_refused_and_accumulating_where_some_are_on_the_device():
    model = build(offload_policy=sw.OffloadPolicy(ratio=0.5))
    sw.optimizer_in_backward(model, adamw(model.parameters()))
    assert "needs the gradients of the whole model" in refusal(sw.StateError, sw.gradient_sync(model, False).__enter__)
    assert "needs the gradients of the whole model" in refusal(sw.StateError, sw.clip_grad_norm, model, 1.0)


@on_ranks(1)
def test_the_model_and_the_thread_are_gone_at_once():
    model = build()
    optimizer = adamw(sw.flat_parameters(model))
    sw.optimizer_in_backward(model, optimizer)
    train(model, optimizer, plain_loss, 0, 2)
    assert "inside backward, unit by unit, those on the host in a thread of their own" in str(sw.summary(model))
    workers = [t for t in threading.enumerate() if t.name.startswith("shardwise-update")]
    assert len(workers) == 1
    engine = probe(model).weak_references()
    gc.disable()
    del model
    assert all(reference() is None for reference in engine)
    workers[0].join(timeout=30)
    assert not workers[0].is_alive()
