"""The model itself: counts on meta, loss at start, causality, recomputation, errors."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.models import GPT, PRESETS, gpt
from shardwise.spec.errors import ConfigError


def tokens(model: GPT, batch: int = 2, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (batch, model.config.seq_len + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_on_meta_add_up_to_the_closed_form(name):
    model = gpt(name, device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == PRESETS[name].num_parameters
    assert not list(model.buffers())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_experts", [0, 3])
def test_variants_add_up_to_the_closed_form(tied, bias, num_experts):
    model = gpt("gpt-nano", device="meta", num_experts=num_experts, tied=tied, bias=bias, ffn=40)
    assert sum(p.numel() for p in model.parameters()) == model.config.num_parameters


def test_meta_forward_gives_shapes_of_a_model_that_no_machine_holds():
    model = gpt("gpt-175b", device="meta", num_layers=2, num_experts=2)
    ids = torch.zeros(1, 2048, dtype=torch.int64, device="meta")
    assert model(ids).shape == (1, 2048, 50000)
    model(ids, ids).backward()
    assert model.blocks[1].mlp.experts[0].up.weight.grad.shape == (4 * 12288, 12288)


@pytest.mark.parametrize("num_experts", [0, 4])
def test_loss_at_start_is_that_of_guessing(num_experts):
    torch.manual_seed(0)
    model = gpt("gpt-tiny", num_experts=num_experts)
    loss = model(*tokens(model))
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_logits_have_one_score_per_token_of_the_vocabulary():
    model = gpt("gpt-nano")
    assert model(torch.zeros(3, 7, dtype=torch.int32)).shape == (3, 7, 64)


def test_loss_is_the_mean_over_positions():
    model = gpt("gpt-nano")
    x, y = tokens(model)
    scores = model(x).log_softmax(-1)
    expected = -scores.gather(-1, y.unsqueeze(-1)).mean()
    torch.testing.assert_close(model(x, y), expected)


def test_same_seed_same_weights_and_materialising_from_meta_gives_them_too():
    for overrides in ({"tied": False}, {"num_experts": 2, "tied": False}):
        torch.manual_seed(5)
        first = gpt("gpt-nano", **overrides)
        torch.manual_seed(5)
        late = gpt("gpt-nano", device="meta", **overrides).to_empty(device="cpu")
        for module in late.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        for (name, a), b in zip(first.named_parameters(), late.parameters(), strict=True):
            assert torch.equal(a, b), name


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    model = gpt("gpt-tiny")
    block = model.blocks[0]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.05)
    assert not block.attention.qkv.bias.any()
    assert torch.equal(model.final_norm.weight, torch.ones(64))


def test_tied_weights_are_one_parameter_with_two_names():
    model = gpt("gpt-nano")
    assert model.lm_head.weight is model.token_embedding.weight
    assert {"lm_head.weight", "token_embedding.weight"} <= model.state_dict().keys()
    untied = gpt("gpt-nano", tied=False)
    assert untied.lm_head.weight is not untied.token_embedding.weight


@pytest.mark.parametrize("num_experts", [0, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_no_bit_of_the_gradients(dropout, num_experts):
    grads = []
    for recompute in (False, True):
        torch.manual_seed(1)
        model = gpt("gpt-nano", num_experts=num_experts, dropout=dropout, activation_checkpointing=recompute)
        model(*tokens(model)).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_recomputation_keeps_fewer_activations():
    kept = []
    for recompute in (False, True):
        model = gpt("gpt-nano", activation_checkpointing=recompute)
        kept.append(0)

        def pack(tensor):
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*tokens(model))
    assert kept[1] < kept[0] / 3


@pytest.mark.parametrize("num_experts", [0, 3])
def test_changing_a_later_token_leaves_earlier_logits_alone(num_experts):
    model = gpt("gpt-nano", num_experts=num_experts).eval()
    x, _ = tokens(model)
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax() > 1e-4


def test_dropout_is_off_in_evaluation():
    model = gpt("gpt-nano", dropout=0.5)
    x, _ = tokens(model)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_an_expert_that_no_token_chose_gets_zero_gradients_and_changes_nothing():
    torch.manual_seed(0)
    model = gpt("gpt-nano", num_experts=3, experts_per_token=1)
    for block in model.blocks:
        torch.nn.init.zeros_(block.mlp.router.weight)  # equal scores: the top one is always the same expert
    model(*tokens(model)).backward()
    used = [any(p.grad.any() for p in expert.parameters()) for expert in model.blocks[0].mlp.experts]
    assert sum(used) == 1
    assert all(p.grad is not None for p in model.parameters())


def test_mixture_with_all_experts_and_equal_scores_is_their_mean():
    model = gpt("gpt-nano", num_experts=3, experts_per_token=3)
    mixture = model.blocks[0].mlp
    torch.nn.init.zeros_(mixture.router.weight)
    x = torch.randn(2, 4, 32)
    expected = torch.stack([expert(x) for expert in mixture.experts]).mean(0)
    torch.testing.assert_close(mixture(x), expected)


def test_half_precision_models_have_a_full_precision_loss():
    model = gpt("gpt-nano").bfloat16()
    loss = model(*tokens(model))
    assert loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(1, 17, dtype=torch.int64), None, r"a sequence of 17 tokens is longer than the model's 16 pos"),
        (torch.zeros(1, 4), None, r"tokens have dtype torch.float32, expected token ids.\n  Use tokens.long\(\)"),
        (torch.zeros(4, dtype=torch.int64), None, r"tokens have shape \(4,\), expected \(batch, seq\)"),
        (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4), r"targets have dtype torch.float32"),
        (
            torch.zeros(1, 4, dtype=torch.int64),
            torch.zeros(1, 3, dtype=torch.int64),
            r"targets have shape \(1, 3\), tokens \(1, 4\)",
        ),
    ],
)
def test_bad_inputs_are_named(x, y, message):
    with pytest.raises(ConfigError, match=message):
        gpt("gpt-nano")(x, y)
