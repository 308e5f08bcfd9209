"""What users do with a model between and inside the steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections.abc import Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing.oracle import gradient_sync
from tests.common.oracle import Block, Chain, Waiting, compare_each, plain_loss, presets, sample
from tests.common.ranks import on_ranks

# -- outputs of any shape

Pair = collections.namedtuple("Pair", ["left", "right"])  # noqa: PYI024 - the untyped kind on purpose


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: dict[str, list[Tensor]]
    note: str = "nothing"


@dataclasses.dataclass(frozen=True)
class FrozenOutput:
    hidden: Tensor
    inner: Output


class ModelOutput(collections.OrderedDict):
    """As transformers': a dict whose entries are attributes as well."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def pack(kind: str, x: Tensor, y: Tensor) -> object:
    return {
        "tuple": lambda: (x, None, (y, 3)),
        "dict": lambda: {"x": x, "rest": {"y": [y]}},
        "named": lambda: Pair(x, y),
        "dataclass": lambda: Output(x, {"list": [y]}),
        "frozen": lambda: FrozenOutput(x, Output(x, {"y": [y]})),
        "mapping": lambda: ModelOutput(x=x, y=y),
        "proxy": lambda: types.MappingProxyType({"x": x, "y": y}),
        "object": lambda: types.SimpleNamespace(x=x, cache=types.SimpleNamespace(layers=[y])),
    }[kind]()


def unpack(kind: str, out: object) -> tuple[Tensor, Tensor]:
    return {
        "tuple": lambda o: (o[0], o[2][0]),
        "dict": lambda o: (o["x"], o["rest"]["y"][0]),
        "named": lambda o: (o.left, o.right),
        "dataclass": lambda o: (o.hidden, o.extra["list"][0]),
        "frozen": lambda o: (o.hidden, o.inner.extra["y"][0]),
        "mapping": lambda o: (o.x, o.y),
        "proxy": lambda o: (o["x"], o["y"]),
        "object": lambda o: (o.x, o.cache.layers[0]),
    }[kind](out)


class Packing(nn.Module):
    """Returns two tensors in a structure of some kind; the second only reaches the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("sink", torch.zeros(()))

    def forward(self, x: Tensor) -> object:
        return pack(self.kind, x + torch.tanh(self.first(x)), torch.sin(self.second(x)))


class Packed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(21)
        self.kind = kind
        self.blocks = nn.ModuleList(Packing(kind) for _ in range(5))

    def forward(self, x: Tensor) -> object:
        total = torch.zeros(())
        for block in self.blocks:
            x, y = unpack(self.kind, block(x))
            total = total + y.mean()
        return pack(self.kind, x, total)


def packed_loss(model, rank, step):
    x, y = unpack(model.kind, model(sample(rank, step)))
    return x.square().mean() + y


@on_ranks(2, 3)
def test_outputs_may_be_tuples_dicts_dataclasses_objects_and_nests_of_them():
    for kind in ("tuple", "dict", "named", "dataclass", "frozen", "mapping", "proxy", "object"):
        compare_each(lambda kind=kind: Packed(kind), packed_loss, ("zero1", "zero3"), steps=3)


# -- forwards that do not train


def evaluate_between(model, rank, step):
    """Evaluations before, between and after, in eval mode and not, with and without grad mode."""
    values = []
    model.eval()
    with torch.no_grad():
        values.append(model(sample(rank, step, salt=3)))
    with torch.inference_mode():
        values.append(model(sample(rank, step, salt=4)).clone())
    values.append(model(sample(rank, step, salt=5)))  # with grad, never used for a backward
    model.train()
    loss = plain_loss(model, rank, step)
    with torch.no_grad():
        values.append(model(sample(rank, step, salt=6)))  # between a forward and its backward
    loss.backward()
    with torch.no_grad():
        values.append(model(sample(rank, step, salt=7)))
    yield *values, loss


class Guided(Chain):
    """Calls its blocks without grad inside a forward that trains (self-conditioning, targets of a teacher)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
            hint = self.blocks[1](self.stem(x))
        return super().forward(x + hint) - target


def skip_evaluation(model, rank, step):
    """Only in some steps is there an evaluation."""
    if step in (1, 3):
        with torch.no_grad():
            model(sample(rank, step, salt=3))
    return plain_loss(model, rank, step)


@on_ranks(2, 3)
def test_forwards_without_grad_may_come_before_between_inside_and_after():
    compare_each(Chain, evaluate_between)
    compare_each(Chain, skip_evaluation)
    compare_each(Guided, plain_loss)


# -- requires_grad switched between steps


def thaw(model, step):
    """Gradual unfreezing, from the last block to the first."""
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index >= 4 - step)


def frozen_but_for_the_last(*_args):
    model = Chain()
    thaw(model, 0)
    return model


def freeze_gradually(model, step):
    for index, block in enumerate(model.blocks):
        if index <= step:
            block.requires_grad_(False)


