"""From torch's fully_shard (FSDP2) to shardwise, side by side: the same losses.

torchrun --nproc-per-node 2 examples/from_fsdp2.py
"""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
    model = build()
    mesh = init_device_mesh(DEVICE.type, (torch.distributed.get_world_size(),))
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(5):
        loss = (model(batch(step)) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def after() -> list[float]:
    model = build()
    for layer in model[1:-1]:
        sw.fully_shard(layer)
    sw.fully_shard(model)
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
            print(f"step {step}  FSDP2 {a:.6f}  shardwise {b:.6f}")
        print("equal to 1e-5:", all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(old, new, strict=True)))
    torch.distributed.destroy_process_group()
