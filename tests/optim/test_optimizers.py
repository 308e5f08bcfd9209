"""Optimizers on shards, and the global gradient norm."""

from __future__ import annotations

import contextlib
import functools
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.spec.errors import StateError
from shardwise.testing import forget_declaration, forget_notices, probe, run_on_ranks
from tests.common.oracle import (
    PRESETS,
    Block,
    Chain,
    compare,
    compare_each,
    even,
    even_loss,
    plain_loss,
    presets,
    sample,
)
from tests.common.own import own
from tests.common.ranks import on_ranks, refusal

SPLIT = ("zero1", "zero2", "shard_grad_op", "zero3")

KINDS = {
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, lr=1e-2, amsgrad=True, **how),
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, **how),
}
HOWS = ({"foreach": False}, {"foreach": True})


def wide():
    return Chain(lambda: Block(8, 61))


@on_ranks(2, 3)
def test_adamw_adam_and_sgd_are_bitwise_in_every_implementation():
    for kind, make in KINDS.items():
        for how in HOWS:
            strategies = ("zero1", "zero3") if kind != "AdamW" else presets()
            compare_each(wide, plain_loss, strategies, optimizer=lambda p, make=make, how=how: make(p, **how))
        # Fused kernels round the remainder of a vector in another way than its whole: here no rank has one.
        by_linear = sw.wrap_by_class({nn.Linear})
        fused = functools.partial(make, fused=True)
        compare_each(even, even_loss, strategies, optimizer=fused, auto_wrap_policy=by_linear)


@on_ranks(2)
def test_the_other_elementwise_optimizers_of_torch_are_bitwise():
    for make in (
        lambda p: torch.optim.Adagrad(p, lr=1e-2),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
        torch.optim.Adadelta,
        lambda p: torch.optim.Adamax(p, lr=1e-2),
        lambda p: torch.optim.NAdam(p, lr=1e-2),
        lambda p: torch.optim.RAdam(p, lr=1e-2),
        lambda p: torch.optim.Rprop(p, lr=1e-2),
    ):
        compare(Chain, plain_loss, "zero3", optimizer=make, steps=3)


class Stranger(torch.optim.Optimizer):
    """Divides each row by its norm: an optimizer that must see whole rows."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad / (parameter.grad.norm() + 1e-6), alpha=group["lr"])


class Harmless(torch.optim.SGD):
    """A subclass that nobody vouched for."""


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@on_ranks(2)
def test_a_compiled_step_is_that_of_one_process():
    def losses(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step, found = torch.compile(optimizer.step, backend="eager"), []
        for number in range(3):
            loss = plain_loss(model, 0, number)  # the same samples on both ranks
            loss.backward()
            step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    expected = losses(Chain())
    for strategy in ("ddp", "zero1", "zero3"):
        torch.manual_seed(0)
        assert losses(sw.parallelize(Chain(), strategy=strategy)) == expected, strategy


@on_ranks(2)
def test_optimizers_that_look_beyond_an_element_are_refused_where_parameters_are_split():
    texts = {}
    makers = {
        "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=1),
        "Stranger": Stranger,
        "Harmless": lambda p: Harmless(p, lr=0.1),
    }
    for strategy in PRESETS:
        for name, make in makers.items():
            model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
            optimizer = make(model.parameters())

            def closure(model=model):
                model.zero_grad()
                loss = plain_loss(model, 0, 0)
                loss.backward()
                return loss

            before = [p.detach().clone() for p in model.parameters()]
            args = (closure,) if name == "LBFGS" else ()
            if not args:
                closure()
            if strategy == "ddp":
                optimizer.step(*args)
                continue
            texts[name] = refusal(StateError, optimizer.step, *args)
            assert all(torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True))
    for name, text in texts.items():
        assert text.startswith(f"{name} is not known to work element by element, but parameter '")
        assert f"sw.declare_elementwise({name})" in text
        assert "Use strategy 'ddp', an element-wise optimizer" in text
    assert {"LBFGS", "Stranger", "Harmless"} == set(texts)


@on_ranks(2)
def test_schedule_free_optimizers_are_known_to_be_element_wise_by_their_names():
    for module, name in (("adamw", "AdamW"), ("sgd", "SGD"), ("radam", "RAdam")):
        made = type(f"{name}ScheduleFree", (Harmless,), {"__module__": f"schedulefree.{module}_schedulefree"})
        model = sw.parallelize(Chain(), "zero3")
        plain_loss(model, 0, 0).backward()
        made(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_optimizers_that_may_look_beyond_a_parameter_or_the_model_are_refused_where_ranks_have_different_parameters():
    tokens = torch.zeros(2, 5, dtype=torch.long)
    for build, batch, axis in (
        (lambda: sw.models.gpt("gpt-tiny", num_layers=1, num_experts=2), (tokens, tokens), "ep"),
        (Chain, torch.ones(4, 8), "pp"),
    ):
        model = sw.parallelize(build(), sw.ParallelPlan("ddp", **{axis: 2}))
        sw.train_step(model, batch, lambda output, _: output.square().mean())
        text = refusal(StateError, Stranger(model.parameters()).step)
        assert text.startswith("Stranger is not known to work parameter by parameter, but ranks have different param")
        assert "strategy 'ddp'" not in text
    weight = nn.Parameter(torch.ones(()))  # of the loss, which is on the last stage
    sw.train_step(model, batch, lambda output, _: output.square().mean() * weight)
    text = refusal(StateError, torch.optim.SGD([*model.parameters(), weight], lr=0.1).step)
    assert "the optimizer holds 1 parameters (of shape []) that are in no parallelized model, and their gradi" in text
    sw.declare_granularity(Stranger, "tensor")  # as it advises
    Stranger(model.parameters()).step()
    forget_declaration(Stranger)


@on_ranks(2)
def test_lbfgs_decides_by_the_loss_of_all_ranks():
    def train(loss_of, wrap=lambda model: model):
        torch.manual_seed(0)
        model = wrap(Chain().double())
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=8, line_search_fn="strong_wolfe")
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            calls.append(loss)
            return loss

        losses = [optimizer.step(closure).item() for _ in range(2)]
        return torch.tensor([len(calls), *losses, *(p.sum().item() for p in model.parameters())])

    def loss_on(rank, model):
        return (model(sample(rank, 0).double()) - 3 * rank).square().mean()

    expected = train(lambda model: (loss_on(0, model) + loss_on(1, model)) / 2)
    found = train(functools.partial(loss_on, dist.get_rank()), lambda m: sw.parallelize(m, sw.ParallelPlan("ddp")))
    torch.testing.assert_close(found, expected)


@on_ranks(1)
def test_a_step_without_any_gradient_is_told():
    for strategy in ("ddp", "zero3"):
        for is_restricted in (False, True):
            forget_notices()
            model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.step()  # nothing has run
            plain_loss(model, 0, 0).backward(inputs=list(model.parameters()) if is_restricted else None)
            told = io.StringIO()
            with contextlib.redirect_stderr(told):
                optimizer.step()
            assert ("optimizer.step() found no gradient" in told.getvalue()) == is_restricted


def whole_stranger():
    compare(Chain, plain_loss, "ddp", optimizer=Stranger)
    compare(Chain, plain_loss, "ddp", optimizer=lambda p: torch.optim.Adafactor(p, lr=1e-2))


def declared():
    assert sw.declare_elementwise(Harmless) is Harmless
    compare_each(Chain, plain_loss, SPLIT, optimizer=lambda p: Harmless(p, lr=0.1))
    with pytest.raises(TypeError, match="an optimizer class is expected"):
        sw.declare_elementwise("Harmless")
    forget_declaration(Harmless)


def test_a_stranger_is_right_under_ddp_and_a_declared_one_everywhere():
    run_on_ranks(whole_stranger, 2)
    run_on_ranks(declared, 2)


# -- the gradient norm


def norm_of(model: nn.Module) -> torch.Tensor:
    """The norm as one process computes it: float64 inside, float32 outside."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().float()


