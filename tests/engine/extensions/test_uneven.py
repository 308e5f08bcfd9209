"""Ranks with different numbers of batches: those that have none left repeat their last one, which counts nothing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.models import gpt
from shardwise.spec.errors import RankDisagreement, StateError
from shardwise.testing import checks, probe, run_on_ranks, same_bits
from tests.common import families, models
from tests.common.oracle import Chain, adamw, descend, plain_loss, presets, sample
from tests.common.ranks import on_ranks, refusal
from tests.engine.test_disagreement import Skips


@torch.no_grad()
def spread(copies):
    """The first copy's parameters to all."""
    for each in copies[1:]:
        for target, source in zip(each.parameters(), copies[0].parameters(), strict=True):
            target.copy_(source)


def one_process(copies, loss_of, optimizer, parts, divisor, *, max_norm=None):
    """The step of one process that adds up the gradients of ``parts`` (rank, step) in order; returns the losses."""
    total, losses = {}, []
    for rank, step in parts:
        loss = loss_of(copies[rank], rank, step)
        loss.backward()
        losses.append(loss.detach())
        for name, parameter in copies[rank].named_parameters():
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                total[name] = total[name] + grad if name in total else grad.clone()
    for name, parameter in copies[0].named_parameters():
        parameter.grad = total[name] / divisor if name in total else None
    norm = None
    if max_norm is not None:
        squares = [p.grad.double().square().sum() for p in copies[0].parameters() if p.grad is not None]
        norm = torch.stack(squares).sum().sqrt().float()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in copies[0].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient)
    optimizer.step()
    optimizer.zero_grad()
    spread(copies)
    return losses, norm


def compare_parameters(plain, model, where):
    parameters = dict(plain.named_parameters())
    for shard in probe(model).shards:
        assert same_bits(shard.values, shard.part_of(parameters[shard.name])), f"{where}: {shard.name}"


