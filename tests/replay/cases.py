"""The configurations whose runs are on record: what is trained, on how many ranks, under which plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import shardwise as sw
from tests.replay import models

#: Every strategy whose ranks are processes.
STRATEGIES = ("ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp", "hybrid_shard_grad_op")
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Case:
    """One run of three steps.

    Attributes:
        name: Names the run in the file of record. A case that changes gets a new name.
        world: Number of ranks.
        plan: Fields of its ``ParallelPlan``.
        model: Which model of ``models.MODELS``.
        optimizer: ``names`` (AdamW over ``model.parameters()``), ``flat`` (over ``sw.flat_parameters``),
            ``in_backward`` (flat, stepped inside backward), or ``sgd``.
        calls: Forwards and backwards of a step. All but the last are under ``sw.gradient_sync(model, False)``.
        num_microbatches: Of each call, as ``sw.train_step`` takes them.
        has_average: An exponential moving average follows the weights, and is saved with them.
        has_scaler: The loss is scaled for fp16.
        is_quick: Part of ``make test``; the others are part of ``make test-all``.
    """

    name: str
    world: int
    plan: tuple[tuple[str, Any], ...]
    model: str = "gpt"
    optimizer: str = "names"
    calls: int = 1
    num_microbatches: int | None = None
    has_average: bool = False
    has_scaler: bool = False
    is_quick: bool = False

    @property
    def parallel_plan(self) -> sw.ParallelPlan:
        """The plan."""
        return sw.ParallelPlan(**dict(self.plan))

    @property
    def build(self) -> models.Build:
        """Builds the model."""
        return models.MODELS[self.model]


def case(name: str, world: int, *, strategy: str = "zero3", is_quick: bool = True, **fields: Any) -> Case:
    """A case; fields that a case does not have are the plan's."""
    own = {key: fields.pop(key) for key in list(fields) if key in Case.__dataclass_fields__}
    return Case(name, world, tuple({"strategy": strategy, **fields}.items()), is_quick=is_quick, **own)


def _of_strategies() -> list[Case]:
    found = []
    for strategy in STRATEGIES:
        for world in (1, 2, 4):
            is_hybrid = strategy.startswith("h")
            axes = {"dp_replicate": 2 if world > 1 else 1} if is_hybrid else {}
            found.append(case(f"{strategy} on {world}", world, strategy=strategy, is_quick=world == 2, **axes))
    return found


FP16 = {"param_dtype": "fp16", "reduce_dtype": "fp16"}

CASES: tuple[Case, ...] = (
    *_of_strategies(),
    # model parallelism and products of it
    case("tp", 2, tp=2),
    case("tp, sequence parallel", 2, tp=2, sequence_parallel=True),
    *(case(f"pp, {schedule}", 2, pp=2, pipeline=schedule, num_microbatches=4) for schedule in SCHEDULES),
    case("pp, tied weights", 2, pp=2, model="tied gpt", num_microbatches=4),
    case("cp", 2, cp=2),
    case("ep", 2, ep=2, model="experts"),
    case("tp x dp", 4, tp=2, is_quick=False),
    case("pp x dp, zero2", 4, pp=2, strategy="zero2", num_microbatches=4, is_quick=False),
    case("pp x tp", 4, pp=2, tp=2, pipeline="zb-h1", num_microbatches=4, is_quick=False),
    case("ep x tp", 4, ep=2, tp=2, model="experts", is_quick=False),
    case("cp x dp", 4, cp=2, is_quick=False),
    case("row sharded", 2, strategy="ddp", row_sharded=("table",), model="recommender"),
    # how a shard is held, and what is sent
    case("offload", 2, offload_policy="cpu"),
    case("offload of half", 2, offload_policy=sw.OffloadPolicy(ratio=0.5), strategy="zero2", is_quick=False),
    case("int8 frozen", 2, quantize_frozen="int8", model="frozen"),
    case("int8 gather and reduce", 2, quantized_gather="int8", quantized_reduce="int8"),
    case("bf16", 2, mp_policy={"param_dtype": "bf16", "reduce_dtype": "fp32"}),
    case("fp16, scaled", 2, mp_policy=FP16, has_scaler=True),
    case("kept over an inner group", 4, reshard_after_forward=2, is_quick=False),
    case("cut by row", 2, granularity="row"),
    case("cut by tensor", 2, granularity="tensor", is_quick=False),
    case("merged units", 2, merge_units=1 << 16, is_quick=False),
    case("merged units, flat", 2, merge_units=1 << 16, optimizer="flat"),
    case("one gradient buffer", 2, gradient_buffers=1, is_quick=False),
    # what a step does
    case("recompute", 2, activation_checkpointing="full"),
    case("recompute, selective", 2, activation_checkpointing="selective", is_quick=False),
    case("in backward", 2, optimizer="in_backward"),
    case("flat", 2, optimizer="flat", strategy="zero1"),
    case("accumulates sharded", 2, calls=2, accumulation="sharded"),
    case("accumulates unsharded", 2, calls=2, accumulation="unsharded"),
    case("accumulates, replication deferred", 4, calls=2, strategy="hsdp", dp_replicate=2,
         accumulation="defer_replicate", is_quick=False),
    case("average", 2, has_average=True, optimizer="sgd"),
    # models whose ranks do different things
    case("unused branches", 2, model="branches"),
    case("dropped layers", 2, model="drops"),
    case("experts without ep", 2, model="experts", is_quick=False),
    case("frozen", 2, model="frozen", strategy="shard_grad_op", is_quick=False),
)  # fmt: skip
