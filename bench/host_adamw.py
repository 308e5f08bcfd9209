"""AdamW on the host, as offloading needs it: GB/s of torch's variants and of DeepSpeed's CPUAdam, in one process.

    python -m bench.host_adamw [--numel 32000000] [--units 8] [--rounds 5] [--threads 1,16]

A unit's slice is one flat fp32 tensor, as ``sw.flat_parameters`` gives it. An update reads the gradient, and reads and
writes master and both moments: 28 bytes for each element at least. The rate is these bytes over the time; that of
copying memory (read and write counted) is the roof. A variant that makes several passes moves more than 28 bytes, and
its rate says so. The variants take turns; shown are the median over the rounds by the clock, and by the processor's
time of all threads, which other programs disturb less.

CPUAdam is there where deepspeed is (``make bench`` installs it); it compiles its kernel with g++ at the first call.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

BYTES = 28


def variants(units: list[nn.Parameter]) -> dict[str, Callable[[], object]]:
    """The update of all units by each variant, which keeps its own state."""
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    found: dict[str, Callable[[], object]] = {
        "torch, fused=True": torch.optim.AdamW(units, fused=True, **settings).step,
        "torch, foreach=True": torch.optim.AdamW(units, foreach=True, **settings).step,
        "torch, foreach=False (the default on a CPU)": torch.optim.AdamW(units, foreach=False, **settings).step,
    }
    cpu_adam = _deepspeed(units, settings)
    if cpu_adam is not None:
        found["DeepSpeed, CPUAdam"] = cpu_adam
    copies = [torch.empty_like(unit) for unit in units]

    def copy() -> None:
        for target, unit in zip(copies, units, strict=True):
            target.copy_(unit.detach())

    found["copy"] = copy
    return found


def _deepspeed(units: list[nn.Parameter], settings: dict[str, object]) -> Callable[[], object] | None:
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyrefly: ignore[missing-import]
    except ImportError:
        return None
    return DeepSpeedCPUAdam(units, adamw_mode=True, **settings).step


def measure(numel: int, num_units: int, rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each round by the clock and of the processor, by variant."""
    generator = torch.Generator().manual_seed(0)

    def unit() -> Tensor:
        return torch.randn(numel // num_units, generator=generator)

    units = [nn.Parameter(unit()) for _ in range(num_units)]
    for each in units:
        each.grad = unit()
    steps = variants(units)
    for step in steps.values():
        step()  # makes the state
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start, used = time.perf_counter(), time.process_time()
            step()
            found[name][0].append(time.perf_counter() - start)
            found[name][1].append(time.process_time() - used)
    return found


def line(name: str, threads: int, numel: int, seconds: list[float], used: list[float]) -> str:
    """A row of the table."""
    moved = (8 if name == "copy" else BYTES) * numel
    clock, processor = (moved / statistics.median(each) / 1e9 for each in (seconds, used))
    return f"| {name} | {threads} | {statistics.median(seconds) * 1e3:,.1f} ms | {clock:.1f} | {processor:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=32_000_000, help="elements of all units")
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", help="numbers of threads; by default torch's")
    given = parser.parse_args()
    print("| update | threads | time | GB/s | GB/s of a processor's second |\n|---|---|---|---|---|")
    for threads in map(int, (given.threads or str(torch.get_num_threads())).split(",")):
        torch.set_num_threads(threads)
        for name, times in measure(given.numel, given.units, given.rounds).items():
            print(line(name, threads, given.numel, *times), flush=True)


if __name__ == "__main__":
    main()
