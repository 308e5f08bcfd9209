"""What the tests of the launcher start: ``python -m tests.launch.elastic_body FOLDER WHAT [CODE]``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from torch import distributed

from shardwise.launch import heartbeat
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.file import replace
from shardwise.launch.world import init_process_group, read_world, shutdown


def main(folder, what, code="0"):
    world = read_world()
    if what.startswith("save-"):
        signal.signal(signal.SIGTERM, lambda *_: save_and_leave())
    init_process_group(world, timeout_s=60)
    distributed.barrier()
    print(f"rank {world.rank} of {world.size}, attempt {world.restart_count}, {world.source}")
    print(f"NCCL on {os.environ.get('NCCL_SOCKET_IFNAME')}, Gloo on {os.environ.get('GLOO_SOCKET_IFNAME')}")
    write(folder, f"pid-{world.restart_count}-{world.rank}", str(os.getpid()))
    heartbeat.enter("step", step=13, limit_s=4 if what == "stop-once" else 60, saved_step=10)
    if world.rank == 1:
        act(world, what, int(code))
    if what in {"wait", "save-wait"}:
        while True:
            heartbeat.record_progress()
            time.sleep(0.05)
    distributed.barrier()
    shutdown()


def act(world, what, code):
    if what == "exit":
        sys.exit(code)
    if what == "note":
        note_exit(code, "the loss is not a number", step=12)
        sys.exit(code)
    if what == "raise":
        raise ValueError("a wrong number")
    if what == "stop-once" and world.restart_count == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "kill" or (what == "kill-once" and world.restart_count == 0):
        os.kill(os.getpid(), signal.SIGKILL)


def save_and_leave():
    note_exit(75, "stopped on request", step=14)
    sys.exit(75)


def write(folder, name, text):
    replace(Path(folder) / name, text)


if __name__ == "__main__":
    main(*sys.argv[1:])
