"""Plans that train on the pretended device: each is a function of a rank that leaves its findings in ``seen``."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.storage.attachment import engine_of
from shardwise.testing import streams

BF16 = {"mp_policy": sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="fp32")}
FP16 = {"mp_policy": sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="fp32")}
#: Tensors that a block saves are offloaded from this size on.
ACTIVATIONS = {"offload_activations": sw.ActivationOffloadPolicy(least_bytes=64)}
#: Reductions of earlier units may be under way while another one is reduced.
TRAVELLING = {"gradient_buffers": 4}
INT8 = {"quantized_gather": "int8", "quantized_reduce": "int8"}
#: Axes whose ranks read the same samples.
SAME_SAMPLES = ("tp", "pp", "cp")


def build(**overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return sw.models.gpt("gpt-nano", **{"num_layers": 3, **overrides}, device=device())


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch(step: int, reader: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(100 * step + reader)).to(device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def parallelized(plan: dict[str, Any], model: nn.Module | None = None) -> nn.Module:
    layers = {"auto_wrap_policy": sw.wrap_by_class({sw.models.Block}), "merge_units": False}
    return sw.parallelize(build() if model is None else model, sw.ParallelPlan(**{**layers, **plan}))


@dataclasses.dataclass
class Case:
    """What is trained, and how.

    Attributes:
        waits: Waits of the host in a steady step.
        how: Arguments of ``pretended_cuda``.
    """

    plan: dict[str, Any]
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    clips: bool = True
    in_backward: bool = False
    scaler: bool = False
    waits: int = 0
    how: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self, seen: streams.Seen, steps: int = 3) -> tuple[list[float], int]:
        """Losses, and how often the host waited in the last step."""
        model = parallelized(self.plan, build(**self.model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = sw.GradScaler(device().type) if self.scaler else None
        if self.in_backward:
            sw.optimizer_in_backward(model, optimizer)
        reader = 0 if any(axis in self.plan for axis in SAME_SAMPLES) else dist.get_rank()
        data = [batch(10 * step + micro, reader) for step in range(steps) for micro in range(self.microbatches)]
        losses, before = [], 0
        for _ in range(steps):
            before = len(seen.host_waits)
            losses.append(self._step(model, [data.pop(0) for _ in range(self.microbatches)], scaler))
            self._update(model, optimizer, scaler)
        waits = len(seen.host_waits) - before
        return [float(loss) for loss in losses if loss is not None], waits

    def _step(self, model: nn.Module, batches: list[Any], scaler: Any) -> Any:
        if "pp" in self.plan:
            inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
            loss = sw.train_step(model, (inputs, targets), num_microbatches=2 * len(batches))
            return loss.detach() if isinstance(loss, Tensor) else loss
        loss = None
        for index, each in enumerate(batches):
            is_last = index == len(batches) - 1
            with sw.gradient_sync(model, is_last) if len(batches) > 1 else contextlib.nullcontext():
                loss = model(*each)
                (loss if scaler is None else scaler.scale(loss)).backward()
        assert loss is not None
        return loss.detach()

    def _update(self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        if self.in_backward:
            return
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self.clips:
            sw.clip_grad_norm(model, 1.0)
        (optimizer.step if scaler is None else lambda: scaler.step(optimizer))()
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad()


CASES: dict[str, Case] = {
    "ddp": Case({"strategy": "ddp"}),
    "ddp in bf16": Case({"strategy": "ddp", **BF16}),
    "zero1": Case({"strategy": "zero1", **BF16}),
    "zero2": Case({"strategy": "zero2"}),
    "zero3": Case({"strategy": "zero3"}),
    "zero3 in bf16": Case({"strategy": "zero3", **BF16}),
    "shard_grad_op": Case({"strategy": "shard_grad_op", **BF16}),
    "hsdp": Case({"strategy": "hsdp", "dp_replicate": 2, **BF16}),
    "hsdp, deferred": Case({"strategy": "hsdp", "dp_replicate": 2, "accumulation": "defer_replicate"}, microbatches=2),
    "zero3, four gradient buffers": Case({"strategy": "zero3", **TRAVELLING, **BF16}),
    "zero3, one gradient buffer": Case({"strategy": "zero3", "gradient_buffers": 1, **BF16}),
    "zero3, no prefetch": Case({"strategy": "zero3", "forward_prefetch": 0, "backward_prefetch": 0, **BF16}),
    "zero3, two prefetched": Case({"strategy": "zero3", "forward_prefetch": 2, "backward_prefetch": 2, **BF16}),
    "zero3, accumulated": Case({"strategy": "zero3", **BF16}, microbatches=2),
    "zero2, accumulated whole": Case({"strategy": "zero2", "accumulation": "unsharded", **BF16}, microbatches=2),
    "recomputed": Case({"strategy": "zero3", "activation_checkpointing": "full", **BF16}),
    "int8": Case({"strategy": "zero3", **INT8, **BF16}),
    "int8, travelling": Case({"strategy": "zero3", **INT8, **TRAVELLING}),
    "offloaded": Case({"strategy": "zero3", "offload_policy": "cpu", **BF16}, waits=3),
    "offloaded, accumulated": Case({"strategy": "zero3", "offload_policy": "cpu", **BF16}, microbatches=2, waits=9),
    "offloaded, int8": Case({"strategy": "zero3", "offload_policy": "cpu", **INT8, **BF16}, waits=3),
    "offloaded, updated in backward": Case(
        {"strategy": "zero3", "offload_policy": "cpu", **BF16}, in_backward=True, waits=6
    ),
    "offloaded, int8, travelling": Case({"strategy": "zero3", "offload_policy": "cpu", **INT8, **TRAVELLING}, waits=3),
    "updated in backward": Case({"strategy": "zero3", **BF16}, in_backward=True),
    "activations offloaded": Case({"strategy": "zero3", **ACTIVATIONS, **BF16}),
    "activations offloaded, recomputed": Case({"strategy": "zero3", "activation_checkpointing": "full", **ACTIVATIONS}),
    "fp16, scaled": Case({"strategy": "zero3", **FP16}, scaler=True, waits=1),
    "reduced in fp16": Case(
        {"strategy": "zero3", "mp_policy": sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="fp16")}
    ),
    "fp16, scaled, not clipped": Case({"strategy": "zero3", **FP16}, scaler=True, clips=False, waits=1),
    "tp": Case({"strategy": "zero3", "tp": 2}),
    "tp, sequence": Case({"strategy": "zero3", "tp": 2, "sequence_parallel": True}),
    "pp": Case({"strategy": "zero2", "pp": 2}, clips=False),
    "pp, tied": Case({"strategy": "zero2", "pp": 2}, {"tied": True}),
    "pp, many microbatches": Case({"strategy": "zero2", "pp": 2}, microbatches=4),
    "cp": Case({"strategy": "zero3", "cp": 2}),
    "ep": Case({"strategy": "zero3", "ep": 2}, {"num_experts": 4}, waits=3),
    "staged": Case({"strategy": "zero3", **BF16}, how={"has_nccl": False}, waits=11),
}


#: Products of axes, on four ranks.
WIDE: dict[str, Case] = {
    "tp and dp": Case({"strategy": "zero3", "tp": 2, **BF16}),
    "tp and pp": Case({"strategy": "zero2", "tp": 2, "pp": 2}),
    "pp and dp": Case({"strategy": "zero2", "pp": 2}, microbatches=2),
    "cp and dp": Case({"strategy": "zero3", "cp": 2}),
    "ep and dp": Case({"strategy": "zero3", "ep": 2}, {"num_experts": 4}, waits=3),
    "hsdp of 2 x 2": Case({"strategy": "hsdp", "dp_replicate": 2, **BF16}, microbatches=2),
    "inner groups": Case({"strategy": "zero3", "reshard_after_forward": 2, **BF16}),
    "tp, offloaded": Case({"strategy": "zero3", "tp": 2, "offload_policy": "cpu", **BF16}, waits=3),
}


def delete_under_way(seen: streams.Seen) -> tuple[list[float], int]:
    """Delete a model while a gather of it is under way."""
    model = parallelized({"strategy": "zero3", **BF16})
    for step in range(2):
        model(*batch(step, 0)).backward()
        model.zero_grad()
    engine = engine_of(model, "test")
    unit, engine.epoch = engine.units[2], engine.epoch + 1
    engine._issue_gather(unit)
    del engine, unit, model
    gc.collect()
    torch.empty(3, device=device())
    return [], 0


def evaluate_before_the_step(seen: streams.Seen) -> tuple[list[float], int]:
    """A forward without gradients between backward and the update on the host."""
    model = parallelized({"strategy": "zero3", "offload_policy": "cpu", **BF16})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        model(*batch(step, 0)).backward()
        with torch.no_grad():
            model(*batch(step, 0))
        optimizer.step()
        optimizer.zero_grad()
    return [], 0


def evaluate(seen: streams.Seen) -> tuple[list[float], int]:
    """Forwards alone, whole parameters, and the state of the whole model."""
    model = parallelized({"strategy": "zero3", **BF16})
    with torch.no_grad():
        for step in range(3):
            model(*batch(step, dist.get_rank()))
    with sw.full_parameters(model):
        sum(parameter.detach().sum() for parameter in model.parameters())
    sw.full_state_dict(model)
    return [], 0


def drop(seen: streams.Seen) -> tuple[list[float], int]:
    """Forwards whose graphs go without a backward, with activations on their way to the host."""
    model = parallelized({"strategy": "zero3", **ACTIVATIONS})
    for step in range(4):
        loss = model(*batch(step, dist.get_rank()))
        if step == 1:
            loss.backward()
        del loss
    return [], 0


def train_on_another_stream(seen: streams.Seen) -> tuple[list[float], int]:
    """The program computes on a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = Case({"strategy": "zero3", **BF16})(seen)
    torch.cuda.current_stream().wait_stream(side)
    return found


