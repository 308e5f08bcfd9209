"""Linear layers in float8 beside bf16, compiled, under zero3 and FSDP2: eight blocks of 4,096 on one GPU.

Engines take turns, each built anew. Losses are printed, because float8 rounds: all of a row begin alike.

    python -m bench.float8 [--rounds 2] [--steps 6] [--layers 8] [--hidden 4096]

Without a GPU it runs a small model in torchao's emulation: that tries the script, and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time

import torch
from torch import Tensor, nn

import shardwise as sw
from bench.gpu import clean, plan_of, synchronize
from shardwise.launch.world import join, read_world, shutdown
from tests.common.blockwise import TORCHAO

#: Engine, recipe of torchao, whether FSDP2 gathers float8.
CASES = (
    ("zero3", None, False),
    ("zero3", "tensorwise", False),
    ("zero3", "rowwise", False),
    ("torch-fsdp2", None, False),
    ("torch-fsdp2", "tensorwise", False),
    ("torch-fsdp2", "tensorwise", True),
)
WARM_UP_STEPS = 4


def build(options: argparse.Namespace, device: torch.device, recipe: str | None, *, gathers: bool) -> nn.Module:
    torch.manual_seed(0)
    width = {"hidden": options.hidden, "num_heads": options.hidden // 128, "num_layers": options.layers}
    model = sw.models.gpt("gpt-nano", **width, seq_len=options.tokens, vocab_size=32000, device=device)
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        config = dataclasses.replace(config, emulate=device.type == "cpu", enable_fsdp_float8_all_gather=gathers)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, path: "blocks" in path)
    return model


def parallel(model: nn.Module, engine: str, device: torch.device) -> nn.Module:
    if engine != "torch-fsdp2":
        return sw.parallelize(model, plan_of(engine, compile=True))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        block.compile()
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return model


def take_turn(
    options: argparse.Namespace, device: torch.device, engine: str, recipe: str | None, *, gathers: bool
) -> tuple[float, float, list[float]]:
    """Seconds of a step, peak bytes, losses."""
    torch._dynamo.reset()  # noqa: SLF001 - or it gives up on the block's code after eight models
    clean(device)
    model = parallel(build(options, device, recipe, gathers=gathers), engine, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    drawn = torch.randint(0, 32000, (options.samples, options.tokens + 1), generator=torch.Generator().manual_seed(0))
    x, y = (part.contiguous().to(device) for part in (drawn[:, :-1], drawn[:, 1:]))
    seconds: list[float] = []
    losses: list[Tensor] = []
    for _ in range(WARM_UP_STEPS + options.steps):
        start = time.perf_counter()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if gathers:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        losses.append(loss.detach())
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return statistics.median(seconds[WARM_UP_STEPS:]), peak, [value.item() for value in losses]


def main() -> None:
    sys.path.append(str(TORCHAO))
    is_small = not torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, small in (
        *(("rounds", 2, 1), ("steps", 6, 2), ("layers", 8, 2), ("hidden", 4096, 256)),
        *(("samples", 8, 2), ("tokens", 1024, 32)),
    ):
        parser.add_argument(f"--{name}", type=int, default=small if is_small else value)
    options = parser.parse_args()
    device = join(read_world())
    for number in range(options.rounds):
        for engine, recipe, gathers in CASES[:: -1 if number % 2 else 1]:
            step_s, peak, losses = take_turn(options, device, engine, recipe, gathers=gathers)
            name = f"{engine} {recipe or 'bf16'}{', gathers float8' * gathers}"
            shown = " ".join(f"{loss:.3f}" for loss in losses[:4])
            print(f"{name:42} {step_s * 1e3:8.1f} ms  {peak / 1e9:6.2f} GB  losses {shown}", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
