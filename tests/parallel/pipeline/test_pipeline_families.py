"""Models of transformers in a pipeline equal one process: to 1e-9 in float64, as most tie embeddings over stages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.common.shapes import small_config

pytest.importorskip("transformers")
pytestmark = pytest.mark.preload("transformers.models.t5.modeling_t5", "transformers.generation")

CAUSAL = ("gpt2", "llama")
STEPS, NUM_MICROBATCHES = 3, 4
SMALL = {"hidden_size": 16, "num_hidden_layers": 5, "num_attention_heads": 2, "intermediate_size": 24}
PLANS = {
    "gpt2": {"pp": 2, "strategy": "zero3", "pipeline": "zb-h1"},
    "llama": {"pp": 2, "strategy": "zero2", "activation_checkpointing": "full"},
    "bert": {"pp": 4, "strategy": "zero1"},
    "vit": {"pp": 2, "strategy": "ddp", "pipeline": "zb-v"},
    "t5": {"pp": 4, "strategy": "zero3", "pipeline": "gpipe"},
}


def build(name):
    import transformers as hf

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 16}
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
        )
    elif name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, num_key_value_heads=1, use_cache=False, **SMALL))
    elif name == "bert":
        model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=64, **SMALL))
    elif name == "vit":
        model = hf.ViTForImageClassification(hf.ViTConfig(image_size=8, patch_size=4, **SMALL))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "use_cache": False}
        model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes))
    return model.double().eval()  # without dropout


def batch(name, step, replica):
    generator = torch.Generator().manual_seed(10 * step + replica)
    if name == "vit":
        images = torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(0, 2, (4,), generator=generator)}
    ids = torch.randint(3, 64, (4, 7), generator=generator)
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask} | ({} if name in CAUSAL else {"labels": ids})


def loss_fn(output, batch):
    """The models' own, but where that is always in float32."""
    if "labels" in batch:
        return output.loss
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(plans):
    results = {}
    for name, options in plans.items():
        model = sw.parallelize(build(name), sw.ParallelPlan(**options))
        optimizer = optimizer_of(model)
        replica = sw.data_parallel_rank(model)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(sw.train_step(model, batch(name, step, replica), loss_fn, NUM_MICROBATCHES).item())
            norms.append(sw.clip_grad_norm(model, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        evaluated = sw.eval_step(model, batch(name, 0, replica), loss_fn, NUM_MICROBATCHES).item()
        pieces = [(e.name, e.start, tensor.clone()) for e, tensor in probe(model).extents()]
        results[name] = losses, norms, evaluated, pieces
    return results


def test_families_equal_one_process():
    world = 4
    ranks = run_on_ranks(train, world, PLANS, timeout_s=200)
    for name, options in PLANS.items():
        replicas = world // options["pp"]
        model = build(name)
        optimizer = optimizer_of(model)

        def loss_of(step, name=name, model=model, replicas=replicas):
            parts = [
                {key: value[i : i + 1] for key, value in batch(name, step, replica).items()}
                for replica in range(replicas)
                for i in range(NUM_MICROBATCHES)
            ]
            return sum(loss_fn(model(**part), part) for part in parts) / len(parts)

        for step in range(STEPS):
            loss = loss_of(step)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for results in ranks:
                assert results[name][0][step] == pytest.approx(loss.item(), rel=1e-9), (name, step)
                assert results[name][1][step] == pytest.approx(norm.item(), rel=1e-9), (name, step)
        whole = dict(model.named_parameters())
        seen = set()
        with torch.no_grad():
            evaluated = loss_of(0).item()
        for results in ranks:
            assert results[name][2] == pytest.approx(evaluated, rel=1e-8)
            for key, start, piece in results[name][3]:
                if key in whole:
                    expected = whole[key].detach().flatten()[start : start + piece.numel()]
                    torch.testing.assert_close(piece, expected, rtol=0, atol=1e-8, msg=f"{name}: {key}")
                    seen.add(key)
        assert seen == set(whole), name


def left_padded(name, plan):
    """The loss and norm of a step in bf16 on samples that begin with padding; attention adds masks of numbers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(small_config(name), attn_implementation="eager")
    ids = torch.arange(48).view(4, 12)
    mask = torch.ones_like(ids)
    mask[::2, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    model = sw.parallelize(model, sw.ParallelPlan(mp_policy=sw.PrecisionPolicy(param_dtype="bf16"), **plan))
    return sw.train_step(model, batch, num_microbatches=2).item(), sw.clip_grad_norm(model, 1.0).item()


def train_left_padded(plan):
    """Of every model."""
    results = []
    for name in ("gemma2", "gpt_oss"):
        torch.manual_seed(0)
        results.append(left_padded(name, plan))
    return results


def test_masks_have_the_dtype_of_activations_on_every_stage():
    """A mask of fp32 hides by a number that is infinite in bf16: rows that see nothing were NaN."""
    whole = run_on_ranks(train_left_padded, 1, {"strategy": "ddp"})[0]
    for results in run_on_ranks(train_left_padded, 2, {"strategy": "ddp", "pp": 2}):
        assert results == [pytest.approx(values, rel=1e-3) for values in whole]