def train_two_models(seen: streams.Seen) -> tuple[list[float], int]:
    """Two models that share communicators, in turns."""
    models = [parallelized({"strategy": "zero3"}) for _ in range(2)]
    losses = []
    for step in range(2):
        for model in models:
            loss = model(*batch(step, 0))
            loss.backward()
            losses.append(float(loss.detach()))
    return losses, 0


class Branches(nn.Module):
    """Layers of which ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8, device=device()) for _ in range(6))

    def forward(self, x: Tensor, step: int) -> Tensor:
        for index, layer in enumerate(self.layers):
            if (index + step + dist.get_rank()) % 2 == 0 or index % 3 == 0:
                x = torch.tanh(layer(x))
        return x.square().mean()


def take_different_paths(seen: streams.Seen) -> tuple[list[float], int]:
    """Flags of unused parameters are read once, at the end of a backward."""
    model = parallelized({"strategy": "zero3", "auto_wrap_policy": sw.wrap_by_class({nn.Linear})}, Branches())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, losses = torch.ones(4, 8, device=device()), []
    for step in range(3):
        loss = model(x, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, 0


def generate(**plan: Any) -> Callable[[streams.Seen], tuple[list[float], int]]:
    def continued(seen: streams.Seen) -> tuple[list[float], int]:
        model = sw.parallelize(build(), sw.ParallelPlan(**plan))
        found = sw.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=4)
        return [float(token) for row in found for token in row], 0

    return continued


def save_and_load(seen: streams.Seen) -> tuple[list[float], int]:
    """A save beside training, one that training waits for, and a load."""
    model = parallelized({"strategy": "zero3", **BF16})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        for step in range(3):
            model(*batch(step, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                sw.save_async(f"{folders[0]}/beside", model, optimizer)
        sw.finish_save(model)
        sw.save(f"{folders[0]}/save", model, optimizer)
        sw.load(f"{folders[0]}/save", model, optimizer)
        loss = float(model(*batch(5, 0)).detach())
        dist.barrier()
    return [loss], 0


def run(name: str, how: dict[str, Any]) -> tuple[streams.Seen, list[float], int]:
    """What is seen, losses, and waits of the host in a steady step."""
    case = {**OTHERS, **WIDE, **CASES}[name]
    with streams.pretended_cuda(**{**how, **getattr(case, "how", {})}) as seen:
        losses, waits = case(seen)
    return seen, losses, waits


def lone(
    plan: dict[str, Any], world: int, rank: int, **model: Any
) -> Callable[[streams.Seen], tuple[list[float], int]]:
    """One rank of a world that is not there."""

    def train(seen: streams.Seen) -> tuple[list[float], int]:
        layers = {"auto_wrap_policy": sw.wrap_by_class({sw.models.Block}), "merge_units": False}
        held = sw.ParallelPlan(**{**layers, **plan})
        made = streams.lone_model(build(**model), held, held.mesh(world), rank)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
        data, before = [batch(step, rank) for step in range(3)], 0
        for each in data:
            before = len(seen.host_waits)
            if held.pp > 1:
                sw.train_step(made, each, num_microbatches=2)
            else:
                made(*each).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [], len(seen.host_waits) - before

    return train


LONE = {
    "one rank of three": lone({"strategy": "zero3"}, 3, 1),
    "zero3 over 64": lone({"strategy": "zero3", **BF16}, 64, 17),
    "zero3 over 512": lone({"strategy": "zero3", **BF16}, 512, 300),
    "hsdp of 8": lone({"strategy": "hsdp", "dp_replicate": 2, **BF16}, 8, 3),
    "hsdp of 64": lone({"strategy": "hsdp", "dp_replicate": 8, **BF16}, 64, 37),
    "hsdp of 512, deferred": lone({"strategy": "hsdp", "dp_replicate": 8, "accumulation": "defer_replicate"}, 512, 200),
    "inner groups of 8": lone({"strategy": "zero3", "reshard_after_forward": 4, **BF16}, 8, 5),
    "inner groups of 64": lone({"strategy": "zero3", "reshard_after_forward": 8, **BF16}, 64, 60),
    "tp and dp of 8": lone({"strategy": "zero3", "tp": 2, **BF16}, 8, 5),
    "tp, pp and dp of 8": lone({"strategy": "zero2", "tp": 2, "pp": 2}, 8, 3),
    "ep and dp of 64": lone({"strategy": "zero3", "ep": 4}, 64, 33, num_experts=8),
    "tp, ep, pp and dp of 64": lone({"strategy": "zero2", "tp": 2, "ep": 4, "pp": 2}, 64, 13, num_experts=8),
    "tp, ep, pp and dp of 512": lone({"strategy": "zero2", "tp": 2, "ep": 4, "pp": 2}, 512, 101, num_experts=8),
}
OTHERS = {
    **LONE,
    "deleted under way": delete_under_way,
    "evaluated before the step": evaluate_before_the_step,
    "evaluated": evaluate,
    "graphs dropped": drop,
    "another stream": train_on_another_stream,
    "two models": train_two_models,
    "different paths": take_different_paths,
    "generated": generate(strategy="zero3"),
    "generated by tp": generate(strategy="zero3", tp=2),
    "generated by pp": generate(strategy="zero2", pp=2),
    "saved and loaded": save_and_load,
}
