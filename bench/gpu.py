"""Our engines on GPUs beside torch's FSDP2 and DDP: GPT-2-medium (350M) and a GPT of 1.3B, in bf16.

One process for each GPU (one GPU: a world of one, over NCCL). Engines take turns, each built anew in its turn, so that
allocated and reserved memory are its own. Batches are as large as fits. Beside step time and memory: allocated memory
over what a dry run says, reserved beyond allocated, the host's time for each unit, kernels of a step, where the host
waits in a steady step, and how much of what copies of an offloaded run take, and of what gathers and reductions take,
is hidden behind computation; and the time and memory of activations that are kept, recomputed, or on the host. One
GPU sends nothing: there each collective occupies its stream for as long as its bytes
would take over a link of 400 Gb/s between 8 ranks.

    make gpu                                        everything marked gpu, then this
    python -m bench.gpu [--rounds 3] [--steps 10] [--models gpt2-medium gpt-1.3b] [--out bench/results]
    torchrun --nproc-per-node 8 -m bench.gpu

Writes ``bench/results/DATE-gpu.md`` and ``.json``, with -2, -3, ... where they are there already.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import torch
from torch import Tensor, distributed, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import shardwise as sw
from bench.files import free_stem
from shardwise.comm.base import Handle
from shardwise.engine.storage.attachment import engine_of
from shardwise.launch.world import join, read_world, shutdown

WARM_UP_STEPS, PROFILED_STEPS = 4, 3
#: Ours, and torch's beside which they stand.
OURS = ("zero3", "zero2", "ddp")
ENGINES = (*OURS, "torch-fsdp2", "torch-ddp")
#: What becomes of activations under zero3: how it is called, and the plan's fields.
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"activation_checkpointing": "full"},
    "on the host": {"offload_activations": True},
    "recomputed, inputs on the host": {"activation_checkpointing": "full", "offload_activations": True},
}
#: Names of models: a preset and what is other than in it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-1.3b": ("gpt2-medium", {"num_layers": 24, "hidden": 2048, "num_heads": 16}),
}
#: Where the device has no memory to fill.
DEFAULT_BATCH = 4
#: Of a parameter under ddp: fp32 value, gradient and two moments, a bf16 copy and its gradient.
STATE_BYTES = 20
#: Share of the device's memory that is to be used: DDP under autocast holds more activations than were measured.
FILL = 0.7
#: The link that stands for a network where there is one GPU, and the ranks that it connects.
LINK_BYTES_PER_S, LINK_RANKS = 400e9 / 8, 8
#: What the profiler calls kernels that communicate: NCCL's, and the one that stands for a link.
MOVING = ("nccl", "spin_kernel")
#: Tokens of a sample where only the host's time is measured.
FEW_TOKENS = 64
#: What a step is called in a profile.
STEP = "steady step"
#: Calls of the CUDA runtime in which the host waits for the device.
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class NoGpuError(SystemExit):
    """There is no CUDA device; ends the script with a message and code 2."""

    def __init__(self) -> None:
        why = "there is none" if torch.version.cuda else f"this torch ({torch.__version__}) is built without CUDA"
        sys.stderr.write(f"bench.gpu measures on CUDA devices, and {why}: run it where torch.cuda.is_available().\n")
        super().__init__(2)


@dataclass(frozen=True)
class Trainer:
    """A model under an engine: one call makes a step."""

    model: nn.Module
    step: Callable[[], Tensor]
    num_units: int = 0


@dataclass
class Turn:
    """One engine's turn.

    Attributes:
        seconds: Of each step.
        allocated_bytes, reserved_bytes: Peaks of the turn above what was there before.
        predicted_bytes: Of allocated memory, by a dry run; ours only.
        losses: Of each step.
    """

    seconds: list[float]
    allocated_bytes: int
    reserved_bytes: int
    predicted_bytes: int | None
    losses: list[float]


# -- engines


def build(name: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    preset, overrides = MODELS.get(name, (name, {}))
    return sw.models.gpt(preset, device=device, **overrides)


def batch_of(model: nn.Module, device: torch.device, samples: int, tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """Random tokens, this rank's; (B, T) each."""
    config = model.config
    generator = torch.Generator().manual_seed(distributed.get_rank())
    size = samples, min(tokens or config.seq_len, config.seq_len) + 1
    drawn = torch.randint(0, config.vocab_size, size, generator=generator).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def batch_that_fits(memory_bytes: int, num_parameters: int, sample_bytes: int) -> int:
    """The largest power of two of samples beside whose activations the states of ddp fit; 0 where none does."""
    left = FILL * memory_bytes - STATE_BYTES * num_parameters
    count = int(left // max(sample_bytes, 1))
    return 1 << (count.bit_length() - 1) if count > 0 else 0


def choose_batch(name: str, device: torch.device) -> int:
    """Samples per rank such that the device is full.

    Collective:
        All-reduce: the fewest of all ranks.
    """
    if device.type != "cuda":
        return DEFAULT_BATCH
    model = build(name, torch.device("meta"))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    memory = torch.cuda.get_device_properties(device).total_memory
    count = 0
    if STATE_BYTES * num_parameters < FILL * memory:
        model = build(name, device).bfloat16()
        peaks = [_peak_of(model, batch_of(model, device, samples)) for samples in (1, 2)]
        count = batch_that_fits(memory, num_parameters, peaks[1] - peaks[0])
    fewest = torch.tensor([count], device=device)
    distributed.all_reduce(fewest, op=distributed.ReduceOp.MIN)
    return int(fewest)


def _peak_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Bytes that forward and backward allocate above what is there."""
    model.zero_grad()
    before = clean(batch[0].device)[0]
    model(*batch).backward()
    model.zero_grad()
    return torch.cuda.max_memory_allocated(batch[0].device) - before


def plan_of(engine: str, **plan: Any) -> sw.ParallelPlan:
    precision = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")
    return sw.ParallelPlan(strategy=engine, mp_policy=precision, **plan)


def trainer(
    engine: str, name: str, device: torch.device, samples: int, *, tokens: int | None = None, **plan: object
) -> Trainer:
    """The engine in bf16 with fp32 masters (DDP: autocast, which is what it has), AdamW fused where the device can.

    Args:
        engine: One of ``ENGINES``, or ``plain``: the model by itself under autocast.
        name: Of the model.
        device: Where.
        samples: Of this rank.
        tokens: Of a sample; by default as many as the model takes.
        plan: Further fields of our plan.
    """
    model = build(name, device)
    batch = batch_of(model, device, samples, tokens)
    if engine == "plain":
        wrapped: nn.Module = model
    elif engine == "torch-ddp":
        wrapped = nn.parallel.DistributedDataParallel(
            model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True
        )
    elif engine == "torch-fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        wrapped = model
    else:
        wrapped = sw.parallelize(model, plan_of(engine, **plan))
    is_fused = device.type == "cuda" and plan.get("offload_policy", "none") == "none"
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=is_fused)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=engine in {"torch-ddp", "plain"}):
            loss = wrapped(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    num_units = len(engine_of(wrapped, "bench").units) if engine in OURS else 0
    return Trainer(wrapped, step, num_units)


def predicted_bytes(engine: str, name: str, samples: int) -> int:
    """The peak of tensors in a step on this rank, by a dry run of the engine on meta."""
    meta = torch.device("meta")
    found = sw.dry_run(
        lambda: build(name, meta),
        plan_of(engine),
        world_size=distributed.get_world_size(),
        rank=distributed.get_rank(),
        batch=batch_of(build(name, meta), meta, samples),
        loss_fn=None,
        forward=lambda model, batch: model(*batch),
        backend="nccl",
    )
    return sum(found.bytes_by_category.values())


# -- measuring


def clean(device: torch.device) -> tuple[int, int]:
    """Free what can be freed; what is allocated and reserved then."""
    gc.collect()
    if device.type != "cuda":
        return 0, 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def take_turn(  # noqa: PLR0917 - in the order of trainer's
    engine: str,
    name: str,
    device: torch.device,
    samples: int,
    steps: int,
    predicted: int | None = None,
    **plan: object,
) -> Turn:
    """Build, warm up, time, and forget."""
    allocated, reserved = clean(device)
    trained = trainer(engine, name, device, samples, **plan)
    for _ in range(WARM_UP_STEPS):
        trained.step()
    wait_for_all(device)
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(trained.step())
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    is_cuda = device.type == "cuda"
    return Turn(
        seconds,
        torch.cuda.max_memory_allocated(device) - allocated if is_cuda else 0,
        torch.cuda.max_memory_reserved(device) - reserved if is_cuda else 0,
        predicted,
        [loss.item() for loss in losses],
    )


def wait_for_all(device: torch.device) -> None:
    """Return when every rank has come and its device has done everything."""
    distributed.all_reduce(torch.zeros(1, device=device))
    synchronize(device)


def host_seconds(engine: str, name: str, device: torch.device, rounds: int) -> tuple[float, int]:
    """What the host takes to issue a step of few tokens, the device being idle at its beginning; and the units."""
    clean(device)
    trained = trainer(engine, name, device, 1, tokens=FEW_TOKENS)
    seconds = []
    for _ in range(WARM_UP_STEPS + 5 * rounds):
        wait_for_all(device)
        start = time.perf_counter()
        trained.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP_STEPS:]), trained.num_units


def profiled_steps(engine: str, name: str, device: torch.device, samples: int, **plan: object) -> list[Any]:
    """The profiler's events of steady steps."""
    clean(device)
    trained = trainer(engine, name, device, samples, **plan)
    for _ in range(WARM_UP_STEPS):
        trained.step()
    wait_for_all(device)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                trained.step()
        synchronize(device)
    return list(found.events())


@contextlib.contextmanager
def a_link() -> Iterator[None]:
    """Collectives over NCCL occupy their stream as if their bytes went over ``LINK_BYTES_PER_S`` to ``LINK_RANKS``."""
    from shardwise.comm.nccl import NcclComm

    cycles_per_s = spin_cycles_per_s()
    share = (LINK_RANKS - 1) / LINK_RANKS / LINK_BYTES_PER_S
    plain_gather, plain_sum = NcclComm.all_gather, NcclComm.reduce_scatter

    def occupy(comm: NcclComm, buffer: Tensor) -> None:
        stream = comm._stream  # noqa: SLF001 - stands for what the link does on it
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(buffer.nbytes * share * cycles_per_s))  # noqa: SLF001 - torch's tests use it too

    def all_gather(self: NcclComm, buffer: Tensor, **options: Any) -> Handle:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        occupy(self, buffer)
        return plain_gather(self, buffer, **options)

    def reduce_scatter(self: NcclComm, buffer: Tensor, out: Tensor, **options: Any) -> Handle:
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        occupy(self, buffer)
        return plain_sum(self, buffer, out, **options)

    NcclComm.all_gather, NcclComm.reduce_scatter = all_gather, reduce_scatter
    try:
        yield
    finally:
        NcclComm.all_gather, NcclComm.reduce_scatter = plain_gather, plain_sum


