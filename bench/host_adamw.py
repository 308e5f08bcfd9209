"""AdamW on the host, as offloading needs it: GB/s of torch's variants and of DeepSpeed's CPUAdam, in one process; and
a step whose update follows backward beside one whose update is made while backward continues.

    python -m bench.host_adamw [--numel 32000000] [--units 8] [--rounds 5] [--threads 1,16]
    python -m bench.host_adamw --steps [--hidden 512] [--tokens 16] [--device-ms 0] [--rounds 30] [--threads 1]

A unit's slice is one flat fp32 tensor, as ``sw.flat_parameters`` gives it. An update reads the gradient, and reads and
writes master and both moments: 28 bytes for each element at least. The rate is these bytes over the time; that of
copying memory (read and write counted) is the roof. A variant that makes several passes moves more than 28 bytes, and
its rate says so. The variants take turns; shown are the median over the rounds by the clock, and by the processor's
time of all threads, which other programs disturb less.

CPUAdam is there where deepspeed is (``make bench`` installs it); it compiles its kernel with g++ at the first call.

With ``--steps`` two models take turns, a GPT with ``offload_policy="cpu"`` each: one calls ``optimizer.step()`` after
backward, of the other ``sw.optimizer_in_backward`` has a thread update each unit. On a GPU the update needs the host,
and backward the device. Without one both need processors, and the thread gains where one of them is free; with
``--device-ms`` the backward of each block also sleeps so long, as a host does whose device computes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import engine_of

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


class Steps:
    """Steps of a model whose optimizer is on the host.

    Args:
        is_beside: Each unit is updated while backward continues with others; else all of them after it.
        hidden: Width of the model.
        num_tokens: Of a step.
        device_s: The backward of each block sleeps so long.

    Attributes:
        took: Seconds of each step by the clock.
        of_update: Of these the update, or the wait at the end of backward for updates.
    """

    def __init__(self, *, is_beside: bool, hidden: int, num_tokens: int, device_s: float) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokens = torch.randint(0, 8192, (1, num_tokens + 1), device=self.device)
        torch.manual_seed(0)
        sizes = {"num_layers": 8, "hidden": hidden, "vocab_size": 8192, "seq_len": num_tokens}
        model = sw.models.gpt("gpt-nano", device=self.device, **sizes)
        self.model = sw.parallelize(model, sw.ParallelPlan(offload_policy="cpu", merge_units=False))
        for block in self.model.blocks if device_s else ():
            block.register_full_backward_hook(lambda *_: time.sleep(device_s))
        self.optimizer = torch.optim.AdamW(sw.flat_parameters(self.model), lr=1e-4, fused=True)
        self.took: list[float] = []
        self.of_update: list[float] = []
        self._spent = 0.0
        if is_beside:
            sw.optimizer_in_backward(self.model, self.optimizer)
            engine = engine_of(self.model, "bench")
            *others, wait = engine.host_waits  # the last one is for updates
            engine.host_waits = (*others, lambda: self._time(wait))
        self.is_beside = is_beside

    def _time(self, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        self._spent += time.perf_counter() - start

    def make(self) -> None:
        """One step."""
        self._spent, start = 0.0, time.perf_counter()
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        if not self.is_beside:
            self._time(self.optimizer.step)
            self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.took.append(time.perf_counter() - start)
        self.of_update.append(self._spent)


def measure_steps(hidden: int, num_tokens: int, rounds: int, device_s: float) -> dict[str, list[float]]:
    """Seconds by the clock, of steps and of what in them the update takes."""
    after, in_backward = (
        Steps(is_beside=value, hidden=hidden, num_tokens=num_tokens, device_s=device_s) for value in (False, True)
    )
    for _ in range(3 + rounds):
        after.make()
        in_backward.make()
    found = {
        "after backward": after.took,
        "of this the update": after.of_update,
        "beside backward": in_backward.took,
        "of this waiting for updates at the end": in_backward.of_update,
    }
    return {name: each[3:] for name, each in found.items()}  # the first ones make the state


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
    parser.add_argument("--steps", action="store_true", help="time steps with the update after and beside backward")
    parser.add_argument("--hidden", type=int, default=512, help="of the 8 layers of the model whose steps are timed")
    parser.add_argument("--tokens", type=int, default=16, help="of a step; the more, the longer backward takes")
    parser.add_argument("--device-ms", type=float, default=0.0, help="the backward of each block sleeps so long")
    given = parser.parse_args()
    if given.steps:
        torch.set_num_threads(int(given.threads or torch.get_num_threads()))
        print("| update | median | least |\n|---|---|---|")
        for name, seconds in measure_steps(given.hidden, given.tokens, given.rounds, given.device_ms / 1e3).items():
            print(f"| {name} | {statistics.median(seconds) * 1e3:.1f} ms | {min(seconds) * 1e3:.1f} ms |")
        return
    print("| update | threads | time | GB/s | GB/s of a processor's second |\n|---|---|---|---|---|")
    for threads in map(int, (given.threads or str(torch.get_num_threads())).split(",")):
        torch.set_num_threads(threads)
        for name, times in measure(given.numel, given.units, given.rounds).items():
            print(line(name, threads, given.numel, *times), flush=True)


if __name__ == "__main__":
    main()
