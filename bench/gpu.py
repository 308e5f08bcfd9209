"""GPT-2-medium in bf16 on GPUs: zero3 against torch's FSDP2 and DDP.

One process for each GPU (one GPU: a world of one, over NCCL). Engines take turns, each built anew in its turn, so that
allocated and reserved memory are its own. Beside step time: allocated memory over the formula, what the host waits for
in a steady step of zero3, and how much of the copies of an offloaded run lies beside computation.

    python -m bench.gpu [--rounds 5] [--steps 10] [--out bench/results]
    torchrun --nproc-per-node 8 -m bench.gpu

Writes ``bench/results/DATE-gpu.md`` and ``.json``, with -2, -3, ... where they are there already.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

import shardwise as sw
from bench.files import free_stem
from shardwise.comm.launch import init_process_group, read_world, shutdown
from shardwise.fsdp.attach import runtime_of
from shardwise.fsdp.summary import predict, predict_activations
from shardwise.recipe.activations import measure_activations
from shardwise.spec.waiting import Activations

BATCH, WARM_UP_STEPS = 4, 4
ENGINES = ("zero3", "torch-fsdp2", "torch-ddp")
#: What a step is called in a profile.
STEP = "steady step"
#: Calls of the CUDA runtime in which the host waits for the device.
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class NoGpuError(SystemExit):
    """There is no CUDA device; ends the script with a message and code 2."""

    def __init__(self) -> None:
        why = "there is none" if torch.version.cuda else f"this torch ({torch.__version__}) is built without CUDA"
        sys.stderr.write(f"bench.gpu measures on CUDA devices, and {why}.\n  Run it where torch.cuda.is_available().\n")
        super().__init__(2)


@dataclass(frozen=True)
class Trainer:
    """A model under an engine: one call makes a step."""

    model: nn.Module
    step: Callable[[], Tensor]


@dataclass
class Turn:
    """One engine's turn.

    Attributes:
        seconds: Of each step.
        allocated_bytes, reserved_bytes: Peaks of the turn above what was there before.
        predicted_bytes: Of allocated memory, by the formula; ours only.
        losses: Of each step.
    """

    seconds: list[float]
    allocated_bytes: int
    reserved_bytes: int
    predicted_bytes: int | None
    losses: list[float]


# -- engines


def build(preset: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt(preset, device=device)


def batch_of(model: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens, this rank's; (B, T) each."""
    config = model.config
    generator = torch.Generator().manual_seed(distributed.get_rank())
    tokens = torch.randint(0, config.vocab_size, (BATCH, config.seq_len + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trainer(engine: str, preset: str, device: torch.device, **plan: object) -> Trainer:
    """The engine in bf16 with fp32 masters (DDP: autocast, which is what it has), AdamW fused where the device can."""
    model = build(preset, device)
    batch = batch_of(model, device)
    if engine == "torch-ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(
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
        precision = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")
        wrapped = sw.parallelize(model, sw.ParallelPlan(strategy=engine, mp_policy=precision, **plan))
    is_fused = device.type == "cuda" and plan.get("offload_policy", "none") == "none"
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, fused=is_fused)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=engine == "torch-ddp"):
            loss = wrapped(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(wrapped, step)


def activations_of(preset: str, device: torch.device) -> Activations:
    """What forward and backward of the plain model in bf16 hold beside parameters and gradients."""
    from shardwise.train.compare.count import TensorCount

    with TensorCount(device.type) as count:
        model = build(preset, device).bfloat16()
        batch = batch_of(model, device)
        found = measure_activations(model, count, lambda: model(*batch).backward())
        count.forget()
    return found


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


def take_turn(engine: str, preset: str, device: torch.device, steps: int, activations: Activations) -> Turn:
    """Build, warm up, time, and forget."""
    allocated, reserved = clean(device)
    trained = trainer(engine, preset, device)
    for _ in range(WARM_UP_STEPS):
        trained.step()
    distributed.barrier()
    synchronize(device)
    seconds, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(trained.step())
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    predicted = None
    if engine not in {"torch-ddp", "torch-fsdp2"}:
        runtime = runtime_of(trained.model, "bench")
        predicted = predict(runtime).on_device + predict_activations(runtime, activations)
    is_cuda = device.type == "cuda"
    return Turn(
        seconds,
        torch.cuda.max_memory_allocated(device) - allocated if is_cuda else 0,
        torch.cuda.max_memory_reserved(device) - reserved if is_cuda else 0,
        predicted,
        [loss.item() for loss in losses],
    )


def profiled_steps(device: torch.device, preset: str, **plan: object) -> list[Any]:
    """The profiler's events of three steady steps of zero3."""
    clean(device)
    trained = trainer("zero3", preset, device, **plan)
    for _ in range(WARM_UP_STEPS):
        trained.step()
    synchronize(device)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=kinds) as found:
        for _ in range(3):
            with record_function(STEP):
                trained.step()
    return list(found.events())