def toggle(model, step):
    """Single parameters, to and fro; in the last steps everything."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(step > 2 or "head" in name or (index + step) % 3 != 0)


def freeze_all_but_the_head(model, step):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("head" in name or step % 2 == 1)


def frozen_before_backward(model, rank, step):
    loss = plain_loss(model, rank, step)
    model.blocks[step].requires_grad_(False)
    return loss


@on_ranks(2, 3)
def test_requires_grad_may_be_switched_between_steps():
    compare_each(frozen_but_for_the_last, plain_loss, steps=6, between=lambda m, s: thaw(m, s + 1))
    compare_each(Chain, plain_loss, steps=6, between=freeze_gradually)
    compare_each(Chain, plain_loss, steps=6, between=toggle)
    compare_each(Chain, plain_loss, steps=5, between=freeze_all_but_the_head)
    compare_each(Chain, frozen_before_backward)


# -- requires_grad switched inside a step


def low_rank(model: nn.Module, which: str = "down") -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if which in name]


def switch_on(parameters: Iterable[nn.Parameter], is_trained: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(is_trained)


def reference_between(model, rank, step):
    """As a preference loss with an adapter does: what the frozen model says comes between forward and backward."""
    chosen = plain_loss(model, rank, step)
    switch_on(low_rank(model), False)
    frozen = plain_loss(model, rank, step)
    switch_on(low_rank(model), True)
    (chosen - frozen.detach()).square().backward()
    yield chosen, frozen


def all_frozen_between(model, rank, step, *, records: bool):
    loss = plain_loss(model, rank, step)
    switch_on(model.parameters(), False)
    with torch.set_grad_enabled(records):
        frozen = plain_loss(model, rank, step)
    switch_on(model.parameters(), True)
    loss.backward()
    yield loss, frozen


def frozen_in_backward(model, rank, step):
    """Frozen after the forward: no gradient is left, and the next backward finds nothing of this one."""
    loss = plain_loss(model, rank, step)
    switch_on(low_rank(model), False)
    switch_on(model.blocks[2].parameters(), False)
    loss.backward()
    yield loss
    switch_on(model.parameters(), True)
    loss = plain_loss(model, rank, step)
    loss.backward()
    yield loss


def frozen_in_forward(model, rank, step):
    switch_on(low_rank(model), False)
    loss = plain_loss(model, rank, step)
    switch_on(low_rank(model), True)
    loss.backward()
    yield loss


def two_adapters(model, rank, step):
    """One is active in each forward, the first again in backward."""
    losses = []
    for active, other in (("down", "up"), ("up", "down")):
        switch_on(low_rank(model, other), False)
        switch_on(low_rank(model, active), True)
        losses.append(plain_loss(model, rank, step))
    switch_on(low_rank(model, "up"), False)
    switch_on(low_rank(model, "down"), True)
    sum(losses).backward()
    yield losses
    switch_on(model.parameters(), True)


def frozen_while_sums_wait(model, rank, step):
    with gradient_sync(model, False):
        loss = plain_loss(model, rank, step)
        loss.backward()
        yield Waiting([loss])
    switch_on(low_rank(model), False)
    switch_on(model.blocks[2].parameters(), False)
    loss = plain_loss(model, rank, step)
    loss.backward()
    yield loss
    switch_on(model.parameters(), True)


SWITCHES = (
    reference_between,
    functools.partial(all_frozen_between, records=False),
    functools.partial(all_frozen_between, records=True),
    frozen_in_backward,
    frozen_in_forward,
    two_adapters,
    frozen_while_sums_wait,
)


@on_ranks(2, timeout_s=120.0)
def test_requires_grad_may_be_switched_between_a_forward_and_its_backward():
    for script in SWITCHES:
        compare_each(Chain, script, steps=3, merge_units=False)


def with_adapters(*_args: object) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model = get_peft_model(Chain(), config)
    model.add_adapter("second", config)
    return model


def prefer(model, rank, step):
    """Direct preference optimization, where the reference is the model without its adapter."""
    chosen = plain_loss(model, rank, step)
    with model.disable_adapter():
        reference = plain_loss(model, rank, step)
    F.softplus(chosen - reference.detach()).backward()
    yield chosen, reference


def in_turns(model, rank, step):
    """Either adapter in a forward of its own; the one that is active in backward gets gradients."""
    model.set_adapter("second")
    other = plain_loss(model, rank, step)
    model.set_adapter("default")
    loss = plain_loss(model, rank, step) + other
    loss.backward()
    yield loss, other


@on_ranks(2, timeout_s=120.0)
def test_adapters_may_be_disabled_and_changed_between_a_forward_and_its_backward():
    pytest.importorskip("peft", reason="the lora extra is not installed")
    for script in (prefer, in_turns):
        compare_each(with_adapters, script, steps=3, merge_units=False)


# -- modules with state


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.gru(self.lstm(x)[0])[0])


@on_ranks(2)
def test_a_recurrent_net_does_not_move_gathered_weights_into_memory_of_its_own():
    for strategy in ("ddp", "zero3"):
        model, moves = sw.parallelize(Recurrent(), sw.ParallelPlan(strategy=strategy)), []
        for module in (model.lstm, model.gru):
            module.flatten_parameters = lambda: moves.append(1)  # noqa: B023 - called below
        model(sample(0, 0, 3, 4, 8)).sum().backward()
        assert moves == []


class RunningMean(nn.Module):
    """Writes a buffer in forward and counts its calls in a Python attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Identity()
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x - self.mean)


