"""The optimizer's step inside backward: the numbers of a step after backward, and what cannot go with it."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.engine import Engine
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import FlatParameter
from shardwise.engine.storage.optimizer import engines_of
from shardwise.spec.errors import StateError
from shardwise.testing import checks, probe, run_on_ranks
from tests.common.oracle import PRESETS, Block, Chain, descend, plain_loss, presets, sample
from tests.common.ranks import on_ranks, refusal
from tests.engine.test_side_doors import Boxed, KeepsLoss, with_aux_loss
from tests.optim.test_flat_ranks import Branching, by_rank, by_step, flat_groups, two_groups


def adamw(groups):
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def train(model, optimizer, script, first=0, last=5):
    descend(optimizer, (script(model, dist.get_rank(), step) for step in range(first, last)))


def differing(build, script, strategy, *, make=adamw, given=flat_groups, **options):
    """Names that differ between a step after backward and one inside it."""
    states = []
    for is_in_backward in (False, True):
        model = sw.parallelize(build(), sw.ParallelPlan(strategy=strategy, **options))
        optimizer = make(given(model))
        if is_in_backward:
            sw.optimizer_in_backward(model, optimizer)
        with checks():  # five steps where the path of each step is another one
            train(model, optimizer, script, last=5 if build is Branching else 3)
        states.append(sw.full_state_dict(model))
    assert states[0].keys() == states[1].keys()
    return [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]


class Recomputed(Chain):
    is_reentrant = False

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    is_reentrant = True


class Twice(Chain):
    """Every block runs twice in a forward, in two rounds."""

    def forward(self, x):
        x = self.stem(x)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


MODELS = {
    "branches by step": (Branching, by_step),
    "branches by rank": (Branching, by_rank),
    "recomputed": (Recomputed, plain_loss),
    "recomputed, reentrant": (RecomputedReentrant, plain_loss),
    "twice": (Twice, plain_loss),
    "hidden outputs": (Boxed, plain_loss),
    "loss on modules": (lambda: Chain(KeepsLoss), with_aux_loss),
}
OPTIONS = (
    {"merge_units": 1 << 20},
    {"merge_units": False, "gradient_buffers": 1},
    {"reshard_after_forward": False},
    {"granularity": "row"},
    {"granularity": "tensor"},
    {"dp_replicate": 2},
    {"activation_checkpointing": "full"},
)
BF16 = sw.PrecisionPolicy(param_dtype="bf16", reduce_dtype="bf16")


@on_ranks(1, 2, timeout_s=120)
def test_numbers_are_those_of_a_step_after_backward():
    found = {}
    for turn, (name, (build, script)) in enumerate(MODELS.items()):
        for strategy in ("ddp", "zero1", "zero3")[turn % 2 :: 1 if dist.get_world_size() == 1 else 2]:
            given = (flat_groups, two_groups)[turn % 2]
            found[name, strategy] = differing(build, script, strategy, given=given)
    for strategy in presets():
        found["bf16", strategy] = differing(Chain, plain_loss, strategy, mp_policy=BF16)
    momentum = lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, foreach=True)  # noqa: E731
    found["momentum"] = differing(Chain, plain_loss, "zero2", make=momentum)
    if dist.get_world_size() == 2:
        for turn, options in enumerate(OPTIONS):
            given = (flat_groups, two_groups)[turn % 2]
            found[str(options)] = differing(Chain, plain_loss, "zero3", given=given, **options)
    assert {key: names for key, names in found.items() if names} == {}


@on_ranks(2)
def test_schedulers_and_several_optimizers_work():
    """A scheduler, two optimizers, and a loop that keeps its step() and zero_grad()."""
    states = []
    for is_in_backward in (False, True):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
        decayed, others = flat_groups(model)
        optimizers = adamw([decayed]), torch.optim.SGD([others], lr=0.1, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 0.8**step) for each in optimizers]
        if is_in_backward:
            sw.optimizer_in_backward(model, *optimizers)
        for step in range(4):
            plain_loss(model, dist.get_rank(), step).backward()
            for each in (*optimizers, *schedules):
                each.step()
            for each in optimizers:
                each.zero_grad()
        states.append(sw.full_state_dict(model))
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


@on_ranks(2)
def test_checkpoints_are_those_of_a_step_after_backward(tmp_path):
    """Six steps after backward; or two so, save, load, two inside backward, save, load, and two more after it."""
    whole = sw.parallelize(Branching(), sw.ParallelPlan(strategy="zero3"))
    train(whole, adamw(two_groups(whole)), by_step, 0, 6)
    expected = sw.full_state_dict(whole)
    for part, (strategy, given) in enumerate((("zero3", two_groups), ("zero1", flat_groups), ("ddp", two_groups))):
        model = sw.parallelize(Branching(), sw.ParallelPlan(strategy=strategy))
        optimizer = adamw(given(model))
        if part == 1:
            sw.optimizer_in_backward(model, optimizer)
        if part:
            sw.load(f"{tmp_path}/{part - 1}", model, optimizer)
        train(model, optimizer, by_step, 2 * part, 2 * part + 2)
        sw.save(f"{tmp_path}/{part}", model, optimizer)
    got = sw.full_state_dict(model)
    assert [name for name, value in expected.items() if not torch.equal(value, got[name])] == []


@on_ranks(2)
def test_ranks_that_run_out_of_batches_update_as_well():
    """Two batches more on the second rank, with and without step() in the loop."""
    states = []
    for how in ("after", "inside", "inside, no step()"):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
        optimizer = adamw(sw.flat_parameters(model))
        if how != "after":
            sw.optimizer_in_backward(model, optimizer)
        for step, weight in sw.join(model, range(3 + 2 * dist.get_rank())):
            (weight * plain_loss(model, dist.get_rank(), step)).backward()
            if how != "inside, no step()":
                optimizer.step()
                optimizer.zero_grad()
        states.append(sw.full_state_dict(model))
    assert [name for name, value in states[0].items() if any(not torch.equal(value, s[name]) for s in states[1:])] == []


# -- what cannot go with it


@on_ranks(1)
def test_what_needs_all_gradients_is_refused():
    texts = []

    def refused(call):
        texts.append(refusal(StateError, call))

    for strategy in ("ddp", "zero3"):
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        optimizer = adamw(flat_groups(model))
        matrices, vectors = flat_groups(model)
        refused(lambda: sw.optimizer_in_backward(model, adamw([matrices])))  # noqa: B023
        refused(lambda: sw.optimizer_in_backward(model, optimizer, adamw([vectors])))  # noqa: B023
        refused(lambda: sw.optimizer_in_backward(model, torch.optim.LBFGS(model.parameters())))  # noqa: B023
        plain_loss(model, 0, 0).backward()
        refused(lambda: sw.optimizer_in_backward(model, optimizer))  # noqa: B023
        optimizer.zero_grad()
        sw.optimizer_in_backward(model, optimizer)
        refused(lambda: sw.optimizer_in_backward(model, optimizer))  # noqa: B023
        refused(lambda: sw.clip_grad_norm(model, 1.0))  # noqa: B023
        refused(lambda: sw.gradient_sync(model, False).__enter__())  # noqa: B023
        refused(lambda: sw.train_step(model, sample(0, 0, 4, 8), lambda y, _: y.sum(), 2))  # noqa: B023
        for kind in (torch.amp.GradScaler, sw.GradScaler):
            scaler = kind("cpu", init_scale=2.0)
            scaler.scale(plain_loss(model, 0, 0)).backward()
            refused(lambda: scaler.step(optimizer))  # noqa: B023
        with sw.gradient_sync(model, True):
            plain_loss(model, 0, 1).backward()
    half = len(texts) // 2
    for found in (texts[:half], texts[half:]):
        starts = [
            "parameter 'stem.bias' is in 0 of the optimizers",
            "parameter 'stem.bias' is in 2 of the optimizers",
            "LBFGS.step() needs a closure",
            "parameter 'stem.weight' has a gradient, which would be lost",
            "the model is updated inside backward already",
            "sw.clip_grad_norm() needs the gradients of the whole model",
            "sw.gradient_sync(model, False) needs the gradients",
            "sw.gradient_sync(model, False) needs the gradients",
            "a gradient scaler came after",
            "sw.GradScaler needs the gradients",
        ]
        assert len(found) == len(starts), found
        for text, start in zip(found, starts, strict=True):
            assert text.startswith(start), text


@on_ranks(1)
def test_fully_shard_refuses_likewise():
    block = Block()
    sw.fully_shard(block)
    optimizer = adamw(block.parameters())
    sw.optimizer_in_backward(block, optimizer)
    with pytest.raises(StateError, match=r"set_requires_gradient_sync\(False\) needs"):
        block.set_requires_gradient_sync(False)
    with pytest.raises(StateError, match="what encloses a trained model"):
        sw.fully_shard(nn.Sequential(block))


class Lends(Block):
    """Its first weight is used outside of it as well, before it runs: backward comes to that use last."""

    def forward(self, x):
        return super().forward(x)


class Borrowing(Chain):
    def __init__(self):
        super().__init__(Lends)

    def forward(self, x):
        used = (x @ torch.cat([block.up.weight.sum(0, keepdim=True) for block in self.blocks]).T).sum()
        return super().forward(x) + used


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        raise RuntimeError("on purpose")


class FailsInBackward(Chain):
    fails = False

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            if place == 1 and self.fails:
                x = Fails.apply(x)
            x = block(x)
        return self.head(x)


@on_ranks(1)
def test_a_failed_backward_and_one_of_an_older_forward_are_told():
    model = sw.parallelize(FailsInBackward(), sw.ParallelPlan(strategy="zero3"))
    model.stem.requires_grad_(requires_grad=False)
    optimizer = adamw(sw.flat_parameters(model))
    sw.optimizer_in_backward(model, optimizer)
    train(model, optimizer, plain_loss, 0, 2)
    model.fails = True
    with pytest.raises(RuntimeError, match="on purpose"):
        plain_loss(model, 0, 2).backward()
    model.fails = False
    with pytest.raises(StateError, match="parameters are of two different steps"):
        plain_loss(model, 0, 2)
    train(model, optimizer, plain_loss, 3, 5)  # told once
    assert all(parameter.grad is None for parameter in model.parameters())
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = adamw(sw.flat_parameters(model))
    sw.optimizer_in_backward(model, optimizer)
    loss = plain_loss(model, 0, 0)
    other = plain_loss(model, 0, 1)
    loss.backward()
    with pytest.raises(StateError, match="ran before the last"):
        other.backward()


def come_back(strategy):
    """Backward comes back to a unit that it had left: what the engine takes for an end was none."""
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
    optimizer = adamw(sw.flat_parameters(model))
    sw.optimizer_in_backward(model, optimizer)
    engine = engine_of(model, "test")
    unit = engine.units[-1]
    seen = []

    def back(_grad):
        assert unit.updated_in == engine.backward.generation
        seen.append(unit.name)
        engine.regather(unit)

    x = model.stem.register_forward_hook(lambda _module, _args, out: out.register_hook(back) and None)
    with pytest.raises(StateError) as caught:
        plain_loss(model, 0, 0).backward()
    x.remove()
    return seen, str(caught.value)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_coming_back_to_an_updated_unit_is_refused(strategy):
    ((seen, text),) = run_on_ranks(come_back, 1, strategy)
    assert seen == ["blocks.4"]
    assert text.startswith("backward came back to unit 'blocks.4' after its parameters had been updated")


class LateUse(Chain):
    """A parameter of the last block enters the loss by a value computed before everything else."""

    def forward(self, x):
        early = F.linear(x[:1, :1], torch.ones(1, 1)) * self.blocks[-1].late.sum()
        return super().forward(x) + early.sum()


class WithLate(Block):
    def __init__(self) -> None:
        super().__init__()
        self.late = nn.Parameter(torch.ones(3))


def late_gradient(strategy):
    model = sw.parallelize(LateUse(WithLate), sw.ParallelPlan(strategy=strategy))
    block = model.blocks[-1]
    optimizer = adamw(sw.flat_parameters(model))
    sw.optimizer_in_backward(model, optimizer)
    full = next(shard.whole for shard in probe(model).shards if shard.name == "blocks.4.late")
    module = block.__dict__["_parameters"]
    shard, module["late"] = module["late"], full  # as a value that had left the unit earlier
    x = sample(0, 0)
    early = full.sum()
    module["late"] = shard
    loss = Chain.forward(model, x).square().mean() if False else nn.Module.__call__(model, x).square().mean() + early
    return refusal(StateError, loss.backward)


# -- what it is for


def held_gradients(strategy, is_in_backward):
    """The most bytes of gradients on shards at any drain of a reduction."""
    model = sw.parallelize(Chain(lambda: Block(8, 64)), sw.ParallelPlan(strategy=strategy))
    optimizer = adamw(sw.flat_parameters(model))
    if is_in_backward:
        sw.optimizer_in_backward(model, optimizer)
    most, parameters = [0], [shard.parameter for shard in probe(model).shards]
    drain = Engine._finish_oldest

    def watched(engine):
        result = drain(engine)
        most[0] = max(most[0], sum(p.grad.nbytes for p in parameters if p.grad is not None))
        return result

    Engine._finish_oldest = watched
    try:
        train(model, optimizer, plain_loss, 0, 3)
    finally:
        Engine._finish_oldest = drain
    return most[0], probe(model).held_bytes()["gradients"]


@on_ranks(2)
def test_no_gradient_outlives_its_update():
    found = {(strategy, on): held_gradients(strategy, on) for strategy in PRESETS for on in (False, True)}
    for strategy in PRESETS:
        assert found[strategy, True] == (0, 0)
        assert min(found[strategy, False]) > 0


@on_ranks(1)
def test_the_model_is_freed_at_once():
    model = sw.parallelize(Chain(), sw.ParallelPlan(strategy="zero3"))
    optimizer = adamw(sw.flat_parameters(model))
    sw.optimizer_in_backward(model, optimizer)
    train(model, optimizer, plain_loss, 0, 2)
    assert "\nupdated as 6 flat tensors instead of 24 by name, inside backward, unit by unit\n" in str(
        sw.summary(model)
    )
    assert engines_of(optimizer) == [engine_of(model, "test")]
    assert all(isinstance(p, FlatParameter) for p in optimizer.param_groups[0]["params"])
    engine = probe(model).weak_references()
    gc.disable()
    del model
    was_freed = all(reference() is None for reference in engine)
    gc.enable()
    assert was_freed
