"""Ranks with different numbers of batches: they end together, or all are told."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.spec.errors import CommError, RankDisagreement, StateError
from shardwise.testing import checks, probe, report_stalls_after, run_on_ranks, same_bits
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
            with sw.join(model, optimizer, divide_by_initial_world_size=by_all):
                for step in range(10 * epoch, 10 * epoch + counts[rank]):
                    loss = loss_of(model, rank, step)
                    loss.backward()
                    norm = sw.clip_grad_norm(model, max_norm) if max_norm else None
                    seen.append((loss.detach(), norm))
                    optimizer.step()
                    optimizer.zero_grad()
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
            with sw.join(model, optimizer):
                descend(optimizer, (plain_loss(model, rank, step) for step in range(counts[rank])))
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
    with sw.join(model, optimizer):
        for step in range(counts[rank]):
            with sw.gradient_sync(model, step % 2 == 1):
                plain_loss(model, rank, step).backward()
            if step % 2:
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
    with sw.join(model):
        for step in range(counts[rank]):
            plain_loss(model, rank, step).backward()
    for step in range(max(counts)):
        there = [r for r in range(len(counts)) if step < counts[r]]
        for r in there:
            plain_loss(copies[r], r, step)
        sources = there if step + 1 == max(counts) else [r for r in there if step + 1 < counts[r]]
        for name, buffer in copies[0].named_buffers():
            held = [dict(each.named_buffers())[name] for each in copies]
            root = held[sources[0]].clone()
            if mode == "mean" and root.is_floating_point():
                gaps = [held[r] - root for r in there if r in sources]
                root = root + sum(gaps[1:], gaps[0]) / len(sources)
            for each in held:
                each.data.copy_(root)
            del buffer
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(copies[0].named_buffers())[name]), f"{mode}: {name}"


def test_buffers_are_those_of_the_ranks_that_have_a_batch():
    for mode in ("auto", "mean"):
        run_on_ranks(buffers, 3, mode)


@on_ranks(2)
def test_settings_of_optimizers_are_those_of_the_ranks_that_have_a_batch_and_compared_at_the_start():
    """A rank without a batch steps with the settings of those that have one."""
    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    optimizer = adamw(model.parameters())
    with sw.join(model, optimizer):
        for step in range(2 + 2 * rank):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (step + 1)
                group["betas"] = (0.5 + 0.1 * step, 0.99)
            plain_loss(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    held = [(group["lr"], group["betas"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * rank
    with pytest.raises(StateError) as caught, sw.join(model, optimizer):
        pass
    text = str(caught.value)
    assert held == [(0.04, (0.8, 0.99))]
    assert text.startswith("sw.join(): the ranks' optimizers have different settings: rank 0 has [{")
    assert "Step schedulers equally often on every rank" in text


def mean_losses():
    """The mean of sw.train_step is that of the ranks that have a batch."""
    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    with sw.join(model):
        means = [sw.train_step(model, sample(rank, step), lambda y, _: y.square().mean()) for step in range(1 + rank)]
    return [float(mean) for mean in means], float(plain_loss(Chain(), 1, 1).detach())


def test_the_mean_loss_is_that_of_the_ranks_that_have_a_batch():
    (first, _), (second, alone) = run_on_ranks(mean_losses, 2)
    assert first[0] == second[0]
    assert second[1] == alone


@on_ranks(2)
def test_a_forward_costs_one_small_message_while_nobody_has_left():
    """While every rank has a batch there is one word for each forward, and nothing else."""
    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    optimizer = adamw(model.parameters())
    recorded = []
    with sw.join(model, optimizer):
        for step in range(3):
            with sw.record_collectives(model) as events:
                plain_loss(model, rank, step).backward()
                sw.clip_grad_norm(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            recorded.append([(event.kind, event.unit, event.sent_bytes) for event in events])
    with sw.record_collectives(model) as events:
        plain_loss(model, rank, step).backward()
        sw.clip_grad_norm(model, 1.0)
    outside = [(event.kind, event.unit, event.sent_bytes) for event in events]
    inside = recorded[-1]
    assert inside == [("all_gather", "join", 24), *outside]


# -- evaluation and generation


def evaluate(counts):
    rank = dist.get_rank()
    plain = Chain()
    for strategy in presets():
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        for _ in range(2):
            model.eval()
            with torch.no_grad(), sw.join(model):
                for step in range(counts[rank]):
                    assert torch.equal(model(sample(rank, step)), plain(sample(rank, step)))
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
    with torch.no_grad(), sw.join(model):
        for step in range(counts[rank]):
            tokens = families.tokens(rank, step, salt=2)
            how = {"max_new_tokens": 2 + (3 * rank + step) % 4, "do_sample": False}
            assert torch.equal(model.generate(input_ids=tokens, **how), plain.generate(input_ids=tokens, **how))
    tokens = families.tokens(rank, 9, salt=2)  # and in step again, by transformers' own means
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
    with sw.join(model, optimizer, throw_on_early_termination=True):
        descend(optimizer, (plain_loss(model, dist.get_rank(), step) for step in range(count)))


@pytest.mark.parametrize("counts", [(4, 2), (2, 0, 3)])
def test_all_ranks_may_stop_as_soon_as_one_has_no_batch_left(counts):
    short = counts.index(min(counts))
    for texts in run_on_ranks(stops, len(counts), counts):
        for text in texts:
            assert text == (
                f"rank 0 has another batch, rank {short} has none left.\n"
                "  Give every rank as many batches (drop_last=True), or use sw.join(model, optimizer)."
            )


def fails():
    """An exception on one rank, while another has no batch left and a third goes on."""
    rank = dist.get_rank()
    model = sw.parallelize(Chain())
    try:
        with sw.join(model):
            for step in range(3 if rank else 1):
                plain_loss(model, rank, step).backward()
                if rank == 2 and step == 1:
                    {}["rank 2's own"]
    except (KeyError, CommError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_exception_on_one_rank_ends_the_others_as_well():
    ended = "CommError: rank 2 has left sw.join() by an exception.\n  Look for the first error among the ranks' logs."
    assert run_on_ranks(fails, 3) == [ended, ended, 'KeyError: "rank 2\'s own"']


@on_ranks(3)
def test_ranks_with_batches_that_do_different_things_are_told_so():
    """Two ranks that have batches do different things."""
    report_stalls_after(0.6)
    rank = dist.get_rank()
    model = sw.parallelize(Chain())

    def run():
        with sw.join(model):
            for step in range(2 if rank else 0):
                with torch.set_grad_enabled(rank == 1):
                    model(sample(rank, step))

    text = refusal(RankDisagreement, run)
    assert text.startswith("ranks inside sw.join() do different things:\n  rank 1: forward (3, ")
    assert "\n  rank 2: forward (0, " in text


@on_ranks(2)
def test_refusals_are_clear_and_come_on_all_ranks(tmp_path):
    rank = dist.get_rank()
    texts = {}

    def note(name, call, *args):
        texts[name] = refusal(StateError, call, *args)

    model = sw.parallelize(Chain())
    optimizer, other = adamw(model.parameters()), adamw(model.parameters())

    def enter(model, *args):
        with sw.join(model, *args):
            pass

    with sw.join(model, optimizer):
        note("nested", enter, model)
        plain_loss(model, rank, 0).backward()
        note("unknown optimizer", other.step)
        optimizer.step()
        optimizer.zero_grad()
        scaler = sw.GradScaler("cpu")
        scaler.scale(plain_loss(model, rank, 0)).backward()
        note("scaler", scaler.unscale_, optimizer)
        sw.save(f"{tmp_path}/all", model)  # every rank is still there
        optimizer.zero_grad()

    def save_late():
        with sw.join(model, optimizer):
            for step in range(1 + rank):
                plain_loss(model, rank, step).backward()
                optimizer.zero_grad()
                if step:
                    sw.save(f"{tmp_path}/late", model)

    note("save", save_late)
    synchronised = sw.parallelize(sw.convert_sync_batchnorm(Chain(Running, 2)))
    note("batch norm", enter, synchronised)
    with sw.join(synchronised, throw_on_early_termination=True):
        plain_loss(synchronised, rank, 0).backward()
    note("plain", enter, Chain())
    assert texts["nested"].startswith("sw.join() inside sw.join() of the same model.")
    assert "Call sw.join(model, optimizer)." in texts["unknown optimizer"]
    assert texts["scaler"].startswith("sw.GradScaler inside sw.join()")
    assert texts["save"].startswith("sw.save inside sw.join() after rank 0 has run out of batches")
    assert "batch norm over all ranks needs samples of every rank" in texts["batch norm"]
    assert "is not parallelized" in texts["plain"]
