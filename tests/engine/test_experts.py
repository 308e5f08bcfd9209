"""Mixtures of experts of the transformers library, whose ranks choose different experts."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.testing import run_on_ranks
from tests.common import families
from tests.common.families import FAMILIES, SEQ, VOCAB, build_transformers
from tests.common.oracle import PRESETS, compare_each

pytestmark = families.PRELOAD

#: Experts of a layer are two stacked tensors: what no token chose has a gradient of zeros.
MIXTRAL = {
    **FAMILIES["Mixtral"].sizes,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
}
#: Experts of a layer are modules: what no token of a rank chose, that rank has no gradient of.
SWITCH = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "num_sparse_encoder_layers": 2,
    "num_sparse_decoder_layers": 2,
    "num_heads": 2,
    "num_experts": 6,
    "vocab_size": VOCAB,
    "decoder_start_token_id": families.PAD,
    "pad_token_id": families.PAD,
    "eos_token_id": families.EOS,
}
STEPS = 3
BUILDS = {
    "Mixtral": functools.partial(build_transformers, "MixtralForCausalLM", "MixtralConfig", MIXTRAL),
    "Switch": functools.partial(
        build_transformers, "SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", SWITCH
    ),
}
WRAPPINGS = {"Mixtral": ("MixtralDecoderLayer",), "Switch": ("SwitchTransformersBlock",)}


def one_word(rank: int, step: int) -> Tensor:
    """Two rows of a word that is this rank's of this step alone: few tokens, few experts."""
    return torch.full((2, SEQ), 4 + (11 * rank + step) % (VOCAB - 4))


def train(name: str, strategies: tuple[str, ...], num_ways: int) -> dict[tuple[int, str], set[int]]:
    """Train under each strategy, wrapped in some ways. By step and layer, the experts that this rank chose."""
    warnings.simplefilter("ignore")
    chosen: dict[tuple[int, str], set[int]] = {}

    def script(model: nn.Module, rank: int, step: int) -> Tensor:
        def note(layer: str, _: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> None:
            index = args[1] if name == "Mixtral" else args[1].flatten(0, -2).nonzero()[:, 1]
            if rank == dist.get_rank():
                chosen.setdefault((step, layer), set()).update(index.flatten().tolist())

        layers = {layer: module for layer, module in model.named_modules() if layer.endswith(".experts")}
        hooks = [m.register_forward_pre_hook(functools.partial(note, layer)) for layer, m in layers.items()]
        assert hooks
        word = one_word(rank, step)
        loss = model(input_ids=word, labels=word).loss
        for hook in hooks:
            hook.remove()
        return loss

    for wrapping in ({}, {"auto_wrap_policy": {"by_class": list(WRAPPINGS[name])}, "merge_units": False})[:num_ways]:
        compare_each(BUILDS[name], script, strategies, steps=STEPS, **wrapping)
    return chosen


def check(name: str, world: int, *how: object) -> None:
    """In every step, of any two ranks each has used an expert that the other has not."""
    ranks = run_on_ranks(train, world, name, *how, timeout_s=250)
    layers = {layer for _, layer in ranks[0]}
    assert len(layers) >= 4
    for step in range(STEPS):
        used = [{(layer, expert) for layer in layers for expert in chosen[step, layer]} for chosen in ranks]
        for mine, theirs in itertools.permutations(used, 2):
            assert mine - theirs, step


@pytest.mark.parametrize("name", BUILDS)
def test_ranks_may_choose_different_experts(name):
    """pytorch#158719, torchtitan#2747, DeepSpeed#7170, Megatron-LM#2218, on models that are in use."""
    check(name, 2, ("zero3",), 1)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", BUILDS)
def test_ranks_may_choose_different_experts_under_every_strategy_however_wrapped(name, world):
    check(name, world, PRESETS, 2)
