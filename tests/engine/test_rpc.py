"""A parallelized part beside remote modules: torch's tutorial of DDP with the RPC framework, on real RPC."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from torch import Tensor, nn
from torch.distributed import rpc

import shardwise as sw
from shardwise.testing import run_on_ranks

STEPS = 3


class Table(nn.Module):
    """Lives on one process; the others look rows up by RPC."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = nn.Embedding(20, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows(ids)


def look_up(table: rpc.RRef, ids: Tensor) -> Tensor:
    return table.local_value()(ids)


def parameters_of(table: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(parameter) for parameter in table.local_value().parameters()]


def weights_of(table: rpc.RRef) -> dict[str, Tensor]:
    return table.local_value().state_dict()


def dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5)))


def ids_of(rank: int, step: int) -> Tensor:
    return torch.arange(4) + 5 * rank + step


def refuse(model: nn.Module, remote: rpc.RRef, local: Any) -> None:
    rank = dist.get_rank()
    before = sw.full_state_dict(model)
    with dist_autograd.context() as context:
        rows = rpc.rpc_sync("worker0", look_up, args=(remote, ids_of(rank, 0)))
        said = io.StringIO()
        with contextlib.redirect_stderr(said), pytest.raises(RuntimeError, match="python_error"):
            dist_autograd.backward(context, [model(rows).square().mean()])
        assert "dist_autograd.backward() reached a parallelized model" in said.getvalue()
        assert "dist_autograd.backward(context, [(remote * x.grad).sum()])" in said.getvalue()
        local.step(context)
    dist.barrier()
    assert all(torch.equal(before[name], tensor) for name, tensor in sw.full_state_dict(model).items())


def train(strategy: str, folder: str, is_refused: bool) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")  # torch warns of its own torch.jit and of its own process groups
    from torch.distributed.optim import DistributedOptimizer

    rank, world = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    plain = dense()
    dist.barrier()  # the table is drawn by the same generator, in another thread of rank 0
    table = rpc.remote("worker0", Table) if rank == 0 else None
    tables = [table]
    if rank == 0:
        for other in range(1, world):
            rpc.rpc_sync(f"worker{other}", keep, args=(table,))
    dist.barrier()
    tables[0] = table or _kept[0]
    remote = tables[0]
    model = sw.parallelize(plain, strategy=strategy)
    references = [rpc.RRef(p) for p in model.parameters()]
    local = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    if is_refused:
        refuse(model, remote, local)
        rpc.shutdown()
        return {}
    remote_parameters = rpc.rpc_sync("worker0", parameters_of, args=(remote,))
    elsewhere = DistributedOptimizer(torch.optim.SGD, remote_parameters, lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):  # as the message says
        with dist_autograd.context() as context:
            rows = rpc.rpc_sync("worker0", look_up, args=(remote, ids_of(rank, step)))
            x = rows.detach().requires_grad_()
            dist.barrier()  # all have read the table
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for turn in range(world):  # the remote optimizers of two trainers would change the table at the same time
                if turn == rank:
                    dist_autograd.backward(context, [(rows * x.grad).sum()])
                    elsewhere.step(context)
                dist.barrier()
    state = sw.full_state_dict(model) | rpc.rpc_sync("worker0", weights_of, args=(remote,))
    rpc.shutdown()
    return state


_kept: list[rpc.RRef] = []


def keep(table: rpc.RRef) -> None:
    _kept.append(table)


def in_one_process() -> dict[str, Tensor]:
    table, plain = Table(), dense()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, table)]
    for step in range(STEPS):
        for rank in range(2):
            rows = table(ids_of(rank, step))
            x = rows.detach().requires_grad_()
            loss = plain(x).square().mean()
            (loss / 2).backward()  # the mean over the ranks trains the dense part
            (rows * (2 * x.grad)).sum().backward()  # every rank's own loss trains the table
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return plain.state_dict() | table.state_dict()


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_distributed_autograd_is_refused_and_changes_nothing(strategy, tmp_path):
    run_on_ranks(train, 2, strategy, str(tmp_path), True)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_two_backwards_of_the_message_train_both_parts(strategy, tmp_path):
    state, _ = run_on_ranks(train, 2, strategy, str(tmp_path), False)
    for name, expected in in_one_process().items():
        assert torch.allclose(state[name], expected, rtol=1e-5, atol=1e-6), (name, (state[name] - expected).abs().max())
