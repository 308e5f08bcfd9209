"""What is there for machines with a GPU (``tests/gpu``) on a pretended one, under the detector."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shardwise.testing import run_on_ranks
from tests.gpu.test_numerics import FP16_LOSSES
from tests.launch.test_join import free_port

#: A rank's result.
Result = Any


@dataclass(frozen=True)
class Run:
    """A function of ``tests/gpu`` and its arguments.

    Attributes:
        is_right: Of each rank's result, as the test there asks.
    """

    module: str
    function: str
    is_right: Callable[[Result], bool]
    arguments: tuple[Any, ...] = ()
    world: int = 1


def call(module: str, function: str, arguments: tuple[Any, ...]) -> Result:
    return getattr(importlib.import_module(f"tests.gpu.{module}"), function)(*arguments)


def all_true(verdict: dict[str, bool]) -> bool:
    return bool(verdict) and all(verdict.values())


def is_near(found: dict[str, tuple[float, float]]) -> bool:
    return max(map(max, found.values())) < 1e-4


def quick_as_slow(result: tuple[list[float], list[float], bool]) -> bool:
    quick, slow, is_same = result
    return quick == slow and is_same


def has_no_wait(steps: int) -> bool:
    return steps > 0


def learns(found: dict[str, tuple[list[float], set[str]]]) -> bool:
    return len(found) == 3 and all(losses == pytest.approx(FP16_LOSSES, rel=0.01) for losses, _ in found.values())


def held_is_predicted(result: tuple[int, int]) -> bool:
    held, predicted = result
    return math.isclose(held, predicted, rel_tol=0.02)


RUNS = {
    "every strategy equals one process": Run("test_engine", "compare_all", all_true),
    "the host does not wait": Run("test_engine", "syncs_in_steady_state", lambda count: count == 0),
    "the host waits for gradients that it reads alone": Run(
        "test_offload", "waits_in_steady_state", lambda count: count == 0
    ),
    "unused parameters cost no wait": Run("test_waits", "unused", has_no_wait, ("cuda",)),
    "bytes held are those of the formula": Run("test_engine", "held_and_predicted", held_is_predicted, ("zero3",)),
    **{
        f"late collectives, {name}": Run("test_delays", "compare", quick_as_slow, (name, "cuda"))
        for name in ("zero3", "hsdp", "offloaded", "one slot of gradients")
    },
    "fp16 on int8 weights": Run("test_numerics", "train_all", learns),
    "updates in backward, late": Run("test_offload", "update_late", all_true),
    "packed sums on either stream": Run("test_offload", "sum_on_either_stream", all),
    "late copies of activations": Run("test_activation_offload", "compare", all_true),
    "two ranks over NCCL": Run("test_nccl", "train", is_near, ("cuda",), 2),
}
NEAR = ("the host does not wait", "two ranks over NCCL")


@pytest.mark.parametrize(
    "name", [name if name in NEAR else pytest.param(name, marks=pytest.mark.long) for name in RUNS]
)
def test_on_a_pretended_gpu(name):
    run = RUNS[name]
    arguments = (*run.arguments, free_port()) if run.world > 1 else run.arguments
    given = run.module, run.function, arguments
    results = run_on_ranks(call, run.world, *given, process_group=False, timeout_s=280, device="pretended")
    for result in results:
        assert run.is_right(result), result
