"""A run that its devices cannot hold is refused before anything starts, with what is largest and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import shardwise as sw
from shardwise.cli import main
from shardwise.spec.errors import MemoryBudgetError
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.predicted.budget import Device, check_budget, find_device
from shardwise.train.predicted.workload import flops_per_step, optimizer_of, shape_of, trace_model, workload_of

GIB = 1 << 30
A100 = Device("cuda", 40 * GIB)


def run(*overrides: str, ranks: int = 8) -> RunConfig:
    base = {"model": {"preset": "gpt2-xl"}, "data": {"source": "random", "seq_len": 1024}}
    settings = ["parallel.mp_policy.param_dtype=bf16", "train.micro_batch_size=8", *overrides]
    return resolve(read_config(None, settings, base=base, title="test"), ranks)


def refusal(resolved: RunConfig, device: Device) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        check_budget(resolved, device)
    assert caught.value.exit_code == 78
    return str(caught.value)


def test_the_message_has_the_largest_category_and_single_changes_that_fit():
    said = refusal(run("parallel.strategy=zero3", "train.micro_batch_size=16"), A100)
    assert "gpt2-xl under zero3 on 8 ranks needs" in said
    assert "which has 40.0 GiB; the largest part is activations" in said
    assert "train.micro_batch_size=1" in said
    assert "parallel.activation_checkpointing=full" in said
    assert "train.check_memory=false" in said


def test_a_strategy_that_fits_is_named():
    said = refusal(run("parallel.strategy=ddp", "train.micro_batch_size=1"), Device("cuda", 24 * GIB))
    assert "largest part is optimizer" in said
    assert "parallel.strategy=zero3" in said


def test_where_no_plan_on_these_ranks_fits_more_ranks_are_tried():
    said = refusal(run("model.preset=gpt-175b", "train.micro_batch_size=1"), Device("cuda", 80 * GIB))
    assert "128 ranks" in said or "64 ranks" in said


def test_where_no_single_change_fits_the_least_use_of_the_host_that_does_is_named():
    """And it does fit: eight GPUs with 40 GiB hold GPT-175B with everything in host memory that can be there."""
    small = ("model.preset=gpt-175b", "train.micro_batch_size=1")
    for device in (A100, Device("cuda", 24 * GIB)):
        said = refusal(run(*small), device)
        assert "zero3, activation_checkpointing=full, micro_batch_size=1 and offload_policy=cpu together" in said
        named = ("parallel.activation_checkpointing=full", "parallel.offload_policy=cpu")
        check_budget(run(*small, *named), device)
    assert "Nothing tried makes it fit: use a smaller model" in refusal(run(*small), Device("cuda", 3 * GIB))


def test_what_a_refusal_names_is_not_refused():
    fits = [("train.micro_batch_size=1",), ("parallel.activation_checkpointing=full",)]
    for overrides in fits:
        check_budget(run("parallel.strategy=zero3", "train.micro_batch_size=16", *overrides), A100)


def test_a_run_may_be_told_to_try_and_an_unknown_device_is_not_judged():
    check_budget(run("train.check_memory=false"), Device("cuda", GIB))
    check_budget(run(), None)


def test_offloaded_states_count_where_device_and_host_are_one():
    offloaded = run("parallel.strategy=zero3", "parallel.offload_policy=cpu", "train.micro_batch_size=1")
    assert "needs" in refusal(offloaded, Device("cpu", GIB))


def test_the_planner_is_asked_about_the_run_itself():
    resolved = run("optimizer.name=sgd", "optimizer.momentum=0.0", "parallel.activation_checkpointing=selective")
    workload = workload_of(resolved, shape_of(resolved))
    assert (workload.precision, workload.optimizer, workload.recompute) == ("bf16", "sgd", "selective")
    assert workload.optimizer_tensors == 0
    default = run("optimizer.name=sgd")
    assert workload_of(default, shape_of(default)).optimizer_tensors == 1  # its momentum is 0.9 unless said
    assert (workload.micro_batch, workload.global_batch) == (8, 64)
    assert shape_of(resolved).num_layers == 48


def test_memory_of_this_machine_is_shared_by_its_ranks():
    one, four = find_device(1), find_device(4)
    assert one is not None
    assert four is not None
    assert one.device_type == "cuda" or one.memory_bytes > 3 * four.memory_bytes


def test_train_refuses_before_it_starts_a_process(tmp_path, capsys):
    words = ["--set", "model.preset=gpt-1t", "--set", "data.source=random", "--set", "data.seq_len=128"]
    assert main(["train", "--nproc", "2", "--run-dir", str(tmp_path / "run"), *words]) == 78
    assert "MemoryBudgetError: gpt-1t under zero3 on 2 ranks needs" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_flops_are_known_for_presets_and_mixtures():
    dense = run("model.preset=gpt2", "data.seq_len=1024")
    shape, tokens = dense.model, 1024 * dense.batch.total
    assert shape is not None
    active = shape.num_parameters - shape.seq_len * shape.hidden
    expected = tokens * (6 * active + 12 * 12 * 768 * 1024)  # PaLM, appendix B
    assert flops_per_step(dense) == pytest.approx(expected, rel=0.01)
    mixture = flops_per_step(run("model.preset=gpt2", "model.num_experts=8", "data.seq_len=1024"))
    assert mixture is not None
    assert mixture > 1.5 * active * tokens


def test_what_a_spec_computes_is_known_for_sequences_of_tokens_too_and_traced_once():
    tokens, built = torch.arange(16) % 64, []
    spec = sw.TrainSpec(model=lambda: built.append(0) or sw.models.gpt("gpt-nano"), data=[(tokens, tokens)] * 64)
    resolved = resolve(read_config(None, base={}), 2, spec=spec)
    preset = run("model.preset=gpt-nano", "data.seq_len=16", "train.micro_batch_size=8", ranks=2)
    assert preset.batch.total == resolved.batch.total
    expected = flops_per_step(preset)
    assert flops_per_step(resolved) == pytest.approx(expected, rel=0.01)
    assert "needs" in refusal(resolved, Device("cuda", 1 << 20))
    assert len(built) == 1


class Endless(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Continues where its last reader left it."""

    at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            self.at += 1
            yield torch.arange(16) % 64, torch.arange(16) % 64


