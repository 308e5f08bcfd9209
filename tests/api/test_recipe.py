"""sw.train_step, sw.gradient_sync, sw.parity, and checkpoints of any world and preset into any other."""

from __future__ import annotations

import itertools
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.checkpoint.reader import open_checkpoint
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.testing import probe, run_on_ranks
from tests.common.oracle import (
    PRESETS,
    Block,
    Chain,
    compare_each,
    compare_local_sums,
    plain_loss,
    presets,
    sample,
)
from tests.common.ranks import on_ranks, refusal

# -- accumulation


def accumulate(model, rank, step):
    """Plain repeated backwards, which add."""
    for micro in range(3):
        loss = plain_loss(model, rank, 10 * step + micro)
        loss.backward()
        yield loss


def is_parallelized(model):
    try:
        return probe(model) is not None
    except StateError:
        return False


def accumulate_sharded(model, rank, step):
    for micro in range(3):
        if is_parallelized(model):
            with sw.gradient_sync(model, micro == 2):
                loss = plain_loss(model, rank, 10 * step + micro)
                loss.backward()
        else:
            loss = plain_loss(model, rank, 10 * step + micro)
            loss.backward()
        yield loss


@on_ranks(1, 2, 3)
def test_repeated_backwards_add_and_sharded_accumulation_reduces_each():
    """open-instruct#746: accumulation that is silently none."""
    compare_each(Chain, accumulate)
    compare_each(Chain, accumulate_sharded, accumulation="sharded")


@on_ranks(1, 2, 3)
def test_unsharded_accumulation_sends_nothing_before_the_last_microbatch():
    """accelerate#2531: what accumulation holds and sends is a choice: these sums are full, those above sharded."""
    for strategy in presets():
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, accumulation="unsharded"))
        compare_local_sums(model, Chain, lambda syncs, model=model: sw.gradient_sync(model, syncs), strategy)


# -- train_step


