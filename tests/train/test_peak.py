"""Measured peaks against what is known to be held; predicted activations against measured ones."""

from __future__ import annotations

import gc
import types

import pytest
import torch

import shardwise as sw
from shardwise.engine.storage.attachment import engine_of
from shardwise.testing import run_on_ranks
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from shardwise.train.predicted import memory
from shardwise.train.predicted.memory import peak_of_tensors

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _nothing_left() -> None:
    gc.collect()


def peak_of(function) -> int:
    with peak_of_tensors(CPU) as nothing:
        pass
    with peak_of_tensors(CPU) as memory:
        function()
    return memory.num_bytes - nothing.num_bytes


def test_what_is_freed_is_taken_off() -> None:
    def work() -> None:
        for _ in range(10):
            torch.zeros(1 << 18)
        torch.zeros(1 << 16)

    assert peak_of(work) == 4 << 18


def test_code_that_has_to_be_compiled_runs_while_memory_is_counted() -> None:
    """As the step of torchao's AdamW8bit, in every run on a CPU."""
    double = torch.compile(lambda x: 2 * x, fullgraph=True, dynamic=False, backend="eager")
    with peak_of_tensors(CPU):
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert double(torch.ones(2)).tolist() == [2.0, 2.0]


def test_views_count_once_and_both_operands_count() -> None:
    def work() -> None:
        a = torch.zeros(1 << 16)
        b = a.view(2, -1).t()
        c = a + 1
        del b, c

    assert peak_of(work) == 2 * (4 << 16)


def test_what_is_held_at_entry_counts() -> None:
    held = torch.zeros(1 << 16)
    with peak_of_tensors(CPU) as before:
        pass
    del held
    gc.collect()
    with peak_of_tensors(CPU) as after:
        pass
    assert before.num_bytes - after.num_bytes == 4 << 16


def test_saved_activations_and_gradients_count() -> None:
    linear = torch.nn.Linear(64, 64, bias=False)
    x = torch.zeros(128, 64)

    def work() -> None:
        hidden = linear(x)
        out = hidden.square()
        out.sum().backward()

    weight, activation = 4 * 64 * 64, 4 * 128 * 64
    peak = peak_of(work)
    # hidden, out, gradient of out, gradient of hidden; then the weight's gradient
    assert 3 * activation <= peak <= 5 * activation + weight + 64
    linear.weight.grad = None


def test_workspaces_are_those_of_the_card_or_as_torch_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for told, capability in (("", (9, 0)), ("", (8, 0)), (":4096:8", (8, 0)), (":16:8:4096:2", (9, 0))):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", told)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device, found=capability: found)
        found.append(memory._workspace_bytes(torch.device("cuda")))
    assert found == [32 << 20, 8_519_680, 32 << 20, 8_519_680]


def test_predicting_leaves_the_random_state_alone() -> None:
    base = {"data": {"source": "random"}, "train": {"steps": 1}}
    resolved = resolve(read_config(None, base=base, title="test"), 1)
    before = torch.get_rng_state()
    alone = types.SimpleNamespace(size=1, rank=0)
    assert memory._run_dry(resolved, alone, CPU)["activations"] > 0
    assert torch.equal(before, torch.get_rng_state())


def largest_by_unit() -> dict[str, int]:
    """Of a model whose blocks keep 4, 8 and 2 kB for backward, what a step has made at its peak."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Keeps(count) for count in (1024, 2048, 512)))
    model = sw.parallelize(model, strategy="ddp", auto_wrap_policy=sw.wrap_by_class("Keeps"))
    x = torch.zeros(1)
    with peak_of_tensors(CPU, engine_of(model, "a test")) as memory:
        model(x).sum().backward()
    return memory.by_unit


class Keeps(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.expand(self.count).contiguous() * self.weight).sum().reshape(1)  # the product keeps its operand


def test_the_peak_is_told_by_the_unit_whose_forward_made_it() -> None:
    (found,) = run_on_ranks(largest_by_unit, 1)
    # In the backward of the second block, when what the third one kept has been freed.
    assert [found[name] for name in ("0", "1", "2")] == [4096, 8192, 0], found
    assert found["backward and update"] >= 8192
