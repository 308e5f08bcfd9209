"""Offload and recomputation on one CUDA device, a world of one over NCCL."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardwise as sw
from shardwise.api.summary import predict
from shardwise.engine.storage import packed
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.host import Transfers
from shardwise.testing import run_on_ranks
from tests.gpu.test_engine import forget_workspaces

POLICIES = ("cpu", sw.OffloadPolicy(ratio=0.5), sw.OffloadPolicy(parameters=False))


def build(hidden: int = 64, **overrides: object) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano", hidden=hidden, **overrides).cuda()


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (2, 17), generator=generator).cuda() for _ in range(count)]
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for batch in batches(steps):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def numbers(**plan: object) -> tuple[list[float], list[torch.Tensor]]:
    """A rate that is a power of two: its product is exact, so that it does not matter whether it is fused."""
    model = sw.parallelize(build(dropout=0.1), sw.ParallelPlan(**plan))
    torch.cuda.manual_seed(3)
    losses = train(model, torch.optim.SGD(model.parameters(), lr=2.0**-6), 4)
    return losses, [value.cpu() for value in sw.full_state_dict(model).values()]


def compare() -> dict[str, bool]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    verdict = {}
    for strategy in ("ddp", "zero1", "zero2", "shard_grad_op", "zero3"):
        for precision in (None, sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")):
            options = {"strategy": strategy, "mp_policy": precision}
            losses, state = numbers(**options)
            others = [{"offload_policy": policy} for policy in POLICIES]
            others += [{"activation_checkpointing": way} for way in ("full", "selective")]
            for other in others:
                got = numbers(**options, **other)
                same = got[0] == losses and all(torch.equal(a, b) for a, b in zip(got[1], state, strict=True))
                verdict[f"{strategy} {precision} {other}"] = same
    return verdict


def test_offload_and_recomputation_change_no_bit() -> None:
    (verdict,) = run_on_ranks(compare, 1, process_group=False, timeout_s=280)
    assert verdict == dict.fromkeys(verdict, True)


def updated_late(*, is_inside: bool) -> tuple[list[torch.Tensor], list[bool]]:
    """Weights after three steps whose copies to the host begin late; and whether the updates' thread has the device."""
    model = sw.parallelize(build(hidden=256, num_layers=6), sw.ParallelPlan(offload_policy="cpu", merge_units=False))
    optimizer = torch.optim.AdamW(sw.flat_parameters(model), lr=1e-2)
    devices: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: devices.append(torch.cuda.current_device() == 0))
    if is_inside:
        sw.optimizer_in_backward(model, optimizer)
    transfers = engine_of(model, "test").extras.find(Transfers)
    send = transfers.send

    def late(*given: object) -> object:
        with torch.cuda.stream(transfers._download):
            torch.cuda._sleep(20_000_000)
        return send(*given)

    transfers.send = late
    train(model, optimizer, 3)
    return [value.cpu() for value in sw.full_state_dict(model).values()], devices


def update_late() -> dict[str, bool]:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    (after, _), (inside, devices) = updated_late(is_inside=False), updated_late(is_inside=True)
    return {
        "same": all(torch.equal(a, b) for a, b in zip(after, inside, strict=True)),
        "unit by unit": len(devices) >= 3 * 6,
        "device": all(devices),
    }


def test_an_update_beside_backward_waits_until_its_gradients_are_on_the_host() -> None:
    (verdict,) = run_on_ranks(update_late, 1, process_group=False)
    assert verdict == {"same": True, "unit by unit": True, "device": True}


def requested() -> int:
    """Bytes of tensors on the device; what is allocated counts up to a MiB more for each, which is not cut off."""
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)  # nothing is counted before the first tensor


