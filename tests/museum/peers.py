"""Bugs of the museum, planted in FSDP2: what torch's own checks say of them.

A script on two ranks trains a small model with FSDP2, as PyTorch's tutorials do it, with
``TORCH_DISTRIBUTED_DEBUG=DETAIL``, and its losses are compared with those of one plain process.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import default_planner, state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.utils import clip_grad

from shardwise.testing import RankFailure, run_on_ranks
from tests.museum.programs import Branches, Chain, numbers, signed

WORLD, ROWS, STEPS, STOP = 2, 2, 5, 3
#: Losses of the script without a bug are as near to those of one process.
_NEAR = 1e-5


@dataclass(frozen=True)
class Script:
    """How the script trains.

    Attributes:
        kind: The model.
        sample: From a number to a sample.
        microbatches: Of a step.
        max_norm: Gradients are clipped to it.
        resumes: Stops after some steps, and goes on from DCP's checkpoint.
        begins_on_meta: Weights are made on each rank after sharding, over two replicas.
        deeper: The checkpoint is loaded into a model with a layer more.
    """

    kind: Callable[[], nn.Module] = Chain
    sample: Callable[[int], Tensor] = numbers
    microbatches: int = 1
    max_norm: float | None = None
    resumes: bool = False
    begins_on_meta: bool = False
    deeper: bool = False

    def batch(self, step: int, reader: int, microbatch: int) -> Tensor:
        first = ((step * WORLD + reader) * self.microbatches + microbatch) * ROWS
        return torch.stack([self.sample(index) for index in range(first, first + ROWS)])

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
        optimizer.step()
        optimizer.zero_grad()


# -- one process


def alone(script: Script) -> list[float]:
    """The mean losses of each step in one process."""
    torch.manual_seed(3)
    model = script.kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    count = WORLD * script.microbatches
    for step in range(STEPS):
        parts = [script.batch(step, r, m) for r in range(WORLD) for m in range(script.microbatches)]
        terms = [model(part).square().mean() / count for part in parts]
        for term in terms:
            term.backward()
        script.update(model, optimizer)
        losses.append(sum(term.item() for term in terms))
    return losses


# -- on the ranks


def train(script: Script, folder: str) -> list[float]:
    """The same on the ranks."""
    rank = dist.get_rank()
    model = make(script)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        if script.resumes and step == STOP:
            model, optimizer = resumed(script, model, optimizer, folder)
        total = torch.zeros(())
        for microbatch in range(script.microbatches):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(microbatch == script.microbatches - 1)
            loss = model(script.batch(step, rank, microbatch)).square().mean() / script.microbatches
            loss.backward()
            total += loss.detach()
        script.update(model, optimizer)
        dist.all_reduce(total)
        losses.append(total.item() / WORLD)
    return losses


def make(script: Script, *, seed: int = 3, deeper: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device("meta" if script.begins_on_meta else "cpu"):
        model = script.kind()
        if deeper:
            model.body.append(nn.Linear(8, 8))  # type: ignore[union-attr, operator]
    shape, names = ((WORLD, 1), ("replicate", "shard")) if script.begins_on_meta else ((WORLD,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if script.begins_on_meta:
        torch.manual_seed(3 + dist.get_rank())  # the bug, which is one of the script
        model.to_empty(device="cpu")
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
    return model


def resumed(
    script: Script, model: nn.Module, optimizer: torch.optim.Optimizer, folder: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Save by DCP, and load into a new model."""
    held = dict(zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer), strict=True))
    dcp.save(held, checkpoint_id=folder)
    model = make(script, seed=4, deeper=script.deeper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fresh = dict(zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer), strict=True))
    dcp.load(fresh, checkpoint_id=folder)
    state_dict.set_state_dict(model, optimizer, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
    return model, optimizer


# -- the bugs


@contextlib.contextmanager
def forgets_microbatches() -> Iterator[None]:
    plain = FSDPParamGroup.post_backward

    def post_backward(self: Any, *unused: Any) -> None:
        plain(self, *unused)
        if not self.reduce_grads:
            for parameter in self.fsdp_params:
                parameter._unsharded_param.grad = None

    with mock.patch.object(FSDPParamGroup, "post_backward", post_backward):
        yield


def does_nothing(owner: Any, name: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Plants that a function of torch does nothing."""
    return lambda: mock.patch.object(owner, name, return_value=None)


@contextlib.contextmanager
def loads_in_part() -> Iterator[None]:
    plain = default_planner.DefaultLoadPlanner.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **(kwargs | {"allow_partial_load": True}))

    with mock.patch.object(default_planner.DefaultLoadPlanner, "__init__", init):
        yield


@dataclass(frozen=True)
class Peer:
    """A bug in another engine.

    Attributes:
        script: The script that runs.
        plant: Plants it.
        where: Where it is.
    """

    script: Script
    plant: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    where: str = "planted"


PEERS: dict[str, Peer] = {
    "only the last microbatch trains": Peer(Script(microbatches=2), forgets_microbatches),
    "forward computes with the weights of the step before": Peer(Script(), does_nothing(FSDPParamGroup, "reshard")),
    "clipping returns the norm and scales nothing": Peer(
        Script(max_norm=0.05), does_nothing(clip_grad, "_clip_grads_with_norm_")
    ),
    "moments of the optimizer are not loaded": Peer(
        Script(resumes=True), does_nothing(state_dict, "_init_optim_state")
    ),
    "missing weights are no error": Peer(Script(resumes=True, deeper=True), loads_in_part),
    "ranks initialise a deferred model by seeds of their own": Peer(Script(begins_on_meta=True), where="in the script"),
    "weights that only other ranks have used are not updated": Peer(
        Script(Branches, signed), where="the engine as it is"
    ),
}


def on_ranks(name: str, folder: str, is_planted: bool) -> tuple[str, list[float]]:
    torch.set_num_threads(1)
    peer = PEERS[name]
    with peer.plant() if is_planted and peer.plant is not None else contextlib.nullcontext():
        return "nothing", train(peer.script, folder)


def run() -> list[dict[str, str]]:
    """Run all; what their checks said, and how far the losses are from those of one process."""
    engine = f"FSDP2 of torch {torch.__version__.partition('+')[0]}"
    found = []
    for name, peer in PEERS.items():
        said, off = look(name)
        print(f"{name}: {said}; {off}", flush=True)
        found.append({"bug": name, "engine": engine, "where": peer.where, "said": said, "off": off})
    return found


def look(name: str, *, is_planted: bool = True) -> tuple[str, str]:
    """What the checks said of one bug, and how far the losses are off."""
    with tempfile.TemporaryDirectory() as held, mock.patch.dict(os.environ, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}):
        folder = str(Path(held) / "saved")
        try:
            (said, losses), *_ = run_on_ranks(on_ranks, WORLD, name, folder, is_planted, timeout_s=60)
        except RankFailure as failure:
            if failure.timed_out:
                return "nothing in 60 s: the ranks wait for each other", ""
            lines = failure.causes[failure.rank].splitlines()
            return " ".join(dict.fromkeys((lines[0], lines[-1])))[:200], ""  # torch's checkpoints say the cause last
    gap = max(abs(a - b) / abs(a) for a, b in zip(alone(PEERS[name].script), losses, strict=True))
    if gap < _NEAR:
        return said, "right"
    return said, f"losses off by up to {gap:.0%}" if gap > 0.01 else f"losses off by {gap:.1e}"
