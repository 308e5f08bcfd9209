"""Expert parallelism against one plain process: float64, where only the order of sums differs, and fp32."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.fsdp.attach import runtime_of
from shardwise.fsdp.clip import grad_norm
from shardwise.fsdp.state import HeldValues
from shardwise.spec.slice import slice_of
from shardwise.testing import run_on_ranks

STEPS = 5
VOCAB, SEQ = 31, 6
#: By dtype: of losses and norms, relative; of parameters, absolute.
TOLERANCES = {torch.float64: (1e-9, 1e-8), torch.float32: (1e-5, 5e-4)}


@dataclass(frozen=True)
class Case:
    """A run under expert parallelism."""

    ep: int = 2
    strategy: str = "zero3"
    family: str = "gpt"
    dtype: torch.dtype = torch.float64
    num_microbatches: int = 1
    max_norm: float | None = None
    capacity: float | None = None
    model: tuple[tuple[str, Any], ...] = ()
    plan: tuple[tuple[str, Any], ...] = ()

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        if self.family == "gpt":
            sizes = {"num_layers": 3, "hidden": 16, "num_heads": 2, "vocab_size": VOCAB, "seq_len": SEQ}
            sizes |= {"num_experts": 4, "tied": False}
            return sw.models.gpt("gpt-tiny", **(sizes | dict(self.model))).to(self.dtype)
        transformers = pytest.importorskip("transformers")
        sizes = {"num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 24, "vocab_size": VOCAB}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
        sizes |= {"output_router_logits": True, "max_position_embeddings": SEQ, "attn_implementation": "eager"}
        if self.dtype is torch.float64:
            sizes["experts_implementation"] = "eager"  # torch's grouped products are for narrower dtypes
        if self.family == "mixtral":
            config = transformers.MixtralConfig(**sizes, num_local_experts=4, **dict(self.model))
            return transformers.MixtralForCausalLM(config).to(self.dtype)
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=4, moe_intermediate_size=24, head_dim=8, **dict(self.model)
        )
        return transformers.Qwen3MoeForCausalLM(config).to(self.dtype)

    def loss(self, model: nn.Module, step: int, microbatch: int, reader: int) -> Tensor:
        tokens_BT, targets_BT = batch(step, microbatch, reader)
        if self.family == "gpt":
            return model(tokens_BT, targets_BT)
        return model(input_ids=tokens_BT, labels=tokens_BT).loss


def batch(step: int, microbatch: int, reader: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * microbatch + reader)
    tokens_BT = torch.randint(0, VOCAB, (2, SEQ + 1), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def train_plain(case: Case, num_readers: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """One process that reads what all ranks read, a rank's batch at a time; with the same capacity."""
    model = case.build()
    if case.capacity is not None:
        find_and_apply(model, case.capacity)
    optimizer, losses, norms = optimizer_of(model), [], []
    for step in range(STEPS):
        for reader in range(num_readers):
            for microbatch in range(case.num_microbatches):
                loss = case.loss(model, step, microbatch, reader) / case.num_microbatches
                (loss / num_readers).backward()
                losses.append(loss.item())
        limit = float("inf") if case.max_norm is None else case.max_norm
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), losses, norms


def find_and_apply(model: nn.Module, capacity: float) -> None:
    """The capacity alone, in a plain process."""
    from shardwise.expert.apply import apply_experts
    from shardwise.expert.find import find_mixtures

    apply_experts(find_mixtures(model, 1), None, capacity)


def differences(case: Case) -> dict[str, float]:
    """On a rank: train in both ways; the largest difference of losses, norms and parameters."""
    size, reader = distributed.get_world_size(), distributed.get_rank()
    whole, losses, norms = train_plain(case, size)
    plan = sw.ParallelPlan(strategy=case.strategy, ep=case.ep, expert_capacity=case.capacity, **dict(case.plan))
    model = sw.parallelize(case.build(), plan)
    optimizer = optimizer_of(model)
    found = {"loss": 0.0, "norm": 0.0, "parameter": 0.0}
    for step in range(STEPS):
        for microbatch in range(case.num_microbatches):
            with sw.gradient_sync(model, microbatch == case.num_microbatches - 1):
                loss = case.loss(model, step, microbatch, reader) / case.num_microbatches
                loss.backward()
            expected = losses[(step * size + reader) * case.num_microbatches + microbatch]
            found["loss"] = max(found["loss"], abs(loss.item() - expected) / abs(expected))
        norm = (
            grad_norm(runtime_of(model, "test")) if case.max_norm is None else sw.clip_grad_norm(model, case.max_norm)
        )
        found["norm"] = max(found["norm"], abs(norm.item() - norms[step]) / norms[step])
        optimizer.step()
        optimizer.zero_grad()
    marks = {name: slice_of(parameter) for name, parameter in model.named_parameters()}
    compared = 0
    for extent, values in HeldValues(model).extents:
        expected, mark = whole[extent.name].detach(), marks[extent.name]
        if mark is not None and mark.cuts:
            ((start, stop),) = mark.cuts[0].ranges
            expected = expected[start:stop]
        error = (expected.reshape(-1)[extent.start : extent.start + values.numel()] - values).abs()
        compared += values.numel()
        found["parameter"] = max(found["parameter"], error.max().item() if error.numel() else 0.0)
    assert compared
    found["experts"] = float(sum(mark is not None and mark.is_expert for mark in marks.values()))
    state = sw.full_state_dict(model)
    if reader == 0:
        assert list(state) == list(case.build().state_dict())
        errors = [(state[name] - p.detach()).abs().max().item() for name, p in whole.items()]
        found["parameter"] = max(found["parameter"], *errors)
    return found


