"""Zero-bubble schedules over tensor-parallel stages: weights get their gradients in W, the same to the last bit."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise.parallel.pipeline.runner import ScheduleRunner
from shardwise.testing import probe, run_on_ranks
from tests.common.products import Products
from tests.common.ranks import on_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.preload("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")

NUM_MICROBATCHES = 3
WEIGHT, BOTH = ("weight",), ("weight", "bias")
#: Of each block the layers, and what of them is left to W.
GPT = {"attention.qkv": BOTH, "attention.out": BOTH, "mlp.up": BOTH, "mlp.down": BOTH}
EXPERTS = {
    f"mlp.experts.{index}.{layer}": keys for index in range(2) for layer, keys in (("up", BOTH), ("down", WEIGHT))
}
LLAMA = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
CASES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "gpt": ("blocks", GPT),
    # a bias that is added to a part of the positions: its gradient is summed over ranks
    "gpt by positions": ("blocks", GPT | {"attention.out": WEIGHT, "mlp.down": WEIGHT}),
    # of the second layers' biases the weighted sum is one tensor
    "experts": ("blocks", {"attention.qkv": BOTH, "attention.out": BOTH, "mlp.router": WEIGHT} | EXPERTS),
    "gpt2": ("transformer.h", dict.fromkeys(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), BOTH)),
    # its one head of keys and values is on both ranks: their gradients are summed
    "llama": ("model.layers", dict.fromkeys(LLAMA, WEIGHT)),
}


def build(name: str) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 8}
        config = hf.GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
        return hf.GPT2LMHeadModel(config).eval()
    if name == "llama":
        sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=32, num_key_value_heads=1, use_cache=False, **sizes))
    num_experts = 2 if name == "experts" else 0
    sizes = {"num_layers": 4, "hidden": 16, "num_heads": 4, "vocab_size": 32, "seq_len": 8}
    return sw.models.gpt("gpt-tiny", tied=False, num_experts=num_experts, **sizes)


def batch(name: str) -> Any:
    ids = torch.randint(0, 32, (2 * NUM_MICROBATCHES, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids} if name in {"gpt2", "llama"} else (ids, ids)


def train(name: str, schedule: str) -> tuple[list[tuple[str, int, torch.Tensor]], list[tuple[int, int, list[str]]]]:
    """The gradients of this rank, and of each W its stage, its microbatch and whose gradients it computes."""
    by_positions = name == "gpt by positions"
    plan = sw.ParallelPlan(pp=2, tp=2, pipeline=schedule, sequence_parallel=by_positions)
    model = sw.parallelize(build(name), plan)
    late: list[tuple[int, int, list[str]]] = []
    compute = ScheduleRunner._backward_weight

    def see(step: Any, action: Any) -> None:
        names = {id(p): key for key, p in _computing(model)}
        terms = step._store._terms[action.stage, action.microbatch]
        assert all(len(pairs) == 1 for _, pairs in terms.values())
        late.append((action.stage, action.microbatch, sorted(names[key] for key in terms)))
        compute(step, action)

    with mock.patch.object(ScheduleRunner, "_backward_weight", see):
        sw.train_step(model, batch(name), num_microbatches=NUM_MICROBATCHES)
    parameters = dict(model.named_parameters())
    extents = [extent for extent, _ in probe(model).extents()]
    return [
        (e.name, e.start, parameters[e.name].grad.to_local().clone()) for e in extents if e.name in parameters
    ], late


def _computing(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What modules compute with, gathered, by name."""
    found = []
    for path, module in model.named_modules():
        for key in BOTH:
            value = getattr(module, key, None)
            if isinstance(value, torch.Tensor):
                found.append((f"{path}.{key}", value))
    return found


def train_all() -> dict[str, tuple[Any, Any, Any]]:
    return {name: (train(name, "1f1b")[0], *train(name, "zb-h1"), train(name, "zb-v")[1]) for name in CASES}


@on_ranks(4, timeout_s=100)
def test_selective_recomputation_computes_no_product_again_under_tp_and_zero_bubble_schedules():
    for name, schedule, by_positions in (("gpt", "1f1b", True), ("gpt2", "1f1b", False), ("llama", "zb-h1", False)):
        counts = []
        for recompute in ("none", "selective"):
            options = {"sequence_parallel": by_positions, "activation_checkpointing": recompute}
            model = sw.parallelize(build(name), sw.ParallelPlan(pp=2, tp=2, pipeline=schedule, **options))
            sw.train_step(model, batch(name), num_microbatches=NUM_MICROBATCHES)  # the first one traces the model
            with Products() as products:
                sw.train_step(model, batch(name), num_microbatches=NUM_MICROBATCHES)
            counts.append(products.count)
        assert counts[0] == counts[1], name


def test_w_computes_every_linear_layer_that_tp_has_cut():
    for rank, results in enumerate(run_on_ranks(train_all, 4, timeout_s=200)):
        for name, (at_once, deferred, late, late_v) in results.items():
            assert at_once
            for (key, start, expected), (other, other_start, found) in zip(at_once, deferred, strict=True):
                assert (key, start) == (other, other_start)
                assert torch.equal(expected, found), (name, rank, key)
            blocks, layers = CASES[name]
            halves = {0: (0, 1), 1: (2, 3)}
            stage = rank // 2
            wanted = names(blocks, layers, halves[stage])
            assert late == [(stage, microbatch, wanted) for microbatch in range(NUM_MICROBATCHES)], (name, rank)
            for part in (0, 3) if stage == 0 else (1, 2):
                found_v = [(m, keys) for s, m, keys in late_v if s == part]
                assert found_v == [(m, names(blocks, layers, (part,))) for m in range(NUM_MICROBATCHES)], (name, rank)


def names(blocks: str, layers: dict[str, tuple[str, ...]], numbers: tuple[int, ...]) -> list[str]:
    return sorted(f"{blocks}.{n}.{layer}.{key}" for n in numbers for layer, keys in layers.items() for key in keys)


class Careless(torch.nn.Module):
    """Writes to what its layers give, and names their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(input=self.up(input=x).relu_())
        y += x
        return y.mul_(0.5)


class CarelessStack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Careless() for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


@on_ranks(4, timeout_s=100)
def test_a_model_may_write_to_what_layers_under_tp_give_and_name_their_argument():
    """Of each schedule the loss of the third step, with that of one process."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(6, 3, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    found = []
    for schedule in (None, "1f1b", "zb-h1"):
        torch.manual_seed(0)
        model: Any = CarelessStack().double()
        if schedule is not None:
            styles = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
            model = sw.parallelize(model, sw.ParallelPlan(pp=2, tp=2, pipeline=schedule, tp_plan=styles))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            if schedule is None:
                loss = model(x, y)
                loss.backward()
            else:
                loss = sw.train_step(model, (x, y), num_microbatches=3)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    for loss in found[1:]:
        assert loss == pytest.approx(found[0], rel=1e-12)
