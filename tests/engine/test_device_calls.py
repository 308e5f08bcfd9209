"""How many operations a step asks the device for, and how often the host waits for one."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.optim import clip
from shardwise.testing import probe, run_on_ranks
from tests.common.ranks import on_ranks

PRESETS = ("ddp", "zero1", "zero3")


class Calls(TorchDispatchMode):
    """Counts aten calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


#: What makes the host wait on CUDA, because the result, or its shape, is read there.
WAITS = {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "equal", "is_nonzero", "_unique2"}


class HostReads(Calls):
    """Counts how often the host reads values of tensors, by how."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self._patches = contextlib.ExitStack()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(i is not None and i.dtype is torch.bool for i in args[1])
        by_counts = name == "repeat_interleave" and "output_size" not in (kwargs or {})
        if name in WAITS or by_mask or by_counts:
            self.reads[name] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __enter__(self) -> Self:
        for name in ("tolist", "numpy", "cpu"):  # on CPU tensors these pass by the dispatcher
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, self._noting(name)))
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._patches.close()

    def _noting(self, name: str) -> Callable[..., Any]:
        read = getattr(torch.Tensor, name)

        def note(tensor: torch.Tensor, *args: Any) -> Any:
            self.reads[name] += 1
            return read(tensor, *args)

        return note


def blocks(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 8), nn.Linear(8, 1024)) for _ in range(count))
    )


def calls_of_clipping(preset: str, count: int) -> tuple[int, int]:
    """Aten calls of ``sw.clip_grad_norm``, and the groups of the model."""
    policy = sw.wrap_by_size(1 << 20)
    model = sw.parallelize(blocks(count), sw.ParallelPlan(strategy=preset, auto_wrap_policy=policy, merge_units=False))
    model(torch.ones(2, 1024)).sum().backward()
    with Calls() as calls:
        sw.clip_grad_norm(model, 1.0)
    return calls.counts.total(), sum(len(shape.groups) for shape in probe(model).unit_facts.values())


@on_ranks(2)
def test_clipping_takes_few_calls_for_each_further_group() -> None:
    found = {preset: [calls_of_clipping(preset, count) for count in (2, 6)] for preset in PRESETS}
    for preset, ((few_calls, few_groups), (calls, groups)) in found.items():
        assert groups - few_groups == 4
        # On the CPU a large gradient is cut into chunks that fit the cache: a view and a split.
        assert calls - few_calls <= 2 * (groups - few_groups), preset
        assert calls <= 30 + 2 * groups, preset


def test_off_the_cpu_the_calls_of_the_norm_do_not_grow_with_the_model():
    found = []
    for count in (1, 1000):
        grads = [torch.empty(1 << 20, device="meta") for _ in range(count)]
        with Calls() as calls:
            clip._local_power(grads, torch.device("meta"), 2.0)
        found.append(calls.counts.total())
    assert found[0] == found[1] <= 8


def test_what_makes_the_host_wait_is_seen():
    mask, counts = torch.tensor([True, False]), torch.tensor([1, 2])
    with HostReads() as host:
        for read in (mask.tolist, mask.nonzero, counts.bincount, lambda: counts[mask], counts.sum().item):
            read()
        bool(mask.any())
        mask.repeat_interleave(counts)
        mask.repeat_interleave(counts, output_size=3)
        counts.sort()
    assert host.reads == {
        "tolist": 1,
        "nonzero": 1,
        "bincount": 1,
        "index": 1,
        "_local_scalar_dense": 2,
        "repeat_interleave": 1,
    }


@pytest.mark.parametrize("factor", [None, 0.5])
@on_ranks(2)
def test_the_host_waits_once_for_each_mixture(factor: float | None) -> None:
    """What the host reads in the forward and in the backward of two mixtures, both trained on all ranks."""
    config = {"num_layers": 2, "hidden": 32, "num_heads": 2, "num_experts": 4}
    model = sw.parallelize(sw.models.gpt("gpt-tiny", **config), sw.ParallelPlan(ep=2, expert_capacity=factor))
    tokens_BT = torch.arange(64).view(2, 32) + 64 * torch.distributed.get_rank()
    model(tokens_BT, tokens_BT).backward()  # in the first pass ranks agree on the order of units
    with HostReads() as forward:
        loss = model(tokens_BT, tokens_BT)
    with HostReads() as backward:
        loss.backward()
    forward, backward = forward.reads, backward.reads
    assert forward == {"tolist": 2}
    assert not backward


class Branches(nn.Module):
    """A branch for each rank, and one that no rank uses."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("always", "0", "1", "never")})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch["always"](x) + self.branch[str(torch.distributed.get_rank())](x)


def reads_of_unused(preset: str, num_microbatches: int) -> tuple[Counter[str], set[str]]:
    """What the host reads in the backwards of a step, and which parameters have gradients afterwards."""
    torch.manual_seed(0)
    plan = sw.ParallelPlan(strategy=preset, auto_wrap_policy=sw.wrap_by_class(Branches), merge_units=False)
    model = sw.parallelize(nn.Sequential(*(Branches() for _ in range(4))), plan)
    assert len(probe(model).units) == 5
    model(torch.ones(2, 8)).sum().backward()  # in the first pass ranks agree on the order of units
    model.zero_grad()
    with HostReads() as host:
        for _ in range(num_microbatches):
            model(torch.ones(2, 8)).sum().backward()
    return host.reads, {name for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("preset", PRESETS)
def test_the_host_waits_once_a_backward_for_what_other_ranks_have_used(preset):
    names = {
        f"{index}.branch.{branch}.{name}"
        for index in range(4)
        for branch in ("always", "0", "1")
        for name in ("weight", "bias")
    }
    for num_microbatches in (1, 2):
        first, second = run_on_ranks(reads_of_unused, 2, preset, num_microbatches)
        assert first[0] == second[0] == {"tolist": num_microbatches}
        assert first[1] | second[1] == names  # a rank has no gradient of what it owns nothing of


@on_ranks(2)
def test_a_groups_sums_are_put_on_its_shards_in_one_operation():
    """Where they are cast, and where they are added to those of earlier microbatches; nothing is zeroed before."""
    low = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")
    found = []
    for policy, num_microbatches in ((low, 1), (None, 1), (None, 2)):
        torch.manual_seed(0)
        model = sw.models.gpt("gpt-tiny", num_layers=2, hidden=16, num_heads=2, vocab_size=32, seq_len=8)
        model = sw.parallelize(model, sw.ParallelPlan(strategy="zero2", mp_policy=policy, merge_units=False))
        tokens = torch.arange(32).view(4, 8)
        for _ in range(3):
            model.zero_grad()
            with Calls() as calls:
                sw.train_step(model, (tokens, tokens), num_microbatches=num_microbatches)
        found.append(calls.counts)
        assert all(parameter.grad is not None for parameter in model.parameters())  # empty where a rank owns nothing
    cast, plain, added = found
    num_units = 3
    assert cast["zero_"] == 0
    assert cast["copy_"] <= plain["copy_"] + 2 * num_units  # parameters into the replica, and sums onto the shards
    assert added["add_"] <= 2 * plain["add_"] + num_units