def spin_cycles_per_s() -> float:
    """How fast ``torch.cuda._sleep`` counts."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 50_000_000
    for _ in range(2):  # the first one loads the kernel
        begin.record()
        torch.cuda._sleep(cycles)  # noqa: SLF001
        end.record()
        torch.cuda.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


def waits(events: Sequence[Any]) -> dict[str, int]:
    """Calls inside of steps in which the host waits for the device, by name. The profiler's own are outside."""
    steps = [event.time_range for event in events if event.name == STEP and event.device_type == DeviceType.CPU]
    found: dict[str, int] = {}
    for event in events:
        at = event.time_range.start
        if event.name in WAITS and any(step.start <= at < step.end for step in steps):
            found[event.name] = found.get(event.name, 0) + 1
    return found


def overlap(spans: Sequence[tuple[str, float, float]], moving: Sequence[str] = ("HtoD", "DtoH")) -> tuple[float, float]:
    """Time of what moves data, and how much of it lies within kernels that compute.

    Args:
        spans: Name, begin and end of everything on the device.
        moving: Parts of the names of what moves data: by default copies between host and device.
    """
    moves = [(start, end) for name, start, end in spans if any(part in name for part in moving)]
    others = (*moving, *MOVING, "Memcpy", "Memset")
    kernels = merged([(start, end) for name, start, end in spans if not any(part in name for part in others)])
    hidden = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in moves for begin, stop in kernels)
    return sum(end - start for start, end in moves), hidden


