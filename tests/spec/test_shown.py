"""Results in a notebook: short reprs, tables, dicts, pandas; and the CLI's page from Python."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cli import main
from shardwise.planner.explain import table_rows
from shardwise.report import read_run
from shardwise.spec.errors import ConfigError
from shardwise.testing import run_on_ranks

CLUSTER = sw.planner.Cluster(gpu="A100-40GB-SXM", num_gpus=8)


@functools.cache
def plans(**fixed: Any) -> sw.planner.Plans:
    workload = sw.planner.Workload(seq_len=1024, global_batch=64)
    return sw.planner.search(sw.ModelShape.from_config("gpt2-xl"), CLUSTER, workload, **fixed)


def test_plans_print_the_page_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "gpt2-xl", "--gpu", "A100-40GB-SXM", "--gpus", "8", "--seq", "1024", "--global-batch", "64"]
    found = plans()
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith(str(found))
    assert main([*arguments, "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    del expected["command"]
    assert json.loads(json.dumps(found.to_dict())) == expected


def test_plans_that_do_not_fit_say_what_they_need_and_nothing_of_remedies() -> None:
    workload = sw.planner.Workload(seq_len=2048, global_batch=8)
    found = sw.planner.search(sw.ModelShape.from_config("gpt-175b"), CLUSTER, workload, strategy="ddp", tp=1, pp=1)
    text = str(found)
    assert "Nothing fits. Nearest is " in text
    assert "were found to help" not in text
    assert "no fit" in found._repr_html_()


def test_a_plan_is_short_in_repr_and_shows_its_own_page() -> None:
    found = plans(strategy="zero3", tp=1, pp=1, cp=1)
    first = found[0]
    assert repr(first).startswith("Estimate(zero3: ")
    assert len(repr(first)) < 100
    assert len(repr(found)) < 150
    assert repr(first.plan) == (
        "ParallelPlan(strategy='zero3', dp_shard=8, mp_policy=PrecisionPolicy(param_dtype='bf16'))"
    )
    assert "memory of plan 1" in str(first)
    assert "Plan 1 is" not in str(first)  # of one plan there is nothing to say about the choice
    assert first.to_dict()["memory"]["device_bytes"] == first.memory.device_bytes


def test_reprs_show_what_differs_from_the_defaults_and_read_back() -> None:
    for plan in (
        sw.ParallelPlan(),
        sw.ParallelPlan("zero1", tp=2, sync_buffers="none", compile=False, reshard_after_forward=False),
        sw.ParallelPlan(mp_policy=sw.PrecisionPolicy("fp16", reduce_dtype=None), offload_policy="cpu"),
    ):
        names = {name: getattr(sw, name) for name in ("ParallelPlan", "PrecisionPolicy", "OffloadPolicy")}
        assert eval(repr(plan), names) == plan
    assert repr(sw.ParallelPlan()) == "ParallelPlan(strategy='zero3')"
    assert repr(sw.ParallelPlan(merge_units=False)) == "ParallelPlan(strategy='zero3', merge_units=False)"
    traced = sw.trace_model(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.ones(3, 4), loss_fn=mean)
    assert repr(traced) == "TracedModel(Sequential: 58 parameters in 2 units, a step of 3 samples)"


def test_tables_are_html_with_escaped_cells_and_pandas_has_a_row_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    found = plans()
    assert found._repr_html_().count("<tr>") == 1 + sum(made.fits for made in table_rows(found))
    pd = pytest.importorskip("pandas")
    frame = found.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame["step_time_s"]) == [made.step_time_s for made in found]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ConfigError, match=r"needs pandas, which is not installed.\n  pip install pandas, or call to_dict"
    ):
        found.to_pandas()


def test_a_run_shows_its_newest_steps(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 2.0 / step, "lr": 1e-3, "note": "<b>"} for step in range(1, 31)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + "damaged\n")
    run = read_run(tmp_path)
    assert repr(run) == f"Run({tmp_path.name}: 30 steps)"
    page = run._repr_html_()
    assert page.count("<tr>") == 1 + 10
    assert ">30<" in page
    assert ">20<" not in page
    assert "1 damaged line of metrics.jsonl left out" in page
    assert json.loads(json.dumps(run.to_dict()))["records"] == lines
    pytest.importorskip("pandas")
    assert list(run.to_pandas()["loss"]) == [line["loss"] for line in lines]


class Named(nn.Sequential):
    """A model whose class has characters of HTML in its name."""


Named.__name__ = "Named<b>"


def build() -> nn.Module:
    torch.manual_seed(0)
    return Named(nn.Linear(8, 16), nn.Linear(16, 8))


def mean(output: torch.Tensor, batch: Any) -> torch.Tensor:
    del batch
    return output.square().mean()


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """As models of transformers count."""
    tables = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if not (exclude_embeddings and name in tables) and (parameter.requires_grad or not only_trainable)
    )


def counts() -> list[list[int]]:
    """Of the plain model, and of the same one under three plans; some parameters are frozen afterwards."""
    found = []
    for plan in (None, {"strategy": "zero3"}, {"strategy": "ddp", "tp": 2}, {"strategy": "ddp", "pp": 2}):
        model: Any = sw.models.gpt("gpt-tiny")
        model.num_parameters = functools.partial(num_parameters, model)
        if plan is not None:
            sw.parallelize(model, sw.ParallelPlan(**plan))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.endswith("bias"))
        arguments = ({}, {"exclude_embeddings": True}, {"only_trainable": True})
        found.append([model.num_parameters(**given) for given in arguments])
    return found


def results() -> dict[str, Any]:
    model = sw.parallelize(build(), sw.ParallelPlan(strategy="zero3"))
    found = sw.summary(model)
    return {
        "repr": repr(found),
        "text": str(found),
        "html": found._repr_html_(),
        "records": found.to_records(),
        "dict": json.dumps(found.to_dict()),
        "counts": counts(),
    }


def test_a_summary_is_a_table_of_its_units_and_num_parameters_is_that_of_the_whole_model() -> None:
    shown, other = run_on_ranks(results, 2)
    plain, zero3, tp, pp = shown["counts"]
    assert plain == zero3 == tp
    assert pp[:2] == plain[:2]
    assert plain[0] > plain[1] > 0
    assert plain[0] > plain[2] > 0
    assert shown["repr"].startswith("Summary(280 parameters in 1 units on 2 ranks")
    assert shown["text"].startswith(shown["repr"].removeprefix("Summary(").removesuffix(")"))
    assert "Named&lt;b&gt;" in shown["html"]
    assert "<b>" not in shown["html"]
    (row,), (row_of_other,) = shown["records"], other["records"]
    assert (row["class"], row["parameters"], row["owned"] + row_of_other["owned"]) == ("Named<b>", 280, 280)
    assert json.loads(shown["dict"])["num_parameters"] == 280


def test_dry_runs_and_parity_are_tables_too() -> None:
    dry = sw.dry_run(build, sw.ParallelPlan(), world_size=4, batch=torch.ones(2, 8), loss_fn=mean)
    assert repr(dry).startswith("DryRun(280 parameters, ")
    kinds = {row["collective"]: row["sent_bytes"] for row in json.loads(json.dumps(dry.to_dict()))["events"]}
    assert sum(kinds.values()) == dry.sent_bytes
    assert "all_gather" in dry._repr_html_()
    report = sw.parity(build, [torch.ones(2, 8)], mean, {"whole": sw.ParallelPlan()})
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["holds"] is True
    assert '<td style="text-align:left">whole</td>' in report._repr_html_()
    assert len(repr(report)) < 100
