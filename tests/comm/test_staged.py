"""Collectives by way of host memory: here from the CPU to the CPU, so that every copy is a real one without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.comm import axes as opening
from shardwise.comm.axes import Transport, open_comms
from shardwise.comm.base import Comm
from shardwise.comm.gloo import GlooComm
from shardwise.comm.staged import StagedComm
from shardwise.spec.errors import CommError
from shardwise.testing import optimizer_state, probe, run_on_ranks, same_bits
from tests.comm import test_gloo
from tests.common import models
from tests.common.ranks import on_ranks, refusal
from tests.common.training import make_optimizer
from tests.gpu import test_staged as on_a_gpu

CPU = torch.device("cpu")


def staged(group: dist.ProcessGroup | None = None) -> Comm:
    return StagedComm(open_comms(CPU, group=group)[0], CPU)


def with_staging(body: Callable[[], None]) -> None:
    with mock.patch.object(test_gloo, "open_comm", staged):
        body()


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 3, 4))])
def test_every_collective_gives_the_naive_result_bit_for_bit(world):
    run_on_ranks(with_staging, world, test_gloo.check_results)


@pytest.mark.parametrize("world", [3, pytest.param(1, marks=pytest.mark.long)])
def test_several_collectives_can_be_under_way_and_waited_for_in_any_order(world):
    run_on_ranks(with_staging, world, test_gloo.use_handles)


def pass_messages() -> list[Tensor]:
    """Around the ring, twice; the sender may change its buffer after the wait."""
    comm = staged()
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    found = []
    for number in range(2):
        mine, theirs = torch.full((5,), 10.0 * number + comm.rank), torch.zeros(5)
        receiving = comm.receive(theirs, source=before, unit="ring")
        comm.send(mine, to=after, unit="ring").wait()
        mine.zero_()
        receiving.wait()
        found.append(theirs)
    return found


def test_messages_arrive_in_order():
    for rank, (first, second) in enumerate(run_on_ranks(pass_messages, 3)):
        before = (rank - 1) % 3
        assert first.tolist() == [before] * 5
        assert second.tolist() == [10.0 + before] * 5


@on_ranks(2)
def test_nothing_is_written_but_what_is_received_and_only_once():
    """A staged collective writes what it received and nothing else, and not before it is waited for."""
    comm = staged()
    size, rank = comm.size, comm.rank
    buffer = torch.full((size * 4,), float(rank))
    handle = comm.all_gather(buffer, unit="u")
    assert buffer.unique().tolist() == [rank]
    handle.wait()
    assert buffer.view(size, 4).mean(1).tolist() == list(range(size))
    buffer[0] = 99.0  # a second wait copies nothing
    handle.wait()
    assert buffer[0] == 99.0
    source, out = torch.full((size * 4,), float(rank)), torch.zeros(4)
    handle = comm.reduce_scatter(source, out, unit="u")
    assert not handle.start_next_phase()
    assert out.tolist() == [sum(range(size))] * 4
    handle.wait()
    assert source.unique().tolist() == [rank]


# -- the engine on top


def stage_everything() -> mock._patch:
    """Every Comm that is opened stages."""
    on_host = Transport(on_host=lambda *given, **named: StagedComm(GlooComm(*given, **named), CPU))
    return mock.patch.object(opening, "transport", on_host)


def train(preset: str, **options: object) -> tuple[dict[tuple[str, int], Tensor], list[tuple]]:
    """Five steps: every number by name and first element, and the last step's collectives."""
    model = sw.parallelize(models.build("tied"), sw.ParallelPlan(strategy=preset, **options))
    optimizer = make_optimizer(model.parameters())
    is_staged = opening.transport.on_host is not GlooComm
    assert {name == "StagedComm" for name in probe(model).transports} == {is_staged}
    numbers: dict[tuple[str, int], Tensor] = {}
    for step in range(5):
        with sw.record_collectives(model) as events:
            loss = model(*models.batch(step, 0, dist.get_rank()))
            loss.backward()
        numbers["loss", step] = loss.detach()
        numbers["norm", step] = sw.clip_grad_norm(model, math.inf)
        optimizer.step()
        optimizer.zero_grad()
    states = optimizer_state(optimizer)
    numbers |= {(f"step/{name}", 0): states[p]["step"] for name, p in model.named_parameters() if p in states}
    numbers |= {(extent.name, extent.start): values for extent, values in probe(model).owned_extents(optimizer)}
    numbers |= {(f"held/{extent.name}", extent.start): values for extent, values in probe(model).extents()}
    numbers |= {(f"whole/{name}", 0): value for name, value in sw.full_state_dict(model).items()}
    return numbers, [(e.kind, e.axis, e.unit, e.dtype, e.sent_bytes) for e in events]


def differing(preset: str, options: dict[str, object]) -> list[str]:
    """What a run with staging has otherwise than one without."""
    direct, direct_events = train(preset, **options)
    with stage_everything():
        numbers, events = train(preset, **options)
    assert direct_events
    assert numbers.keys() == direct.keys()
    found = [] if events == direct_events else ["events"]
    return found + [
        f"{name} from {start}" for (name, start), v in direct.items() if not same_bits(v, numbers[name, start])
    ]


HYBRID = {"dp_replicate": 2}
QUANTIZED = {"quantized_gather": "int8", "quantized_reduce": "int8"}


def compare_all(world: int) -> dict[str, list[str]]:
    cases = [("ddp", {}), ("zero1", {}), ("zero3", {}), ("zero3", {"granularity": "tensor"}), ("zero3", QUANTIZED)]
    if world == 4:
        cases = [("hsdp", HYBRID), ("ddp", HYBRID), ("zero3", {"reshard_after_forward": 2})]
    return {f"{preset} {options}": differing(preset, options) for preset, options in cases}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_training_by_way_of_the_host_has_the_same_numbers_and_events(world):
    for found in run_on_ranks(compare_all, world, world, timeout_s=150):
        assert not any(found.values()), found
        assert len(found) >= 3


# -- which Comm is opened


@on_ranks(2)
def test_a_group_without_nccl_stages_what_is_on_a_gpu_and_is_watched_as_any_gloo_group():
    """For tensors on a GPU, of which opening touches none, over a group of Gloo."""
    device = torch.device("cuda", 0)
    found = [
        (
            type(comm).__name__,
            str(comm.device),
            comm.size,
            isinstance(comm, StagedComm) and comm._inner.watch is not None,
        )
        for comm in open_comms(device)
    ]
    assert found == [("StagedComm", "cuda:0", 2, True)] * 2


def refused() -> list[str]:
    """A group whose backend moves neither; only its name is asked for."""
    with mock.patch.object(dist, "get_backend_config", return_value="cpu:mpi,cuda:mpi"):
        return [refusal(CommError, open_comms, device) for device in (CPU, torch.device("cuda", 0))]


def test_a_group_with_neither_is_refused_by_the_device_that_it_does_not_serve():
    ((of_cpu, of_gpu),) = run_on_ranks(refused, 1)
    assert "which does not move CPU tensors" in of_cpu
    assert "which does not move CUDA tensors" in of_gpu
    assert "init_process_group('gloo')" in of_gpu


def test_the_function_that_is_run_on_gpus_is_right_where_nothing_is_staged():
    for found in run_on_ranks(on_a_gpu.differing, 2, "cpu"):
        assert set(found) == set(on_a_gpu.STRATEGIES)
        assert not any(found.values()), found
