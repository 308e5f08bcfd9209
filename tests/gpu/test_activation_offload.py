"""Activations on the host on one CUDA device: copies that are slow, the device's peak, and streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.engine.extensions import safety
from shardwise.engine.extensions.activation_offload import ActivationOffload
from shardwise.engine.storage.attachment import engine_of
from shardwise.testing import run_on_ranks

EVERYTHING = sw.ActivationOffloadPolicy(least_bytes=1)
#: About a millisecond: a block of this model computes for less.
CYCLES = 2_000_000


def build(hidden: int = 64, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano", hidden=hidden, num_layers=6, **overrides).cuda()


def train(plan: dict[str, Any], *, hidden: int = 64, rows: int = 2, steps: int = 4) -> tuple[nn.Module, list[Tensor]]:
    precision = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")
    model = sw.parallelize(build(hidden, dropout=0.1), sw.ParallelPlan(**plan, mp_policy=precision, merge_units=False))
    torch.cuda.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return model, losses


@contextlib.contextmanager
def slow_copies() -> Iterator[None]:
    """Copies begin late and end late, on their streams, while the host and the computation go on."""
    plain = ActivationOffload._copy

    def slow(self: ActivationOffload, source: Tensor, target: Tensor, stream: Any, after: Any) -> Any:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        plain(self, source, target, stream, after)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
            return stream.record_event()

    with mock.patch.object(ActivationOffload, "_copy", slow), safety.checks():
        yield


def compare() -> dict[str, bool]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    verdict = {}
    for strategy in ("ddp", "zero2", "zero3"):
        for way in ("none", "full"):
            for offload_policy in ("none", "cpu"):
                plan = {"strategy": strategy, "activation_checkpointing": way, "offload_policy": offload_policy}
                model, losses = train(plan)
                with slow_copies():
                    late, others = train({**plan, "offload_activations": EVERYTHING})
                same = [torch.equal(a, b) for a, b in zip(losses, others, strict=True)]
                ours, theirs = (sw.full_state_dict(each).values() for each in (late, model))
                verdict[str(plan)] = all(same) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return verdict


def test_copies_that_come_late_change_no_bit() -> None:
    (verdict,) = run_on_ranks(compare, 1, process_group=False, timeout_s=280)
    assert verdict == dict.fromkeys(verdict, True)


def peaks() -> list[tuple[int, int, bool]]:
    """For each way: the device's peak besides what is held, bytes of the host's memory, whether that is pinned."""
    found = []
    for offloaded in (False, True):
        model, _ = train({"offload_activations": offloaded}, hidden=512, rows=256, steps=2)
        offload = engine_of(model, "test").extras.find(ActivationOffload)
        tokens = torch.randint(0, 64, (256, 16)).cuda()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(tokens, tokens).backward()
        torch.cuda.synchronize()
        buffers = [buffer for buffer, _ in offload.host._unused] if offload else []
        found.append(
            (
                torch.cuda.max_memory_allocated() - held,
                sum(buffer.numel() for buffer in buffers),
                all(buffer.is_pinned() for buffer in buffers),
            )
        )
        del model
    return found


def test_the_peak_falls_by_what_the_host_holds_but_for_two_blocks() -> None:
    (((plain, _, _), (offloaded, on_host, is_pinned)),) = run_on_ranks(peaks, 1, process_group=False)
    assert is_pinned
    # Without offloading the peak is where backward begins; with it, where the gradients of four blocks are there.
    gradients = sum(p.numel() * p.element_size() for p in sw.models.gpt("gpt-nano", hidden=512).blocks[0].parameters())
    assert plain - offloaded == pytest.approx(on_host * 4 / 6 - 4 * gradients, rel=0.03)


def streams() -> tuple[dict[int, set[str]], ...]:
    """What runs on which stream: kernels, copies to the host, copies to the device; a wait of the host raises."""
    model, _ = train({"offload_activations": True}, hidden=512, rows=64, steps=2)
    tokens = torch.randint(0, 64, (64, 16)).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        model(tokens, tokens).backward()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    names: dict[str, dict[int, set[str]]] = {"kernel": {}, "DtoH": {}, "HtoD": {}}
    for event in seen.profiler.kineto_results.events():
        kind = next((word for word in ("DtoH", "HtoD") if word in event.name()), "kernel")
        is_label = event.name().startswith("shardwise::")  # which the profiler repeats on the device
        if (
            str(event.device_type()).endswith("CUDA")
            and not is_label
            and ("Memcpy" in event.name()) == (kind != "kernel")
        ):
            names[kind].setdefault(event.device_resource_id(), set()).add(event.name())
    return names["kernel"], names["DtoH"], names["HtoD"]


def test_copies_run_beside_the_computation_and_the_host_waits_for_none() -> None:
    ((kernels, out, back),) = run_on_ranks(streams, 1, process_group=False)
    assert out
    assert back
    assert not out.keys() & back.keys()
    assert not {stream: names for stream, names in kernels.items() if stream in out or stream in back}