def waits(events: Sequence[Any]) -> dict[str, int]:
    """Calls inside of steps in which the host waits for the device, by name. The profiler's own are outside."""
    steps = [event.time_range for event in events if event.name == STEP and event.device_type == DeviceType.CPU]
    found: dict[str, int] = {}
    for event in events:
        at = event.time_range.start
        if event.name in WAITS and any(step.start <= at < step.end for step in steps):
            found[event.name] = found.get(event.name, 0) + 1
    return found


def overlap(spans: Sequence[tuple[str, float, float]]) -> tuple[float, float]:
    """Time of the copies between host and device, and how much of it lies within kernels.

    Args:
        spans: Name, begin and end of everything on the device.
    """
    copies = [(start, end) for name, start, end in spans if "HtoD" in name or "DtoH" in name]
    kernels = merged([(start, end) for name, start, end in spans if "Memcpy" not in name and "Memset" not in name])
    hidden = sum(max(0.0, min(end, stop) - max(start, begin)) for start, end in copies for begin, stop in kernels)
    return sum(end - start for start, end in copies), hidden


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
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    return [(event.name, event.time_range.start, event.time_range.end) for event in on_device]


# -- results


def report(turns: dict[str, list[Turn]], found: dict[str, Any], facts: dict[str, Any], title: str) -> str:
    """Tables as Markdown."""
    marks = {engine: [statistics.median(turn.seconds) for turn in each] for engine, each in turns.items()}
    lines = [f"# Measurements on a GPU of {title}", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| engine | step | zero3's over it, by round | allocated | of the formula | reserved | last loss |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for engine, each in turns.items():
        ratios = [ours / theirs for ours, theirs in zip(marks["zero3"], marks[engine], strict=True)]
        allocated, predicted = max(turn.allocated_bytes for turn in each), each[0].predicted_bytes
        cells = (
            engine,
            f"{statistics.median(marks[engine]) * 1e3:.1f} ms",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{allocated / 1e9:.2f} GB",
            "-" if predicted is None else f"{allocated / predicted:.3f}",
            f"{max(turn.reserved_bytes for turn in each) / 1e9:.2f} GB",
            f"{each[0].losses[-1]:.6f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"The host waits for the device in three steady steps of zero3: {found['waits'] or 'nowhere'}."]
    copied, hidden = found["copied_us"], found["hidden_us"]
    share = f"{hidden / copied:.0%}" if copied else "nothing was copied"
    lines += [f"With offload_policy=cpu, of {copied / 1e3:.1f} ms of copies beside computation: {share}."]
    return "\n".join(lines) + "\n"


def measure(preset: str, device: torch.device, rounds: int, steps: int) -> tuple[dict[str, list[Turn]], dict[str, Any]]:
    """Everything.

    Collective:
        That of the engines. All ranks must call.
    """
    activations = activations_of(preset, device)
    turns: dict[str, list[Turn]] = {engine: [] for engine in ENGINES}
    for number in range(rounds):
        for engine in ENGINES[:: -1 if number % 2 else 1]:
            turns[engine].append(take_turn(engine, preset, device, steps, activations))
    found: dict[str, Any] = {"waits": waits(profiled_steps(device, preset))}
    spans = device_spans(profiled_steps(device, preset, offload_policy="cpu"))
    found["copied_us"], found["hidden_us"] = overlap(spans)
    return turns, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of an engine in a round")
    parser.add_argument("--preset", default="gpt2-medium", help="model of shardwise.models")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise NoGpuError
    world = read_world()
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    init_process_group(world, device)
    turns, found = measure(options.preset, device, options.rounds, options.steps)
    if world.rank == 0:
        facts = {
            "device": f"{world.size} x {torch.cuda.get_device_name(device)}",
            "torch": torch.__version__,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "model": f"{options.preset}, bf16, {BATCH} samples per rank",
            "timing": f"{options.rounds} rounds of {options.steps} steps, engines in turns, median of a round",
        }
        write(options.out, turns, found, facts)
    shutdown()


def write(folder: Path, turns: dict[str, list[Turn]], found: dict[str, Any], facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = free_stem(folder, f"{dt.datetime.now(tz=dt.UTC).date().isoformat()}-gpu")
    text = report(turns, found, facts, stem)
    values = {
        "facts": facts,
        "found": found,
        "turns": {name: [asdict(turn) for turn in each] for name, each in turns.items()},
    }
    (folder / f"{stem}.md").write_text(text, "utf-8")
    (folder / f"{stem}.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
