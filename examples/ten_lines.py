"""Your own loop under ZeRO-3 in ten lines.

torchrun --nproc-per-node 2 examples/ten_lines.py
python examples/ten_lines.py                        # a world of one
"""

import os

import torch
from torch import nn

import shardwise as sw

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
torch.manual_seed(0)
plain = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)), nn.Linear(64, 1)).to(device)

model = sw.parallelize(plain, sw.ParallelPlan(strategy="zero3"))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(sw.data_parallel_rank(model))  # each rank draws different samples
for step in range(40):
    x = torch.randn(32, 64, generator=generator).to(device)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    loss.backward()
    sw.clip_grad_norm(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0 and step % 13 == 0:
        print(f"step {step:2d}  loss {loss.item():.3f}")
torch.distributed.destroy_process_group()