def test_an_iterable_is_read_by_plans_and_never_by_a_run_before_its_steps():
    data = Endless()
    spec = sw.TrainSpec(model=lambda: sw.models.gpt("gpt-nano"), data=data)
    resolved = resolve(read_config(None, base={}), 1, spec=spec)
    assert flops_per_step(resolved) is None
    assert data.at == 0
    assert trace_model(resolved, reads_iterables=True).seq_len == 16
    assert data.at == resolved.batch.micro


class Lion(torch.optim.Optimizer):
    """Keeps one state tensor for each parameter."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, {"lr": 1e-3})

    def step(self, closure: Any = None) -> None:
        assert closure is None
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("exp_avg", torch.zeros_like(p)).add_(p.grad)


@pytest.mark.parametrize(
    ("given", "counts_as"),
    [
        (lambda groups, lr: torch.optim.SGD(groups, lr=lr), "sgd"),
        (lambda groups, _lr: Lion(groups), "sgd-momentum"),
        (lambda groups, lr: torch.optim.Adafactor(groups, lr=lr), "adamw8bit"),
        (lambda groups, lr: torch.optim.AdamW(groups, lr=lr), "adamw"),
        (lambda groups, _lr: torch.optim.LBFGS(groups[0]["params"]), "adamw"),  # its step needs a closure
    ],
)
def test_a_spec_s_own_optimizer_is_judged_by_the_state_that_it_keeps(given: Any, counts_as: str) -> None:
    spec = sw.TrainSpec(optimizer=given)
    base = {"model": {"preset": "gpt2-xl"}, "data": {"source": "random", "seq_len": 64}}
    resolved = resolve(read_config(None, ["train.micro_batch_size=1"], base=base, title="test"), 1, spec=spec)
    assert optimizer_of(resolved.config.optimizer, given) == counts_as
    assert workload_of(resolved, shape_of(resolved)).optimizer == counts_as


def test_a_run_that_fits_with_its_own_optimizer_is_not_refused() -> None:
    tokens = torch.arange(16) % 64
    wide = {"num_layers": 2, "hidden": 2048, "num_heads": 16}
    given = {"model": lambda: sw.models.gpt("gpt2", **wide), "data": [(tokens, tokens)] * 64}
    device = Device("cuda", 4 * GIB)  # 4.9 GiB are needed with AdamW's states, 3.0 GiB without
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        spec = sw.TrainSpec(**given, optimizer=lambda groups, lr, kind=kind: kind(groups, lr=lr))
        resolved = resolve(read_config(None, ["train.micro_batch_size=1"], base={}), 1, spec=spec)
        if kind is torch.optim.SGD:
            check_budget(resolved, device)
        else:
            assert "needs" in refusal(resolved, device)