def num_kernels(spans: Sequence[tuple[str, float, float]]) -> float:
    """Kernels of a step, without copies and fills."""
    return sum("Memcpy" not in name and "Memset" not in name for name, _, _ in spans) / PROFILED_STEPS


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, so that kernels that run side by side are not counted twice."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def device_spans(events: Sequence[Any]) -> list[tuple[str, float, float]]:
    on_device = [event for event in events if event.device_type == DeviceType.CUDA and not _is_label(event)]
    return [(event.name, event.time_range.start, event.time_range.end) for event in on_device]


def _is_label(event: Any) -> bool:
    """The profiler repeats on the device what ``record_function`` named on the host."""
    return event.name == STEP or event.name.startswith(
        ("shardwise::", "FSDP::", "Optimizer.", "DistributedDataParallel")
    )


# -- results


@dataclass
class Measured:
    """Of one model.

    Attributes:
        name: The model.
        samples: Per rank; 0 where the device is too small for it.
        turns: By engine.
        kernels: Of a step, by engine.
        host_us: Of a step, by engine and of the plain model.
        num_units: Of zero3.
        waits: In which calls the host waits for the device in steady steps of zero3.
        offload_us: Time of copies of zero3 with offload, and how much of it is hidden.
        collectives_us: Time of gathers and reductions of zero3, and how much of it is hidden.
        ways: Turns of zero3, by what becomes of activations.
    """

    name: str
    samples: int
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    host_us: dict[str, float] = field(default_factory=dict)
    num_units: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    offload_us: tuple[float, float] = (0.0, 0.0)
    collectives_us: tuple[float, float] = (0.0, 0.0)
    ways: dict[str, list[Turn]] = field(default_factory=dict)


