"""Expert parallelism against one plain process: float64, where only the order of sums differs, and fp32."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode

import shardwise as sw
from shardwise.spec.slice import slice_of
from shardwise.testing import part_of, probe, run_on_ranks
from tests.common.bits import worst

pytestmark = pytest.mark.preload(
    "transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3_moe.modeling_qwen3_moe"
)

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
            config = transformers.MixtralConfig(**(sizes | dict(self.model)), num_local_experts=4)
            return transformers.MixtralForCausalLM(config).to(self.dtype)
        config = transformers.Qwen3MoeConfig(
            **(sizes | dict(self.model)), num_experts=4, moe_intermediate_size=24, head_dim=8
        )
        return transformers.Qwen3MoeForCausalLM(config).to(self.dtype)

    def loss(self, model: nn.Module, step: int, microbatch: int, reader: int) -> Tensor:
        return self.loss_of(model, *batch(step, microbatch, reader))

    def loss_of(self, model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
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
    from shardwise.expert.layer import apply_experts, find_mixtures

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
            found["loss"] = worst(found["loss"], abs(loss.item() - expected) / abs(expected))
        norm = sw.clip_grad_norm(model, math.inf) if case.max_norm is None else sw.clip_grad_norm(model, case.max_norm)
        found["norm"] = worst(found["norm"], abs(norm.item() - norms[step]) / norms[step])
        optimizer.step()
        optimizer.zero_grad()
    marks = {name: slice_of(parameter) for name, parameter in model.named_parameters()}
    compared = 0
    for extent, values in probe(model).extents():
        error = (part_of(extent, whole[extent.name]) - values).abs()
        compared += values.numel()
        found["parameter"] = worst(found["parameter"], error.max().item() if error.numel() else 0.0)
    assert compared
    found["experts"] = float(sum(mark is not None and mark.is_expert for mark in marks.values()))
    state = sw.full_state_dict(model)
    if reader == 0:
        assert list(state) == list(case.build().state_dict())
        errors = [(state[name] - p.detach()).abs().max().item() for name, p in whole.items()]
        found["parameter"] = worst(found["parameter"], *errors)
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


@pytest.mark.transports
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


def beside(case: Case) -> tuple[float, float, float]:
    """On a rank: steps with another axis too against one process; differences of losses, norms, and on rank 0 values.

    Every rank reads what its data-parallel coordinate says, in as many microbatches as one process accumulates.
    """
    rank = distributed.get_rank()
    plan = sw.ParallelPlan(ep=case.ep, strategy=case.strategy, expert_capacity=case.capacity, **dict(case.plan))
    mesh = plan.mesh(distributed.get_world_size())
    count, readers = max(mesh.pp, case.num_microbatches), mesh.data_parallel_size
    plain, model = case.build(), sw.parallelize(case.build(), plan)
    if case.capacity is not None:
        find_and_apply(plain, case.capacity)
    cuts = {len(mark.cuts) for mark in map(slice_of, model.parameters()) if mark is not None and mark.is_expert}
    if case.family != "gpt" and case.ep > 1:
        assert cuts == {2 if plan.tp > 1 and plan.tp_plan is None else 1}
    theirs, mine = optimizer_of(plain), optimizer_of(model)
    found = [0.0, 0.0, 0.0]
    for step in range(STEPS):
        expected = 0.0
        for reader in range(readers):
            tokens_BT, targets_BT = batch(step, 0, reader)
            for tokens, targets in zip(tokens_BT.chunk(count), targets_BT.chunk(count), strict=True):
                loss = case.loss_of(plain, tokens, targets) / (count * readers)
                loss.backward()
                expected += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.3).item()
        read = batch(step, 0, mesh.data_parallel_rank(rank))
        given = read if case.family == "gpt" else {"input_ids": read[0], "labels": read[0]}
        loss = sw.train_step(model, given, num_microbatches=count).item()
        found[0] = worst(found[0], abs(loss - expected) / abs(expected))
        found[1] = worst(found[1], abs(sw.clip_grad_norm(model, 0.3).item() - norm) / norm)
        for optimizer in (theirs, mine):
            optimizer.step()
            optimizer.zero_grad()
    state = sw.full_state_dict(model)
    if rank == 0:
        assert list(state) == list(plain.state_dict())
        found[2] = worst(*((state[name] - value).abs().max().item() for name, value in plain.state_dict().items()))
    return found[0], found[1], found[2]


class AllInDouble(TorchFunctionMode):
    """Nothing of float64 is narrowed: models of transformers compute norms, scores and losses in float32 otherwise.

    There a last bit of float64, by which sums in parts differ, now and then turns into one of float32.
    """

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if function is Tensor.float:
                return args[0]
            if function is Tensor.to:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


def run_beside(cases: tuple[Case, ...]) -> list[tuple[float, float, float]]:
    warnings.filterwarnings("ignore", module="transformers")
    found = []
    for case in cases:
        with AllInDouble() if case.dtype is torch.float64 else contextlib.nullcontext():
            found.append(beside(case))
    return found


def check_beside(cases: tuple[Case, ...], size: int) -> None:
    for found in run_on_ranks(run_beside, size, cases):
        for case, (loss, norm, parameter) in zip(cases, found, strict=True):
            relative, absolute = TOLERANCES[case.dtype]
            assert loss <= relative, case
            assert norm <= relative, case
            assert parameter <= absolute, case


TP = (("tp", 2),)
#: A table that leaves experts whole on every rank of tp.
WHOLE_EXPERTS = (
    *TP,
    ("tp_plan", {f"model.layers.*.mlp.experts{name}": "replicate" for name in ("", ".gate_up_proj", ".down_proj")}),
)


def test_stacked_experts_cut_by_tp_too_equal_one_process():
    check_beside(
        (
            Case(family="mixtral", plan=TP),
            Case(family="qwen3", strategy="ddp", capacity=0.7, plan=TP),
            Case(family="mixtral", strategy="zero2", num_microbatches=2, plan=WHOLE_EXPERTS),
            Case(family="mixtral", dtype=torch.float32, plan=(*TP, *RECOMPUTED)),
            Case(family="mixtral", ep=1, capacity=0.7, plan=TP),
        ),
        4,
    )


@pytest.mark.long
def test_experts_beside_tensor_pipeline_and_context_parallelism_equal_one_process():
    single = Case(dtype=torch.float32, family="mixtral")
    check_beside(
        (
            Case(plan=TP),
            Case(strategy="ddp", plan=TP),
            Case(plan=(("cp", 2),)),
            Case(plan=(("pp", 2),)),
            Case(strategy="zero1", plan=(("pp", 2),)),
            dataclasses.replace(single, strategy="zero1", num_microbatches=2, plan=TP),
            dataclasses.replace(single, strategy="shard_grad_op", plan=(*TP, ("offload_policy", "cpu"))),
            Case(family="mixtral", plan=(("pp", 2),), model=(("output_router_logits", False),)),
        ),
        4,
    )


@pytest.mark.long
def test_stacked_experts_under_every_axis_equal_one_process():
    silent = (("output_router_logits", False),)
    check_beside(
        (
            Case(family="mixtral", plan=TP),
            Case(family="mixtral", strategy="hsdp", plan=(*TP, ("dp_replicate", 2))),
            Case(family="qwen3", plan=(*TP, ("pp", 2)), model=silent),
        ),
        8,
    )
