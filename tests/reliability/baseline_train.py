"""What the board is held beside: a plain script for torchrun that trains with FSDP2 and saves with DCP.

It is written as PyTorch's tutorials do it: a folder a checkpoint, the newest one with metadata is resumed, no handler
of signals. Faults strike at the same names as in shardwise (``launch.inject``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardwise.launch import inject

VOCABULARY, WIDTH, LENGTH, BATCH = 256, 32, 16, 4
SAVE_EVERY = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BTD):
        return x_BTD + self.down(torch.relu(self.up(self.norm(x_BTD))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens_BT):
        return self.head(self.blocks(self.embedding(tokens_BT)))


class Writer(dcp.FileSystemWriter):
    """DCP's own, with the points at which a fault can strike."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        self.step = step

    def write_data(self, plan, planner):
        inject.at("mid_shard_write", self.step)
        written = super().write_data(plan, planner)
        inject.at("after_shard_fsync", self.step)
        return written

    def finish(self, metadata, results) -> None:
        inject.at("before_manifest", self.step)
        super().finish(metadata, results)
        inject.at("after_manifest", self.step)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def newest(folder: Path) -> Path | None:
    found = [path for path in folder.glob("step-*") if (path / ".metadata").exists()]
    return max(found, key=lambda path: int(path.name[5:]), default=None)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, run: Path) -> int:
    """Load the newest checkpoint, where there is one; its step."""
    found = newest(run)
    if found is None:
        return 0
    state = state_of(model, optimizer, 0)
    dcp.load(state, checkpoint_id=found)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    metrics = run / "metrics.jsonl"
    if dist.get_rank() == 0:
        print(f"resumed at step {state['step']}", flush=True)
        lines = metrics.read_text().splitlines()[: state["step"]] if metrics.exists() else []
        metrics.write_text("".join(f"{line}\n" for line in lines))
    return state["step"]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict:
    held, optimizer_state = get_state_dict(model, optimizer)
    return {"model": held, "optimizer": optimizer_state, "step": step}


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """One step; the mean of the ranks' losses."""
    inject.at("step_begin", step)
    tokens = tokens_of(step, dist.get_rank())
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    inject.at("before_backward", step)
    loss.backward()
    inject.at("before_update", step, lambda: (p.grad.to_local() for p in model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    inject.at("after_step", step, lambda: (p.to_local() for p in model.parameters()))
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--same-folder", action="store_true", help="save every checkpoint into one folder")
    parser.add_argument("--asynchronous", action="store_true")
    options = parser.parse_args()
    options.run.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saving = None
    for step in range(resume(model, optimizer, options.run) + 1, options.steps + 1):
        loss = make_step(model, optimizer, step).item()
        if dist.get_rank() == 0:
            with (options.run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")
            print(f"step {step}/{options.steps}  loss {loss:.4f}", flush=True)
        if step % SAVE_EVERY == 0:
            inject.at("save_begin", step)
            writer = Writer(options.run / ("step-1" if options.same_folder else f"step-{step}"), step)
            if options.asynchronous:
                if saving is not None:
                    saving.result()
                saving = dcp.async_save(state_of(model, optimizer, step), storage_writer=writer)
            else:
                dcp.save(state_of(model, optimizer, step), storage_writer=writer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
