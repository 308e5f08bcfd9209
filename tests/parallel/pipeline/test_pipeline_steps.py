"""Steps of a pipeline that differ from those before: what is trained, what a batch holds, how many samples it has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.parallel.pipeline.batch import split_batch
from shardwise.parallel.pipeline.pipelined import pipelined_of
from shardwise.spec.errors import StateError
from shardwise.testing import run_on_ranks

NUM_MICROBATCHES = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(6, 10)

    def forward(self, ids, positions=None, num_items_in_batch=None, info=None):
        x = self.embedding(ids)
        if positions is not None:
            x = x + positions
        for block in self.blocks:
            x = block(x)
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


class Info:
    """Its text has its address."""


def ids(rows=4):
    return torch.randint(0, 10, (rows, 5), generator=torch.Generator().manual_seed(rows))


def thaw(model, step):
    """Everything but the last block and head frozen, all trained, the first half frozen, all trained again."""
    for name, parameter in model.named_parameters():
        is_late = name.startswith(("blocks.3", "head"))
        is_early = name.startswith(("embedding", "blocks.0", "blocks.1"))
        parameter.requires_grad_([is_late, True, not is_early, True][step % 4])


BATCHES = (
    {"ids": ids(), "positions": torch.randn(1, 5, 1, generator=torch.Generator().manual_seed(1)).double()},
    {"ids": ids(), "num_items_in_batch": torch.tensor(16)},
    {"ids": ids(), "num_items_in_batch": 16},
)


def run(schedules):
    results = []
    for schedule in schedules:
        model = sw.parallelize(Net().double(), sw.ParallelPlan(pp=2, pipeline=schedule))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        steps = []
        for step in range(6):
            thaw(model, step)
            steps.append(sw.train_step(model, {"ids": ids(), "info": Info()}, None, NUM_MICROBATCHES).item())
            steps.append(sw.clip_grad_norm(model, 1e9).item())
            optimizer.step()
            optimizer.zero_grad()
        for batch in BATCHES:
            steps.append(sw.train_step(model, batch, None, NUM_MICROBATCHES).item())
            steps.append(sw.clip_grad_norm(model, 1e9).item())
            optimizer.zero_grad()
        steps += [sw.eval_step(model, {"ids": ids(rows)}).item() for rows in (4, 3, 1)]
        with pytest.raises(StateError, match="a backward for each microbatch"):
            sw.optimizer_in_backward(model, optimizer)
        with pytest.raises(StateError, match=r"microbatch 1 of a step .* \[3, 5\], .* 0 has \[4, 5\]"):
            sw.train_step(model, iter([{"ids": ids()}, {"ids": ids(3)}]), None, NUM_MICROBATCHES)
        results.append((steps, len(pipelined_of(model)._stages._flows)))
    return results


def one_process():
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []

    def train(batch, is_sum):
        count = 1 if is_sum else NUM_MICROBATCHES
        losses = [model(**part) / count for part in split_batch(batch, count)]
        for loss in losses:
            loss.backward()
        steps.append(sum(loss.item() for loss in losses))
        steps.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())

    for step in range(6):
        thaw(model, step)
        train({"ids": ids()}, is_sum=False)
        optimizer.step()
        optimizer.zero_grad()
    for batch in BATCHES:
        train(batch, is_sum="num_items_in_batch" in batch)
        optimizer.zero_grad()
    with torch.no_grad():
        return steps + [model(ids(rows)).item() for rows in (4, 3, 1)]


def test_steps_that_differ_are_those_of_one_process():
    expected = one_process()
    for results in run_on_ranks(run, 2, ("1f1b", "zb-v"), timeout_s=100):
        for steps, num_flows in results:
            assert steps == pytest.approx(expected, rel=1e-12)
            assert num_flows == 1 + len(BATCHES) + 3, "one for each kind of batch"


def summaries():
    frozen = Net()
    for part in (frozen.embedding, frozen.blocks[0], frozen.blocks[1]):
        part.requires_grad_(requires_grad=False)
    model = sw.parallelize(frozen, sw.ParallelPlan(pp=2, pipeline=sw.PipelinePolicy(first_of_stage=("blocks.2",))))
    return str(sw.summary(model)).splitlines(), len(torch.optim.AdamW(model.parameters()).param_groups[0]["params"])


def test_summary_shows_which_stage_has_what():
    lines = [
        "pipeline stages:",
        "  stage 1 of 2 on rank 0: embedding to blocks.1, 3 modules; 144 parameters, none of them trained",
        "  stage 2 of 2 on rank 1: blocks.2 to head, 3 modules; 154 parameters",
    ]
    for rank, (found, num_parameters) in enumerate(run_on_ranks(summaries, 2)):
        numel = (144, 154)[rank]
        assert f"{numel} parameters of this rank in" in found[0]
        assert f"on 1 data-parallel ranks (this is rank 0, rank {rank} of 2 in the world)" in found[0]
        assert [line for line in found if line in lines] == lines
        assert num_parameters


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(StateError, match="cannot be cut into 2 equal parts"):
        split_batch({"ids": ids(3), "positions": torch.zeros(1)}, 2)
    with pytest.raises(StateError, match="cannot be cut into 2 equal parts"):
        split_batch(torch.tensor(1.0), 2)
    parts = split_batch((ids(4), torch.zeros(1, 5), torch.tensor(2)), 2)
    assert [part[0].shape for part in parts] == [(2, 5)] * 2
    assert all(part[1].shape == (1, 5) and part[2] == 2 for part in parts)
