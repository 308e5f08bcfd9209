"""Which modules become units."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.extensions.wrap import find_units
from shardwise.spec.errors import PlanError
from tests.common.ranks import refusal


class Block(nn.Module):
    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class OtherBlock(Block):
    pass


class Layer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Block()


class Stage(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])


class Holder(nn.Module):
    """Holds others and is never called: it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Block(), OtherBlock()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int(self.router(x).sum() > 0)](x)


class Model(nn.Module):
    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return x


def chain(make: Any = Block, count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(make() for _ in range(count))


def names(model: nn.Module, policy: Any = "auto") -> list[str]:
    return list(find_units(model, policy))


# -- auto


def test_auto_takes_the_blocks_of_our_gpt():
    model = sw.models.gpt("gpt-tiny", device="meta")
    units = find_units(model, "auto")
    assert len({type(module) for module in units.values()}) == 1
    assert all(name.startswith("blocks.") for name in units)
    assert len(units) == len(model.blocks)


def test_auto_takes_what_a_transformers_model_names():
    model = Model(embed=nn.Embedding(3, 4), body=Model(layers=chain(Block), extra=OtherBlock()))
    model._no_split_modules = ["OtherBlock"]
    assert names(model) == ["body.extra"]
    model._no_split_modules = {"Block"}
    assert names(model) == ["body.layers.0", "body.layers.1", "body.layers.2"]
    model._no_split_modules = ["NotThere"]  # then it looks for itself
    assert names(model) == ["body.layers.0", "body.layers.1", "body.layers.2"]


def test_what_a_transformers_model_names_inside_of_what_it_names_is_one_unit():
    model = Model(body=Model(layers=chain(Layer)))  # as MBart and Mamba have it
    model._no_split_modules = ["Layer", "Block"]
    assert names(model) == ["body.layers.0", "body.layers.1", "body.layers.2"]
    model = Model(tower=Layer(), stages=chain(Stage, 2))  # as ConvNeXt has it
    model._no_split_modules = ["Layer", "Stage"]
    assert names(model) == ["tower", "stages.0.layers.0", "stages.0.layers.1", "stages.1.layers.0", "stages.1.layers.1"]


def test_auto_finds_chains_at_any_depth_and_in_several_places():
    model = Model(encoder=Model(layers=chain()), decoder=Model(layers=chain(OtherBlock, 2)), head=nn.Linear(4, 4))
    assert names(model) == [*(f"encoder.layers.{i}" for i in range(3)), "decoder.layers.0", "decoder.layers.1"]


def test_auto_stops_at_the_outermost_chain():
    class Deep(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Block(), Block())

    assert names(Model(layers=chain(Deep))) == ["layers.0", "layers.1", "layers.2"]


def test_auto_looks_through_lists_of_lists_and_through_modules_without_a_forward():
    lists = nn.ModuleList(nn.ModuleList([nn.LayerNorm(4), Block()]) for _ in range(2))
    assert names(Model(layers=lists)) == ["layers.0.1", "layers.1.1"]
    assert names(Model(layers=chain(Holder, 2))) == [
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1.attention",
        "layers.1.mlp",
    ]


def test_auto_never_splits_experts_or_other_alternatives():
    assert names(Model(layers=chain(Experts))) == ["layers.0", "layers.1", "layers.2"]
    for name in ("experts", "expert", "branches", "paths", "adapters", "local_experts"):
        assert names(Model(**{name: chain()})) == [], name
    assert names(Model(choices=nn.ModuleDict({"a": Model(layers=chain())}))) == []
    towers = {key: Model(layers=chain()) for key in "ab"}
    assert names(Model(towers=nn.ModuleDict(towers))) == []
    assert names(nn.ModuleDict(towers)) == [f"{key}.layers.{i}" for key in "ab" for i in range(3)]  # two models in one
    holder = Holder()
    holder.experts = chain()
    assert "layers.0.experts.0" not in names(Model(layers=nn.ModuleList([holder, holder])))


def test_auto_looks_into_a_dict_of_named_parts_or_of_numbered_blocks():
    parts = {"wte": nn.Embedding(3, 4), "h": chain(), "ln_f": nn.LayerNorm(4)}  # as nanoGPT and LitGPT have it
    blocks = ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert names(Model(lm_head=nn.Linear(4, 3), transformer=nn.ModuleDict(parts))) == blocks
    assert names(Model(layers=nn.ModuleDict({str(i): Block() for i in range(3)}))) == [  # as torchtitan has it
        "layers.0",
        "layers.1",
        "layers.2",
    ]

    class Dense(nn.ModuleDict):  # as torchvision's DenseNet has it
        def forward(self, x: Tensor) -> Tensor:
            return x

    dense = [Dense({f"layer{i}": Block() for i in range(2)}) for _ in range(2)]
    assert names(nn.Sequential(*dense)) == ["0.layer0", "0.layer1", "1.layer0", "1.layer1"]


def test_auto_takes_the_blocks_of_a_large_stage_and_a_small_stage_as_one():
    """As of ConvNeXt, Swin and timm's models: a stage would be gathered as a whole, most of the model."""

    def stage(width: int, count: int) -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)))

    model = Model(stages=nn.Sequential(stage(4, 2), stage(32, 3), stage(64, 2)))
    assert names(model) == ["stages.0", *(f"stages.1.{i}" for i in range(3)), "stages.2.0", "stages.2.1"]