def one_process(step: int) -> nn.Module:
    """A plain model with the gradients of all ranks of one step."""
    model = Chain()
    parts = []
    for rank in range(dist.get_world_size()):
        plain_loss(model, rank, step).backward()
        parts.append([p.grad for p in model.parameters()])
        model.zero_grad()
    for parameter, grads in zip(model.parameters(), zip(*parts, strict=True), strict=True):
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        parameter.grad = total / len(grads)
    return model


@on_ranks(1, 2, 3)
def test_the_norm_is_that_of_one_process_to_the_bit_for_every_layout():
    """pytorch#170862: a norm of this rank's shards alone."""
    for step, max_norm in enumerate((1e-3, 0.05, 1e6, 0.0)):
        plain = one_process(step)
        expected = norm_of(plain)
        torch.testing.assert_close(expected, torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
        coefficient = torch.clamp(max_norm / (expected + 1e-6), max=1.0)
        grads = {name: p.grad * coefficient for name, p in plain.named_parameters()}
        for strategy in presets():
            model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
            plain_loss(model, dist.get_rank(), step).backward()
            got = sw.clip_grad_norm(model, max_norm)
            assert got.dtype is torch.float32
            assert got.shape == ()
            assert torch.equal(got, expected), f"{strategy}: {got} is not {expected}"
            for shard in probe(model).shards:
                if shard.grad is not None:
                    assert torch.equal(shard.grad, shard.part_of(grads[shard.name])), f"{strategy}: {shard.name}"


def odd_norms():
    rank = dist.get_rank()
    found = {}
    for strategy in PRESETS:
        model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy))
        plain = Chain()
        for name, poison in (("inf", float("inf")), ("nan", float("nan"))):
            for each in (model, plain):
                for parameter in each.parameters():
                    parameter.grad = torch.ones_like(parameter)
            if strategy == "ddp" or rank == 1:  # only one rank holds the bad element
                own(next(p for p in model.blocks[2].parameters() if p.shape.numel()).grad).view(-1)[0] = poison
            plain.blocks[2].up.weight.grad[0, 0] = poison
            norm = sw.clip_grad_norm(model, 1.0)
            theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            assert torch.equal(norm.isnan(), theirs.isnan())
            assert torch.equal(norm.isinf(), theirs.isinf())
            ours = [own(p.grad).flatten() for p in model.parameters() if p.shape.numel()]
            kinds = {float(v) for grad in ours for v in grad.nan_to_num(7.0)}
            expected = {float(v) for p in plain.parameters() for v in p.grad.flatten().nan_to_num(7.0)}
            assert kinds <= expected
            found[strategy, name] = float(norm)
        model.zero_grad()
        found[strategy, "nothing"] = float(sw.clip_grad_norm(model, 1.0))
        for bad in (-1.0, float("nan")):
            with pytest.raises(StateError, match="expected a number of at least 0"):
                sw.clip_grad_norm(model, bad)
    return found


