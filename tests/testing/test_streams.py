"""The detector itself, on stream programs written by hand: it finds what is missing, and is silent where nothing is."""

from __future__ import annotations

import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.testing import RankFailure, run_on_ranks, streams


@pytest.fixture
def seen():
    with streams.pretended_cuda() as found:
        yield found


def on(stream):
    return torch.cuda.stream(stream)


def now():
    return torch.cuda.current_stream()


# -- races


def test_a_tensor_that_another_stream_reads_without_a_wait_is_a_race(seen):
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    with on(side):
        x.mul_(2)
    with pytest.raises(streams.StreamError) as caught:
        seen.check()
    text = str(caught.value)
    assert "aten::mul_ on a stream of test_streams.py" in text
    assert "while this may not be done: aten::zeros on the compute stream writes" in text
    assert text.count("test_streams.py:") >= 3  # of both accesses, and of the allocation
    assert "must wait for an event that the compute stream records after the earlier access" in text


def test_a_wait_for_the_stream_or_for_an_event_of_it_orders(seen):
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(now())
    with on(side):
        x.mul_(2)
        done = side.record_event()
    now().wait_event(done)
    assert x.add_(1).tolist() == [1.0] * 8
    seen.check()


def test_an_event_that_was_recorded_too_early_orders_nothing(seen):
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(now())
    early = side.record_event()
    with on(side):
        x.mul_(2)
    now().wait_event(early)
    x.add_(1)
    (race,) = seen.races
    assert (race.first.operation, race.second.operation) == ("aten::mul_", "aten::add_")


def test_reads_at_the_same_time_and_different_bytes_of_one_storage_are_no_race(seen):
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(now())
    with on(side):
        _ = x[:4] + 1
        x[4:].mul_(2)
    _ = x[:4] * 3
    assert not seen.races
    x[3:5].add_(1)
    # Its first element is still read on the other stream, its second one is still written there.
    assert [(r.second.low, r.second.high) for r in seen.races] == [(12, 20)] * 2


def test_an_order_by_way_of_a_third_stream_counts(seen):
    one, two, x = torch.cuda.Stream(), torch.cuda.Stream(), torch.zeros(8, device="cuda")
    one.wait_stream(now())
    with on(one):
        x.mul_(2)
    two.wait_stream(one)
    now().wait_stream(two)
    x.add_(1)
    seen.check()


def test_the_same_places_again_are_one_finding_that_counts(seen):
    side, x = torch.cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(now())
    for _ in range(5):
        with on(side):
            x.mul_(2)
        x.add_(1)
    assert [race.count for race in seen.races] == [5, 4]


def test_lists_of_tensors_and_results_of_operators_are_seen(seen):
    side, xs = torch.cuda.Stream(), [torch.zeros(4, device="cuda") for _ in range(2)]
    with on(side):
        torch._foreach_add_(xs, 1.0)
    assert {race.second.operation for race in seen.races} == {"aten::_foreach_add_"}
    with on(side):
        y = torch.cat(xs)
    seen.races.clear()
    y.add_(1)
    assert [race.second.operation for race in seen.races] == ["aten::add_"]


# -- host memory


def test_the_host_may_read_pinned_memory_only_when_it_has_waited_for_the_copy(seen):
    x, host = torch.ones(4, device="cuda"), torch.zeros(4, pin_memory=True)
    assert host.is_pinned()
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert host.sum() == 4
    seen.check()
    host.copy_(x, non_blocking=True)
    host.sum()
    with pytest.raises(streams.StreamError, match="the host must wait for an event that the compute stream records"):
        seen.check()


def test_the_host_may_write_what_a_copy_reads_only_when_it_is_done(seen):
    x, host = torch.zeros(4, device="cuda"), torch.ones(4, pin_memory=True)
    x.copy_(host, non_blocking=True)
    host.zero_()
    assert [race.second.operation for race in seen.races] == ["aten::zero_"]