def test_auto_takes_no_single_modules_and_none_without_parts():
    assert names(Model(layers=nn.ModuleList([Block(), nn.Linear(4, 4)]))) == []
    assert names(Model(layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))) == []
    assert names(nn.Linear(4, 4)) == []
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) == []


def test_a_module_in_two_places_is_one_unit():
    blocks = chain()
    assert names(Model(layers=blocks, again=blocks)) == ["layers.0", "layers.1", "layers.2"]
    shared = Block()
    assert names(Model(layers=nn.ModuleList([shared, shared, Block()]))) == ["layers.0", "layers.2"]


def test_none_takes_nothing():
    assert names(Model(layers=chain()), "none") == []


# -- by class


def test_by_class_takes_subclasses_names_and_several_classes():
    model = Model(layers=chain(), last=OtherBlock(), head=nn.Linear(4, 4))
    assert names(model, sw.wrap_by_class({OtherBlock})) == ["last"]
    assert names(model, sw.wrap_by_class(Block)) == ["layers.0", "layers.1", "layers.2", "last"]
    assert names(model, sw.wrap_by_class("Block")) == ["layers.0", "layers.1", "layers.2", "last"]
    assert names(model, sw.wrap_by_class([OtherBlock, nn.Linear]))[-2:] == ["last.linear", "head"]


def test_a_class_that_is_not_there_is_an_error_that_shows_those_that_are():
    assert refusal(PlanError, find_units, Model(layers=chain()), sw.wrap_by_class({"Blok"})) == (
        "wrap_by_class({Blok}) matches no module of Model.\n  Classes in it: Block (3), LayerNorm (3), Linear (3)."
    )
    with pytest.raises(PlanError, match=r"Classes in it: none with parameters\."):
        find_units(nn.Sequential(nn.ReLU()), sw.wrap_by_class(Block))
    with pytest.raises(PlanError, match="matches no module"):  # containers are never called
        find_units(Model(layers=chain()), sw.wrap_by_class(nn.ModuleList))


# -- by name


def test_by_name_takes_patterns_that_do_not_cross_dots():
    model = Model(encoder=Model(layers=chain()), layers=chain(Block, 2), head=nn.Linear(4, 4))
    assert names(model, sw.wrap_by_name("layers.*")) == ["layers.0", "layers.1"]
    assert names(model, sw.wrap_by_name("*.layers.?")) == [f"encoder.layers.{i}" for i in range(3)]
    assert names(model, sw.wrap_by_name("head", "layers.1")) == ["layers.1", "head"]
    assert names(model, sw.wrap_by_name("encoder")) == ["encoder"]
    assert names(model, sw.wrap_by_name("encoder", "encoder.layers.0")) == ["encoder", "encoder.layers.0"]


def test_every_pattern_must_match_something():
    model = Model(layers=chain())
    assert refusal(PlanError, find_units, model, sw.wrap_by_name("layers.*", "layer.7")) == (
        "wrap_by_name('layer.7') matches no module of Model that has parameters and is called.\n"
        "  Names in it: layers.0, layers.0.norm, layers.0.linear, layers.1, layers.1.norm, layers.1.linear, layers.2,"
        " layers.2.norm, ...."
    )
    with pytest.raises(PlanError, match="that has parameters and is called"):
        find_units(model, sw.wrap_by_name("layers"))


# -- by size


def test_by_size_builds_units_bottom_up():
    model = Model(layers=chain(), head=nn.Linear(4, 2))
    assert names(model, sw.wrap_by_size(28)) == ["layers.0", "layers.1", "layers.2"]
    assert names(model, sw.wrap_by_size(20)) == ["layers.0.linear", "layers.1.linear", "layers.2.linear"]
    assert names(model, sw.wrap_by_size(10))[-1] == "head"
    experts = names(Model(layers=chain(Experts)), sw.wrap_by_size(28))
    assert experts == ["layers.0", "layers.1", "layers.2"]


def test_a_size_beyond_the_model_is_an_error():
    assert refusal(PlanError, find_units, Model(layers=chain()), sw.wrap_by_size(1000)) == (
        "wrap_by_size(min_num_params=1000) finds no unit: Model has 84 parameters in all.\n"
        "  Choose a smaller size, or auto_wrap_policy='none'."
    )


# -- what is not a policy


@pytest.mark.parametrize("policy", [None, 3, "all", lambda _m: True])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(PlanError, match=r"is not a policy|is not a wrap policy"):
        find_units(Model(layers=chain()), policy)
    with pytest.raises(PlanError, match="is not a wrap policy"):
        sw.ParallelPlan(auto_wrap_policy=policy)


def test_wrapping_needs_no_values():
    with torch.device("meta"):
        model = Model(layers=chain())
    assert len(names(model)) == 3
