"""``sw.chunk_cross_entropy``: the loss and gradients of the plain model, without logits in memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing import run_on_ranks
from tests.common.ranks import on_ranks, refusal

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytestmark = [
    pytest.mark.preload("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    pytest.mark.skipif(not hasattr(nn.functional, "linear_cross_entropy"), reason="torch is older than 2.13"),
]

VOCAB = 97


def build(kind: str, vocab: int = VOCAB) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if kind == "ours":
        return sw.models.gpt("gpt-nano", vocab_size=vocab, seq_len=16, tied=True)
    if kind == "gpt2":
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=vocab, n_embd=16, n_layer=2, n_head=2, n_positions=16, **quiet)
        )
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=vocab, max_position_embeddings=4096, **shape))


def batch(seed: int = 1, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, 12), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    return ids, labels


def loss_of(model: nn.Module, kind: str, ids: Tensor, labels: Tensor, **more: Any) -> Tensor:
    if kind == "ours":
        return model(ids, labels)
    return model(input_ids=ids, labels=labels, **more).loss


@pytest.mark.parametrize("kind", ["ours", "gpt2", "llama"])
def test_loss_and_gradients_are_those_of_the_plain_model(kind: str) -> None:
    plain = build(kind)
    chunked = sw.chunk_cross_entropy(copy.deepcopy(plain))
    assert plain.state_dict().keys() == chunked.state_dict().keys()
    for more in [{}] if kind == "ours" else [{}, {"num_items_in_batch": 20}, {"shift_labels": batch(2)[1]}]:
        losses = [loss_of(model, kind, *batch(), **more) for model in (plain, chunked)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
        for loss, model in zip(losses, (plain, chunked), strict=True):
            model.zero_grad()
            loss.backward()
        for (name, one), other in zip(plain.named_parameters(), chunked.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)
    ids = batch()[0]
    with torch.no_grad():
        whole = [model(ids) if kind == "ours" else model(input_ids=ids).logits for model in (plain, chunked)]
        assert torch.equal(*whole)
        if kind != "ours":
            assert chunked(input_ids=ids, labels=ids).logits is None
            generated = [model.generate(ids[:, :4], max_new_tokens=4, do_sample=False) for model in (plain, chunked)]
            assert torch.equal(*generated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 3}], ids=["mean", "sum"])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_losses_of_16_bit_are_added_in_fp32(dtype: torch.dtype, more: dict[str, Any], *, is_autocast: bool) -> None:
    plain = build("llama") if is_autocast else build("llama").to(dtype)
    chunked = sw.chunk_cross_entropy(copy.deepcopy(plain))
    ids, labels = (each.repeat(500, 1) for each in batch())  # 18,000 positions: their sum is beyond fp16's range
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=is_autocast):
        losses = [loss_of(model, "llama", ids, labels, **more).item() for model in (plain, chunked)]
    assert losses[1] == pytest.approx(losses[0], rel=5e-4)
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        for model in (plain, chunked):
            loss_of(model, "llama", *batch(), **more).backward()
    for (name, one), other in zip(plain.named_parameters(), chunked.parameters(), strict=True):
        assert (other.grad - one.grad).norm() < 0.03 * one.grad.norm(), name


def train(kind: str, strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    model = sw.parallelize(sw.chunk_cross_entropy(build(kind)), strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for step in range(3):
        ids, labels = (each.chunk(2)[torch.distributed.get_rank()] for each in batch(step))
        losses.append(
            float(sw.train_step(model, {"input_ids": ids, "labels": labels} if kind != "ours" else (ids, labels)))
        )
        optimizer.step()
        optimizer.zero_grad()
    return losses, sw.full_state_dict(model)


@pytest.mark.parametrize(("kind", "strategy"), [("llama", "zero3"), ("gpt2", "zero3"), ("ours", "zero2")])
def test_two_ranks_train_as_one_plain_process(kind: str, strategy: str) -> None:
    losses, state = run_on_ranks(train, 2, kind, strategy, timeout_s=60)[0]
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step, loss in enumerate(losses):
        expected = loss_of(model, kind, *batch(step))
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-5)


def test_logits_take_no_memory() -> None:
    from shardwise.train.predicted.memory import peak_of_tensors

    vocab, positions = 20_000, 2048
    peaks = []
    for is_chunked in (False, True):
        model = build("llama", vocab)
        if is_chunked:
            sw.chunk_cross_entropy(model)
        ids = torch.randint(0, vocab, (1, positions))
        with peak_of_tensors(torch.device("cpu")) as memory:
            model(input_ids=ids, labels=ids).loss.backward()
        peaks.append(memory.num_bytes)
    assert peaks[0] > 2 * 4 * vocab * positions  # logits and their gradient
    assert peaks[1] < 0.05 * peaks[0]


@on_ranks(2, timeout_s=60)
def test_what_cannot_be_chunked_is_refused():
    import transformers as hf

    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    capped = hf.Gemma2ForCausalLM(hf.Gemma2Config(vocab_size=VOCAB, num_key_value_heads=1, **shape))
    text = refusal(StateError, sw.chunk_cross_entropy, capped)
    assert "final_logit_softcapping changes logits before the loss" in text
    small = {"num_hidden_layers": 1, "pad_token_id": 0, "hidden_size": 32, "num_heads": 2, "vocab_size": VOCAB}
    capped = hf.xLSTMForCausalLM(hf.xLSTMConfig(**small))
    assert "output_logit_soft_cap changes logits" in refusal(StateError, sw.chunk_cross_entropy, capped)
    assert "not that of its head" in refusal(StateError, sw.chunk_cross_entropy, nn.Linear(2, 2))
    model = sw.chunk_cross_entropy(build("llama"))
    assert "tp divides logits by ids as it is" in refusal(PlanError, sw.parallelize, model, sw.ParallelPlan(tp=2))
