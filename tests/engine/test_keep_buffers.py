"""``keep_buffers=False`` beside the other fields of the plan, and the calls around a step: the numbers of ``True``."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.testing import probe, run_on_ranks, same_bits
from tests.common import models
from tests.common.ranks import on_ranks

pytestmark = pytest.mark.slow

STEPS, VOCAB, SEQ = 2, 31, 8
INT8 = {"quantized_gather": "int8", "quantized_reduce": "int8"}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        plan: Fields of the plan.
        model: ``gpt``, ``moe`` (with experts), or a name of ``tests.common.models``.
        num_microbatches: Of each call of ``sw.train_step``.
        calls: Of ``sw.train_step`` before the optimizer's step.
        is_in_backward: The optimizer steps inside backward.
        is_flat: The optimizer updates flat parameters.
        is_watched: Between steps the run also averages the weights, shows whole ones, changes some and generates.
    """

    plan: dict[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    num_microbatches: int = 1
    calls: int = 1
    is_in_backward: bool = False
    is_flat: bool = False
    is_watched: bool = False


ALONE = {
    "zero3": Run(calls=2, is_watched=True),
    "zero3 bf16": Run({"mp_policy": sw.PrecisionPolicy(param_dtype="bf16")}, is_flat=True),
    "ddp": Run({"strategy": "ddp"}, calls=2, is_watched=True),
    "quantized frozen": Run({"quantize_frozen": "int8"}, "frozen"),
    "replicas in one process": Run({"strategy": "data_parallel"}, calls=2),
}

IN_PAIRS = {
    "plain": Run(),
    **{f"watched {preset}": Run({"strategy": preset}, is_watched=True) for preset in ("ddp", "zero1", "zero2")},
    "watched zero3": Run(is_watched=True, is_flat=True),
    "odd": Run({"auto_wrap_policy": models.wrap_policy("odd")}, "odd"),
    "odd shard_grad_op": Run({"strategy": "shard_grad_op", "auto_wrap_policy": models.wrap_policy("odd")}, "odd"),
    "tied": Run({"merge_units": False}, "tied"),
    "one unit": Run({"auto_wrap_policy": "none"}),
    "three gradient buffers": Run({"gradient_buffers": 3}, calls=2),
    "offloaded": Run({"offload_policy": "cpu"}, calls=2, is_watched=True),
    "offloaded zero1": Run({"strategy": "zero1", "offload_policy": "cpu"}, is_flat=True),
    "offloaded gradients": Run({"offload_policy": sw.OffloadPolicy(parameters=False)}),
    "tensor parallel": Run({"tp": 2}, is_watched=True),
    "sequence parallel": Run({"tp": 2, "sequence_parallel": True}, calls=2),
    "pipeline": Run({"pp": 2}, num_microbatches=4, calls=2, is_watched=True),
    "zb-v": Run({"pp": 2, "pipeline": "zb-v"}, num_microbatches=4),
    "interleaved": Run({"pp": 2, "pipeline": "interleaved-1f1b"}, num_microbatches=4),
    "context parallel": Run({"cp": 2}, is_watched=True),
    "expert parallel": Run({"ep": 2}, "moe", calls=2, is_watched=True),
    "capacity": Run({"expert_capacity": 1.25}, "moe"),
    **{
        f"in backward {preset}": Run({"strategy": preset}, is_in_backward=True, is_flat=True)
        for preset in ("ddp", "zero1", "zero3")
    },
    "in backward bf16": Run({"mp_policy": sw.PrecisionPolicy(param_dtype="bf16")}, is_in_backward=True, is_flat=True),
    "quantized": Run(INT8, calls=2, is_watched=True),
    "quantized ddp": Run({"strategy": "ddp", "quantized_reduce": "int8"}),
    "quantized frozen": Run({"quantize_frozen": "int8", **INT8}, "frozen"),
    "quantized frozen ddp": Run({"strategy": "ddp", "quantize_frozen": "bf16"}, "frozen"),
    "kept after forward": Run({"reshard_after_forward": False}, calls=2, is_watched=True),
    "recomputed": Run({"activation_checkpointing": "full"}, num_microbatches=2, is_watched=True),
    "recomputed selectively": Run({"activation_checkpointing": "selective"}, is_flat=True),
    "accumulated sharded": Run({"accumulation": "sharded"}, calls=3),
    "accumulated unsharded": Run({"accumulation": "unsharded"}, calls=3),
    "bf16": Run({"mp_policy": sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")}, calls=2),
    "rows": Run({"row_sharded": "embedding", "auto_wrap_policy": models.wrap_policy("odd")}, "odd"),
    "granular": Run({"granularity": "tensor"}, is_flat=True),
    "all at once": Run(
        {"offload_policy": "cpu", "activation_checkpointing": "full", "gradient_buffers": 1, **INT8}, calls=2
    ),
}

IN_FOURS = {
    "hsdp": Run({"strategy": "hsdp", "dp_replicate": 2}, calls=2, is_watched=True),
    "hsdp deferred": Run({"strategy": "hsdp", "dp_replicate": 2, "accumulation": "defer_replicate"}, calls=3),
    "hsdp quantized": Run({"strategy": "hsdp", "dp_replicate": 2, **INT8}, is_flat=True),
    "hsdp offloaded": Run({"strategy": "hsdp", "dp_replicate": 2, "offload_policy": "cpu"}, calls=2),
    "hsdp in backward": Run({"strategy": "hsdp", "dp_replicate": 2}, is_in_backward=True, is_flat=True),
    "hybrid_shard_grad_op": Run({"strategy": "hybrid_shard_grad_op", "dp_replicate": 2}),
    "kept over two ranks": Run({"reshard_after_forward": 2}, calls=2, is_watched=True),
    "kept over two ranks, recomputed": Run({"reshard_after_forward": 2, "activation_checkpointing": "full"}),
    "tensor parallel": Run({"tp": 2}, is_flat=True),
    "pipeline": Run({"pp": 2, "pipeline": "zb-h1"}, num_microbatches=4, is_watched=True),
    "pipeline of tensor parallel stages": Run({"pp": 2, "tp": 2, "sequence_parallel": True}, num_microbatches=4),
    "expert parallel": Run({"ep": 2}, "moe", calls=2),
    "context parallel": Run({"cp": 2, "activation_checkpointing": "full"}),
}

COMPILED = {
    "compiled": Run({"compile": True}, calls=2, is_watched=True),
    "compiled, recomputed": Run({"compile": True, "activation_checkpointing": "full"}, is_in_backward=True),
}


def build(run: Run) -> nn.Module:
    if run.model not in {"gpt", "moe"}:
        return models.build(run.model)
    torch.manual_seed(5)
    sizes = {"num_layers": 4, "hidden": 16, "num_heads": 2, "vocab_size": VOCAB, "seq_len": SEQ}
    return sw.models.gpt("gpt-tiny", **sizes, **({"num_experts": 4} if run.model == "moe" else {}))


def batch(run: Run, step: int, call: int, reader: int) -> tuple[Tensor, Tensor]:
    if run.model not in {"gpt", "moe"}:
        return models.batch(step, call, reader)
    generator = torch.Generator().manual_seed(1000 * step + 100 * call + reader)
    tokens_BT = torch.randint(0, VOCAB, (2 * run.num_microbatches, SEQ + 1), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def reader_of(plan: sw.ParallelPlan) -> int:
    return plan.mesh(distributed.get_world_size()).data_parallel_rank(distributed.get_rank())


def train(run: Run, *, keeps: bool) -> tuple[list[Any], dict[str, Tensor], int]:
    """Numbers of each step, what is saved of the model, and the bytes that the engine holds between steps."""
    plan = sw.ParallelPlan(keep_buffers=keeps, **run.plan)
    model, reader = sw.parallelize(build(run), plan), reader_of(plan)
    optimizer = torch.optim.AdamW(sw.flat_parameters(model) if run.is_flat else model.parameters(), lr=1e-2)
    if run.is_in_backward:
        sw.optimizer_in_backward(model, optimizer)
    average = sw.ExponentialMovingAverage(model, decay=0.5) if run.is_watched else None
    numbers: list[Any] = []
    for step in range(STEPS):
        for call in range(run.calls):
            is_last = call == run.calls - 1
            with contextlib.nullcontext() if is_last else sw.gradient_sync(model, is_last):
                loss = sw.train_step(model, batch(run, step, call, reader), num_microbatches=run.num_microbatches)
            numbers.append(loss.item())
        if not run.is_in_backward:
            numbers.append(sw.clip_grad_norm(model, 0.3).item())
            optimizer.step()
            optimizer.zero_grad()
        if average is not None:
            average.update()
            numbers += look(run, model, average, reader)
    state = dict(sw.full_state_dict(model))
    held = sum(size for name, size in probe(model).held_bytes().items() if name in {"gathered", "gradients", "reduce"})
    if average is not None:
        with average.swapped_in():
            state |= {f"average {name}": value for name, value in sw.full_state_dict(model).items()}
    return numbers, state, held


def look(run: Run, model: nn.Module, average: sw.ExponentialMovingAverage, reader: int) -> list[Any]:
    """What can be done with a model between steps."""
    with average.swapped_in():
        found: list[Any] = [sw.eval_step(model, batch(run, 9, 0, reader), num_microbatches=run.num_microbatches).item()]
    found.append(sw.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=2))
    if not {"tp", "pp", "ep"} & set(run.plan):
        with sw.full_parameters(model, writeback=True), torch.no_grad():
            found += [parameter.double().sum().item() for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.mul_(0.9)
    return found


def differing(runs: dict[str, Run]) -> dict[str, str]:
    """Why ``keep_buffers=False`` is not as ``True``, by name of the run."""
    faults = {}
    for name, run in runs.items():
        print(name, flush=True)  # which run an exception is of
        (expected, state, held), (got, other, rest) = (train(run, keeps=keeps) for keeps in (True, False))
        wrong = [key for key, value in state.items() if not same_bits(value, other[key])]
        if got != expected or wrong or state.keys() != other.keys():
            faults[name] = f"{expected} != {got}, {wrong}"
        elif rest >= held and "offload_policy" not in run.plan:  # what is on the host stays
            faults[name] = f"{rest} bytes held, {held} where buffers are kept"
    return faults


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPU")
@pytest.mark.parametrize("name", ["compiled", pytest.param("compiled, recomputed", marks=pytest.mark.long)])
@on_ranks(2, timeout_s=300)
def test_compiled_units_have_the_numbers_of_kept_buffers(name: str) -> None:
    warnings.simplefilter("ignore")  # inductor imports deprecated parts of torch
    torch._inductor.config.compile_threads = 1
    faults = differing({name: COMPILED[name]})
    assert faults == {}


@pytest.mark.parametrize(("world", "runs"), [(1, ALONE), (2, IN_PAIRS), (4, IN_FOURS)], ids=["1", "2", "4"])
def test_every_combination_has_the_numbers_of_kept_buffers(world, runs):
    for faults in run_on_ranks(differing, world, runs, timeout_s=300):
        assert faults == {}
