"""Messages from one rank to another."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.comm.axes import WORLD, MeshRanks, open_comms
from shardwise.comm.record import RecordComm
from shardwise.spec.mesh import Mesh
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks


@on_ranks(3)
def test_messages_arrive_in_order():
    """Everyone sends two messages each way, among collectives, and waits for them in another order."""
    comm, _ = open_comms(torch.device("cpu"))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    with comm.record() as events:
        sent = [comm.send(torch.full((5,), 10.0 * comm.rank + n), to=right, unit=f"act {n}") for n in range(2)]
        total = torch.ones(3)
        reduction = comm.all_reduce(total, unit="x")
        found = [torch.empty(5) for _ in range(2)]
        received = [comm.receive(found[n], source=left, unit=f"act {n}") for n in range(2)]
        for handle in (*reversed(received), reduction, *sent):
            handle.wait()
    assert total.tolist() == [comm.size] * 3
    assert [buffer.tolist() for buffer in found] == [[10.0 * left + n] * 5 for n in range(2)]
    events = [(event.kind, event.unit, event.sent_bytes) for event in events]
    assert events[:2] == [("send", "act 0", 20), ("send", "act 1", 20)]
    assert events[3:] == [("receive", "act 0", 0), ("receive", "act 1", 0)]


def test_the_recorder_counts_what_is_sent() -> None:
    comm = RecordComm("pp", rank=0, size=2, device="meta")
    with comm.record() as events:
        comm.send(torch.empty(8, device="meta"), to=1, unit="a").wait()
        comm.receive(torch.empty(8, device="meta"), source=1, unit="b").wait()
    assert [(event.kind, event.sent_bytes) for event in events] == [("send", 32), ("receive", 0)]


MESH = Mesh(pp=2, dp_shard=1, cp=2, tp=2)


def sums_along_axes() -> dict[str, float]:
    comms = MeshRanks(MESH).open(torch.device("cpu"))
    found = {}
    for name in ("tp", "pp", "cp", "world", "reduce"):
        total = torch.tensor([float(2 ** dist.get_rank())])
        getattr(comms, name).all_reduce(total, unit=name).wait()
        found[name] = total.item()
    assert comms.sizes == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2}
    assert comms.world.axis == WORLD
    return found


def test_every_axis_has_its_ranks() -> None:
    for rank, found in enumerate(run_on_ranks(sums_along_axes, 8)):
        for axis in ("tp", "pp", "cp"):
            assert found[axis] == sum(2**peer for peer in MESH.group(axis, rank))
        assert found["reduce"] == found["cp"]  # ranks along cp hold the same parameters
        assert found["world"] == 2**8 - 1