def train(build, strategy, counts, *, loss_of=plain_loss, by_all=True, max_norm=None, prepare=None, **options):
    """Two epochs of uneven numbers of batches, and some steps together; compared with one process after each.

    ``prepare`` makes the optimizer from the parallelized model; returns ``None`` if backward steps by itself.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    copies = [build() for _ in range(world)]
    reference = adamw(copies[0].parameters())
    model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, **options))
    optimizer = prepare(model) if prepare else adamw(model.parameters())
    with checks():
        for epoch in range(2):
            where = f"{strategy}, {counts}, epoch {epoch}"
            seen = []
            steps = range(10 * epoch, 10 * epoch + counts[rank])
            for step, weight in sw.join(model, steps, like=0, divide_by_initial_world_size=by_all):
                loss = loss_of(model, rank, step)
                (weight * loss).backward()
                norm = sw.clip_grad_norm(model, max_norm) if max_norm else None
                seen.append((loss.detach(), norm))
                optimizer.step()
                optimizer.zero_grad()
            assert len(seen) == max(counts)
            for step in range(max(counts)):
                parts = [(r, 10 * epoch + step) for r in range(world) if step < counts[r]]
                divisor = world if by_all else len(parts)
                losses, norm = one_process(copies, loss_of, reference, parts, divisor, max_norm=max_norm)
                if step < counts[rank]:
                    mine = losses[[r for r, _ in parts].index(rank)]
                    assert torch.equal(seen[step][0], mine), f"{where}, loss of step {step}"
                    assert norm is None or torch.equal(seen[step][1], norm), f"{where}, norm of step {step}"
            compare_parameters(copies[0], model, where)
            counts = counts[::-1]
        for step in (50, 51):
            one_process(copies, loss_of, reference, [(r, step) for r in range(world)], world)
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        compare_parameters(copies[0], model, f"{where}, afterwards")


def train_all(counts):
    for strategy in presets():
        train(Chain, strategy, counts, max_norm=0.5)
    for strategy in ("ddp", "zero3"):
        train(Chain, strategy, counts, by_all=False)


@pytest.mark.parametrize("counts", [(2, 4), (0, 3, 1), pytest.param((3, 0), marks=pytest.mark.long)])
def test_it_is_bitwise_one_process_that_adds_only_the_batches_there_are(counts):
    run_on_ranks(train_all, len(counts), counts)


# -- with everything else


def model_loss(model, rank, step):
    return model(*models.batch(step, 0, rank))


def skipping_loss(model, rank, step):
    """From the second step on ranks skip units; before the last epoch ends one unit has never been run by all."""
    left_out = () if step % 10 == 0 else ((rank + step) % 5,)
    return model(sample(rank, step), left_out).square().mean()


def flat(model):
    return adamw(sw.flat_parameters(model))


def in_backward(model):
    optimizer = adamw(model.parameters())
    sw.optimizer_in_backward(model, optimizer)
    return optimizer


@on_ranks(2)
def test_it_goes_with_odd_models_skipped_units_flat_parameters_and_steps_in_backward():
    for name in ("odd", "frozen", "tied"):
        options = {"auto_wrap_policy": models.wrap_policy(name)}
        train(lambda name=name: models.build(name), "zero3", (2, 4), loss_of=model_loss, **options)
    for strategy in ("zero2", "zero3"):
        train(Skips, strategy, (2, 4), loss_of=skipping_loss)
        train(Chain, strategy, (2, 4), prepare=flat)
        train(Chain, strategy, (2, 4), prepare=in_backward)
    train(Chain, "zero3", (2, 3), reshard_after_forward=False)


def train_summed_by_groups(strategy):
    """As ``train``; sums inside each group of two come first, which a single process does not do: compare the ranks."""
    rank = dist.get_rank()
    counts = (1, 4, 2, 3)
    states = []
    for _ in range(2):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, dp_replicate=2))
        optimizer = adamw(model.parameters())
        if not states:
            steps = sw.join(model, range(counts[rank]))
            descend(optimizer, (weight * plain_loss(model, rank, step) for step, weight in steps))
        else:  # the same by hand: a rank without a batch has a loss of nothing
            for step in range(max(counts)):
                loss = plain_loss(model, rank, step) * (1.0 if step < counts[rank] else 0.0)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        with sw.full_parameters(model):
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), f"{strategy}: {name}"


@pytest.mark.long
@on_ranks(4)
def test_it_goes_with_hybrid_sharding_and_inner_groups():
    for strategy in ("hsdp", "hybrid_shard_grad_op"):
        train_summed_by_groups(strategy)
    train(Chain, "zero3", (1, 4, 2, 3), reshard_after_forward=2)


def accumulates(strategy, accumulation):
    """Windows of two batches; rank 0 has three, and its last one is left over in a window that the others complete."""
    rank, counts = dist.get_rank(), (3, 6)
    copies = [Chain() for _ in counts]
    reference = adamw(copies[0].parameters())
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, accumulation=accumulation))
    optimizer = adamw(model.parameters())
    for place, (step, weight) in enumerate(sw.join(model, range(counts[rank]))):
        with sw.gradient_sync(model, place % 2 == 1):
            (weight * plain_loss(model, rank, step)).backward()
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()
    for first in (0, 2, 4):
        window = [(r, s) for r in range(len(counts)) for s in (first, first + 1) if s < counts[r]]
        if accumulation == "sharded":  # one sum, and one division, for each microbatch
            sums = [_sum_of(copies, [[part] for part in window if part[1] == s]) for s in (first, first + 1)]
        else:  # each rank adds up its own first
            sums = [_sum_of(copies, [[part for part in window if part[0] == r] for r in range(len(counts))])]
        for name, parameter in copies[0].named_parameters():
            parameter.grad = sum((each[name] / len(counts) for each in sums[1:]), sums[0][name] / len(counts))
        reference.step()
        reference.zero_grad()
        spread(copies)
    compare_parameters(copies[0], model, f"{strategy}, {accumulation}")


def _sum_of(copies, groups):
    """Gradients added up: those of each group of (rank, step) first."""
    total = {}
    for group in groups:
        for rank, step in group:
            plain_loss(copies[rank], rank, step).backward()
        for rank in {rank for rank, _ in group}:
            for name, parameter in copies[rank].named_parameters():
                grad, parameter.grad = parameter.grad, None
                total[name] = total[name] + grad if name in total else grad
    return total


@on_ranks(2)
def test_what_a_rank_has_accumulated_counts_when_it_has_no_batch_left():
    for strategy in presets():
        for accumulation in ("sharded", "unsharded"):
            accumulates(strategy, accumulation)


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def buffers(mode):
    """Only ranks with a batch count; in the end all ranks hold what the last ones have."""
    rank = dist.get_rank()
    counts = (1, 3, 2)
    copies = [Chain(Running, 2) for _ in counts]
    model = sw.parallelize(Chain(Running, 2), sw.ParallelPlan(sync_buffers=mode))
    for step, weight in sw.join(model, range(counts[rank])):
        (weight * plain_loss(model, rank, step)).backward()
    for step in range(max(counts)):
        there = [r for r in range(len(counts)) if step < counts[r]]
        for r in there:
            plain_loss(copies[r], r, step)
        sources = there if step + 1 == max(counts) else [r for r in there if step + 1 < counts[r]]
        for name, buffer in copies[0].named_buffers():
            buffers = [dict(each.named_buffers())[name] for each in copies]
            root = buffers[sources[0]].clone()
            if mode == "mean" and root.is_floating_point():
                gaps = [buffers[r] - root for r in there if r in sources]
                root = root + sum(gaps[1:], gaps[0]) / len(sources)
            for each in buffers:
                each.data.copy_(root)
            del buffer
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(copies[0].named_buffers())[name]), f"{mode}: {name}"


def test_buffers_are_those_of_the_ranks_that_have_a_batch():
    for mode in ("auto", "mean"):
        run_on_ranks(buffers, 3, mode)


def mean_losses(pp):
    """The means of sw.train_step and sw.eval_step are those of the ranks that have a batch; all make every step."""
    model = sw.parallelize(Chain(), pp=pp)
    rank = sw.data_parallel_rank(model)
    means = [
        float(step_of(model, sample(rank, step), lambda y, _, weight=weight: weight * y.square().mean(), 1))
        for step, weight in sw.join(model, range(1 + rank))
        for step_of in (sw.train_step, sw.eval_step)
    ]
    return means, float(plain_loss(Chain(), 1, 1).detach())


@pytest.mark.parametrize("pp", [1, 2])
def test_the_mean_loss_is_that_of_the_ranks_that_have_a_batch(pp):
    results = run_on_ranks(mean_losses, 2 * pp, pp)
    means, alone = results[0]
    assert all(each == results[0] for each in results)
    assert means[0] == means[1]
    assert means[2:] == [alone, alone]


def with_experts(strategy):
    """Experts of a rank without a batch have gradients of other ranks' tokens."""
    counts, rank = (2, 4), dist.get_rank()
    copies = [gpt_with_experts() for _ in counts]
    reference = torch.optim.SGD(copies[0].parameters(), lr=0.3)
    model = sw.parallelize(gpt_with_experts(), strategy=strategy, ep=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step, weight in sw.join(model, range(counts[rank])):
        (weight * token_loss(model, rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for step in range(max(counts)):
        one_process(copies, token_loss, reference, [(r, step) for r in range(2) if step < counts[r]], 2)
    found, wanted = sw.full_state_dict(model), copies[0].state_dict()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted) if found else 0.0  # {} on rank 1


def gpt_with_experts():
    torch.manual_seed(0)
    return gpt("gpt-tiny", num_layers=1, hidden=16, num_heads=2, vocab_size=32, seq_len=8, num_experts=4)


def token_loss(model, rank, step):
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_experts_learn_from_the_tokens_of_ranks_that_still_have_a_batch(strategy):
    assert run_on_ranks(with_experts, 2, strategy)[0] < 1e-6


@on_ranks(2)
def test_a_batch_costs_one_small_message():
    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    optimizer = adamw(model.parameters())
    descend(optimizer, [plain_loss(model, rank, 0)])  # in the first step ranks learn the order
    with sw.record_collectives(model) as outside:
        descend(optimizer, [plain_loss(model, rank, 0)])
    with sw.record_collectives(model) as inside:
        for step, weight in sw.join(model, range(2 + rank)):
            descend(optimizer, [weight * plain_loss(model, rank, step)])
    joins = [event for event in inside if event.unit == "join"]
    assert [(event.kind, event.sent_bytes) for event in joins] == [("all_gather", 8)] * 4
    once = [(event.kind, event.unit, event.sent_bytes) for event in outside]
    assert [(e.kind, e.unit, e.sent_bytes) for e in inside if e.unit != "join"] == 3 * once


# -- evaluation and generation


def evaluate(counts):
    rank = dist.get_rank()
    plain = Chain()
    for strategy in presets():
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        for _ in range(2):
            model.eval()
            with torch.no_grad():
                every = [
                    (model(sample(rank, s)), s, weight) for s, weight in sw.join(model, range(counts[rank]), like=0)
                ]
            found = [(y, step) for y, step, weight in every if weight]
            assert [step for _, step in found] == list(range(counts[rank]))
            assert all(torch.equal(y, plain(sample(rank, step))) for y, step in found)
            model.train()
            plain_loss(model, rank, 0).backward()
            model.zero_grad()


@pytest.mark.parametrize("counts", [(2, 4), (3, 0), (0, 2, 1)])
def test_deepspeed_860_evaluation_with_uneven_batches_does_not_hang(counts):
    """microsoft/DeepSpeed#860: ZeRO-3 hangs in evaluation when ranks have different numbers of batches."""
    run_on_ranks(evaluate, len(counts), counts)


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("Llama", marks=pytest.mark.long)])
@on_ranks(2)
def test_deepspeed_2223_generation_with_uneven_batches_and_lengths_does_not_hang(name):
    """microsoft/DeepSpeed#2223: generate() under ZeRO-3 hangs when ranks stop at different lengths."""
    counts = (1, 3)
    rank = dist.get_rank()
    plain = families.FAMILIES[name].build().eval()
    model = sw.parallelize(families.FAMILIES[name].build(), sw.ParallelPlan(strategy="zero3")).eval()
    with torch.no_grad():
        for step, _ in sw.join(model, range(counts[rank])):
            tokens = families.tokens(rank, step, salt=2)
            how = {"max_new_tokens": 2 + (3 * rank + step) % 4, "do_sample": False}
            assert torch.equal(model.generate(input_ids=tokens, **how), plain.generate(input_ids=tokens, **how))
    tokens = families.tokens(rank, 9, salt=2)
    how = {"max_new_tokens": 3 + rank, "do_sample": False}
    assert torch.equal(model.generate(input_ids=tokens, **how), plain.generate(input_ids=tokens, **how))


