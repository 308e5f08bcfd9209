"""Measure generation: latency and throughput by layout, and decoding under tp=2 beside transformers' own.

One row is also continued after prompts of several lengths: the time to its first token, and the time of each further
one, tell which layout answers first.

One small Llama with random weights is saved to a folder, and every engine loads it from there. Engines take turns
within one run of one set of processes, each process with one thread; a ratio is taken in each round. Greedy tokens of
all engines are compared. Writes ``bench/results/DATE-generation.md``, where that is there already with -2, -3, ...
behind the name.

    python -m bench.generation [--rounds 5] [--tokens 32] [--lengths 16 256 1024] [--profile] [--out bench/results]

Needs the extra shardwise[peers]. Takes about five minutes on two cores; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.files import free_stem

SIZES = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip
PROMPT_LENGTH, BATCH = 16, 8
TARGET = 1.2
ONE, OURS, THEIRS = "one process", "tp=2", "transformers, tp_plan='auto', 2 processes"
#: Cases in which engines of others take part.
SHARED = ("latency", "throughput")
#: What runs on how many processes.
ENGINES = {1: [ONE, "transformers, one process"], 2: [OURS, THEIRS, "pp=2", "zero3", "ddp"]}
PLANS = {ONE: {}, OURS: {"tp": 2}, "pp=2": {"pp": 2}, "zero3": {}, "ddp": {"strategy": "ddp"}}

Generate = Callable[[list[list[int]], int], list[list[int]]]


# -- on the ranks


def save_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # far from uniform: no two tokens are near each other
    model.save_pretrained(folder)


def engine(name: str, folder: Path) -> Generate:
    import torch
    from transformers import LlamaForCausalLM

    import shardwise as sw

    if name in PLANS:
        model = LlamaForCausalLM.from_pretrained(folder).eval()
        if name != ONE:
            model = sw.parallelize(model, sw.ParallelPlan(**PLANS[name]))
        return lambda prompts, count: sw.generate(model, prompts, max_new_tokens=count)
    how = {"tp_plan": "auto"} if name == THEIRS else {}
    peer = LlamaForCausalLM.from_pretrained(folder, **how).eval()

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        found = peer.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return found[:, ids.shape[1] :].tolist()

    return generate


def work(folder: Path, rounds: int, num_tokens: int, lengths: list[int], *, is_profiled: bool) -> None:
    """Time every engine of this many processes, in turns; the first rank writes what was found."""
    import torch
    import torch.distributed as dist

    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engines = {name: engine(name, folder) for name in ENGINES[size]}
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(SIZES["vocab_size"], (BATCH, PROMPT_LENGTH), generator=generator).tolist()
    cases = {"latency": (prompts[:1], num_tokens), "throughput": (prompts, num_tokens)}
    for length in lengths:
        prompt = torch.randint(SIZES["vocab_size"], (1, length), generator=generator).tolist()
        cases |= {f"first {length}": (prompt, 1), f"all {length}": (prompt, num_tokens)}
    turns = {case: [name for name in engines if name in PLANS or case in SHARED] for case in cases}
    tokens = {name: {case: run(*cases[case]) for case in cases if name in turns[case]} for name, run in engines.items()}
    times: dict[str, dict[str, list[float]]] = {name: {case: [] for case in tokens[name]} for name in engines}
    for _ in range(rounds):
        for case, arguments in cases.items():
            for name in turns[case]:
                run = engines[name]
                dist.barrier()
                start = time.perf_counter()
                run(*arguments)
                dist.barrier()
                times[name][case].append(time.perf_counter() - start)
    profiles = {name: profiled(run, *cases["latency"]) for name, run in engines.items()} if is_profiled else {}
    if rank == 0:
        found = {"times": times, "tokens": tokens, "profiles": profiles}
        (folder / f"found-{size}.json").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def profiled(run: Generate, prompts: list[list[int]], count: int) -> str:
    """Where the host's time goes."""
    import cProfile
    import io
    import pstats

    profile = cProfile.Profile(time.thread_time)
    profile.runcall(run, prompts, count)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
    return text.getvalue()


