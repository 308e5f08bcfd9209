"""Muon on shards: each matrix is orthogonalized once, whole, and the numbers are those of one process."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise import torch_private
from shardwise.optim.muon import matrix_extent
from shardwise.spec.errors import StateError
from shardwise.testing import part_of, run_on_ranks
from tests.common import models
from tests.common.families import FAMILIES, build_transformers
from tests.common.oracle import compare, presets
from tests.common.ranks import on_ranks, refusal
from tests.optim.test_granularity_ranks import Both, loss_of

WHOLE = {"*.qkv.weight": 1}


def torchs(model: nn.Module) -> Both:
    """Muon and AdamW of torch, on the groups that ours makes without fused weights."""
    parts = []
    for group in sw.muon_groups(model, fused=WHOLE):
        kept = {key: value for key, value in group.items() if key not in ("kind", "parts", "dim")}
        parts.append((torch.optim.Muon if group["kind"] == "muon" else torch.optim.AdamW)([kept]))
    return Both(*parts)


def build() -> nn.Module:
    return models.build("gpt")


def with_torchs(strategies: tuple[str, ...]) -> None:
    for strategy in strategies:
        compare(
            build,
            loss_of,
            strategy,
            steps=3,
            auto_wrap_policy=models.wrap_policy("gpt"),
            optimizer=lambda made: made,
            parameters=torchs,
            given=lambda model: sw.Muon(sw.muon_groups(model, fused=WHOLE)),
        )


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_torchs_muon_and_adamw_bit_for_bit_under_every_strategy(world):
    run_on_ranks(with_torchs, world, presets() if world == 2 else ("zero3",))


@on_ranks(2)
def test_fused_projections_are_orthogonalized_by_themselves():
    compare(
        build,
        loss_of,
        "zero3",
        steps=2,
        auto_wrap_policy=models.wrap_policy("gpt"),
        optimizer=sw.Muon,
        parameters=lambda model: sw.muon_groups(model, momentum=0.9, nesterov=False),
    )


CONFIG = sw.models.GPTConfig(num_layers=2, hidden=32, num_heads=4, vocab_size=64, seq_len=8)


def gpt() -> nn.Module:
    torch.manual_seed(5)
    return sw.models.GPT(CONFIG)


def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step * 1000 + sum(name.encode())))


def set_gradients(model: nn.Module, step: int) -> None:
    """The same gradients as a plain model gets, of each parameter what this rank holds."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = gradient(name, tuple(sw.logical_shape(parameter)), step)
        parameter.grad = part_of(matrix_extent(parameter), whole).clone().view(parameter.shape)


def count_calls() -> list[tuple[int, ...]]:
    """The shapes of the matrices that are orthogonalized from now on."""
    seen: list[tuple[int, ...]] = []
    plain = torch_private.orthogonalized

    def counted(matrix: Tensor, *rest: object) -> Tensor:
        seen.append(tuple(matrix.shape))
        return plain(matrix, *rest)

    torch_private.orthogonalized = counted
    return seen


def by_hand(plans: list[dict], build: Callable[[], nn.Module] = gpt) -> None:
    """Given gradients, weights after three steps beside one process; matrices by how often they were orthogonalized."""
    seen = count_calls()
    alone = build()
    reference = sw.Muon(sw.muon_groups(alone))
    for step in range(3):
        for name, parameter in alone.named_parameters():
            if parameter.requires_grad:
                parameter.grad = gradient(name, tuple(parameter.shape), step)
        reference.step()
    expected = sorted(seen)
    for fields in plans:
        model = sw.parallelize(build(), sw.ParallelPlan(**fields))
        optimizer = sw.Muon(sw.muon_groups(model))
        seen.clear()
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, seen)
        assert sorted(shape for rank in found for shape in rank) == expected, fields
        state = sw.full_state_dict(model)
        if dist.get_rank() == 0:
            for name, tensor in alone.state_dict().items():
                assert torch.equal(state[name], tensor), (fields, name)


TWO = [{"strategy": "ddp"}, {"strategy": "zero1"}, {"strategy": "zero3"}, {"tp": 2}, {"pp": 2}]
FOUR = [
    {"strategy": "zero3", "dp_replicate": 2},
    {"strategy": "zero3", "tp": 2},
    {"strategy": "zero2", "pp": 2},
    {"strategy": "zero3", "cp": 2},
    {"tp": 2, "pp": 2},
]


@pytest.mark.parametrize("world", [2, 4])
def test_each_matrix_is_orthogonalized_once_and_the_weights_are_those_of_one_process(world):
    run_on_ranks(by_hand, world, TWO if world == 2 else FOUR)


def half_frozen() -> nn.Module:
    """Of the first half of the blocks nothing is trained: a stage of pp has the embedding alone."""
    model = gpt()
    model.blocks[0].requires_grad_(requires_grad=False)
    return model


