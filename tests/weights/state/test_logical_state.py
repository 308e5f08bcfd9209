"""Checkpoints and state dicts are logical: models in slices and stages, cut by hand, between all layouts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.api.preparation import prepare
from shardwise.api.shard import shard_model
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.cli import main
from shardwise.comm.axes import Comms, MeshRanks
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.spec.extent import Extent
from shardwise.spec.granularity import ELEMENT, ROW, Granularity
from shardwise.spec.mesh import Mesh
from shardwise.spec.slice import Cut, Slice, even_ranges, set_slice
from shardwise.spec.unit_facts import EngineOptions
from shardwise.testing import probe, run_on_ranks
from tests.common.blockwise import RowAdagrad
from tests.common.ranks import on_ranks, refusal

HIDDEN, HEADS, ROWS = 12, 4, 22
DTYPES = {"fp32": torch.float32, "int64": torch.int64}


class Block(nn.Module):
    """Of everything that is cut one, and of everything that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.Parameter(torch.randn(4, HIDDEN, 6))
        self.kv = nn.Linear(HIDDEN, 6, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.turned = nn.Parameter(torch.randn(5, HIDDEN).t())  # dense, but not in the usual order

    def get_extra_state(self) -> dict[str, float]:
        return {"gain": round(self.gain.numel() * 0.5, 1)}

    def set_extra_state(self, state: dict[str, float]) -> None:
        assert state == {"gain": 0.5}


class Stack(nn.Module):
    """An embedding that is the head, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, HIDDEN)
        self.positions = nn.Buffer(torch.arange(9), persistent=True)
        self.turned = nn.Buffer(torch.randn(3, HIDDEN).t())  # not contiguous
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, ROWS, bias=False)
        self.head.weight = self.embedding.weight


def build() -> Stack:
    torch.manual_seed(3)
    model = Stack()
    for index, block in enumerate(model.blocks):
        block.norm.running_mean += index + 1
    return model


def cut(model: nn.Module, comms: Comms, *, whole: tuple[str, ...]) -> None:
    """Slices as tensor and expert parallelism make them; a third of the rows goes to rank 0."""
    if comms.tp is None:
        return
    size, rank = comms.tp.size, comms.tp.rank
    rows = ((0, ROWS // 3), (ROWS // 3, ROWS))[rank]
    fused = even_ranges(3 * HIDDEN, size, rank, blocks=3)
    half = even_ranges(HIDDEN, size, rank)
    slices = {
        "embedding.weight": (Cut(0, (rows,)),),
        "qkv.weight": (Cut(0, fused),),
        "qkv.bias": (Cut(0, fused),),
        "out.weight": (Cut(1, half),),
        "experts": (Cut(0, even_ranges(4, size, rank)),) if rank < 2 else (),
    }
    for name, parameter in list(model.named_parameters()):
        if name.endswith("kv.weight") and not name.endswith("qkv.weight"):
            set_slice(parameter, Slice(tuple(parameter.shape), (), copy=rank, copies=size))
        cuts = next((found for ending, found in slices.items() if name.endswith(ending)), None)
        if cuts is not None and not name.endswith(whole):
            part = parameter.data
            for each in cuts:
                part = torch.cat([part.narrow(each.dim, a, b - a) for a, b in each.ranges], each.dim)
            own_slice = Slice(tuple(parameter.shape), cuts)
            parameter.data = part.clone()
            set_slice(parameter, own_slice)


def keep_stage(model: Stack, comms: Comms) -> None:
    """The first two blocks here, the others there; the head is tied across the stages."""
    if comms.pp is None:
        return
    weight = model.embedding.weight
    names = ("embedding.weight", "head.weight")
    if comms.pp.rank == 0:
        set_slice(weight, Slice((ROWS, HIDDEN), copy=0, copies=2, names=names))
        model.norm = model.head = nn.Identity()
    else:
        model.head.weight = nn.Parameter(weight.detach().clone())
        set_slice(model.head.weight, Slice((ROWS, HIDDEN), copy=1, copies=2, names=names))
        model.embedding = nn.Identity()
    for index in range(4):
        if index // 2 != comms.pp.rank:
            model.blocks[index] = nn.Identity()


@dataclass(frozen=True)
class Layout:
    mesh: Mesh
    strategy: str = "zero3"

    def make(
        self, granularity: Granularity = ELEMENT, whole: tuple[str, ...] = ()
    ) -> tuple[nn.Module, torch.optim.Optimizer, sw.ExponentialMovingAverage]:
        """The model on this rank, with an optimizer and an average."""
        model = build()
        alone = [distributed.get_rank()] if self.mesh.world_size == 1 else None  # then every rank is a world
        comms = MeshRanks(self.mesh, ranks=alone).open(torch.device("cpu"))
        keep_stage(model, comms)
        cut(model, comms, whole=whole)
        blocks = {f"blocks.{i}": block for i, block in enumerate(model.blocks) if isinstance(block, Block)}
        prepared = replace(prepare(model, sw.ParallelPlan(self.strategy, auto_wrap_policy="none")), units=blocks)
        shard_model(model, prepared, comms, EngineOptions(granularity=granularity))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, sw.ExponentialMovingAverage(model, decay=0.5)


LAYOUTS = {
    "plain": Layout(Mesh()),
    "dp4": Layout(Mesh(dp_shard=4), "zero2"),
    "tp2 x ddp2": Layout(Mesh(tp=2, dp_shard=2), "ddp"),
    "tp2 x dp2": Layout(Mesh(tp=2, dp_shard=2)),
    "pp2 x dp2": Layout(Mesh(pp=2, dp_shard=2), "zero1"),
    "pp2 x tp2": Layout(Mesh(pp=2, tp=2)),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, average: sw.ExponentialMovingAverage) -> None:
    generator = torch.Generator().manual_seed(11)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        average.update()


def logical(path: str) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, in the order of its memory."""
    checkpoint = open_checkpoint(path)
    found = {name: torch.zeros(extent.numel, dtype=DTYPES[extent.dtype]) for name, extent in checkpoint.tensors.items()}
    checkpoint.read_into([(extent, found[name]) for name, extent in checkpoint.tensors.items()])
    return found


def part_of(extent: Extent, flat: Tensor) -> Tensor:
    """What an extent holds of a logical tensor, by torch's own indexing."""
    whole = flat.view(extent.shape) if extent.stride is None else flat.as_strided(extent.shape, extent.stride)
    for each in extent.cuts:
        whole = torch.cat([whole.narrow(each.dim, a, b - a) for a, b in each.ranges], each.dim)
    if extent.stride is not None:
        whole = whole.permute(sorted(range(whole.dim()), key=lambda dim: -extent.stride[dim]))
    return whole.reshape(-1)[extent.start : extent.stop]


def wrong(model: nn.Module, optimizers: list[torch.optim.Optimizer], reference: dict[str, Tensor]) -> list[str]:
    """What this rank holds that is not its part of the reference."""
    pairs = [*probe(model).extents(), *probe(model).owned_extents(*optimizers)]
    return [extent.name for extent, flat in pairs if not torch.equal(flat, part_of(extent, reference[extent.name]))]


def wrong_average(model: nn.Module, average: sw.ExponentialMovingAverage, reference: dict[str, Tensor]) -> list[str]:
    with average.swapped_in():
        pairs = [(extent, flat) for extent, flat in probe(model).extents() if not extent.name.startswith("buffer/")]
        return [e.name for e, flat in pairs if not torch.equal(flat, part_of(e, reference[f"average/{e.name}"]))]


def different(state: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """What of a state dict on rank 0 is not the plain model's; other ranks (of a world of several) have none."""
    if not state:
        return [] if distributed.get_rank() else ["all of it"]
    if list(state) != list(plain):
        return ["the order of keys"]
    return [
        key
        for key, value in plain.items()
        if not (same(value, state[key]) if isinstance(value, Tensor) else value == state[key])
    ]


def differing_parameters(model: nn.Module, plain: dict[str, Any]) -> list[str]:
    """What this rank is given otherwise than the plain model has it, when it takes parameters unit by unit."""
    names = dict(build().named_parameters())
    found = dict(sw.iterate_full_parameters(model))
    wrong = [name for name in names if name not in found or not same(found[name], plain[name])]
    cast = [
        name for name, value in sw.iterate_full_parameters(model, "bf16") if not same(value, found[name].bfloat16())
    ]
    return [*wrong, *cast, *(found.keys() - names)]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


@on_ranks(4)
def test_every_layout_loads_what_every_other_saved(tmp_path: str) -> None:
    """Every layout loads what every other saved; gives what was not as in the plain model."""
    rank = distributed.get_rank()
    model, optimizer, average = LAYOUTS["plain"].make()
    train(model, optimizer, average)
    sw.save(f"{tmp_path}/plain-{rank}", model, optimizer, state={"step": 2}, average=average)
    plain = sw.full_state_dict(model)
    distributed.barrier()
    reference = logical(f"{tmp_path}/plain-0")
    found: dict[Any, list[str]] = {}
    for source, target in sorted(itertools.product(LAYOUTS, LAYOUTS), key=lambda pair: pair[0] != "plain"):
        model, optimizer, average = LAYOUTS[target].make()
        for settings in optimizer.param_groups:
            settings["lr"] = 0.0  # the checkpoint knows better
        assert wrong(model, [], reference)  # the test sees what is not loaded
        saved = f"{tmp_path}/{source}" + ("-0" if source == "plain" else "")
        assert sw.load(saved, model, optimizer, average=average) == {"step": 2}
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert all(state["step"] == 2 for state in optimizer.state.values())
        found[source, target] = wrong(model, [optimizer], reference)
        if source == "plain":
            found["average", target] = wrong_average(model, average, reference)
            found["state dict", target] = different(sw.full_state_dict(model), plain)
            found["unit by unit", target] = differing_parameters(model, plain)
            if target != "plain":
                sw.save(f"{tmp_path}/{target}", model, optimizer, state={"step": 2}, average=average)
    changed = {key: value + 1 if isinstance(value, Tensor) else value for key, value in plain.items()}
    some = ("embedding.weight", "blocks.2.qkv.bias", "blocks.2.experts", "blocks.2.norm.running_mean", "norm.weight")
    for name, layout in LAYOUTS.items():
        is_first = rank == 0 or name == "plain"
        model, _, _ = layout.make()
        sw.load_full_state_dict(model, plain if is_first else {})
        found["from rank 0", name] = wrong(model, [], reference)
        partly = {key: changed[key] for key in some}
        sw.load_full_state_dict(model, partly if is_first else {}, strict=False)
        new = {key: reference[key] + 1 if key.removeprefix("buffer/") in some else reference[key] for key in reference}
        found["partly", name] = wrong(model, [], new)
        misfit = {key: value for key, value in plain.items() if key != "norm.weight"} | {"what": plain["norm.weight"]}
        misfit["blocks.3.out.weight"] = torch.zeros(HIDDEN, HIDDEN // 2)
        with pytest.raises(StateError) as caught:
            sw.load_full_state_dict(model, misfit if is_first else {})
        expected = ["blocks.3.out.weight: expected [12, 12], got [12, 6]", "norm.weight: missing (expected [12])"]
        found["refused", name] = [text for text in [*expected, "what: unexpected"] if text not in str(caught.value)]
        found["refused", name] += wrong(model, [], new)
    for name in LAYOUTS.keys() - {"plain"}:
        saved = logical(f"{tmp_path}/{name}")
        assert saved.keys() == reference.keys()
        found["saved", name] = [key for key in reference if not torch.equal(reference[key], saved[key])]
    assert len(found) == 36 + 3 * 6 + 3 * 6 + 5
    assert not any(found.values()), {key: value for key, value in found.items() if value}


def trained_with(make: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has stepped once."""
    optimizer = make(model.parameters())
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.linspace(0.1, index + 1, parameter.shape.numel()).reshape(parameter.shape)
    optimizer.step()
    return optimizer


class Recommender(nn.Module):
    """A table, and what is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, HIDDEN)
        self.dense = nn.Linear(HIDDEN, 1)


def share_a_table(folder: str) -> list[str]:
    """Rows of an ignored table on all ranks, saved, loaded whole and back; what is wrong of it."""
    rank = distributed.get_rank()
    first, last = rank * ROWS // 4, (rank + 1) * ROWS // 4

    def make(*, is_shared: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = Recommender()
        ignored = []
        if is_shared:
            weight = model.table.weight
            weight.data = weight.data[first:last].clone()
            set_slice(weight, Slice((ROWS, HIDDEN), (Cut(0, ((first, last),)),)))
            ignored = ["table"]
        ranks = None if is_shared else [rank]
        comms = MeshRanks(Mesh(dp_shard=4 if is_shared else 1), ranks=ranks).open(torch.device("cpu"))
        strategy = "ddp" if is_shared else "zero3"
        prepared = prepare(model, sw.ParallelPlan(strategy, auto_wrap_policy="none", ignored=ignored))
        shard_model(model, prepared, comms, EngineOptions())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    model, optimizer = make(is_shared=True)
    before = model.table.weight.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + (rank if parameter is model.table.weight else 0))
    optimizer.step()
    sw.save(f"{folder}/table", model, optimizer)
    whole, whole_optimizer = make(is_shared=False)
    sw.load(f"{folder}/table", whole, whole_optimizer)
    got, state = sw.full_state_dict(whole), sw.full_state_dict(model)
    found = [] if rank else unequal(state, got)
    momentum = whole_optimizer.state[whole.table.weight]["exp_avg"].view(ROWS, HIDDEN)[first:last]
    found += [] if torch.equal(momentum, optimizer.state[model.table.weight]["exp_avg"]) else ["momentum"]
    found += [] if torch.equal(got["table.weight"][first:last], model.table.weight) else ["rows"]
    found += ["nothing happened"] if torch.equal(before, model.table.weight) else []
    new = {key: value * 2 for key, value in got.items()}
    sw.load_full_state_dict(model, new if rank == 0 else {})
    found += [] if torch.equal(new["table.weight"][first:last], model.table.weight) else ["rows from rank 0"]
    if rank == 0:
        sw.save(f"{folder}/whole", whole, whole_optimizer)
    distributed.barrier()
    sw.load(f"{folder}/whole", model, optimizer)
    return found + ([] if torch.equal(got["table.weight"][first:last], model.table.weight) else ["rows of the whole"])


def refuse(folder: str) -> dict[str, str]:
    """What cannot be saved or loaded, with the text on this rank; and what is seen of slices and stages."""
    texts = {}
    sw.declare_granularity(RowAdagrad, "row")
    rows = ROW
    for name in ("tp2 x dp2", "pp2 x dp2"):
        model, optimizer, _ = LAYOUTS[name].make()
        texts[name] = str(sw.summary(model))
        shapes = {key: tuple(parameter.shape) for key, parameter in build().named_parameters()}
        assert all(
            sw.logical_shape(parameter) == shapes[key] for key, parameter in model.named_parameters() if key in shapes
        )
        sw.save(f"{folder}/{name}", model, optimizer)
    model, _, _ = LAYOUTS["tp2 x dp2"].make(rows)
    texts["columns"] = refusal(StateError, trained_with, RowAdagrad, model)
    model, _, _ = LAYOUTS["tp2 x dp2"].make(rows, ("out.weight",))  # rows are whole, on whatever rank
    sw.save(f"{folder}/rows", model, trained_with(RowAdagrad, model))
    reference = logical(f"{folder}/rows")
    assert reference["optimizer/blocks.1.experts/sum"].unique().numel() > 2
    for name in ("pp2 x dp2", "dp4"):
        model, _, _ = LAYOUTS[name].make(rows)
        optimizer = RowAdagrad(model.parameters())
        sw.load(f"{folder}/rows", model, optimizer)
        texts[name, "rows"] = str(wrong(model, [optimizer], reference))
    model, optimizer, _ = LAYOUTS["pp2 x dp2"].make()
    if distributed.get_rank() == 2:  # one rank of the last stage
        model.blocks[3].norm.running_mean = torch.zeros(1).expand(HIDDEN)
    texts["one rank"] = refusal(StateError, sw.load, f"{folder}/tp2 x dp2", model, optimizer)
    texts["table"] = str(share_a_table(folder))
    return texts


def test_rows_and_tables_are_logical_and_what_one_stage_cannot_do_ends_all(tmp_path, capsys):
    every = run_on_ranks(refuse, 4, str(tmp_path))
    (expanded,) = {texts["one rank"] for texts in every}
    assert expanded.startswith("rank 2: buffer 'blocks.3.norm.running_mean' of shape [12] is expanded: several of its")
    assert {texts["table"] for texts in every} == {"[]"}
    assert len({texts["columns"] for texts in every}) == 1
    assert "RowAdagrad needs every row of a parameter on one rank" in every[0]["columns"]
    assert {texts[name, "rows"] for texts in every for name in ("pp2 x dp2", "dp4")} == {"[]"}
    assert "this rank holds slice 2 of 2 (tp)" in every[1]["tp2 x dp2"]
    lines = [line.strip() for line in every[1]["tp2 x dp2"].splitlines()]
    assert "blocks.*.qkv.weight (4): [6:12 18:24 30:36 of 36, :]" in lines
    assert "blocks.*.kv.weight (4): all of [6, 12], copy 2 of 2" in lines
    assert "this rank holds pipeline stage 2 of 2 (pp)" in every[2]["pp2 x dp2"]
    capsys.readouterr()
    assert main(["checkpoint", "inspect", str(tmp_path / "tp2 x dp2")]) == 0
    shown = capsys.readouterr().out
    assert "saved by    4 ranks, " in shown
    assert "dp_shard=2 x tp=2" in shown
    assert "  embedding.weight: [0:7 of 22, :] [7:22 of 22, :]" in shown
    assert main(["checkpoint", "verify", str(tmp_path / "tp2 x dp2")]) == 0
    shown = capsys.readouterr().out
    assert "good, 4 files, step 0, " in shown
    assert "tensors in slices" in shown


def of_plan(**plan: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Our GPT under a plan: its head is tied to the embedding."""
    torch.manual_seed(5)
    model = sw.models.gpt("gpt-tiny", num_layers=4, hidden=24, num_heads=4, vocab_size=31, seq_len=6, tied=True)
    model = sw.parallelize(model, sw.ParallelPlan(**plan))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens_BT = torch.randint(0, 31, (4, 7), generator=generator)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def go_on(folder: str, source: str | None, target: str, steps: range, plan: dict[str, Any]) -> dict[str, Any]:
    """Load, train, save; gives the whole state dict on rank 0, before and after."""
    model, optimizer = of_plan(**plan)
    if source is not None:
        sw.load(f"{folder}/{source}", model, optimizer)
    before = sw.full_state_dict(model)
    for step in steps:
        sw.train_step(model, batch(step), num_microbatches=2)
        optimizer.step()
        optimizer.zero_grad()
    sw.save(f"{folder}/{target}", model, optimizer, state={"step": steps.stop})
    return {"before": before, "after": sw.full_state_dict(model)}


def alone(folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return go_on(folder, "both", "alone", range(0), {}), go_on(folder, "tp2 x dp2", "plain", range(2, 3), {})


def unequal(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert list(a) == list(b)
    return [key for key in a if not torch.equal(a[key], b[key])]


def test_a_run_moves_from_tensor_parallelism_to_a_pipeline_to_one_process(tmp_path):
    tensor = {"tp": 2, "dp_shard": 2}
    first = run_on_ranks(go_on, 4, str(tmp_path), None, "tp2 x dp2", range(2), tensor)[0]
    piped = run_on_ranks(go_on, 2, str(tmp_path), "tp2 x dp2", "pp2", range(2, 3), {"pp": 2})[0]
    both = run_on_ranks(go_on, 4, str(tmp_path), "pp2", "both", range(0), {"pp": 2, "tp": 2, "strategy": "ddp"})[0]
    last, plain = run_on_ranks(alone, 1, str(tmp_path))[0]
    assert unequal(first["after"], piped["before"]) == []
    assert unequal(piped["before"], piped["after"]) == list(piped["after"])  # it did train
    assert unequal(piped["after"], both["before"]) == unequal(both["before"], last["before"]) == []
    tied = {"token_embedding.weight", "lm_head.weight"}  # on two stages: its gradient is added up in another order
    assert set(unequal(piped["after"], plain["after"])) <= tied
    saved = [logical(f"{tmp_path}/{name}") for name in ("pp2", "both", "alone")]
    assert saved[0].keys() == saved[1].keys() == saved[2].keys()
    assert "optimizer/blocks.2.attention.qkv.weight/exp_avg" in saved[0]
    assert all(torch.equal(saved[0][name], other[name]) for other in saved[1:] for name in other)


def of_family(name: str) -> nn.Module:
    """Small models of three libraries' worth of names: key heads that ranks share, transposed weights, tied heads."""
    torch.manual_seed(2)
    if name == "gpt":
        return sw.models.gpt("gpt-tiny", num_layers=6, hidden=24, num_heads=4, vocab_size=31, seq_len=6, tied=True)
    import transformers

    sizes = {"vocab_size": 37, "bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, **sizes))
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 32, "intermediate_size": 64}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, **heads, **sizes))


FAMILIES = [
    ("gpt", {"pp": 2, "pipeline": "interleaved-1f1b"}),
    ("gpt", {"pp": 2, "pipeline": "zb-v"}),
    *itertools.product(("llama", "gpt2"), ({"tp": 2}, {"pp": 2})),
]


def pass_families(folder: str) -> dict[str, list[str]]:
    """Whole state dicts of models as they were built, and of zero3 models that loaded their checkpoints."""
    found = {}
    for place, (name, plan) in enumerate(FAMILIES):
        plain = of_family(name).state_dict()
        model = sw.parallelize(of_family(name), sw.ParallelPlan(**plan))
        found[f"{name} {plan}"] = different(sw.full_state_dict(model), plain)
        for key, value in sw.iterate_full_parameters(model):
            found[f"{name} {plan}"] += [] if torch.equal(value, plain[key]) else [f"{key}, iterated over"]
        sw.save(f"{folder}/{place}", model)
        other = sw.parallelize(of_family(name).apply(to_zero))
        sw.load(f"{folder}/{place}", other)
        found[f"{name} {plan} loaded"] = different(sw.full_state_dict(other), plain)
    return found


@torch.no_grad()
def to_zero(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


@pytest.mark.long
def test_real_models_give_the_plain_state_dict_in_slices_and_stages(tmp_path):
    every = run_on_ranks(pass_families, 2, str(tmp_path), timeout_s=200)
    assert all(len(found) == 2 * len(FAMILIES) and not any(found.values()) for found in every), every


class Counted(nn.Linear):
    """A module with a count and tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.said: Any = None

    def get_extra_state(self) -> Any:
        return self.said

    def set_extra_state(self, state: Any) -> None:
        self.said = state


def counted(strategy: str) -> nn.Module:
    return sw.parallelize(nn.Sequential(nn.Linear(3, 3), Counted()), strategy)


def pass_extra_state(folder: str) -> tuple[list[Any], str]:
    model = counted("zero3")
    rank = distributed.get_rank()
    wide = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    model[1].said = {"count": 7.0 + rank, "of": (1, [b"a", None]), "scale": torch.arange(3) + rank, "wide": [wide]}
    sw.save(f"{folder}/extra", model)
    found = []
    for strategy in ("zero3", "ddp"):
        fresh = counted(strategy)
        sw.load(f"{folder}/extra", fresh)
        found.append(fresh[1].said)
    model[1].said = {"count": 1, "odd": [object()] if rank == 1 else []}
    return found, refusal(CheckpointError, sw.save, f"{folder}/odd", model)


def test_extra_state_is_saved_as_data_with_the_first_ranks_values_and_other_things_are_refused_by_name(tmp_path):
    for found, text in run_on_ranks(pass_extra_state, 2, str(tmp_path)):
        for said in found:
            assert said["count"] == 7.0
            assert said["of"] == (1, [b"a", None])
            assert torch.equal(said["scale"], torch.arange(3))
            assert said["wide"][0].dtype is torch.bfloat16
            assert said["wide"][0].tolist() == [1.5, -2.0]
        assert "1._extra_state.odd[0] is a object" in text
        assert "Let its get_extra_state() return such data" in text
    assert not (tmp_path / "odd").exists()