def report(models: Sequence[Measured], facts: dict[str, Any], title: str, tests: Sequence[str] = ()) -> str:
    """One page of Markdown."""
    lines = [f"# Measurements on a GPU of {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    for found in models:
        lines += [f"## {found.name}", ""]
        lines += _lines_of(found) if found.samples else ["The device has too little memory for it.", ""]
    lines += [
        "Wanted: reserved over allocated under 2% for ours, allocated within 2% of the prediction, zero3 at most 1.00"
    ]
    lines += ["of FSDP2's step, no waits."]
    if tests:
        lines += ["", "## Tests marked gpu", "", *(f"- {line}" for line in tests)]
    return "\n".join(lines) + "\n"


def _lines_of(found: Measured) -> list[str]:
    marks = {engine: [statistics.median(turn.seconds) for turn in each] for engine, each in found.turns.items()}
    lines = [f"{found.samples} samples per rank.", ""]
    head = "engine", "step", "zero3's over it, by round", "allocated", "of the prediction", "reserved", "reserved more"
    lines += [f"| {' | '.join((*head, 'host', 'kernels', 'last loss'))} |", "| --- |" + " ---: |" * 9]
    for engine, each in found.turns.items():
        ratios = [ours / theirs for ours, theirs in zip(marks["zero3"], marks[engine], strict=True)]
        allocated, predicted = max(turn.allocated_bytes for turn in each), each[0].predicted_bytes
        reserved = max(turn.reserved_bytes for turn in each)
        cells = (
            engine,
            f"{statistics.median(marks[engine]) * 1e3:.1f} ms",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{allocated / 1e9:.2f} GB",
            "-" if predicted is None else f"{allocated / predicted:.3f}",
            f"{reserved / 1e9:.2f} GB",
            f"{reserved / allocated - 1:.1%}" if allocated else "-",
            f"{found.host_us[engine] / 1e3:.1f} ms",
            f"{found.kernels[engine]:.0f}",
            f"{each[0].losses[-1]:.6f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    per_unit = (found.host_us["zero3"] - found.host_us["plain"]) / max(found.num_units, 1)
    beside = f"beyond the plain model's {found.host_us['plain'] / 1e3:.1f} ms"
    return [
        *lines,
        "",
        f"- The host takes {per_unit:.0f} us for each unit of zero3 ({found.num_units}) {beside}.",
        f"- The host waits for the device in {PROFILED_STEPS} steady steps of zero3: {found.waits or 'nowhere'}.",
        f"- Gathers and reductions of zero3, {_share(found.collectives_us)}.",
        f"- Copies with offload_policy=cpu, {_share(found.offload_us)}.",
        "",
        *_lines_of_ways(found.ways),
    ]


def _lines_of_ways(ways: dict[str, list[Turn]]) -> list[str]:
    """What becomes of activations under zero3: time and memory of each way over those of keeping them."""
    if not ways:
        return []
    lines = ["| activations, zero3 | step | over kept, by round | allocated | last loss |", "| --- |" + " ---: |" * 4]
    kept = [statistics.median(turn.seconds) for turn in ways["kept"]]
    for way, turns in ways.items():
        own = [statistics.median(turn.seconds) for turn in turns]
        ratios = [ours / theirs for ours, theirs in zip(own, kept, strict=True)]
        step = f"{statistics.median(own) * 1e3:.1f} ms"
        over = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        allocated = f"{max(turn.allocated_bytes for turn in turns) / 1e9:.2f} GB"
        lines.append(f"| {way} | {step} | {over} | {allocated} | {turns[0].losses[-1]:.6f} |")
    return [*lines, ""]


def _share(times_us: tuple[float, float]) -> str:
    total, hidden = times_us
    return f"of {total / 1e3:.1f} ms hidden behind computation: {hidden / total:.0%}" if total else "none were seen"


def measure(name: str, device: torch.device, rounds: int, steps: int) -> Measured:
    """Everything of one model.

    Collective:
        That of the engines. All ranks must call.
    """
    samples = choose_batch(name, device)
    found = Measured(name, samples)
    if not samples:
        return found
    predicted = {engine: predicted_bytes(engine, name, samples) for engine in OURS}
    found.turns = {engine: [] for engine in ENGINES}
    for number in range(rounds):
        for engine in ENGINES[:: -1 if number % 2 else 1]:
            found.turns[engine].append(take_turn(engine, name, device, samples, steps, predicted.get(engine)))
    found.ways = {way: [] for way in ACTIVATIONS}
    for number in range(rounds):
        for way in [*ACTIVATIONS][:: -1 if number % 2 else 1]:
            found.ways[way].append(take_turn("zero3", name, device, samples, steps, **ACTIVATIONS[way]))
    for engine in (*ENGINES, "plain"):
        seconds, num_units = host_seconds(engine, name, device, rounds)
        found.host_us[engine] = seconds * 1e6
        found.num_units = num_units if engine == "zero3" else found.num_units
    for engine in ENGINES:
        events = profiled_steps(engine, name, device, samples)
        spans = device_spans(events)
        found.kernels[engine] = num_kernels(spans)
        if engine == "zero3":
            found.waits, found.collectives_us = waits(events), overlap(spans, MOVING)
    if device.type == "cuda" and distributed.get_world_size() == 1:
        with a_link():
            found.collectives_us = overlap(device_spans(profiled_steps("zero3", name, device, samples)), MOVING)
    found.offload_us = overlap(device_spans(profiled_steps("zero3", name, device, samples, offload_policy="cpu")))
    clean(device)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of an engine in a round")
    parser.add_argument("--models", nargs="+", default=["gpt2-medium", "gpt-1.3b"], help="of shardwise.models")
    parser.add_argument("--tests", type=Path, help="JUnit file of the tests marked gpu, for the page")
    parser.add_argument("--count", action="store_true", help="print the number of GPUs, and nothing else")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise NoGpuError
    if options.count:
        print(torch.cuda.device_count())
        return
    world = read_world()
    device = join(world)
    models = [measure(name, device, options.rounds, options.steps) for name in options.models]
    if world.rank == 0:
        link = f"{LINK_BYTES_PER_S * 8 / 1e9:.0f} Gb/s between {LINK_RANKS} ranks, by kernels that wait as long"
        facts = {
            "device": f"{world.size} x {torch.cuda.get_device_name(device)}",
            "torch": torch.__version__,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "link": link if world.size == 1 else "NCCL's own",
            "timing": f"{options.rounds} rounds of {options.steps} steps, engines in turns, median of a round",
            "host": f"median time to issue a step of one sample of {FEW_TOKENS} tokens",
        }
        write(options.out, models, facts, outcomes(options.tests))
    shutdown()


def outcomes(junit: Path | None) -> list[str]:
    """One line for all tests that pytest ran, and one for each that failed or was skipped; of what it wrote."""
    if junit is None or not junit.exists():
        return ["not run"]
    suites = ET.parse(junit).getroot().iter("testsuite")  # noqa: S314 - our own pytest wrote it
    cases = [case for suite in suites for case in suite.iter("testcase")]
    lines = []
    for case in cases:
        for kind in ("failure", "error", "skipped"):
            found = case.find(kind)
            if found is not None:
                message = (found.get("message") or "").strip().splitlines() or [""]
                lines.append(f"{kind}: {case.get('classname')}.{case.get('name')}: {message[0][:200]}")
    return [f"{len(cases) - len(lines)} of {len(cases)} passed", *lines]


def write(folder: Path, models: Sequence[Measured], facts: dict[str, Any], tests: Sequence[str] = ()) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, f"{dt.datetime.now(tz=dt.UTC).date().isoformat()}-gpu")
    text = report(models, facts, stem, tests)
    values = {"facts": facts, "models": [asdict(found) for found in models]}
    (folder / f"{stem}.md").write_text(text, "utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
