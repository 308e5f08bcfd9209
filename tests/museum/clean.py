"""False alarms: the tools of the museum on programs without a bug.

The programs are those of the fuzzer, without dropout (each with its model and strategy), and the products of parallel
degrees on up to four ranks. Reentrant recomputation adds up gradients in another order, where ``sw.parity`` expects
equal bits: programs with it are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import RankFailure, run_on_ranks
from tests.fuzz import model as fuzz
from tests.fuzz import program as fuzzed
from tests.fuzz.run import has_units, shard_each
from tests.fuzz.run import options as options_of
from tests.museum import tools
from tests.museum.programs import Program
from tests.product import product

_BATCH = 20
#: A program may take so long.
_LIMIT_S = 30.0


def _without_dropout(node: fuzzed.Node) -> fuzzed.Node:
    return dataclasses.replace(node, dropout=False, inner=tuple(map(_without_dropout, node.inner)))


def of_fuzzer(seed: int) -> tuple[int, Program]:
    """A random program and the number of its ranks."""
    drawn = fuzzed.generate(seed)
    drawn = dataclasses.replace(drawn, nodes=tuple(map(_without_dropout, drawn.nodes)))

    def build(_seed: int) -> nn.Module:
        return fuzz.Model(drawn)

    def loss(output: Any, _batch: Any, _model: Any) -> Tensor:
        return fuzz.loss(output, "both", drawn)

    def parallelize(model: nn.Module, plan: sw.ParallelPlan, _seed: int) -> nn.Module:
        is_own = drawn.route == "parallelize" or plan.strategy != drawn.strategy
        return sw.parallelize(model, plan) if is_own else shard_each(model, drawn)

    fields = options_of(drawn) if drawn.route == "parallelize" else {}
    units = sw.wrap_by_class({fuzz.Unit}) if has_units(drawn) else "none"
    return drawn.world, Program(
        {"strategy": drawn.strategy, "merge_units": False} | fields,
        build,
        _numbers,
        _with_turn,
        loss,
        world=drawn.world,
        parallelize=parallelize,
        units=units,
    )


def _numbers(index: int) -> Tensor:
    return torch.randn(fuzz.DIM, generator=torch.Generator().manual_seed(1000 + index))


def _with_turn(samples: list[Any]) -> Any:
    return torch.stack(samples), 0, 0


def of_product(case: product.Case) -> tuple[int, Program]:
    """A product of degrees and the number of its ranks."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return product.build(case.dtype, case.model)

    plan = {"strategy": case.strategy, "pipeline": case.schedule} | dict(case.mesh) | dict(case.variant.plan)
    return case.world, Program(plan, build, _ids, world=case.world, rows=8 if case.schedule else 2)


def _ids(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, product.VOCAB, (product.SEQ + 1,), generator=generator)
    return ids[:-1], ids[1:]


def programs(count: int) -> list[tuple[str, int]]:
    """Names of programs: ``fuzz SEED`` and ``product NUMBER``, with their ranks."""
    products = [
        (f"product {number}", case.world)
        for number, case in enumerate(product.cases())
        if case.world <= 4 and case.dtype != "bf16" and not case.is_beside_flat
    ]
    seeds = (seed for seed in itertools.count() if "reentrant" not in fuzzed.generate(seed).recomputations)
    seeds = itertools.islice(seeds, max(count - len(products), 0))
    drawn = [(f"fuzz {seed}", fuzzed.generate(seed).world) for seed in seeds]
    return [*drawn, *products]


def make(name: str) -> Program:
    """The program of a name."""
    kind, number = name.split()
    _, made = of_fuzzer(int(number)) if kind == "fuzz" else of_product(product.cases()[int(number)])
    return made


def look(names: list[str], folder: str) -> None:
    """On the ranks: run the tools on some programs, and write down what they say."""
    torch.set_num_threads(1)
    notes = (Path(folder) / f"notes-{dist.get_rank()}").open("a")
    for name in names:
        made = make(name)
        found = [each for tool in made.tools for each in tools.TOOLS[tool](made, Path(folder))]
        notes.write(json.dumps([name, [f"{each.tool}: {each.text}" for each in found]]) + "\n")
        notes.flush()


def run(count: int) -> dict[str, Any]:
    """Run so many programs; counts the alarms."""
    begin, alarms = time.monotonic(), list[str]()
    names = programs(count)
    for world in sorted({ranks for _, ranks in names}):
        waiting = [name for name, ranks in names if ranks == world]
        while waiting:
            found = _look_at(waiting[:_BATCH], world)
            alarms += [f"{name}: {text}" for name, texts in found.items() for text in texts]
            waiting = [name for name in waiting if name not in found]
            print(
                f"{world} ranks, {len(waiting)} left, {len(alarms)} alarms, {time.monotonic() - begin:.0f} s",
                flush=True,
            )
    num_products = sum(name.startswith("product") for name, _ in names)
    what = f"{len(names) - num_products} of the fuzzer and {num_products} products of parallel degrees"
    return {"programs": len(names), "alarms": alarms, "what": what, "seconds": time.monotonic() - begin}


def _look_at(names: Sequence[str], world: int) -> dict[str, list[str]]:
    with tempfile.TemporaryDirectory(prefix="museum-") as folder:
        ended = ""
        try:
            run_on_ranks(look, world, list(names), folder, timeout_s=_LIMIT_S * len(names))
        except RankFailure as failure:
            ended = failure.causes[failure.rank]
        found: dict[str, list[str]] = {}
        for path in sorted(Path(folder).glob("notes-*")):
            for name, texts in map(json.loads, path.read_text().splitlines()):
                found.setdefault(name, []).extend(text for text in texts if text not in found.get(name, ()))
        if ended:
            missing = next(name for name in names if name not in found)
            found[missing] = [f"error: {ended}"]
        return found
