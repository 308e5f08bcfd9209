"""Tests of failing stages start it: ``python -m tests.parallel.pipeline.pipeline_body FOLDER PP TP RANK WHAT``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

import shardwise as sw
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.world import init_process_group, read_world, shutdown
from shardwise.parallel.pipeline.runner import ScheduleRunner
from shardwise.spec.errors import ShardwiseError
from shardwise.spec.schedule import Kind

SEQ, ROWS = 6, 8


def main(folder, pp, tp, culprit, what):
    world = read_world()
    init_process_group(world, timeout_s=60)
    Path(folder, f"pid-0-{world.rank}").write_text(str(os.getpid()))
    try:
        train(sw.ParallelPlan(pp=pp, tp=tp), what if world.rank == culprit else "")
    except ShardwiseError as error:
        note_exit(error.exit_code, str(error))
        sys.exit(error.exit_code)
    shutdown()


def train(plan, what):
    torch.manual_seed(0)
    layers = 7 if what == "another model" else 8
    model = sw.models.gpt("gpt-tiny", num_layers=layers, hidden=24, num_heads=2, vocab_size=31, seq_len=SEQ)
    sw.parallelize(model, plan)
    sw.train_step(model, batch(), num_microbatches=4)
    if what == "dies":
        ScheduleRunner.execute = dies_before_its_second_backward(ScheduleRunner.execute)
    seq = SEQ - 1 if what == "another batch" else SEQ
    sw.train_step(model, batch(seq), num_microbatches=4)


def batch(seq=SEQ):
    ids = torch.arange(ROWS * seq).view(ROWS, seq) % 31
    return ids, ids


def dies_before_its_second_backward(do):
    def see(step, action):
        if action.kind is Kind.BACKWARD and action.microbatch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        do(step, action)

    return see


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
