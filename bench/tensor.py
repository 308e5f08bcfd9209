"""Measure tensor parallelism beside torch's own: two Gloo processes that share one model, in turns with DTensor's.

``torch-dtensor`` is ``parallelize_module`` with ``ColwiseParallel`` and ``RowwiseParallel`` as its tutorial has them,
the output projection left divided and the loss under ``loss_parallel``. ``single`` is the whole model without
parallelism, in both processes at once. All train the same model code from the same weights on the same batches with
``torch.optim.AdamW``. Of the GPT, whose query, key and value projections are one layer, DTensor gets the rows in the
order in which its even parts are whole heads (what it trains is the same model).

Host cost per layer is what a step of an engine takes above one of ``single``, over the number of layers, at sizes at
which arithmetic takes next to nothing. Writes ``bench/results/DATE-tensor.md``.

    OMP_NUM_THREADS=1 python -m bench.tensor [--rounds 5] [--only gpt-host] [--profile] [--out bench/results]

Takes about three minutes on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import datetime as dt
import io
import itertools
import pstats
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate

import shardwise as sw
from bench.compare.peer import LEARNING_RATE, Trainee
from bench.compare.request import CASES, SEED, WARM_UP_STEPS, Case
from bench.compare.run import machine_facts
from bench.files import free_stem
from shardwise.models.transformer import Attention
from shardwise.testing import run_on_ranks

TP = 2
OURS, THEIRS, SINGLE = "shardwise", "torch-dtensor", "single"
ENGINES = (SINGLE, OURS, THEIRS)
#: Steps that an engine makes in one turn, by case.
STEPS = {"host": 5, "compute": 2}
#: Largest relative difference of a loss from that of one process, in the first steps: sums are split, in fp32.
LOSS_TOLERANCE, LOSS_STEPS = 1e-5, 3


@dataclass(frozen=True)
class Workload:
    """A model at the sizes of a case of ``bench.compare``."""

    family: str
    case: Case

    @property
    def name(self) -> str:
        return f"{self.family}-{self.case.name}"

    @property
    def num_layers(self) -> int:
        return self.case.model["num_layers"]

    def build(self) -> nn.Module:
        torch.manual_seed(SEED)
        if self.family == "gpt":
            return sw.models.gpt("gpt-tiny", **self.case.model)
        import transformers as tf

        sizes = self.case.model
        config = tf.LlamaConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["hidden"],
            intermediate_size=4 * sizes["hidden"],
            num_hidden_layers=sizes["num_layers"],
            num_attention_heads=sizes["num_heads"],
            num_key_value_heads=sizes["num_heads"],
            max_position_embeddings=sizes["seq_len"],
            use_cache=False,
        )
        return tf.LlamaForCausalLM(config)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        shape = self.case.batch, self.case.seq_len
        return torch.randint(0, self.case.model["vocab_size"], shape, generator=generator)

    def loss(self, model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids, ids) if self.family == "gpt" else model(input_ids=ids, labels=ids).loss

    @property
    def styles(self) -> dict[str, Any]:
        """For ``parallelize_module``."""
        column, row = ColwiseParallel, RowwiseParallel
        head, embedding = partial(column, use_local_output=False), partial(row, input_layouts=Replicate())
        if self.family == "gpt":
            layers = {"attention.qkv": column, "attention.out": row, "mlp.up": column, "mlp.down": row}
            layers = {f"blocks.*.{name}": style for name, style in layers.items()}
            return {name: make() for name, make in (layers | {"token_embedding": embedding, "lm_head": head}).items()}
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        layers = dict.fromkeys(columns, column) | dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), row)
        layers = {f"model.layers.*.{name}": style for name, style in layers.items()}
        return {name: make() for name, make in (layers | {"model.embed_tokens": embedding, "lm_head": head}).items()}


WORKLOADS = {
    each.name: each
    for case in ("host", "compute")
    for family in ("gpt", "llama")
    for each in [Workload(family, CASES[case])]
}


# -- on a rank


def with_dtensor(model: nn.Module, workload: Workload) -> nn.Module:
    """``model``, cut by torch."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.num_heads //= TP
            for parameter in module.qkv.parameters():  # (3, ranks, features of a rank, ...) to ranks first
                parts = parameter.data.unflatten(0, (3, TP, -1))
                parameter.data = parts.transpose(0, 1).flatten(0, 2).contiguous()
    return parallelize_module(model, init_device_mesh("cpu", (TP,)), workload.styles)