class WithLoss(Chain):
    """Called as transformers' models are."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> object:
        y = super().forward(x)
        loss = None if labels is None else (y - labels).square().mean()
        return types.SimpleNamespace(loss=loss, logits=y)


class Scalar(Chain):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (super().forward(x) - labels).square().mean()


def batch_of(rank, step):
    return {"x": sample(rank, step, 6, 8), "labels": sample(rank, step, 6, 3, salt=1)}


def mse(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


@on_ranks(1, 2)
def test_a_train_step_takes_dicts_tuples_and_loss_functions_and_averages_microbatches():
    rank, world = dist.get_rank(), dist.get_world_size()
    for strategy in presets():
        for num in (None, 1, 3):
            losses = []
            for kind in ("dict", "tuple", "function"):
                model = {"dict": WithLoss, "tuple": Scalar, "function": Chain}[kind]()
                sw.parallelize(model, sw.ParallelPlan(strategy=strategy))
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                seen = []
                for step in range(2):
                    batch = batch_of(rank, step)
                    if kind == "dict":
                        loss = sw.train_step(model, batch, num_microbatches=num)
                    elif kind == "tuple":
                        loss = sw.train_step(model, tuple(batch.values()), num_microbatches=num)
                    else:
                        labels = iter(batch["labels"].chunk(num or 1))
                        loss = sw.train_step(model, batch["x"], lambda out, _part, it=labels: mse(out, next(it)), num)
                    optimizer.step()
                    optimizer.zero_grad()
                    assert not loss.requires_grad
                    assert loss.shape == ()
                    seen.append(loss)
                losses.append(torch.stack(seen))
            assert torch.equal(losses[0], losses[1])
            assert torch.equal(losses[0], losses[2])
            everyone = [torch.zeros(2) for _ in range(world)]
            dist.all_gather(everyone, losses[0])
            assert all(torch.equal(each, losses[0]) for each in everyone)


@on_ranks(2)
def test_batches_that_cannot_be_split_and_losses_that_are_none_are_refused():
    model = sw.parallelize(Chain())
    texts = []
    for batch, options in (
        (torch.zeros(3, 8), {"num_microbatches": 2}),
        (torch.zeros(3, 8), {"num_microbatches": 0}),
        (torch.zeros(3, 8), {}),
        (torch.zeros(3, 8), {"loss_fn": lambda output, batch: output.detach().sum()}),
    ):
        texts.append(refusal(StateError, sw.train_step, model, batch, **options))
    odd, zero, loss, constant = texts
    assert odd.startswith("a batch tensor of shape [3, 8] cannot be cut into 2 equal parts on dim 0.")
    assert zero == "num_microbatches=0: expected at least 1."
    assert loss.startswith("Chain gave a tensor of shape [3, 3] where a scalar loss was expected.")
    assert constant.startswith("the loss of microbatch 0 depends on no trained parameter")


@on_ranks(2)
def test_a_train_step_draws_microbatches_and_leaves_losses_to_the_caller():
    """Losses, gradients and collectives of a step whose microbatches are drawn, beside one that splits the batch."""
    rank = dist.get_rank()
    batch = batch_of(rank, 0)
    found = []
    for is_drawn in (False, True):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
        own: list[Tensor] = []
        with sw.record_collectives(model) as events:
            if is_drawn:
                parts = ((x, y) for x, y in zip(batch["x"].chunk(3), batch["labels"].chunk(3), strict=True))
                how = {"forward": lambda held, part: held(part[0]), "losses": own}
                loss = sw.train_step(model, parts, lambda out, part: mse(out, part[1]), 3, **how)
            else:
                labels = iter(batch["labels"].chunk(3))
                loss = sw.train_step(model, batch["x"], lambda out, _part, it=labels: mse(out, next(it)), 3)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.eval()
        held_out: list[Tensor] = []
        whole = iter([(batch["x"], batch["labels"])])
        last = sw.eval_step(model, whole, lambda o, b: mse(o, b[1]), 1, forward=lambda m, b: m(b[0]), losses=held_out)
        assert torch.equal(held_out[0], last)
        found.append((loss, grads, [event.unit for event in events], own))
    (mean, grads, units, _), (mine, same_grads, fewer, own) = found
    assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
    assert units == [*fewer, "loss"]  # the all-reduce of the mean alone is left out
    assert len(own) == 3
    assert not any(loss.requires_grad for loss in own)
    assert torch.equal(mine, torch.stack(own).double().mean().float())
    everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert torch.allclose(torch.stack(everyone).mean(), mean)
    model = sw.parallelize(Chain())
    text = refusal(StateError, sw.train_step, model, iter([batch["x"]]), lambda out, _part: out.square().mean(), 2)
    assert text.startswith("the iterator gave 1 microbatches, but num_microbatches=2.")


# -- parity


def proofs():
    batches = [{"x": sample(0, step, 12, 8), "labels": sample(1, step, 12, 3)} for step in range(3)]
    plans = {name: sw.ParallelPlan(strategy=name) for name in PRESETS}
    report = sw.parity(Scalar, batches, None, plans)

    built = itertools.count()

    def other():
        model = Scalar()
        if next(built) == 2:  # the first is looked at, the second trains as one process, the third as the plan says
            with torch.no_grad():
                model.blocks[1].up.bias[3] += 1e-3
        return model

    wrong = sw.parity(other, batches, None, [sw.ParallelPlan(strategy="zero3")])
    with pytest.raises(StateError, match="got no batches"):
        sw.parity(Scalar, [], None, plans)
    return report.is_bitwise, str(report), wrong.is_bitwise, str(wrong)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parity_proves_every_preset_and_finds_a_difference(world):
    results = run_on_ranks(proofs, world)
    for is_bitwise, text, wrong, wrong_text in results:
        assert is_bitwise
        assert [line.split()[0] for line in text.splitlines()[1:]] == list(PRESETS)
        assert all(line.endswith("0 (bitwise)") for line in text.splitlines()[1:])
        assert not wrong
        assert "DIFFER" in wrong_text
    assert len({text for _, text, _, _ in results}) == 1


# -- checkpoints


class Kept(nn.Module):
    """Odd shapes, ties, a buffer, a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(43)
        self.embed = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(Block(8, 17) for _ in range(5))
        self.blocks[1].requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.strided = nn.Parameter(torch.randn(5, 8).t().clone(memory_format=torch.preserve_format))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) @ self.strided


MAKERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def same_data_step(model, optimizer, step):
    """One step on data that does not depend on the rank, so that every world computes the same up to rounding."""
    model(sample(0, step)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


#: Layouts beside those of the presets.
LAYOUTS = {
    "2 x 2": sw.ParallelPlan(strategy="hsdp", dp_replicate=2),
    "3 x 1": sw.ParallelPlan(strategy="hsdp", dp_replicate=3),
    "inner": sw.ParallelPlan(reshard_after_forward=2),
}


def plan_of(layout):
    return LAYOUTS.get(layout) or sw.ParallelPlan(strategy=layout)


def write(folder, strategies, kind):
    found = {}
    for strategy in strategies:
        model = sw.parallelize(Kept(), plan_of(strategy))
        optimizer = MAKERS[kind](model.parameters())
        for step in range(3):
            same_data_step(model, optimizer, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.125
        path = sw.save(Path(folder) / strategy, model, optimizer, state={"step": 3, "note": [1, {"a": "b"}]})
        assert path.is_dir()
        found[strategy] = (sw.full_state_dict(model), whole_optimizer(model, optimizer))
    return found


def whole_optimizer(model, optimizer):
    """This rank's optimizer state by name: (first element, elements) of each tensor, and scalars."""
    found = {}
    for shard in probe(model).shards:
        if shard.numel == 0:
            continue
        for key, value in optimizer.state.get(shard.parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                flat = value.as_strided((value.numel(),), (1,)).clone()
                found[shard.name, key] = (shard.start, flat)
            else:
                found[shard.name, key] = (0, torch.as_tensor(value).reshape(1).clone())
    return found


def read(sources, strategies, kind):
    states = {}
    for strategy, source in itertools.product(strategies, sources):
        model = sw.parallelize(Kept(), plan_of(strategy))
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        optimizer = MAKERS[kind](model.parameters())
        state = sw.load(source, model, optimizer)
        assert state == {"step": 3, "note": [1, {"a": "b"}]}
        assert optimizer.param_groups[0]["lr"] == 0.125
        states[strategy, source] = (sw.full_state_dict(model), whole_optimizer(model, optimizer))
        same_data_step(model, optimizer, 3)
    return states


def merged(results):
    """The ranks' pieces put together: ``{(name, key): elements}``."""
    whole = {}
    for found in results:
        for key, (start, flat) in found.items():
            held = whole.setdefault(key, {}).setdefault(start, flat)
            assert torch.equal(held, flat), f"{key} differs between ranks"
    return {key: torch.cat([parts[s] for s in sorted(parts)]) for key, parts in whole.items()}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad"])
def test_checkpoints_go_from_any_world_and_preset_to_any_other_bit_for_bit(tmp_path, kind):
    """DeepSpeed#2898, DeepSpeed#7628, torchtitan#811: resuming on another number of ranks, the optimizer included."""
    matrix = {1: ("zero3",), 2: PRESETS, 3: ("zero1", "zero3", "3 x 1"), 4: ("zero3", "2 x 2", "inner")}
    if kind != "adamw":
        matrix = {2: ("ddp", "zero3"), 3: ("zero1",)}
    expected = {}
    for world, strategies in matrix.items():
        results = run_on_ranks(write, world, str(tmp_path / str(world)), strategies, kind)
        for strategy in strategies:
            optimizer = merged([result[strategy][1] for result in results])
            expected[str(tmp_path / str(world) / strategy)] = (results[0][strategy][0], optimizer)
    if kind == "adamw":
        grouped = open_checkpoint(tmp_path / "4" / "2 x 2")
        assert grouped.summary()["mesh"] == {"dp_replicate": 2, "dp_shard": 2}
        table = grouped.manifest.table
        assert {held.rank for name in table.names for held in table.pieces(name)} == {0, 1}  # once
    for world, strategies in matrix.items():
        targets = strategies[-1:]
        if kind == "adamw":
            targets = strategies if world != 2 else ("ddp", "zero3")
        results = run_on_ranks(read, world, list(expected), targets, kind)
        for strategy, (source, (weights, optimizer)) in itertools.product(targets, expected.items()):
            where = f"{source} to {strategy} on {world}"
            got = results[0][strategy, source][0]
            assert list(got) == list(weights), where
            for name, value in weights.items():
                assert torch.equal(got[name], value), f"{where}: {name}"
            loaded = merged([result[strategy, source][1] for result in results])
            assert loaded.keys() == optimizer.keys(), f"{where}: {loaded.keys() ^ optimizer.keys()}"
            for key, value in optimizer.items():
                assert torch.equal(loaded[key], value), f"{where}: {key}"


def wrong_loads(folder):
    texts = {}
    model = sw.parallelize(Kept())
    adamw = torch.optim.AdamW(model.parameters())
    same_data_step(model, adamw, 0)
    sw.save(Path(folder) / "bare", model)
    sw.save(Path(folder) / "adamw", model, adamw)
    held = [p.detach().clone() for p in model.parameters()]
    other = sw.parallelize(Chain())
    groups = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    for name, call in {
        "missing": lambda: sw.load(Path(folder) / "nothing", model),
        "no optimizer": lambda: sw.load(Path(folder) / "bare", model, adamw),
        "class": lambda: sw.load(Path(folder) / "adamw", model, torch.optim.SGD(model.parameters(), lr=1.0)),
        "groups": lambda: sw.load(Path(folder) / "adamw", model, groups),
        "model": lambda: sw.load(Path(folder) / "adamw", other),
        "again": lambda: sw.save(Path(folder) / "bare", model),
    }.items():
        texts[name] = refusal((CheckpointError, sw.StorageError), call)
    assert all(torch.equal(a, b.detach()) for a, b in zip(held, model.parameters(), strict=True))
    assert sw.load(Path(folder) / "adamw", model) == {}
    return texts


def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(tmp_path):
    first, second = run_on_ranks(wrong_loads, 2, str(tmp_path))
    assert first.keys() == second.keys()
    for texts in (first, second):
        assert "holds no optimizer state" in texts["no optimizer"]
        assert "holds the state of AdamW, the optimizer is SGD" in texts["class"]
        assert "holds 1 parameter groups, the optimizer has" in texts["groups"]
        assert "nothing" in texts["missing"]
