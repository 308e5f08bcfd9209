"""From torch's FullyShardedDataParallel to shardwise, side by side: the same losses.

torchrun --nproc-per-node 2 examples/from_fsdp1.py
"""

import functools
import os

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

import shardwise as sw

DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(DEVICE)


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True) for _ in range(5))
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 1)).to(DEVICE)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
    return torch.randn(4, 10, 8, generator=generator).to(DEVICE)


def before() -> list[float]:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FullyShardedDataParallel(
        build(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=policy,
        use_orig_params=True,
        device_id=DEVICE,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        loss = (model(batch(step)) - 1).square().mean()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def after() -> list[float]:
    plan = sw.ParallelPlan(
        strategy="FULL_SHARD",  # FSDP's names are accepted
        auto_wrap_policy=sw.wrap_by_class({nn.TransformerEncoderLayer}),
    )
    model = sw.parallelize(build(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        loss = (model(batch(step)) - 1).square().mean()
        loss.backward()
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.distributed.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    old, new = before(), after()
    if torch.distributed.get_rank() == 0:
        for step, (a, b) in enumerate(zip(old, new, strict=True)):
            print(f"step {step}  FSDP {a:.6f}  shardwise {b:.6f}")
        print("equal to 1e-5:", all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(old, new, strict=True)))
    torch.distributed.destroy_process_group()
