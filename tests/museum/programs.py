"""What the bugs of the museum are planted in: small models, plans, and the tools that a user runs on them.

A program says nothing of a bug. Each runs without one as well, and no tool may find anything then
(``test_museum.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.train.checkpoints.random_state import rank_seed

VOCAB, LENGTH, WIDTH, DIM = 24, 8, 16, 8

# -- models


def gpt(seed: int, **sizes: Any) -> nn.Module:
    """Our GPT, with biases and norms that are not at their neutral values."""
    torch.manual_seed(seed)
    defaults = {
        "num_layers": 2,
        "hidden": WIDTH,
        "num_heads": 4,
        "vocab_size": VOCAB,
        "seq_len": LENGTH,
        "dropout": 0.0,
    }
    model = sw.models.gpt("gpt-tiny", **(defaults | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


class Chain(nn.Module):
    """Linear layers, each a unit, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Branches(Chain):
    """Samples of which the first number decides which layer they go through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((self.first if x[0, 0] > 0 else self.second)(x))


class Normed(Chain):
    """With batch norm, whose running statistics forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Headless(Chain):
    """The loss computes with the head's weight."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = x + torch.tanh(layer(x))
        return x


class Scaled(nn.Module):
    """Keeps a scale as extra state, which each forward in training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.amount = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.amount *= 0.9
        return x * self.amount

    def get_extra_state(self) -> float:
        return self.amount

    def set_extra_state(self, state: float) -> None:
        self.amount = state


class Counting(Chain):
    """With extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.scale(x))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.down, self.up = nn.Linear(DIM, 4, bias=False), nn.Linear(4, DIM, bias=False)
        self.base.requires_grad_(False)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return torch.tanh(y + self.up(self.down(x)) if self.is_on else y)


class Policy(Chain):
    """Layers with adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Adapted() for _ in range(3))
        self.head.requires_grad_(False)

    def switch(self, *, is_on: bool) -> None:
        """As peft's ``disable_adapter()``: what is off requires no gradient."""
        for layer in self.body:
            layer.is_on = is_on
            for adapter in (layer.down, layer.up):
                adapter.requires_grad_(is_on)


class Dropping(Chain):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class Spiking(Chain):
    """Has a parameter of its own whose gradient the loss may let overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.spike = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), self.spike(x[:, :1])], 1)


class Timed(Chain):
    """Each layer gets a number that bf16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Late() for _ in range(3))
        self.head = Late()

    def forward(self, x: Tensor) -> Tensor:
        phase = x.new_tensor([1000.4], dtype=torch.float32)
        for layer in self.body:
            x = x + layer(x, phase)
        return self.head(x, phase)


class Late(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: Tensor, phase: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)) * torch.sin(phase)


