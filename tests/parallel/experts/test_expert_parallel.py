"""Experts that ranks of ep share out: odd batches, checkpoints, what is refused, and mistakes that must show."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.engine import build as engine
from shardwise.parallel.experts import route as expert_route
from shardwise.spec.errors import MeshError, PlanError, StateError
from shardwise.spec.tolerances import Tolerance
from shardwise.testing import RankFailure, probe, run_on_ranks
from tests.common.own import own
from tests.common.ranks import on_ranks, refusal
from tests.common.split import batch, compare, optimizer_of
from tests.common.written import Written
from tests.parallel.experts.test_experts_parity import Mixture

pytestmark = pytest.mark.preload("transformers.models.mixtral.modeling_mixtral")

CASE = Mixture(dtype=torch.float32)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, case: Mixture, *, reader: int | None = None
) -> list[float]:
    losses = []
    for step in steps:
        loss = case.loss(model, step, 0, distributed.get_rank() if reader is None else reader)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# -- checkpoints


@pytest.mark.slow
@on_ranks(4)
def test_a_checkpoint_of_some_ep_loads_into_any_other(tmp_path):
    folder = str(tmp_path)
    """Four steps; and two, a checkpoint, and two more with another ep: the same to fp32's rounding of sums.

    With tp, ranks of which read the same, all do.
    """
    for family, ways in (
        ("gpt", [((2, 1), (1, 1)), ((1, 1), (4, 1))]),
        ("mixtral", [((2, 1), (4, 1)), ((2, 2), (4, 1)), ((4, 1), (2, 2))]),
    ):
        case = dataclasses.replace(CASE, family=family)
        for number, ((ep, tp), (other_ep, other_tp)) in enumerate(ways):
            path, reader = Path(folder) / f"{case.family}-{number}", 0 if tp + other_tp > 2 else None
            model = sw.parallelize(case.build(), sw.ParallelPlan(ep=ep, tp=tp))
            optimizer = optimizer_of(model.parameters())
            train(model, optimizer, range(2), case, reader=reader)
            sw.save(path, model, optimizer)
            expected, whole = train(model, optimizer, range(2, 4), case, reader=reader), sw.full_state_dict(model)
            again = sw.parallelize(case.build(), sw.ParallelPlan(ep=other_ep, tp=other_tp, strategy="zero1"))
            optimizer = optimizer_of(again.parameters())
            sw.load(path, again, optimizer)
            found, loaded = train(again, optimizer, range(2, 4), case, reader=reader), sw.full_state_dict(again)
            assert found == pytest.approx(expected, rel=1e-5)
            assert list(loaded) == list(whole)
            for name, value in loaded.items():
                assert torch.allclose(value, whole[name], atol=5e-4), name


@on_ranks(2)
def test_state_dicts_are_whole_and_a_rank_holds_its_experts():
    """A state dict out of ep and into it, and a model that has no values but on rank 0."""
    for case in (CASE, dataclasses.replace(CASE, family="mixtral")):
        plain = case.build()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(1.25)
        model = sw.parallelize(case.build(), sw.ParallelPlan(ep=2))
        sw.load_full_state_dict(model, plain.state_dict() if distributed.get_rank() == 0 else {})
        found = sw.full_state_dict(model)
        if distributed.get_rank() == 0:
            assert list(found) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert torch.equal(found[name], value), name
        else:
            assert not found
        with pytest.raises(StateError, match=r"sw.full_parameters\(\) under ep"), sw.full_parameters(model):
            pass
        own = slice(2 * distributed.get_rank(), 2 * distributed.get_rank() + 2)  # of four experts
        for extent, values in probe(model).extents():
            if case.family == "mixtral" and ".experts." in extent.name:
                assert torch.equal(values, dict(plain.named_parameters())[extent.name][own].reshape(-1))
            elif ".experts." in extent.name:
                assert int(extent.name.split(".experts.")[1][0]) in range(own.start, own.stop)


@on_ranks(4)
def test_a_rank_holds_its_columns_of_its_experts():
    """Experts that tp and ep cut both: a rank holds the very elements of its part, and gives them back."""
    case, rank = dataclasses.replace(CASE, family="mixtral"), distributed.get_rank()
    plain = case.build()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(1.25)
    model = sw.parallelize(case.build(), sw.ParallelPlan(ep=2, tp=2))
    sw.load_full_state_dict(model, plain.state_dict() if rank == 0 else {})
    found = sw.full_state_dict(model)
    assert rank > 0 or all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    values = dict(plain.named_parameters())
    held = {extent.name: value for extent, value in probe(model).extents()}
    experts, columns = slice(2 * (rank // 2), 2 * (rank // 2) + 2), slice(12 * (rank % 2), 12 * (rank % 2) + 12)
    for layer in range(3):
        path = f"model.layers.{layer}.mlp.experts"
        gates, ups = values[f"{path}.gate_up_proj"][experts].unflatten(1, (2, -1))[:, :, columns].unbind(1)
        assert torch.equal(held[f"{path}.gate_up_proj"], torch.cat([gates, ups], 1).reshape(-1))
        assert torch.equal(held[f"{path}.down_proj"], values[f"{path}.down_proj"][experts][..., columns].reshape(-1))


# -- odd batches


@on_ranks(2)
def test_experts_that_no_token_chose_have_gradients_of_zero_and_nobody_waits():
    """Every token chooses experts 0 and 1, which rank 0 holds: rank 1's experts have no rows, and gradients of zero."""
    for case in (CASE, dataclasses.replace(CASE, family="mixtral")):
        for options in ({}, {"activation_checkpointing": "full"}, {"strategy": "ddp"}):
            model = case.build()
            for path, module in model.named_modules():
                if path.endswith(("mlp.router", "mlp.gate")):
                    with torch.no_grad():
                        module.weight.zero_()  # ties, which topk resolves alike: the first of equal scores

            def choose(scores: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
                kwargs.pop("dim", None)
                chosen = torch.tensor([0, 1]).expand(*scores.shape[:-1], 2)
                return scores.gather(-1, chosen), chosen

            with mock.patch.object(torch.Tensor, "topk", choose), mock.patch.object(torch, "topk", choose):
                model = sw.parallelize(model, sw.ParallelPlan(ep=2, **options))
                case.loss(model, 0, 0, distributed.get_rank()).backward()
            grads = [p.grad for name, p in model.named_parameters() if ".experts." in name]
            assert grads
            assert all(grad is not None for grad in grads)
            largest = max(own(grad).abs().max().item() for grad in grads)
            assert (largest > 0) == (distributed.get_rank() == 0)


@on_ranks(2)
def test_ranks_may_have_different_numbers_of_tokens():
    """Ranks with batches of different sizes exchange tokens all the same."""
    model = sw.parallelize(CASE.build(), sw.ParallelPlan(ep=2))
    tokens, targets = batch(0, 0, distributed.get_rank())
    if distributed.get_rank() == 1:
        tokens, targets = tokens[:1, :3], targets[:1, :3]
    plain = CASE.build()(tokens, targets)
    loss = model(tokens, targets)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    loss.backward()
    model.eval()
    assert sw.eval_step(model, (tokens, targets)).item() > 0
    with torch.no_grad():
        logits = CASE.build().eval()(tokens)
        assert torch.allclose(model(tokens), logits, atol=1e-5)
    if distributed.get_rank() == 1:
        tokens = tokens[:0]
    for plan in (sw.ParallelPlan(ep=2), sw.ParallelPlan(expert_capacity=1.0)):
        model = sw.parallelize(CASE.build(), plan)
        logits = model(tokens)
        assert logits.shape[:2] == tokens.shape
        logits.sum().backward()
        assert torch.isfinite(sw.clip_grad_norm(model, 1.0))


@on_ranks(2)
def test_narrow_dtypes_and_one_ranks_overflow_are_the_same_on_all_ranks():
    """fp16 with its scaler, where one expert's gradient overflows, and bf16: ranks skip and step together."""
    for strategy in ("ddp", "zero3"):
        policy = sw.PrecisionPolicy(param_dtype="fp16", reduce_dtype="fp16")
        model = sw.parallelize(CASE.build(), sw.ParallelPlan(ep=2, strategy=strategy, mp_policy=policy))
        optimizer, scaler = optimizer_of(model.parameters()), sw.GradScaler("cpu", init_scale=8.0)
        for is_bad in (True, False):
            loss = CASE.loss(model, 0, 0, distributed.get_rank())
            scaler.scale(loss).backward()
            if is_bad and distributed.get_rank() == 1:
                expert = next(p for name, p in model.named_parameters() if ".experts." in name and p.grad is not None)
                expert.grad.fill_(float("inf"))
            before = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            has_changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            assert has_changed != is_bad
    policy = sw.PrecisionPolicy(param_dtype="bf16")
    for case in (CASE, dataclasses.replace(CASE, family="mixtral")):
        plain = case.loss(case.build(), 0, 0, distributed.get_rank()).item()
        model = sw.parallelize(case.build(), sw.ParallelPlan(ep=2, mp_policy=policy, offload_policy="cpu"))
        losses = train(model, optimizer_of(model.parameters()), range(2), case)
        assert losses[0] == pytest.approx(plain, rel=2e-2)


CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, num_layers: 3, num_experts: 4, tied: false}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 3, micro_batch_size: 2, gradient_accumulation_steps: 2, eval_every: 3, eval_batches: 1}
log: {tensorboard: false}
"""


@pytest.mark.long
def test_a_run_under_ep_is_the_run_without(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)
    found = {}
    for name in ("ep=1", "ep=2"):
        command = [sys.executable, "-m", "shardwise", "train", "run.yaml", "--nproc", "2", "--run-dir", name]
        done = subprocess.run(
            [*command, "--set", f"parallel.{name}"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        found[name] = [summary["first_loss"], summary["final_loss"], summary["eval_loss_final"]]
    assert found["ep=2"] == pytest.approx(found["ep=1"], rel=1e-5)


def two_steps(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Under a plan that says more than ``ep``."""
    options: dict = {
        "host": {"offload_policy": "cpu"},
        "tensors": {"granularity": "tensor"},
        "recomputed": {"activation_checkpointing": sw.wrap_by_name("blocks.*.mlp")},
        "units": {"auto_wrap_policy": sw.wrap_by_name("blocks.*.mlp", "blocks.*.attention")},
        "rank 0": {"sync": "rank0"},
    }.get(kind, {})
    model = sw.deferred_init(CASE.build) if kind == "deferred" else CASE.build()
    if kind == "rank 0" and distributed.get_rank() > 0:
        model = model.to("meta")
    model = sw.parallelize(model, sw.ParallelPlan(ep=2, **options))
    is_flat = kind in {"flat", "in backward"}
    optimizer = torch.optim.AdamW(sw.flat_parameters(model) if is_flat else model.parameters(), lr=1e-3)
    if kind == "in backward":
        sw.optimizer_in_backward(model, optimizer)
    losses = []
    for step in range(2):
        loss = CASE.loss(model, step, 0, distributed.get_rank())
        loss.backward()
        losses.append(loss.item())
        if kind != "in backward":
            optimizer.step()
            optimizer.zero_grad()
    return losses, sw.full_state_dict(model)


