"""What the time of a missed target goes to: one rank of our engine and of the peer, as text."""

from __future__ import annotations

import cProfile
import io
import pstats

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from bench.compare.request import CASES, OURS, PEERS, WARM_UP_STEPS, Entrant, Request
from shardwise.testing import run_on_ranks

STEPS = 3
ROWS = 25


def profiles(case: str, world: int, names: tuple[str, str]) -> str:
    """The top entries of rank 0, operators and Python functions, for one of our strategies and a peer."""
    parts = []
    for name in names:
        entrant = Entrant(name, PEERS[name]) if name in PEERS else Entrant(OURS, name)
        # One plain process is one process, whatever it is compared with.
        size = 1 if name == "single" else world
        parts.append(run_on_ranks(profile_steps, size, case, entrant, timeout_s=900.0)[0])
    return "\n".join(parts)


def profile_steps(case: str, entrant: Entrant) -> str:
    """On a rank: steps of the steady state under torch's profiler, then as many under Python's."""
    # Here, as the peers' imports warn and take seconds.
    from bench.compare.engine import Engine, Workload

    torch.set_num_threads(1)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    workload = Workload(Request(CASES[case], (entrant,), world, rounds=1), torch.device("cpu"))
    batches = [workload.batch(step, rank) for step in range(WARM_UP_STEPS + 2 * STEPS)]
    engine = Engine(entrant, workload)
    for batch in batches[:WARM_UP_STEPS]:
        engine.step(batch)
    distributed.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        for batch in batches[WARM_UP_STEPS : WARM_UP_STEPS + STEPS]:
            engine.step(batch)
    distributed.barrier()
    functions = cProfile.Profile()
    functions.enable()
    for batch in batches[WARM_UP_STEPS + STEPS :]:
        engine.step(batch)
    functions.disable()
    distributed.barrier()
    text = io.StringIO()
    pstats.Stats(functions, stream=text).sort_stats("tottime").print_stats(ROWS)
    averages = operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=ROWS, max_name_column_width=60)
    title = f"{entrant.name}, case {case}, rank {rank} of {world}, {STEPS} steps"
    return f"== {title}: operators\n\n{averages}\n== {title}: Python functions\n{text.getvalue()}"