def trainee(engine: str, workload: Workload) -> Trainee:
    """The model under an engine."""
    model = workload.build()
    if engine == OURS:
        sw.parallelize(model, sw.ParallelPlan(tp=TP))
    elif engine == THEIRS:
        with_dtensor(model, workload)
    return Trainee.with_optimizer(model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE))


def step(engine: str, workload: Workload, under: Trainee, ids: Tensor) -> tuple[Tensor, float, float]:
    """The loss, the seconds of forward and backward, and those of the step."""
    distributed.barrier()
    begin = time.perf_counter()
    with loss_parallel() if engine == THEIRS else contextlib.nullcontext():
        loss = workload.loss(under.model, ids)
        under.backward(loss)
    middle = time.perf_counter()
    under.update()
    return loss.detach(), middle - begin, time.perf_counter() - begin


def value_of(loss: Tensor) -> float:
    return (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).item()


def turns(name: str, rounds: int) -> dict[str, Any]:
    """Seconds of every step, by engine, and its losses; for forward and backward alone, and for all of it."""
    warnings.filterwarnings("ignore")  # of the peer's and transformers'
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    trainees = {engine: trainee(engine, workload) for engine in ENGINES}
    losses: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    parts: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
    wholes: dict[str, list[list[float]]] = {engine: [] for engine in ENGINES}
    done = 0
    for turn in range(-1, rounds):
        count = STEPS[workload.case.name] if turn >= 0 else WARM_UP_STEPS
        for engine in ENGINES:
            if engine == SINGLE and turn >= 0 and workload.case.name == "compute":
                continue  # its steps take long, and nothing is set beside them
            found = [step(engine, workload, trainees[engine], workload.batch(done + index)) for index in range(count)]
            losses[engine] += [value_of(loss) for loss, _, _ in found]
            if turn >= 0:
                parts[engine].append([part for _, part, _ in found])
                wholes[engine].append([whole for _, _, whole in found])
        done += count
    return {"losses": losses, "forward and backward": parts, "step": wholes}