def memory(policy: str | sw.OffloadPolicy) -> tuple[int, int, int, bool]:
    torch.cuda.empty_cache()
    before, before_exact = torch.cuda.memory_allocated(), requested()
    model = sw.parallelize(build(hidden=512, num_layers=8), sw.ParallelPlan(offload_policy=policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # the for-each form has its peak in the step
    train(model, optimizer, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train(model, optimizer, 1)
    torch.cuda.synchronize()
    is_pinned = all(p.is_pinned() for p in model.parameters() if p.device.type == "cpu" and p.numel())
    forget_workspaces()
    held = requested() - before_exact
    predicted = predict(engine_of(model, "test"))
    between_steps = predicted.on_device - predicted.gathered - predicted.reduce
    return held, torch.cuda.max_memory_allocated() - before, between_steps, is_pinned


def measure_memory() -> list[tuple[int, int, int, bool]]:
    return [memory(policy) for policy in ("none", *POLICIES)]


def test_the_device_holds_what_is_predicted_and_its_peak_falls() -> None:
    (found,) = run_on_ranks(measure_memory, 1, process_group=False)
    for held, _, predicted, is_pinned in found:
        assert held == pytest.approx(predicted, rel=0.02, abs=1 << 20)  # 1 KiB where everything is on the host
        assert is_pinned
    plain, everything, half, _ = (peak for _, peak, _, _ in found)
    moved = found[0][2] - found[1][2]
    assert plain - everything == pytest.approx(moved, rel=0.1)
    assert plain - half == pytest.approx(moved / 2, rel=0.3)


def sums_late(policy: str) -> list[torch.Tensor]:
    """Gradients where packed ones are added up only after the next units' were packed, by the host's clock."""
    add_up = packed.sum_packed

    def late(*args: object) -> None:
        torch.cuda._sleep(20_000_000)
        add_up(*args)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))).cuda()
    layers = sw.wrap_by_class({nn.Linear})
    plan = {"quantized_reduce": "int8", "auto_wrap_policy": layers, "merge_units": False, "gradient_buffers": 4}
    sw.parallelize(model, sw.ParallelPlan(offload_policy=policy, **plan))
    packed.sum_packed = late
    try:
        model(torch.randn(8, 512, device="cuda")).square().sum().backward()
    finally:
        packed.sum_packed = add_up
    torch.cuda.synchronize()
    return [parameter.grad.cpu() for parameter in model.parameters()]


def sum_on_either_stream() -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(sums_late("none"), sums_late("cpu"), strict=True)]


def test_packed_gradients_stay_until_the_stream_that_goes_down_has_added_them_up() -> None:
    (same,) = run_on_ranks(sum_on_either_stream, 1, process_group=False)
    assert same == [True] * 12


def waits_in_steady_state() -> int:
    """No call that the sync debug mode knows; the wait for the last gradient is one for an event, which it does not."""
    model = sw.parallelize(build(), sw.ParallelPlan(offload_policy="cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for index, batch in enumerate(batches(6)):
        if index == 3:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return 0


def test_the_host_waits_only_for_the_gradients_that_it_is_about_to_read() -> None:
    assert run_on_ranks(waits_in_steady_state, 1, process_group=False) == [0]


def overlap() -> tuple[float, float]:
    """Time of copies from the host in a step, and how much of it lies within kernels of other streams (both in us)."""
    model = sw.parallelize(build(hidden=1024, num_layers=6, seq_len=512), sw.ParallelPlan(offload_policy="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-6)
    tokens = torch.zeros(8, 512, dtype=torch.int64, device="cuda")

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end, event.name) for event in events]
    copies = [(start, end) for start, end, name in spans if "HtoD" in name]
    kernels = [(start, end) for start, end, name in spans if "Memcpy" not in name and "Memset" not in name]
    hidden = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in kernels)
    return sum(end - start for start, end in copies), hidden


def test_copies_from_the_host_run_beside_the_computation() -> None:
    ((copied, hidden),) = run_on_ranks(overlap, 1, process_group=False)
    assert copied > 0
    assert hidden > 0.3 * copied


def peaks() -> list[int]:
    found = []
    for way in ("full", "selective", "none"):
        torch.cuda.empty_cache()
        model = sw.parallelize(
            build(hidden=256, num_layers=8, seq_len=256), sw.ParallelPlan(activation_checkpointing=way)
        )
        tokens = torch.zeros(8, 256, dtype=torch.int64, device="cuda")
        model(tokens, tokens).backward()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(tokens, tokens).backward()
        found.append(torch.cuda.max_memory_allocated() - before)
        del model
    return found


def test_recomputation_lowers_the_peak() -> None:
    (found,) = run_on_ranks(peaks, 1, process_group=False)
    assert found == sorted(set(found))
    assert found[0] < found[2] / 3