def run_all(cases: tuple[Case, ...]) -> list[dict[str, float]]:
    warnings.filterwarnings("ignore", module="transformers")
    return [differences(case) for case in cases]


def check(cases: tuple[Case, ...], size: int) -> None:
    for found in run_on_ranks(run_all, size, cases):
        for case, errors in zip(cases, found, strict=True):
            relative, absolute = TOLERANCES[case.dtype]
            assert (errors["experts"] > 0) == (case.ep > 1)
            assert errors["loss"] <= relative, (case, errors)
            assert errors["norm"] <= relative, (case, errors)
            assert errors["parameter"] <= absolute, (case, errors)


RECOMPUTED = (("activation_checkpointing", "full"),)


def test_two_ranks_with_half_of_the_experts_each_equal_one_process():
    check(
        (
            Case(),
            Case(strategy="ddp", max_norm=0.5),
            Case(strategy="zero1", num_microbatches=2),
            Case(strategy="zero2", plan=RECOMPUTED),
            Case(family="mixtral"),
            Case(family="qwen3", strategy="shard_grad_op"),
            Case(capacity=0.7),
            Case(capacity=0.7, ep=1),
            Case(family="mixtral", capacity=0.7, plan=RECOMPUTED),
            Case(dtype=torch.float32),
            Case(family="mixtral", dtype=torch.float32),
        ),
        2,
    )


def test_four_ranks_that_share_experts_or_hold_one_each_equal_one_process():
    check(
        (
            Case(max_norm=0.5),
            Case(strategy="ddp"),
            Case(strategy="hsdp", plan=(("dp_replicate", 2),), num_microbatches=2),
            Case(ep=4),
            Case(ep=4, family="mixtral", capacity=0.6),
        ),
        4,
    )


def beside(options: dict[str, Any]) -> tuple[float, float, float]:
    """On a rank: steps with another axis too against one process; differences of losses, norms, and on rank 0 values.

    Every rank reads what its data-parallel coordinate says, in as many microbatches as one process accumulates.
    """
    case, rank = Case(max_norm=0.3), distributed.get_rank()
    plan = sw.ParallelPlan(ep=2, **options)
    mesh = plan.mesh(distributed.get_world_size())
    count, readers = mesh.pp, mesh.data_parallel_size
    plain, model = case.build(), sw.parallelize(case.build(), plan)
    theirs, mine = optimizer_of(plain), optimizer_of(model)
    found = [0.0, 0.0, 0.0]
    for step in range(STEPS):
        expected = 0.0
        for reader in range(readers):
            tokens_BT, targets_BT = batch(step, 0, reader)
            for tokens, targets in zip(tokens_BT.chunk(count), targets_BT.chunk(count), strict=True):
                loss = plain(tokens, targets) / (count * readers)
                loss.backward()
                expected += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3).item()
        loss = sw.train_step(model, batch(step, 0, mesh.data_parallel_rank(rank)), num_microbatches=count).item()
        found[0] = max(found[0], abs(loss - expected) / abs(expected))
        found[1] = max(found[1], abs(sw.clip_grad_norm(model, 0.3).item() - norm) / norm)
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    state = sw.full_state_dict(model)
    if rank == 0:
        assert list(state) == list(plain.state_dict())
        found[2] = max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    return found[0], found[1], found[2]


def run_beside(every: tuple[dict[str, Any], ...]) -> list[tuple[float, float, float]]:
    return [beside(options) for options in every]


@pytest.mark.long
def test_experts_beside_tensor_pipeline_and_context_parallelism_equal_one_process():
    every = ({"tp": 2}, {"tp": 2, "strategy": "ddp"}, {"cp": 2}, {"pp": 2}, {"pp": 2, "strategy": "zero1"})
    for found in run_on_ranks(run_beside, 4, every):
        for options, (loss, norm, parameter) in zip(every, found, strict=True):
            assert loss <= 1e-9, options
            assert norm <= 1e-9, options
            assert parameter <= 1e-8, options
