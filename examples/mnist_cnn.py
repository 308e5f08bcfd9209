"""Peak memory of a small CNN under DDP, under FSDP in one unit, and under FSDP with auto-wrap.

    torchrun --nproc-per-node 4 examples/mnist_cnn.py

The digits are drawn (seven segments, shifted, with noise), so nothing is downloaded. All three compute the same.
"""

import os

import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.train.predicted.memory import peak_of_tensors

DEVICE = torch.device("cpu")
if torch.cuda.is_available():
    DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(DEVICE)

SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]
BARS = {  # rows and columns of a 28 x 28 picture
    "a": (slice(4, 6), slice(9, 19)),
    "b": (slice(4, 14), slice(18, 20)),
    "c": (slice(14, 24), slice(18, 20)),
    "d": (slice(22, 24), slice(9, 19)),
    "e": (slice(14, 24), slice(8, 10)),
    "f": (slice(4, 14), slice(8, 10)),
    "g": (slice(13, 15), slice(9, 19)),
}


def digits(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randn(count, 1, 28, 28, generator=generator) * 0.2
    for image, label in zip(images, labels.tolist(), strict=True):
        for bar in SEGMENTS[label]:
            image[0][BARS[bar]] += 1.0
        dy, dx = torch.randint(-3, 4, (2,), generator=generator).tolist()
        image.copy_(image.roll((dy, dx), (1, 2)))
    return images.to(DEVICE), labels.to(DEVICE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.fc1 = nn.Linear(32 * 7 * 7, 512)
        self.fc2 = nn.Linear(512, 512)
        self.fc3 = nn.Linear(512, 512)
        self.fc4 = nn.Linear(512, 512)
        self.out = nn.Linear(512, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(images)))).flatten(1)
        x = F.relu(self.fc2(F.relu(self.fc1(x))))
        x = F.relu(self.fc4(F.relu(self.fc3(x))))
        return F.cross_entropy(self.out(x), labels)


PLANS = {
    "DDP": sw.ParallelPlan(strategy="ddp", auto_wrap_policy="none"),
    "FSDP, one unit": sw.ParallelPlan(strategy="fsdp", auto_wrap_policy="none"),
    "FSDP, auto-wrap": sw.ParallelPlan(strategy="fsdp", auto_wrap_policy=sw.wrap_by_size(min_num_params=100_000)),
}


def train(plan: sw.ParallelPlan, steps: int = 20) -> tuple[float, int]:
    """Return the last loss, and this rank's peak of tensor bytes in a late step."""
    torch.manual_seed(0)
    model = sw.parallelize(Net().to(DEVICE), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(sw.data_parallel_rank(model))

    def step() -> float:
        loss = model(*digits(16, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(steps):
        step()
    with peak_of_tensors(DEVICE) as peak:
        last = step()
    return last, peak.num_bytes


def main() -> None:
    results = {name: train(plan) for name, plan in PLANS.items()}
    if torch.distributed.get_rank() == 0:
        for name, (loss, peak) in results.items():
            print(f"{name:<16} peak {peak / 1e6:6.2f} MB   loss {loss:.6f}")
        ddp, one_unit, auto_wrap = (peak for _, peak in results.values())
        print("DDP > FSDP in one unit > FSDP with auto-wrap:", ddp > one_unit > auto_wrap)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