# -- what is refused, and what all ranks are told


def stops(counts):
    rank = dist.get_rank()
    texts = []
    for strategy in ("ddp", "zero3"):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        optimizer = adamw(model.parameters())
        with pytest.raises(RankDisagreement) as caught:
            run_strictly(model, optimizer, counts[rank])
        assert caught.value.exit_code == 83
        texts.append(str(caught.value))
        run_strictly(model, optimizer, 2)  # the model is in order
    return texts


def run_strictly(model, optimizer, count):
    batches = sw.join(model, range(count), throw_on_early_termination=True)
    descend(optimizer, (plain_loss(model, dist.get_rank(), step) for step, _ in batches))


@pytest.mark.parametrize("counts", [(4, 2), (2, 0, 3)])
def test_all_ranks_may_stop_as_soon_as_one_has_no_batch_left(counts):
    short = counts.index(min(counts))
    for texts in run_on_ranks(stops, len(counts), counts):
        for text in texts:
            assert text == (
                f"rank 0 has another batch, rank {short} has none left.\n"
                "  Give every rank as many batches (drop_last=True), or leave throw_on_early_termination out."
            )


@on_ranks(2)
def test_refusals_are_clear_and_come_on_all_ranks_and_a_save_in_the_loop_is_one_of_all_ranks(tmp_path):
    rank = dist.get_rank()
    model = sw.parallelize(Chain())

    def run(model, count, **how):
        return [weight for step, weight in sw.join(model, range(count), **how) if model(sample(rank, step)) is not None]

    none = refusal(StateError, run, model, rank)
    assert none.startswith("sw.join(): rank 0 has no batch at all, so none to repeat.\n  Give all ranks one")
    assert run(model, rank, like=0) == [float(rank)]  # the message's own advice
    assert "is not parallelized" in refusal(StateError, sw.join, Chain(), [])
    for place, (_, weight) in enumerate(sw.join(model, range(1 + rank))):
        if place == 1:
            assert weight == rank
            sw.save(f"{tmp_path}/late", model)
    synchronised = sw.parallelize(sw.convert_sync_batchnorm(Chain(Running, 2)))
    text = refusal(StateError, sw.join, synchronised, [0])
    assert "batch norm over all ranks would count samples that are repeated" in text
    assert run(synchronised, 2, throw_on_early_termination=True) == [1.0, 1.0]
    rows = sw.parallelize(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), row_sharded=["0"])
    text = refusal(StateError, sw.join, rows, [0], divide_by_initial_world_size=False)
    assert "gradients of row-sharded embeddings are divided by all ranks" in text