# -- outside


def launch(size: int, folder: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Run this file's :func:`work` on ``size`` processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", f"--master-port={port}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command += ["-m", "bench.generation", "--work", str(folder), *arguments]
    subprocess.run(command, check=True, env=environment, timeout=600)
    return json.loads((folder / f"found-{size}.json").read_text("utf-8"))


def by_length(times: dict[str, dict[str, list[float]]], num_tokens: int) -> list[str]:
    """Lines with the time to the first token and of each further one, by layout and length of the prompt."""
    lengths = [int(case.removeprefix("first ")) for case in times[ONE] if case.startswith("first ")]
    if not lengths:
        return []
    heads = [f"prompt of {length}: first token, ms | each further one, ms" for length in lengths]
    lines = [f"| layout (1 row) | {' | '.join(heads)} |", "|---" * (1 + 2 * len(lengths)) + "|"]
    for name in PLANS:
        cells = []
        for length in lengths:
            first = statistics.median(times[name][f"first {length}"])
            further = (statistics.median(times[name][f"all {length}"]) - first) / (num_tokens - 1)
            cells += [f"{1e3 * first:.0f}", f"{1e3 * further:.1f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return ["", *lines]


def table(found: dict[int, dict[str, Any]], num_tokens: int) -> str:
    """The results as text."""
    times = {name: measured for each in found.values() for name, measured in each["times"].items()}
    tokens = {name: measured for each in found.values() for name, measured in each["tokens"].items()}
    lines = [
        "| engine | latency, ms per token (1 row) | throughput, tokens/s (8 rows) | greedy tokens |",
        "|---|---|---|---|",
    ]
    for name, measured in times.items():
        latency = 1e3 * statistics.median(measured["latency"]) / num_tokens
        throughput = BATCH * num_tokens / statistics.median(measured["throughput"])
        is_same = all(tokens[ONE][case] == rows for case, rows in tokens[name].items())
        are_same = "those of one process" if is_same else "differ"
        lines.append(f"| {name} | {latency:.2f} | {throughput:.0f} | {are_same} |")
    lines += by_length(times, num_tokens)
    ratios = {
        case: [theirs / ours for ours, theirs in zip(times[OURS][case], times[THEIRS][case], strict=True)]
        for case in ("latency", "throughput")
    }
    medians = {case: statistics.median(each) for case, each in ratios.items()}
    lines += ["", f"Decoding under tp=2, tokens/s of ours over those of transformers (target: at least {TARGET}):", ""]
    for case, each in ratios.items():
        verdict = "reached" if medians[case] >= TARGET else "missed"
        shown = ", ".join(f"{ratio:.2f}" for ratio in each)
        lines.append(f"- {case}: **{medians[case]:.2f}** (rounds: {shown}), {verdict}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each row")
    parser.add_argument("--lengths", type=int, nargs="*", default=[16, 256, 1024], help="of prompts of one row")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes, by engine")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.rounds, given.tokens, given.lengths, is_profiled=given.profile)
        return
    arguments = [f"--rounds={given.rounds}", f"--tokens={given.tokens}", *["--profile"] * given.profile]
    arguments += ["--lengths", *map(str, given.lengths)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        found = {size: launch(size, folder, arguments) for size in ENGINES}
    for each in found.values():
        for engine_name, text in each["profiles"].items():
            print(f"\n== {engine_name}\n{text}")
    text = table(found, given.tokens)
    print(text)
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items())
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    head = [
        f"# Generation, {today}",
        "",
        f"`python -m bench.generation {' '.join(arguments)}` on {os.cpu_count()} cores, one thread per process, fp32.",
        f"Llama ({sizes}), random weights; prompts of {PROMPT_LENGTH} tokens and {given.tokens} new ones, all timed.",
        "Medians of the rounds; engines of as many processes take turns within one run.",
        "",
    ]
    given.out.mkdir(parents=True, exist_ok=True)
    stem = free_stem(given.out, f"{today}-generation")
    (given.out / f"{stem}.md").write_text("\n".join([*head, text, ""]), "utf-8")


if __name__ == "__main__":
    main()