def sequence_loss(model, rank, step):
    return model(sample(rank, step, 3, 4, 8)).square().mean()


@on_ranks(2, 3)
def test_batch_norm_recurrent_nets_and_buffers_written_in_forward_are_right():
    for build, script in (
        (lambda: Chain(Normed), plain_loss),
        (lambda: Chain(Recurrent), sequence_loss),
        (lambda: Chain(RunningMean), plain_loss),
    ):
        for strategy, trained in compare_each(build, script).items():
            trained.model.eval()
            trained.plain.eval()
            x = sample(0, 0, 3, 4, 8) if script is sequence_loss else sample(0, 0)
            with torch.no_grad():
                assert torch.equal(trained.model(x), trained.plain(x))
            for (name, ours), (_, plain) in zip(
                trained.model.named_buffers(), trained.plain.named_buffers(), strict=True
            ):
                assert torch.equal(ours, plain), f"{strategy}: buffer {name}"


# -- hooks of the user


def with_hooks(model, rank, step):
    """Forward hooks, output hooks and full backward hooks of the user see what they would see in one process."""
    seen = []
    handles = [
        model.blocks[1].register_forward_hook(lambda _m, _i, out: out * 1.5),
        model.blocks[2].register_full_backward_hook(lambda _m, _gi, go: seen.append(go[0].clone())),
        model.blocks[3].register_forward_pre_hook(lambda _m, args: (args[0] + 1.0,)),
        model.blocks[4].up.register_forward_hook(lambda m, _i, _o: seen.append(m.weight.detach().clone())),
    ]
    y = model(sample(rank, step))
    y.register_hook(lambda grad: seen.append(grad.clone()))
    y.square().mean().backward()
    for handle in handles:
        handle.remove()
    yield y, *seen


class Keywords(Chain):
    """Blocks are called with keyword arguments; the model with none of its tensors positional."""

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
        x = self.stem(x) * scale
        for block in self.blocks:
            x = block(x=x)
        return self.head(x)


def call_with_keywords(model, rank, step):
    return model(x=sample(rank, step), scale=0.5).square().mean()


def gradient_of_inputs(model, rank, step):
    x = sample(rank, step).requires_grad_()
    model(x).square().mean().backward()
    yield (x.grad,)


def only_inputs(model, rank, step):
    """torch.autograd.grad for the input alone: no parameter gets a gradient."""
    x = sample(rank, step).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    yield grad, plain_loss(model, rank, step).detach()


@on_ranks(2, 3)
def test_hooks_keyword_arguments_and_gradients_of_inputs_are_those_of_one_process():
    compare_each(Chain, with_hooks)
    compare_each(Keywords, call_with_keywords)
    compare_each(Chain, gradient_of_inputs)


@on_ranks(2)
def test_the_gradient_of_the_input_alone_leaves_parameters_without_one():
    for strategy in presets():
        model, plain = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy)), Chain()
        for step in range(3):
            grads = []
            for each in (model, plain):
                x = sample(0, step).requires_grad_()
                grads.append(torch.autograd.grad(each(x).square().mean(), x)[0])
            assert torch.equal(*grads)
            assert all(p.grad is None for p in model.parameters())


# -- units that some forwards skip, on all ranks alike


class Drops(Chain):
    """Stochastic depth: blocks are left out, the same ones on every rank."""

    def forward(self, x: Tensor, left_out: tuple[int, ...] = ()) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index not in left_out:
                x = block(x)
        return self.head(F.gelu(x))


def leave_out(model, rank, step):
    left_out = [(), (1,), (0, 4), (2, 3), (0, 1, 2, 3, 4), ()][step]
    return model(sample(rank, step), left_out).square().mean()


def leave_out_at_first(model, rank, step):
    left_out = [(1, 2), (), (3,), ()][step]
    return model(sample(rank, step), left_out).square().mean()


def detach_inside(model, rank, step):
    """Backward does not reach the first units in some steps."""
    x = model.stem(sample(rank, step)) if step == 9 else sample(rank, step)
    handle = model.blocks[step % 3].register_forward_hook(lambda _m, _i, out: out.detach())
    loss = model(x).square().mean()
    handle.remove()
    return loss


@on_ranks(2, 3)
def test_forwards_may_leave_units_out_and_backward_may_end_early():
    compare_each(Drops, leave_out, steps=6)
    compare_each(Drops, leave_out_at_first)
    compare_each(Chain, detach_inside)
    compare_each(lambda: Chain(Block, 1), plain_loss, auto_wrap_policy=sw.wrap_by_class({Block}))
    compare_each(Chain, plain_loss, auto_wrap_policy="none")
