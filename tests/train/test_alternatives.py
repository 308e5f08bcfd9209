"""A plan under other strategies, and what cannot be held against a process without casts."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.parity import STRATEGIES
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.policies import OffloadPolicy, wrap_by_class
from shardwise.train.parity import under_strategies


def test_what_a_strategy_cannot_do_is_left_out_and_named() -> None:
    plan = ParallelPlan(
        strategy="hsdp", dp_replicate=2, offload_policy=OffloadPolicy(parameters=True), reshard_after_forward=False
    )
    plans = under_strategies(plan, ["hsdp", "zero3", "ddp", "zero1"])
    assert list(plans) == ["hsdp", "zero3", "ddp -offload_policy", "zero1 -offload_policy"]
    assert plans["hsdp"] is plan
    assert plans["zero3"].offload_policy == plan.offload_policy
    assert plans["zero3"].reshard_after_forward == "auto"
    assert plans["ddp -offload_policy"].offload_policy == "none"
    assert all(other.dp_replicate == 2 for other in plans.values())


def test_replicas_of_one_process_have_no_units() -> None:
    plan = ParallelPlan(
        auto_wrap_policy=wrap_by_class(["Block"]), activation_checkpointing="full", offload_policy="cpu"
    )
    ((name, other),) = under_strategies(plan, ["data_parallel"]).items()
    assert name == "data_parallel -auto_wrap_policy -activation_checkpointing"
    assert (other.auto_wrap_policy, other.activation_checkpointing) == ("auto", "none")
    assert other.offload_policy == "cpu"


def test_every_plan_of_the_default_list_can_be_made_under_any_configuration() -> None:
    from shardwise.spec.plan import check_plan

    for fields in (
        {"quantized_gather": "int8"}, {"offload_policy": {"parameters": True}}, {"reshard_after_forward": 2},
        {"offload_policy": {"gradients": False, "optimizer": False, "parameters": True}},
    ):  # fmt: skip
        for plan in under_strategies(ParallelPlan(**fields), [*STRATEGIES, "hsdp", "data_parallel"]).values():
            check_plan(plan)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("mp_policy={param_dtype: bf16}", "ddp: mp_policy rounds numbers"),
        ("quantized_gather=int8", "zero1: quantized_gather rounds numbers"),
        ("quantize_frozen=bf16", "ddp: quantize_frozen rounds numbers"),
    ],
)
def test_what_rounds_by_design_is_not_compared_with_a_process_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], setting: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["parity", "--set", f"parallel.{setting}", "--set", "data.source=random"]) == 78
    assert said in capfd.readouterr().err


def test_the_demo_says_why_it_does_not_compare() -> None:
    """The comparison comes after training, which must not fail for it."""
    import torch

    from shardwise.train.config.resolve import resolve
    from shardwise.train.config.sections import read_config
    from shardwise.train.parity import parity_line

    draft = read_config(
        None, ["parallel.mp_policy={param_dtype: bf16}"], base={"data": {"source": "random"}}, title="t"
    )
    line = parity_line(resolve(draft, 1), data=None, device=torch.device("cpu"))
    assert line.startswith("not compared with one process: zero3: mp_policy rounds numbers")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.micro_batch_size=60"], "3 steps of 60 samples need 180, and the data has 140"),
        (["data.streaming=true", "data.source=a.jsonl"], "streamed text has no samples by number"),
    ],
)
def test_the_demo_says_which_data_it_does_not_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], said: str
) -> None:
    import torch

    from shardwise.train.config.resolve import data_of, resolve
    from shardwise.train.config.sections import read_config
    from shardwise.train.parity import parity_line

    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a few words " * 750)
    Path("a.jsonl").write_text('{"text": "a few words"}\n' * 750)
    source = {"source": "a.txt", "eval_source": "a.txt", "seq_len": 64}
    resolved = resolve(read_config(None, settings, base={"data": source}, title="t"), 1)
    line = parity_line(resolved, data_of(resolved), torch.device("cpu"))
    assert line == f"not compared with one process: parity: {said}{line.partition(said)[2]}"


def test_replicas_of_one_process_are_compared_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["parity", "--strategies", "data_parallel", "--nproc", "2", "--set", "data.source=random"]) == 78
    assert "--nproc 1" in capfd.readouterr().err
