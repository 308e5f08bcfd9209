"""Embeddings whose rows are spread over all ranks: equal to one process, and only the rows looked up travel."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import shardwise as sw
from shardwise.spec.errors import PlanError, StateError
from shardwise.spec.traffic.rows import row_bounds
from shardwise.testing import probe, run_on_ranks
from tests.common.ranks import on_ranks, refusal

ROWS, WIDTH, STEPS = 103, 6, 4
STRATEGIES = ("ddp", "zero3")


class Recommender(nn.Module):
    """A table that is large beside the dense part; ids come in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH, padding_idx=5)
        self.dense = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, ids_BN: Tensor) -> Tensor:
        return self.dense(self.table(ids_BN).mean(1)).square().mean()


def lookup_bytes(rank: int, requested: Sequence[Sequence[int]], row_bytes: int) -> tuple[int, ...]:
    """The bytes that a rank sends for a lookup: counts, ids, rows, and in backward gradients of rows.

    Args:
        rank: The rank.
        requested: ``requested[r][s]`` is the number of different rows of rank ``s`` that rank ``r`` looks up.
        row_bytes: Bytes of a row, and of its gradient.
    """
    peers = [other for other in range(len(requested)) if other != rank]
    wanted, answered = sum(requested[rank][other] for other in peers), sum(requested[other][rank] for other in peers)
    return 8 * len(peers), 8 * wanted, row_bytes * answered, row_bytes * wanted


def build() -> Recommender:
    torch.manual_seed(3)
    return Recommender()


def sample(step: int, rank: int, world: int) -> Tensor:
    """Ids with repetitions; in step 1 rank 0 asks for its own rows only, in step 2 all ask for the padding too."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    bound = row_bounds(ROWS, world)[1] if step == 1 and rank == 0 else ROWS
    ids_BN = torch.randint(0, bound, (5, 7), generator=generator)
    if step == 2:
        ids_BN[:, :2] = 5
    return ids_BN


def requested(step: int, world: int) -> list[list[int]]:
    """How many different rows each rank looks up of each."""
    bounds = row_bounds(ROWS, world)
    ids = [sample(step, rank, world).unique() for rank in range(world)]
    return [
        [int(((each >= bounds[other]) & (each < bounds[other + 1])).sum()) for other in range(world)] for each in ids
    ]


@functools.cache
def train_plain(world: int) -> tuple[list[list[float]], list[float], dict[str, Tensor], dict[str, Tensor]]:
    """One process adds the ranks' gradients in order and divides by their number."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        total: dict[nn.Parameter, Tensor] = {}
        losses.append([])
        for rank in range(world):
            loss = model(sample(step, rank, world))
            loss.backward()
            losses[-1].append(loss.item())
            for parameter in model.parameters():
                total[parameter] = total[parameter] + parameter.grad if parameter in total else parameter.grad
                parameter.grad = None
        for parameter, grad in total.items():
            parameter.grad = grad / world
        squares = [parameter.grad.double().square().sum() for parameter in model.parameters()]
        norm = torch.stack(squares).sum().sqrt().float()
        norms.append(norm.item())
        for parameter in model.parameters():
            parameter.grad *= torch.clamp(0.05 / (norm + 1e-6), max=1.0)
        optimizer.step()
        optimizer.zero_grad()
    moments = {key: value for key, value in optimizer.state[model.table.weight].items() if key != "step"}
    return losses, norms, model.state_dict(), moments