@on_ranks(2)
def test_a_stage_without_matrices_takes_part_and_one_with_nothing_to_train_is_refused():
    by_hand([{"pp": 2}], half_frozen)
    model = half_frozen()
    for parameter in (*model.token_embedding.parameters(), *model.position_embedding.parameters()):
        parameter.requires_grad_(requires_grad=False)
    model = sw.parallelize(model, sw.ParallelPlan(pp=2))
    text = refusal(StateError, sw.muon_groups, model)
    assert text.startswith("sw.muon_groups: rank 0 has no trained parameter")


def mixture() -> nn.Module:
    torch.manual_seed(5)
    return sw.models.GPT(dataclasses.replace(CONFIG, num_experts=4))


@pytest.mark.parametrize(
    ("world", "plans"),
    [
        (2, [{"ep": 2}, {"strategy": "zero1", "ep": 2}]),
        (4, [{"ep": 2}, {"ep": 4}, {"ep": 2, "tp": 2}, {"ep": 2, "pp": 2}]),
    ],
)
def test_each_experts_matrix_is_orthogonalized_once(world, plans):
    run_on_ranks(by_hand, world, plans, mixture)


def stacked() -> nn.Module:
    warnings.simplefilter("ignore")
    return build_transformers(
        "MixtralForCausalLM", "MixtralConfig", {**FAMILIES["Mixtral"].sizes, "num_local_experts": 4}
    )


def test_experts_in_stacked_weights_are_matrices_of_their_own():
    """Gate and up apart, as they are where each has a weight of its own."""
    groups = {key: g for g in sw.muon_groups(stacked()) if (key := (g["kind"], g.get("is_stacked")))[1]}
    assert set(groups) == {("muon", True)}
    run_on_ranks(by_hand, 2, [{}, {"strategy": "ddp"}, {"ep": 2}], stacked)


@pytest.mark.parametrize("other", [{"tp": 2}, {"pp": 2}])
@on_ranks(2)
def test_its_state_loads_on_another_layout(tmp_path, other):
    folder = str(tmp_path)
    """Two steps, saved under zero3, two more under another plan: as four steps of one process."""
    alone = gpt()
    reference = sw.Muon(sw.muon_groups(alone))
    model = sw.parallelize(gpt(), sw.ParallelPlan(strategy="zero3"))
    optimizer = sw.Muon(sw.muon_groups(model))
    for step in range(4):
        for name, parameter in alone.named_parameters():
            parameter.grad = gradient(name, tuple(parameter.shape), step)
        reference.step()
        if step == 2:
            sw.save(f"{folder}/saved", model, optimizer)
            model = sw.parallelize(gpt(), sw.ParallelPlan(**other))
            optimizer = sw.Muon(sw.muon_groups(model))
            sw.load(f"{folder}/saved", model, optimizer)
            sw.save(f"{folder}/again", model, optimizer)
        set_gradients(model, step)
        optimizer.step()
    state = sw.full_state_dict(model)
    if dist.get_rank() == 0:
        assert all(torch.equal(state[name], tensor) for name, tensor in alone.state_dict().items())


def test_without_ranks_it_is_torchs():
    ours, theirs = gpt(), gpt()
    optimizer = sw.Muon(sw.muon_groups(ours, fused=WHOLE, ns_steps=3))
    reference = Both(
        *(
            torch.optim.Muon(group["params"], lr=0.02, ns_steps=3)
            if group["kind"] == "muon"
            else torch.optim.AdamW(group["params"], lr=3e-4, betas=(0.9, 0.95), weight_decay=group["weight_decay"])
            for group in sw.muon_groups(theirs, fused=WHOLE)
        )
    )
    for step in range(2):
        for model in (ours, theirs):
            for name, parameter in model.named_parameters():
                parameter.grad = gradient(name, tuple(parameter.shape), step)
        optimizer.step()
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("head", ["proj_out", "vocab_projector", "qa_outputs", "lm_head.decoder", "anything"])
def test_heads_are_trained_by_adamw(head):
    """By their usual names, or as a model of transformers says."""
    model = nn.Module()
    model.hidden = nn.Linear(8, 8, bias=False)
    inner = model
    for name in head.split(".")[:-1]:
        inner.add_module(name, nn.Module())
        inner = inner.get_submodule(name)
    inner.add_module(head.split(".")[-1], nn.Linear(8, 32, bias=False))
    if head == "anything":
        model.get_output_embeddings = lambda: model.anything
    matrices = [p for g in sw.muon_groups(model) if g["kind"] == "muon" for p in g["params"]]
    assert [p is model.hidden.weight for p in matrices] == [True]


def test_groups_that_cannot_be_are_refused():
    model = gpt()
    with pytest.raises(StateError, match="takes matrices"):
        sw.Muon(model.parameters())
    with pytest.raises(StateError, match=r"no trained matrix is called '\*\.nothing'"):
        sw.muon_groups(model, fused={"*.nothing": 2})
    with pytest.raises(StateError, match="not 5 equal parts"):
        sw.muon_groups(model, fused={"*.mlp.up.weight": 5})
    with pytest.raises(StateError, match="make 9"):
        sw.muon_groups(model, fused={"*.mlp.up.weight": [4, 5]})
    groups = sw.muon_groups(model, adamw=["blocks.0.*"])
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].startswith("blocks.1.") for g in groups if g["kind"] == "muon" for p in g["params"])