@on_ranks(2)
def test_what_else_a_plan_says_changes_no_bit():
    expected, whole = two_steps("plain")
    for kind in ("flat", "in backward", "host", "tensors", "recomputed", "units", "deferred", "rank 0"):
        losses, state = two_steps(kind)
        assert losses == expected, kind
        for name, value in state.items():
            assert torch.equal(value, whole[name]), (kind, name)


def mixture_written(num_experts: int) -> Written:
    """What forward and backward of a mixture write under ``ep`` of 2."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden": 16, "num_heads": 2, "vocab_size": 32, "seq_len": 8}
    model = sw.models.gpt("gpt-tiny", **sizes, num_experts=num_experts, experts_per_token=2)
    model = sw.parallelize(model, sw.ParallelPlan(ep=2, auto_wrap_policy=sw.wrap_by_name("blocks.*.mlp")))
    x_BTC = torch.randn(2, 8, 16, requires_grad=True)
    with Written() as written:
        model.blocks[0].mlp(x_BTC).sum().backward()
    return written


@on_ranks(2)
def test_rows_that_are_in_order_are_not_put_into_it():
    assert mixture_written(4).calls["cat"] > 0
    one_each = mixture_written(2)
    assert one_each.calls["cat"] == 0
    assert one_each.calls["new_zeros"] <= 1  # the gradient of the choice; every place of a row is written


# -- controls


def compare_with_a_mistake(mistake: str, limits: Tolerance) -> None:
    make, returned = engine.Group, expert_route._send_back

    def by_fewer(*args: object, **given: object) -> object:
        group = make(*args, **given)
        if group.facts.is_expert:
            group.gradient.set_divisor(group.facts.num_ranks // 2)
        return group

    def in_order_of_arrival(rows: Tensor, route: Any) -> Tensor:
        return returned(rows.flip(0), route)

    with (
        mock.patch.object(engine, "Group", by_fewer)
        if mistake == "divisor of the ranks that share experts"
        else mock.patch.object(expert_route, "_send_back", in_order_of_arrival)
    ):
        compare(Mixture(strategy="ddp"), steps=5, limits=limits)


@pytest.mark.parametrize(
    ("mistake", "limits", "seen"),
    [
        ("divisor of the ranks that share experts", Tolerance(1e-3, math.inf), "norm is"),
        ("results to other tokens", Tolerance(math.inf, 1e-4), "is off by"),
    ],
)
def test_a_wrong_divisor_and_a_wrong_order_are_seen(mistake, limits, seen):
    with pytest.raises(RankFailure, match=f"failed first: AssertionError: .*{seen}"):
        run_on_ranks(compare_with_a_mistake, 2, mistake, limits)


# -- what is refused


def refusals() -> list[str]:
    found = []
    for build, options, error in (
        (Mixture(model=(("num_experts", 0),)).build, {}, PlanError),
        (Mixture(model=(("num_experts", 3),)).build, {}, PlanError),
        (CASE.build, {"auto_wrap_policy": sw.wrap_by_class({"FeedForward"})}, PlanError),
        (CASE.build, {"ignored": ["blocks.*.mlp.experts"]}, PlanError),
        (CASE.build, {"ep": 4}, MeshError),
    ):
        found.append(refusal(error, sw.parallelize, build(), sw.ParallelPlan(**{"ep": 2, **options})))
    ids, _ = batch(0, 0, 0)
    stages = sw.parallelize(dataclasses.replace(CASE, family="mixtral").build(), sw.ParallelPlan(pp=2))
    with pytest.raises(PlanError) as caught:  # a loss of routers, which other stages have
        sw.train_step(stages, {"input_ids": ids, "labels": ids})
    found.append(str(caught.value))
    model = sw.parallelize(CASE.build(), sw.ParallelPlan(ep=2))
    return [*found, str(sw.summary(model))]


def test_what_cannot_be_divided_is_refused_by_name_and_the_summary_says_who_holds_what():
    first, second = run_on_ranks(refusals, 2)
    none, odd, inside, ignored, mesh, routers, summary = first
    assert none.startswith("expert parallelism: GPT has no mixture of experts that is known")
    assert odd.startswith("ep=2 does not divide the 3 experts of 'blocks.0.mlp'.\n  Set ep to one of 1, 3.")
    assert inside.startswith("unit 'blocks.0.mlp.experts.0' lies in the experts of 'blocks.0.mlp'")
    assert ignored.startswith("ep=2: experts of 'blocks.0.mlp' are ignored")
    assert mesh.startswith("ep=4 does not divide the dp_shard=2 * cp=1 = 2 ranks that share parameters")
    assert "such as router logits" in routers
    assert "Switch that off (output_router_logits=False" in routers
    assert "experts: this rank is 1 of 2 (ep), with experts 0 to 1 of 4 of 3 mixtures; they take all tokens" in summary
    assert "experts: this rank is 2 of 2 (ep), with experts 2 to 3 of 4" in second[-1]
