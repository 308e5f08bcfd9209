"""Ranks whose devices wait for each other: ``python -m tests.launch.stuck_body WHAT`` under the launcher.

On a CPU: the handles of :class:`Stuck` are never done, and its host goes on, as over NCCL.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

from shardwise.comm import stall
from shardwise.comm.base import Comm, Done
from shardwise.comm.record import RecordComm
from shardwise.launch.world import init_process_group, read_world, shutdown


class Stuck(RecordComm):
    """Issues collectives on a device that does the first ``num_done`` of them."""

    def __init__(self, limit_s, num_done=0):
        world = dist.group.WORLD
        super().__init__("dp_shard", rank=world.rank(), size=world.size())
        self.channel = "dp_shard/0/gather"
        watch = stall.StallWatch.of(world)
        watch.limit_s = limit_s
        self._ledger = stall.Ledger([rank for rank in range(self.size) if rank != self.rank], watch)
        self.num_done, self.num_issued = num_done, 0

    def _start(self, *given, **named):
        self._ledger.check()
        return Comm._start(self, *given, **named)

    def _do_all_gather(self, stamp, buffer, bounds):
        number = self.num_issued
        self.num_issued += 1
        self._ledger.add(stamp, lambda: number < self.num_done)
        return Done()

    def gather_unit(self, unit):
        self.all_gather(torch.zeros(2 * self.size), unit=unit).wait()


def hasten(stall_s=0.4):
    stall.STALL_S, stall.INTERVAL_S, stall.IDLE_INTERVAL_S, stall.GRACE_S = stall_s, 0.1, 0.2, 1.0


def main(what):
    hasten()
    world = read_world()
    init_process_group(world, timeout_s=60)
    comm = Stuck(limit_s=2.0 if what == "silent" else 300.0)
    if what == "differ":
        comm.gather_unit("blocks.1" if world.rank == 0 else "blocks.2")
    elif world.rank == 0:
        comm.gather_unit("blocks.1")
    time.sleep(50)  # as in a wait for the device, from which nothing wakes the main thread
    shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
