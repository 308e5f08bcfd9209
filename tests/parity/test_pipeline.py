"""Pipelines give, to the last bit, what one process gives that accumulates the same microbatches in order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.parity import models
from tests.parity.training import STEPS, Variant, make_optimizer, train_plain

NUM_MICROBATCHES = 4
MAX_NORM = 0.3


@pytest.fixture(autouse=True)
def _one_thread():
    """Kernels cut sums by threads; the ranks have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    parts = [models.batch(step, microbatch, replica) for microbatch in range(NUM_MICROBATCHES)]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([targets for _, targets in parts])


def train(name: str, options: dict) -> dict:
    torch.manual_seed(5)
    clips = options.pop("clips", True)
    model = sw.parallelize(models.build(name), sw.ParallelPlan(**options))
    optimizer = make_optimizer(model.parameters())
    replica = sw.data_parallel_rank(model)
    losses, norms = [], []
    for step in range(STEPS):
        loss = sw.train_step(model, batch(step, replica), num_microbatches=NUM_MICROBATCHES)
        losses.append(loss.item())
        norms.append(sw.clip_grad_norm(model, MAX_NORM if clips else math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    evaluated = sw.eval_step(model, batch(0, replica), num_microbatches=2).item()
    return {
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
        "pieces": [(e.name, e.start, tensor.clone()) for e, tensor in probe(model).extents()],
        "peak": probe(model).peak_microbatches,
    }


def train_all(cases) -> list[dict]:
    return [train(name, dict(options)) for name, options in cases]


def check(world: int, pp: int, cases, timeout_s: float = 120.0) -> list[list[dict]]:
    ranks = run_on_ranks(train_all, world, cases, timeout_s=timeout_s)
    replicas = world // pp
    for place, (name, options) in enumerate(cases):
        max_norm = MAX_NORM if options.get("clips", True) else None
        expected = train_plain(name, Variant("pp", NUM_MICROBATCHES, "unsharded", max_norm), replicas)
        found = differences(expected, [results[place] for results in ranks], replicas)
        assert not found, f"{name}, {options}: {found}"
    return ranks


def differences(expected, ranks, replicas: int) -> list[str]:
    found = []
    for step, parts in enumerate(expected.losses):
        scaled = torch.tensor(parts, dtype=torch.float64).view(replicas, -1) * NUM_MICROBATCHES
        means = [sum(row) / NUM_MICROBATCHES for row in scaled.tolist()]
        loss = torch.tensor(sum(means) / replicas, dtype=torch.float64).float().item()
        found += [f"loss {step} of rank {r}" for r, result in enumerate(ranks) if result["losses"][step] != loss]
        norm = expected.norms[step]
        found += [f"norm {step} of rank {r}" for r, result in enumerate(ranks) if result["norms"][step] != norm]
    seen = set()
    for rank, result in enumerate(ranks):
        for name, start, piece in result["pieces"]:
            if name not in expected.tensors:
                continue
            seen.add(name)
            whole = expected.tensors[name][start : start + piece.numel()]
            if not torch.equal(whole.view(torch.int32), piece.view(torch.int32)):
                found.append(f"{name} on rank {rank}")
    missing = {name for name in expected.tensors if not name.startswith("optimizer/")} - seen
    found += [f"{name} is on no rank" for name in missing]
    return found


STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def test_two_stages_and_two_replicas():
    cases = [("gpt", {"strategy": strategy, "pp": 2}) for strategy in STRATEGIES]
    cases += [("gpt", {"strategy": "zero3", "pp": 2, "pipeline": "gpipe", "clips": False}), ("frozen", {"pp": 2})]
    check(4, 2, cases)


@pytest.mark.transports
def test_four_stages():
    cases = [("gpt", {"strategy": "zero3", "pp": 4}), ("gpt", {"pp": 4, "pipeline": "gpipe"})]
    cases += [("frozen", {"strategy": "ddp", "pp": 4})]
    ranks = check(4, 4, cases)
    assert [results[0]["peak"] for results in ranks] == [4, 3, 2, 1]  # 1F1B
    assert [results[1]["peak"] for results in ranks] == [4, 4, 4, 4]  # GPipe


@pytest.mark.transports
def test_several_stages_of_a_rank():
    cases = [("gpt", {"strategy": s, "pp": 2, "pipeline": "interleaved-1f1b"}) for s in ("zero3", "zero1")]
    again = {"activation_checkpointing": "full"}
    cases += [("gpt", {"pp": 2, "pipeline": name, **again}) for name in ("interleaved-1f1b", "zb-v")]
    cases += [("gpt", {"pp": 2, "pipeline": "interleaved-1f1b", "activation_checkpointing": "selective"})]
    check(2, 2, cases)


def test_backward_in_two_parts():
    cases = [("gpt", {"strategy": s, "pp": 2, "pipeline": "zb-h1"}) for s in ("zero3", "ddp")]
    cases += [("gpt", {"pp": 2, "pipeline": "zb-v"}), ("frozen", {"pp": 2, "pipeline": "zb-v"})]
    check(2, 2, cases)


# -- parameters that several stages hold

TIED = [
    ({"strategy": "zero3", "pp": 2}, 4),
    ({"strategy": "zero1", "pp": 2, "pipeline": "zb-v"}, 4),
    ({"strategy": "ddp", "pp": 4, "pipeline": "gpipe"}, 4),
]


def train_tied(cases) -> list[tuple[list[float], list[float], list]]:
    results = []
    for options, _ in cases:
        torch.manual_seed(5)
        model = sw.parallelize(models.build("tied").double(), sw.ParallelPlan(**options))
        optimizer = make_optimizer(model.parameters())
        replica = sw.data_parallel_rank(model)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(sw.train_step(model, batch(step, replica), num_microbatches=4).item())
            norms.append(sw.clip_grad_norm(model, MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        results.append((losses, norms, [(e.name, e.start, t.clone()) for e, t in probe(model).extents()]))
    return results


@pytest.mark.transports
def test_tied_parameters_get_the_sum_of_their_copies():
    ranks = run_on_ranks(train_tied, 4, TIED, timeout_s=120)
    for place, (options, world) in enumerate(TIED):
        replicas = world // options["pp"]
        model = models.build("tied").double()
        optimizer = make_optimizer(model.parameters())
        for step in range(STEPS):
            every = [model(*batch(step, replica)) for replica in range(replicas)]
            loss = sum(every) / replicas
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            for results in ranks:
                assert results[place][0][step] == pytest.approx(loss.item(), rel=1e-9)
                assert results[place][1][step] == pytest.approx(norm.item(), rel=1e-9)
        copies: dict = {}
        whole = dict(model.named_parameters())
        for results in ranks:
            for name, start, piece in results[place][2]:
                expected = whole[name].detach().flatten()[start : start + piece.numel()]
                torch.testing.assert_close(piece, expected, rtol=0, atol=1e-8)
                copies.setdefault((name, start, piece.numel()), []).append(piece)
        for name, held in copies.items():
            assert all(torch.equal(held[0], piece) for piece in held), f"copies of {name} differ"
        assert {name for name, *_ in copies} == set(whole)
