"""From DeepSpeed's ZeRO-2 to shardwise, side by side: the same losses.

torchrun --nproc-per-node 2 examples/from_deepspeed.py     # needs the extra shardwise[peers]
"""

import os

import deepspeed
import torch
from torch import nn

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
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    losses = []
    for step in range(5):
        loss = (engine(batch(step)) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def after() -> list[float]:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero2"))
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
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    old, new = before(), after()
    if torch.distributed.get_rank() == 0:
        for step, (a, b) in enumerate(zip(old, new, strict=True)):
            print(f"step {step}  DeepSpeed {a:.6f}  shardwise {b:.6f}")
        print("equal to 1e-5:", all(abs(a - b) <= 1e-5 * abs(a) for a, b in zip(old, new, strict=True)))
    torch.distributed.destroy_process_group()
