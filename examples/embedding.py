"""A huge embedding beside a dense part, trained without a parameter server.

    torchrun --nproc-per-node 4 examples/embedding.py

The rows of the table are spread over all ranks, with their gradients and optimizer state, and only the rows that a
batch looks up are sent; the dense part is trained under ddp. The last lines compare this with ddp alone, where every
rank holds the whole table and reduces its whole gradient.

This is the model of torch's tutorial "Combining Distributed DataParallel with Distributed RPC Framework": an embedding
bag apart from a dense trunk that several trainers share. Its parts and those of this file:

    tutorial                                                this file
    remote = RemoteModule("ps", nn.EmbeddingBag, ...)       self.items = nn.Embedding(...), row_sharded=["items"]
    trunk = DDP(nn.Linear(...))                             self.dense, strategy="ddp"
    hybrid(indices, offsets): trunk(remote(...))            Recommender.forward: the mean of each bag, then the trunk
    DistributedOptimizer(optim.SGD, rrefs, lr=0.05)         torch.optim.AdamW(model.parameters(), lr=2e-2)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [loss])          loss.backward()
        optimizer.step(context_id)                          optimizer.step()
    a server, a master and two trainers, rpc.init_rpc       trainers alone, torchrun

``dist_autograd.backward`` of a parallelized model raises a StateError: gradients in an RPC's context are not summed
over the ranks. If remote modules must stay, the error names the two backwards that train both.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw

ITEMS, WIDTH, BAG = 50_000, 32, 8
DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(DEVICE)


class Recommender(nn.Module):
    """Predicts from the items that a person has seen whether the person likes the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.dense = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, seen: torch.Tensor, following: torch.Tensor, is_liked: torch.Tensor) -> torch.Tensor:
        rows = self.items(torch.cat([seen, following.unsqueeze(1)], dim=1))  # one lookup, one exchange
        features = torch.cat([rows[:, :BAG].mean(dim=1), rows[:, BAG]], dim=1)
        return F.binary_cross_entropy_with_logits(self.dense(features).squeeze(1), is_liked)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw people who like either even or odd items. Few items are popular."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    popular = (torch.rand(64, BAG + 1, generator=generator) ** 4 * (ITEMS // 200)).long() * 2
    taste = torch.randint(0, 2, (64, 1), generator=generator)
    seen, following = popular[:, :BAG] + taste, popular[:, BAG] + torch.randint(0, 2, (64,), generator=generator)
    is_liked = (following % 2 == taste.squeeze(1)).float()
    return seen.to(DEVICE), following.to(DEVICE), is_liked.to(DEVICE)


def train(plan: sw.ParallelPlan, steps: int = 30) -> tuple[list[float], int, int]:
    """Return the losses, the bytes that this rank sent in the last step, and the bytes of its parameters."""
    torch.manual_seed(0)
    model = sw.parallelize(Recommender().to(DEVICE), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    losses = []
    for step in range(steps):
        with sw.record_collectives(model) as events:
            loss = model(*batch(step, sw.data_parallel_rank(model)))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sum(event.sent_bytes for event in events), sum(p.nbytes for p in model.parameters())


def main() -> None:
    spread = train(sw.ParallelPlan(strategy="ddp", row_sharded=["items"]))
    whole = train(sw.ParallelPlan(strategy="ddp"))
    if torch.distributed.get_rank() == 0:
        for name, (losses, sent, held) in {"rows spread": spread, "ddp alone": whole}.items():
            print(f"{name:<12} loss {losses[0]:.6f} -> {losses[-1]:.6f}   sent in a step {sent / 1e3:9.1f} kB", end="")
            print(f"   parameters held {held / 1e6:5.2f} MB")
        print("losses equal to the last bit:", spread[0] == whole[0])


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