def train(strategy: str, folder: str) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, row_sharded=["table"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, sent = [], [], []
    for step in range(STEPS):
        with sw.record_collectives(model) as events:
            loss = model(sample(step, rank, world))
            loss.backward()
        sent.append([(event.kind, event.sent_bytes) for event in events if event.unit == "table"])
        losses.append(loss.item())
        others = [p for p in model.parameters() if p is not model.table.weight]
        pieces = [sw.clip_grad_norm(given, float("inf")) for given in (model.table, others)]
        norms.append(sw.clip_grad_norm((model, model.parameters())[step % 2], 0.05).item())
        assert torch.stack(pieces).norm().item() == pytest.approx(norms[-1])
        optimizer.step()
        if step < STEPS - 1:
            optimizer.zero_grad()
    moments = {key: value for key, value in optimizer.state[model.table.weight].items() if key != "step"}
    whole = sw.full_state_dict(model)
    sw.save(f"{folder}/{strategy}-{world}", model, optimizer)
    again = sw.parallelize(Recommender(), sw.ParallelPlan(strategy=strategy, row_sharded=["table"]))
    sw.load_full_state_dict(again, whole)
    assert torch.equal(again.table.weight, model.table.weight)
    predicted = probe(model).predicted_bytes()
    assert torch.is_inference_mode_enabled() is False
    with torch.no_grad():
        evaluated = model(sample(9, rank, world)).item()
    return {
        "losses": losses,
        "norms": norms,
        "sent": sent,
        "whole": {name: value.clone() for name, value in whole.items()},
        "moments": {key: value.clone() for key, value in moments.items()},
        "rows": tuple(model.table.weight.shape),
        "shown": str(sw.summary(model)),
        "parameters": predicted["parameters"],
        "evaluated": evaluated,
    }


def train_all(folder: str) -> dict[str, dict]:
    return {strategy: train(strategy, folder) for strategy in STRATEGIES}


def load_all(folder: str, saved_by: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """What another number of ranks saved: parameters, and moments of this rank's rows."""
    found = []
    for strategy in STRATEGIES:
        model = sw.parallelize(Recommender(), sw.ParallelPlan(strategy=strategy, row_sharded=["table"]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sw.load(f"{folder}/{strategy}-{saved_by}", model, optimizer)
        whole = {name: value.clone() for name, value in sw.full_state_dict(model).items()}
        found.append((whole, optimizer.state[model.table.weight]["exp_avg"].clone()))
    # Neither spread nor by rows: the same checkpoint holds the table as any other tensor.
    plain = sw.parallelize(Recommender(), sw.ParallelPlan(strategy="zero3"))
    sw.load(f"{folder}/zero3-{saved_by}", plain)
    found.append(({name: value.clone() for name, value in sw.full_state_dict(plain).items()}, torch.zeros(0)))
    return found


@pytest.mark.parametrize(("world", "other"), [(2, 3), (4, 1)])
def test_rows_spread_over_ranks_train_like_one_process_and_load_on_other_ranks(world, other, tmp_path):
    ranks = run_on_ranks(train_all, world, str(tmp_path))
    losses, norms, state, moments = train_plain(world)
    bounds = row_bounds(ROWS, world)
    dense = sum(p.numel() for p in build().dense.parameters())
    for strategy in STRATEGIES:
        found = [results[strategy] for results in ranks]
        assert [list(step) for step in zip(*(each["losses"] for each in found), strict=True)] == losses
        assert all(each["norms"] == norms for each in found)
        assert max(norms) > 0.05  # clipping is at work
        assert found[0]["whole"].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found[0]["whole"][name], value), (strategy, name)
        for key, value in moments.items():
            assert torch.equal(torch.cat([each["moments"][key] for each in found]), value), (strategy, key)
        for rank, each in enumerate(found):
            assert each["rows"] == (bounds[rank + 1] - bounds[rank], WIDTH)
            for step in range(STEPS):
                counts, ids, rows, grads = lookup_bytes(rank, requested(step, world), 4 * WIDTH)
                assert each["sent"][step] == [("all_to_all", sent) for sent in (counts, ids, rows, grads)]
            shown = f"table: rows spread over {world} ranks, here {bounds[rank]} to {bounds[rank + 1]} of {ROWS}"
            assert shown in each["shown"]
        if strategy == "ddp":
            assert all(each["parameters"] >= 4 * (dense + each["rows"][0] * WIDTH) for each in found)
            assert all(each["parameters"] < 4 * (dense + each["rows"][0] * WIDTH) + 2048 for each in found)
    results = run_on_ranks(load_all, other, str(tmp_path), world)
    for index in range(len(STRATEGIES) + 1):
        for name, value in state.items():
            assert torch.equal(results[0][index][0][name], value), name
        if index < len(STRATEGIES):
            assert torch.equal(torch.cat([result[index][1] for result in results]), moments["exp_avg"])


def test_rank_0_asks_for_nothing_of_others_where_it_needs_nothing():
    """So that the bytes above have been compared where they are zero, too."""
    assert sum(requested(1, 2)[0][1:]) == 0
    assert lookup_bytes(0, requested(1, 2), 24)[1] == lookup_bytes(0, requested(1, 2), 24)[3] == 0


class Doubled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("model", "pattern", "message"),
    [
        (Recommender, "tabel", "matches no module of Recommender.\n  Its embeddings: table."),
        (Recommender, "dense", "'dense' is a Sequential, not an nn.Embedding"),
        (lambda: nn.Sequential(nn.EmbeddingBag(9, 2)), "0", "Use an nn.Embedding, and add up the rows of each bag"),
        (Tied, "table", "is tied to 'head', which needs all of its rows"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), "0", "has max_norm=1.0"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, scale_grad_by_freq=True)), "0", "has scale_grad_by_freq=True"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "0", "has sparse=True"),
        (lambda: nn.Sequential(Doubled(4, 2)), "0", "'0' is a Doubled that does more than look up rows"),
        (lambda: nn.Sequential(weight_norm(nn.Embedding(4, 2))), "0", "does more than look up rows of its parameter"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(model, pattern, message):
    assert message in refusal(PlanError, sw.parallelize, model(), sw.ParallelPlan(row_sharded=[pattern]))


def test_rows_are_spread_over_data_parallel_ranks_only():
    with pytest.raises(PlanError, match=r"row_sharded=\['table'\] with tp=2: rows are spread over data-parallel"):
        sw.ParallelPlan(row_sharded="table", tp=2)
    with pytest.raises(PlanError, match=r"row_sharded=\['table'\] with compile=True: compiled units would break"):
        sw.ParallelPlan(row_sharded="table", compile=True)
    with pytest.raises(PlanError, match="expected names of embeddings"):
        sw.ParallelPlan(row_sharded=[3])


def test_a_dry_run_takes_ids_that_are_all_different():
    plan = sw.ParallelPlan(strategy="ddp", row_sharded=["table"])
    dry = sw.dry_run(Recommender, plan, world_size=4, rank=1, batch=torch.zeros(8, 3, dtype=torch.int64))
    sent = [event.sent_bytes for event in dry.events if event.unit == "table"]
    assert sent == [8 * 18, 4 * WIDTH * 18, 4 * WIDTH * 18]


def spread(**fields) -> Recommender:
    return sw.parallelize(build(), sw.ParallelPlan(row_sharded=["table"], **fields))


def rows_of(whole: Tensor) -> Tensor:
    bounds = row_bounds(ROWS, dist.get_world_size())
    return whole[bounds[dist.get_rank()] : bounds[dist.get_rank() + 1]]


def computes_in_16_bit() -> None:
    """Rows are cast after the lookup; gradients come back in the table's dtype, as in one process that does so."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain = build()
    whole = plain.table.weight
    plain.dense.bfloat16()
    losses = []
    for other in range(world):
        rows = plain.table(sample(0, other, world)).bfloat16()
        loss = plain.dense(rows.mean(1)).square().mean()
        loss.backward()
        losses.append(loss.item())
    model = spread(mp_policy={"param_dtype": "bf16"})
    assert model.table(sample(0, rank, world)).dtype is torch.bfloat16
    loss = model(sample(0, rank, world))
    loss.backward()
    assert loss.item() == losses[rank]
    assert model.table.weight.grad.dtype is torch.float32
    assert torch.equal(model.table.weight.grad, rows_of(whole.grad / world))
    raised = sw.parallelize(
        build().bfloat16(), sw.ParallelPlan(row_sharded=["table"], mp_policy={"master_dtype": "fp32"})
    )
    assert raised.table.weight.dtype is torch.float32
    raised(sample(0, rank, world)).backward()


def averages(folder: str) -> None:
    """Replicas of the dense part hold different rows: each writes its own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = spread(strategy="hsdp", dp_replicate=2, dp_shard=1)
    average = sw.ExponentialMovingAverage(model, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    expected = model.table.weight.detach().clone()
    for step in range(2):
        model(sample(step, rank, world)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update()
        expected.lerp_(model.table.weight.detach(), 0.5)
    own = model.table.weight.detach().clone()
    assert not torch.equal(own, expected)
    alone = torch.optim.SGD([model.table.weight], lr=1.0)
    with average.swapped_in():
        assert torch.equal(model.table.weight, expected)
        averaged = {name: value.clone() for name, value in sw.full_state_dict(model).items()}
        with pytest.raises(StateError, match="it would change the average"):
            alone.step()
    assert torch.equal(model.table.weight, own)
    assert 0 <= average.num_bytes - sum(p.nbytes for p in model.parameters()) < 1024  # padding; rows are more
    sw.save(f"{folder}/average", model, average=average)
    for fields in ({"row_sharded": ["table"]}, {}):
        again = sw.parallelize(Recommender(), sw.ParallelPlan(**fields))
        loaded = sw.ExponentialMovingAverage(again)
        sw.load(f"{folder}/average", again, average=loaded)
        with loaded.swapped_in():
            whole = sw.full_state_dict(again)
        assert all(torch.equal(whole[name], value) for name, value in averaged.items())


def refuses() -> None:
    model = spread()
    for module, name in ((model, "table.weight"), (model.table, "weight")):
        with pytest.raises(StateError, match=f"of '{name}', of shape .* only .row_sharded"):  # noqa: SIM117
            with sw.full_parameters(module):
                pass
    with sw.full_parameters(model.dense):
        assert model.dense[0].weight.shape == (16, WIDTH)
    with pytest.raises(
        StateError, match=r"parameter 'table.weight' of logical shape .*\n  Leave it out of row_sharded"
    ):
        torch.optim.Adafactor([model.table.weight]).step()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(StateError, match=r"'table.weight', whose rows are spread \(row_sharded\), would never be"):
        sw.optimizer_in_backward(model, optimizer)
    assert str(sw.summary(model)).startswith(f"{sum(p.numel() for p in build().parameters()):,} parameters in ")


def misses_rows() -> None:
    """All ranks raise together, and are in step afterwards."""
    model = spread(strategy="ddp")
    rank = dist.get_rank()
    for ids, asked_for in ((torch.tensor([3, ROWS]), f"for 3 to {ROWS}"), (torch.tensor([-1, 2]), "for -1 to 2")):
        shown = asked_for if rank == 1 else "for others"
        with pytest.raises(IndexError, match=f"'table' has rows 0 to {ROWS - 1}, but was asked {shown} by rank 1"):
            model.table(ids if rank == 1 else torch.tensor([1, ROWS - 1]))
    assert torch.equal(model.table(torch.tensor([1, ROWS - 1])), build().table.weight[[1, ROWS - 1]])


@on_ranks(2)
def test_rows_go_with_precision_and_averages_and_refuse_what_needs_the_whole_table(tmp_path):
    folder = str(tmp_path)
    computes_in_16_bit()
    averages(folder)
    refuses()
    misses_rows()