def seeded(kind: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Builds a model of ``kind`` from a seed."""

    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return kind()

    return build


def causal(kind: str, seed: int, **sizes: Any) -> nn.Module:
    """A causal language model of transformers."""
    import transformers as hf

    torch.manual_seed(seed)
    config = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**(config | heads | sizes)))


def of_transformers(kind: str, plan: Mapping[str, Any] | None = None, /, **sizes: Any) -> Callable[..., Program]:
    """Makes a program on a causal language model of transformers."""

    def build(seed: int) -> nn.Module:
        return causal(kind, seed, **sizes)

    return functools.partial(Program, plan or {}, build, labelled, units="auto", preload=TRANSFORMERS)


# -- samples


def tokens(index: int) -> tuple[Tensor, Tensor]:
    """Ids, and those that follow; in every second sample most of the first half does not count."""
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, VOCAB, (LENGTH + 1,), generator=generator)
    targets = ids[1:].clone()
    if index % 2:
        targets[: LENGTH // 2 - 1] = -100
    return ids[:-1], targets


def numbers(index: int) -> Tensor:
    return torch.randn(DIM, generator=torch.Generator().manual_seed(1000 + index))


def signed(index: int) -> Tensor:
    """Batches of two that go through different layers on two ranks."""
    sample = numbers(index)
    sample[0] = (-1.0 if index // 2 % 2 else 1.0) * sample[0].abs()
    return sample


def labelled(index: int) -> dict[str, Tensor]:
    ids, targets = tokens(index)
    return {"input_ids": ids, "labels": targets}


def collated(samples: list[Any]) -> Any:
    """A batch."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: torch.stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))
    return torch.stack(samples)


def counted(samples: list[Any]) -> Any:
    """A batch with the number of targets that count, by which a model of transformers divides its loss."""
    batch = collated(samples)
    return batch | {"num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}


# -- programs


def square(output: Tensor, _batch: Any, _model: Any) -> Tensor:
    return output.square().mean()


#: Each block of our GPT is a unit.
BLOCKS = sw.wrap_by_class({sw.models.Block})


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        plan: Fields of the plan.
        build: From a seed to a model.
        sample: From a number to a sample.
        collate: From samples to a batch.
        loss: As for ``sw.train_step``; gets the model that was built last as a third argument.
        world: Ranks.
        rows: Samples of a reader's microbatch; with a pipeline of its step.
        microbatches: Of a step, where there is no pipeline.
        optimizer: From parameters or groups of them.
        parameters: From a model to what its optimizer gets.
        parallelize: From a plain model, a plan and a seed to one in training.
        max_norm: Gradients are clipped to it.
        scales: A gradient scaler is used.
        tools: Which tools a user would run.
        resumed: Builds the model that continues; ``None``: the same.
        is_refused: Without a bug it ends in a refusal: the user's mistake is a part of it.
        is_async: Saves go on beside training.
        units: Which modules are units.
        seed_of: From a reader to the seed of its random numbers in training; ``None``: one for all ranks.
        preload: Modules to import before the ranks begin.
    """

    plan: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[int], nn.Module] = gpt
    sample: Callable[[int], Any] = tokens
    collate: Callable[[list[Any]], Any] = collated
    loss: Callable[[Any, Any, Any], Tensor] | None = None
    world: int = 2
    rows: int = 2
    microbatches: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)
    parameters: Callable[[nn.Module], Any] = nn.Module.parameters
    parallelize: Callable[[nn.Module, sw.ParallelPlan, int], nn.Module] = lambda model, plan, _seed: sw.parallelize(
        model, plan
    )
    max_norm: float = 0.3
    scales: bool = False
    tools: tuple[str, ...] = ("parity", "script")
    resumed: Callable[[int], nn.Module] | None = None
    is_refused: bool = False
    is_async: bool = False
    units: Any = BLOCKS
    seed_of: Callable[[int], int] | None = None
    preload: tuple[str, ...] = ()

    def make_plan(self, **others: Any) -> sw.ParallelPlan:
        """The plan, or another one for the same model."""
        return sw.ParallelPlan(**({"auto_wrap_policy": self.units, "merge_units": False} | (others or dict(self.plan))))


def of_gpt(**sizes: Any) -> Callable[[int], nn.Module]:
    def sizes_of(seed: int) -> nn.Module:
        return gpt(seed, **sizes)

    return sizes_of


#: Each layer is a unit.
LAYERS = sw.wrap_by_class({nn.Linear, Adapted, nn.BatchNorm1d})


def small(kind: Callable[[], nn.Module], plan: Mapping[str, Any] | None = None, **more: Any) -> Program:
    """A program on a model of layers."""
    defaults: dict[str, Any] = {"sample": numbers, "loss": square, "units": LAYERS}
    return Program(plan or {}, seeded(kind), **(defaults | more))


def head_outside(hidden: Tensor, _batch: Any, model: Any) -> Tensor:
    return (hidden @ model.head.weight.T).square().mean()


def against_reference(output: Tensor, batch: Tensor, model: Any) -> Tensor:
    """The distance from what the model gives without its adapters."""
    model.switch(is_on=False)
    with torch.no_grad():
        reference = model(batch)
    model.switch(is_on=True)
    return (output - reference - 1).square().mean()


def overflowing(output: Tensor, batch: Tensor, _model: Any) -> Tensor:
    """In some batches the gradient of one parameter is infinite."""
    if batch[0, 0] > 0.5:
        return output[:, :-1].square().mean() + output[:, -1].sum() * 3e38 * 3e38
    return output.square().mean()


def freeze_first(model: nn.Module) -> Any:
    """Freeze what comes first in every layer, once the model is in training."""
    for layer in model.body:  # type: ignore[union-attr]
        layer.weight.requires_grad_(False)  # type: ignore[union-attr]
    return model.parameters()


def from_meta(model: nn.Module, plan: sw.ParallelPlan, seed: int) -> nn.Module:
    """Build the model anew without values, which every rank would draw by itself."""
    with torch.device("meta"):
        empty = type(model)()
    rank = torch.distributed.get_rank()
    torch.manual_seed(seed + rank)
    return sw.parallelize(empty, plan)


def from_rank_0(model: nn.Module, plan: sw.ParallelPlan, _seed: int) -> nn.Module:
    """Each rank has weights of its own; those of rank 0 count."""
    rank = torch.distributed.get_rank()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return sw.parallelize(model, plan)


TRANSFORMERS = tuple(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "mixtral", "qwen3"))
MICRO = sw.PipelinePolicy(num_microbatches=2)
MUON: dict[str, Any] = {"optimizer": sw.Muon, "parameters": sw.muon_groups}
#: Programs on which parity has nothing to say: random numbers, or a start, by rank.
BY_RANK: dict[str, Any] = {"tools": ("script",)}

PROGRAMS: dict[str, Program] = {
    "zero3": Program(),
    "zero2": Program({"strategy": "zero2"}),
    "accumulated": Program(microbatches=2),
    "accumulated, whole": Program({"accumulation": "unsharded"}, microbatches=2),
    "hsdp, deferred": Program(
        {"strategy": "hsdp", "dp_replicate": 2, "accumulation": "defer_replicate"}, microbatches=2
    ),
    "tp": Program({"tp": 2}),
    "sequence": Program({"tp": 2, "sequence_parallel": True}),
    "sequence with experts": Program({"tp": 2, "sequence_parallel": True}, of_gpt(num_experts=4)),
    "tp with dropout": Program({"tp": 2}, of_gpt(dropout=0.2), tools=("script",)),
    "sequence, whole experts": of_transformers(
        "Mixtral", {"tp": 2, "sequence_parallel": True}, num_local_experts=4, num_experts_per_tok=2
    )(),
    "grouped heads": of_transformers("Llama", {"tp": 2}, num_key_value_heads=1)(),
    "norms of heads": of_transformers("Qwen3", {"tp": 2}, head_dim=4)(),
    "counted items": of_transformers("Llama")(collate=counted, microbatches=2),
    "cp": Program({"cp": 2}),
    "pp": Program({"pp": 2, "pipeline": MICRO}, of_gpt(num_layers=4)),
    "pp, tied": Program({"pp": 2, "pipeline": MICRO}, of_gpt(tied=True)),
    "experts": Program({"ep": 2}, of_gpt(num_experts=4)),
    "experts, replicated": Program({"ep": 2, "strategy": "ddp"}, of_gpt(num_experts=4)),
    "muon": Program(**MUON),
    "muon, cut by rows": Program({"granularity": "row"}, **MUON),
    "scaled": Program(scales=True),
    "branches": small(Branches, sample=signed),
    "batch norm": small(Normed, {"strategy": "ddp"}, tools=("script",)),
    "head in the loss": small(Headless, {"strategy": "ddp"}, loss=head_outside),
    "reference model": small(Policy, loss=against_reference),
    "frozen later": small(Chain, {"strategy": "zero2"}, parameters=freeze_first),
    "extra state": small(Counting, tools=("script",)),
    "overflow": small(Spiking, loss=overflowing, scales=True, tools=("script",)),
    "deferred": small(Chain, {"strategy": "ddp"}, parallelize=from_meta, **BY_RANK),
    "from rank 0": small(Chain, {"strategy": "ddp", "sync": "rank0"}, parallelize=from_rank_0, **BY_RANK),
    "dropout by reader": small(Dropping, seed_of=lambda reader: rank_seed(7, reader), **BY_RANK),
    "cast inputs": small(
        Timed, {"mp_policy": sw.PrecisionPolicy(param_dtype="bf16", cast_forward_inputs=False)}, tools=("script",)
    ),
    "saved beside": Program(is_async=True),
    "deeper": Program(resumed=of_gpt(num_layers=3), is_refused=True, tools=("script",)),
}