def profiled(name: str, engine: str) -> str:
    """Where an engine's time goes, on a rank."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    under = trainee(engine, workload)
    for index in range(WARM_UP_STEPS):
        step(engine, workload, under, workload.batch(index))
    functions = cProfile.Profile()
    functions.enable()
    for index in range(3):
        step(engine, workload, under, workload.batch(index))
    functions.disable()
    text = io.StringIO()
    pstats.Stats(functions, stream=text).sort_stats("tottime").print_stats(30)
    return f"== {name}, {engine}, 3 steps\n{text.getvalue()}"


# -- ratios


def representatives(workload: Workload, rounds: Sequence[Sequence[float]]) -> list[float]:
    """One number for each round."""
    return [min(each) if workload.case.statistic == "min" else statistics.median(each) for each in rounds]


def host_cost(workload: Workload, times: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    """Seconds for each layer above one process, by round."""
    plain = representatives(workload, times[SINGLE])
    return {
        engine: [
            (t - p) / workload.num_layers for t, p in zip(representatives(workload, times[engine]), plain, strict=True)
        ]
        for engine in (OURS, THEIRS)
    }


def step_time(workload: Workload, times: dict[str, list[list[float]]]) -> dict[str, list[float]]:
    return {engine: representatives(workload, times[engine]) for engine in (OURS, THEIRS)}


@dataclass(frozen=True)
class Target:
    """A ratio of ours to theirs."""

    what: str
    case: str
    part: str
    limit: float | None
    measure: Callable[[Workload, dict[str, list[list[float]]]], dict[str, list[float]]]

    def rows(self, found: dict[str, dict[str, Any]]) -> Iterator[str]:
        for name, measured in found.items():
            workload = WORKLOADS[name]
            if workload.case.name != self.case:
                continue
            values = self.measure(workload, measured[self.part])
            ratios = [ours / theirs for ours, theirs in zip(values[OURS], values[THEIRS], strict=True)]
            limit, verdict = "-", ""
            if self.limit is not None:
                limit, verdict = f"≤ {self.limit}", "met" if statistics.median(ratios) <= self.limit else "MISSED"
            ours, theirs = (_ms(statistics.median(values[engine])) for engine in (OURS, THEIRS))
            yield (
                f"| {self.what} | {name} | {ours} | {theirs} | {limit} | {statistics.median(ratios):.3f}"
                f" ({len(ratios)}: {min(ratios):.2f} to {max(ratios):.2f}) | {verdict} |"
            )


TARGETS = (
    Target("host cost per layer", "host", "step", 0.3, host_cost),
    Target("the same without the optimizer", "host", "forward and backward", None, host_cost),
    Target("step", "host", "step", None, step_time),
    Target("step", "compute", "step", 0.95, step_time),
    Target("forward and backward", "compute", "forward and backward", None, step_time),
)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def loss_row(found: dict[str, dict[str, Any]]) -> str:
    gaps = {
        engine: max(
            abs(loss - expected) / abs(expected)
            for measured in found.values()
            for loss, expected in itertools.islice(
                zip(measured["losses"][engine], measured["losses"][SINGLE], strict=False), LOSS_STEPS
            )
        )
        for engine in (OURS, THEIRS)
    }
    verdict = "met" if gaps[OURS] <= LOSS_TOLERANCE else "MISSED"
    return (
        f"| losses of {LOSS_STEPS} steps, largest difference from one process | {', '.join(found)} | {gaps[OURS]:.1e}"
        f" | {gaps[THEIRS]:.1e} | ≤ {LOSS_TOLERANCE:.0e} | - | {verdict} |"
    )


def table(found: dict[str, dict[str, Any]], rounds: int) -> Iterator[str]:
    """Lines of the results."""
    yield "| what | case | shardwise | DTensor | target | ratio (rounds: lowest to highest) | |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | --- |"
    for target in TARGETS:
        yield from target.rows(found)
    yield loss_row(found)
    yield ""
    for name in found:
        case = WORKLOADS[name].case
        yield f"- {name}: {case} ({case.statistic} of {STEPS[case.name]} steps a round)"
    yield (
        f"- {rounds} rounds, engines in turns within one run, tp={TP} over Gloo, fp32, `torch.optim.AdamW`; ratios are"
        " medians of per-round ratios"
    )
    yield "- " + ", ".join(f"{key} {value}" for key, value in machine_facts().items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(WORKLOADS), action="append", help="this one; may be repeated")
    parser.add_argument("--profile", action="store_true", help="print where both engines' time goes instead")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = options.only or list(WORKLOADS)
    if options.profile:
        for name in names:
            print(*(run_on_ranks(profiled, TP, name, engine, timeout_s=250)[0] for engine in (OURS, THEIRS)), sep="\n")
        return
    found = {}
    for name in names:
        found[name] = run_on_ranks(turns, TP, name, options.rounds, timeout_s=250)[0]
        print(f"measured: {name}", flush=True)
    stem = free_stem(options.out, f"{dt.datetime.now(tz=dt.UTC).date().isoformat()}-tensor")
    lines = [f"# Tensor parallelism beside DTensor, {stem.removesuffix('-tensor')}", "", *table(found, options.rounds)]
    command = " ".join(
        ["python -m bench.tensor", f"--rounds {options.rounds}", *(f"--only {name}" for name in options.only or ())]
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{stem}.md").write_text("\n".join([*lines, f"- `{command}`"]) + "\n", "utf-8")
    print("\n".join(lines))
    print(f"written: {options.out / stem}.md")


if __name__ == "__main__":
    main()