def test_inf_and_nan_pass_as_in_torch_on_every_rank():
    first, second = run_on_ranks(odd_norms, 2)
    for key, value in first.items():
        assert value == second[key] or (value != value and second[key] != second[key])  # noqa: PLR0124 - nan
        if key[1] == "inf":
            assert value == float("inf")
        if key[1] == "nothing":
            assert value == 0.0


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(41)
        self.blocks = nn.ModuleList(Block().double() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        for block in self.blocks:
            x = block(x)
        return x


def double_norm():
    compare(Doubles, plain_loss, "zero3")
    model = sw.parallelize(Doubles())
    plain_loss(model, 0, 0).backward()
    return sw.clip_grad_norm(model, 1.0)


def test_a_float64_model_keeps_a_float64_norm():
    first, second = run_on_ranks(double_norm, 2)
    assert first.dtype is torch.float64
    assert torch.equal(first, second)
    plain = Doubles()
    plain_loss(plain, 0, 0).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=0)


class Spectral(nn.Module):
    """Complex weights alone, as in a Fourier neural operator."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        torch.manual_seed(43)
        self.modes = nn.ParameterList([torch.randn(4, 4, dtype=dtype), torch.randn(4, 3, dtype=dtype)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.modes:
            x = x.to(weight.dtype) @ weight
        return x.abs()


@on_ranks(2)
def test_the_norm_of_complex_gradients_is_torchs_in_every_order():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for strategy in PRESETS:
        for order in (1.0, 2.0, 3.0, float("inf")):
            plain, model = Spectral(), sw.parallelize(Spectral(), sw.ParallelPlan(strategy=strategy))
            for each in (plain, model):
                each(x).square().mean().backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, order)
            got = sw.clip_grad_norm(model, 0.01, norm_type=order)
            assert got.dtype is torch.float64
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
            grads = {name: p.grad for name, p in plain.named_parameters()}
            for shard in probe(model).shards:
                torch.testing.assert_close(shard.grad, shard.part_of(grads[shard.name]), rtol=1e-12, atol=0)


def layouts():
    """The same gradients in units of other sizes and on all ranks alike give the same norm."""
    found = []
    for strategy in PRESETS:
        for policy in ("auto", "none", sw.wrap_by_size(50)):
            model = sw.parallelize(Chain(), sw.ParallelPlan(strategy=strategy, auto_wrap_policy=policy))
            model(sample(0, 0)).square().mean().backward()
            found.append(float(sw.clip_grad_norm(model, 1.0)))
    return found


def test_the_norm_does_not_depend_on_the_layout():
    values = {value for world in (1, 2, 3) for found in run_on_ranks(layouts, world) for value in found}
    # Over three ranks x/3 summed thrice is not x: gradients differ in the last bit, and only those.
    assert max(values) - min(values) <= 1e-6 * max(values)
    assert len({value for found in run_on_ranks(layouts, 2) for value in found}) == 1


@on_ranks(2)
def test_two_models_may_share_a_parameter_group():
    rank = dist.get_rank()
    first, second = (
        sw.parallelize(nn.Linear(64, 64), sw.ParallelPlan(strategy=strategy)) for strategy in ("ddp", "zero3")
    )
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1.0)
    x = sample(rank, 0).new_ones(2, 64)
    # An inf that only one rank holds, in the second model.
    scaler = sw.GradScaler("cpu")
    scaler.scale(second(first(x)).sum()).backward()
    if rank == 1:
        own(second.weight.grad).view(-1)[0] = float("inf")
    scaler.unscale_(optimizer)
    found = scaler.has_found_inf
    optimizer.zero_grad()
    # Both models know that the parameters have changed.
    versions = [probe(model).num_updates for model in (first, second)]
    second(first(x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps = [probe(model).num_updates - v for model, v in zip((first, second), versions, strict=True)]
    # A model that joins later is seen as well; its microbatches are not reduced yet.
    third = sw.parallelize(nn.Linear(64, 64), sw.ParallelPlan(strategy="ddp"))
    optimizer.add_param_group({"params": list(third.parameters())})
    with sw.gradient_sync(third, False):
        third(x).sum().backward()
    text = refusal(StateError, optimizer.step)
    assert found
    assert steps == [1, 1]
    assert "before the gradients of accumulated microbatches were reduced" in text
    before = probe(third).num_updates
    optimizer.step(lambda: third(x).sum().backward())  # reduces what has waited
    assert probe(third).num_updates == before + 1