def test_pageable_memory_is_read_at_once_and_waited_for_where_it_is_written(seen):
    x, host = torch.zeros(4, device="cuda"), torch.ones(4)
    x.copy_(host, non_blocking=True)
    host.zero_()
    assert not seen.host_waits
    host.copy_(x, non_blocking=True)
    assert [wait.why for wait in seen.host_waits] == ["aten::copy_ to pageable host memory"]
    assert host.tolist() == [1.0] * 4
    seen.check()


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "aten::_to_copy to pageable host memory"),
        (lambda x: x[x > 0], "aten::index by a mask"),
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: torch.cuda.synchronize(), "torch.cuda.synchronize"),
        (lambda x: torch.tensor([1.0], device="cuda"), "a tensor of numbers, from pageable host memory"),
    ],
)
def test_each_wait_of_the_host_is_counted_with_its_place(seen, read, why):
    x = torch.zeros(4, device="cuda")
    before = len(seen.host_waits)
    read(x)
    (wait,) = seen.host_waits[before:]
    assert wait.why == why
    assert "test_streams.py" in wait.where[0][0]


def test_copies_from_pinned_memory_and_work_on_the_device_wait_for_nothing(seen):
    host = torch.ones(4).pin_memory()
    x = host.to("cuda", non_blocking=True)
    (x * 2).sum()
    back = x.to("cpu", non_blocking=True)
    assert back.is_pinned()
    assert not seen.host_waits
    seen.check()


# -- memory that is freed


def test_memory_that_another_stream_uses_may_not_be_freed(seen):
    side = torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    side.wait_stream(now())
    with on(side):
        y = x * 2
    del x
    assert not seen.early_frees
    torch.empty(8, device="cuda")  # may get the memory
    with pytest.raises(streams.StreamError, match=r"Early free: memory went back.*\n.*test_streams"):
        seen.check()
    del y


@pytest.mark.parametrize("way", ["wait", "record_stream", "host", "same stream"])
def test_a_wait_before_the_next_allocation_or_record_stream_makes_a_free_right(seen, way):
    side = torch.cuda.Stream()
    if way == "same stream":
        side.wait_stream(now())
    with on(side if way == "same stream" else now()):
        x = torch.ones(8, device="cuda")
    side.wait_stream(now())
    with on(side):
        y = x * 2
        done = side.record_event()
    if way == "record_stream":
        x.record_stream(side)
    del x
    if way == "wait":
        now().wait_event(done)
    elif way == "host":
        done.synchronize()
    torch.empty(8, device="cuda")
    del y
    now().wait_stream(side)
    seen.check()


def test_a_storage_that_gives_its_memory_back_has_freed_it(seen):
    side, x = torch.cuda.Stream(), torch.ones(8, device="cuda")
    side.wait_stream(now())
    with on(side):
        x.mul_(2)
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == 0
    x.untyped_storage().resize_(32)
    assert [each.access.operation for each in seen.early_frees] == ["aten::mul_"]


def test_memory_is_there_when_the_allocating_stream_comes_to_it(seen):
    side = torch.cuda.Stream()
    x = torch.ones(8, device="cuda")
    x.add_(1)
    y = torch.empty(8, device="cuda")
    with on(side):
        y.zero_()  # the block may be one that the compute stream still uses
    assert [race.first.operation for race in seen.races] == ["allocation"]
    del x


def test_what_autograd_saved_is_freed_where_its_graph_goes(seen):
    side = torch.cuda.Stream()
    x = torch.ones(8, device="cuda", requires_grad=True)
    y = x.exp()
    side.wait_stream(now())
    with on(side):
        y.detach().sum()
    z = y * y
    del y
    now().wait_stream(side)
    z.sum().backward()
    del z
    torch.empty(8, device="cuda")
    seen.check()


# -- threads


def test_work_that_a_pool_does_is_ordered_by_submit_and_result(seen):
    host = torch.zeros(4, pin_memory=True)
    x = torch.ones(4, device="cuda")
    host.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(host.add_, 1).result()
        assert host.sum() == 8
        seen.check()
        pool.submit(host.add_, 1)  # whose end nobody waits for
        gc.collect()
        host.mul_(1)
    assert len(seen.races) == 1


def test_a_thread_is_ordered_by_start_and_join_and_has_a_stream_of_its_own(seen):
    x, found = torch.zeros(4, device="cuda"), []

    def work():
        found.append(torch.cuda.current_stream() == torch.cuda.default_stream())
        x.add_(1)

    side = torch.cuda.Stream()
    with on(side):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [True]
    seen.check()


def test_what_goes_through_a_queue_is_ordered(seen):
    host, handed = torch.zeros(4, pin_memory=True), queue.Queue()

    def fill():
        for _ in range(2):
            host.add_(1)
            handed.put(host)

    thread = threading.Thread(target=fill)
    thread.start()
    for _ in range(2):
        handed.get()
    torch.zeros(4, device="cuda").copy_(host, non_blocking=True)
    seen.check()
    thread.join()


