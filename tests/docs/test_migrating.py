"""docs/migrating.md: names exist, and what the page calls refused is refused in words that say what to call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from bench import migrating_tables
from shardwise.cli.convert import tables
from shardwise.spec.errors import ShardwiseError
from shardwise.testing import run_on_ranks
from tests.common.ranks import refusal

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text("utf-8")


def rows(heading: str) -> dict[str, str]:
    """The first table behind ``heading``: its first cells, and the second ones."""
    lines = PAGE.partition(heading)[2].split("\n\n|", 1)[1].split("\n\n")[0].splitlines()[2:]
    cells = [line.strip("|").split(" | ") for line in lines]
    return {first.strip(): second.strip() for first, second in cells}


class Model(nn.Sequential):
    """Five layers, with the method of a model of transformers that changes a parameter's shape."""

    def resize_token_embeddings(self, count: int) -> None:
        self[0].weight.data = torch.zeros(count, 8)


def build() -> Model:
    torch.manual_seed(0)
    return Model(nn.Embedding(16, 8), *[nn.Linear(8, 8, bias=False) for _ in range(5)])


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(8).view(2, 4)).square().mean()


def step_and_read(model: nn.Module) -> dict[str, object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    return optimizer.state_dict()


def add(model: nn.Module) -> None:
    model.add_module("head", nn.Linear(8, 2))
    loss_of(model)


def compute_with_parts(model: nn.Module) -> None:
    parts = {name: 2 * p.detach() for name, p in model.named_parameters()}
    torch.func.functional_call(model, parts, torch.arange(8).view(2, 4))


def replace_weight(model: Model) -> None:
    model[1].weight = nn.Parameter(torch.ones(8, 8))
    loss_of(model)


def read_gradient(model: nn.Module) -> torch.Tensor:
    loss_of(model).backward()
    return next(p.grad for p in model.parameters() if p.grad is not None).abs().max()


#: By the beginning of the first cell.
CALLS: dict[str, Callable[[Model], object]] = {
    "model.state_dict": lambda model: model.state_dict(),
    "model.load_state_dict": lambda model: model.load_state_dict(build().state_dict()),
    "optimizer.state_dict": step_and_read,
    "copy.deepcopy": copy.deepcopy,
    "DistributedDataParallel": nn.parallel.DistributedDataParallel,
    "model.add_module": add,
    "model.half": lambda model: model.half(),
    "torch.optim.Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1).step(),
    "loss.backward": lambda model: torch.autograd.backward(loss_of(model), create_graph=True),
    "torch.func.functional_call": compute_with_parts,
    "layer.weight = nn.Parameter": replace_weight,
    "p.register_hook": lambda model: next(model.parameters()).register_hook(print),
    "model.resize_token_embeddings": lambda model: model.resize_token_embeddings(20),
    "sw.parallelize": sw.parallelize,
    "p.norm": lambda model: next(model.parameters()).norm(),
    "p.grad.abs": read_gradient,
}


def messages() -> dict[str, str]:
    found = {}
    for name, call in CALLS.items():
        model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
        found[name] = refusal(ShardwiseError, call, model)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_each_call_is_refused_and_the_message_names_the_one_to_make() -> None:
    table = {cell.strip("`").partition("(")[0]: instead for cell, instead in rows("## What is refused").items()}
    assert list(table) == list(CALLS)
    for found in run_on_ranks(messages, 2):
        for name, message in found.items():
            wanted = re.search(r"sw\.\w+", table[name])
            assert wanted is not None, name
            assert wanted[0] in message, (name, message)


def test_every_name_of_ours_exists() -> None:
    names = set(re.findall(r"\bsw\.(\w+)", PAGE))
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(sw, name)] == []


@pytest.mark.parametrize("kind", tables())
def test_the_tables_of_keys_are_those_of_convert(kind: str) -> None:
    table = PAGE.partition(migrating_tables.START.format(kind))[2].partition(migrating_tables.END.format(kind))[0]
    assert table.strip() == migrating_tables.table(kind), "run: python -m bench.migrating_tables"