@pytest.mark.parametrize("has_thread", [False, True])
def test_backward_gives_the_same_gradients_in_a_thread_of_its_own(has_thread):
    names = []
    with streams.pretended_cuda(has_backward_thread=has_thread) as seen:
        layer = nn.Linear(2, 2).cuda()
        y = layer(torch.ones(1, 2, device="cuda"))
        y.register_hook(lambda grad: names.append(threading.current_thread().name))
        y.sum().backward()
        assert layer.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert layer.weight.grad.is_cuda
    assert names[0].startswith("autograd-of-device" if has_thread else "MainThread")
    seen.check()


# -- the device


def test_tensors_say_where_they_are_and_nothing_is_left_behind():
    with streams.pretended_cuda():
        device = torch.device("cuda", 0)
        x = torch.ones(2, 3, device="cuda")
        with torch.device("cuda"):
            made = torch.zeros(2)
        assert {
            t.device for t in (x, x.T, x + 1, x.detach(), x.bfloat16(), torch.empty_like(x), x.new_zeros(3), made)
        } == {device}
        assert {t.device.type for t in (x.cpu(), x.to("cpu"), torch.ones(3))} == {"cpu"}
        assert x.to(torch.ones(1, device="cuda")) is x
        assert x.to("cuda", torch.float64).dtype == torch.float64
        assert x.untyped_storage().device == device
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        assert torch.cuda.memory_allocated() > 0
        assert nn.Linear(2, 2).cuda().weight.is_cuda
    assert not torch.cuda.is_available()
    assert x.device == torch.device("cpu")
    assert torch.tensor([1.0]).device.type == "cpu"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")


def test_a_tensor_that_outlives_its_context_is_one_of_the_next_device():
    with streams.pretended_cuda():
        x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
        side.wait_stream(now())
        with on(side):
            x.add_(1)
        now().wait_stream(side)
    with streams.pretended_cuda() as seen:
        assert x.is_cuda
        with on(torch.cuda.Stream()):
            x.add_(1)
        assert not seen.findings  # what was before is done
        x.add_(1)
        assert len(seen.races) == 1
        assert torch.cuda.memory_allocated() == 32
        del x
        assert torch.cuda.memory_allocated() == 0


def test_an_operator_on_tensors_of_both_sides_is_reported(seen):
    torch.ones(3, device="cuda") + torch.ones(3)
    torch.ones(3, device="cuda") + torch.ones(())  # a scalar may
    with pytest.raises(streams.StreamError, match=r"aten::add takes tensors of the host and of the device"):
        seen.check()


def test_two_pretended_devices_at_once_are_refused_and_streams_need_one():
    with streams.pretended_cuda():
        stream = torch.cuda.Stream()
        with pytest.raises(RuntimeError, match="or one is pretended already"), streams.pretended_cuda():
            pass
    with pytest.raises(RuntimeError, match="no pretended device is in use"):
        stream.synchronize()


# -- on ranks


def unordered() -> None:
    x = torch.ones(4, device="cuda")
    with on(torch.cuda.Stream()):
        x.add_(dist.get_rank())


def ordered() -> list[float]:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(now())
    with on(side):
        x.add_(dist.get_rank())
    now().wait_stream(side)
    dist.all_reduce(x)  # the program's own collective, on the current stream
    return x.tolist()


def given_to_gloo() -> None:
    rank, x = dist.get_rank(), torch.ones(4, device="cuda")
    (dist.send(x, 1) if rank == 0 else dist.recv(x, 0))


def summed_beside() -> None:
    x = torch.ones(4, device="cuda")
    with on(torch.cuda.Stream()):
        dist.all_reduce(x)


def test_ranks_on_a_pretended_device_fail_where_a_wait_is_missing():
    assert run_on_ranks(ordered, 2, device="pretended") == [[3.0] * 4] * 2
    for body, told in ((given_to_gloo, "device memory given to Gloo by c10d::"), (summed_beside, "Race over bytes")):
        with pytest.raises(RankFailure, match=told):
            run_on_ranks(body, 2, device="pretended")
    with pytest.raises(RankFailure, match=r"StreamError.*\n.*\n.*Race over bytes 0 to 16 of 16"):
        run_on_ranks(unordered, 1, device="pretended")
    with pytest.raises(ValueError, match="device='tpu': expected 'own' or 'pretended'"):
        run_on_ranks(ordered, 1, device="tpu")
