"""The page of plans holds the figures of their estimates, and draws the simulated step behind the first."""

from __future__ import annotations

import pytest

from shardwise.planner import Cluster, Estimate, Workload, estimate
from shardwise.planner.estimate import simulated, simulated_spans
from shardwise.planner.explain import gib, recommendation, seconds
from shardwise.report import plan_report
from shardwise.sim.pipeline import SimulatedPipeline
from shardwise.sim.step import SimulatedStep
from shardwise.spec.errors import PlanError
from shardwise.spec.plan import ParallelPlan
from shardwise.spec.schedule import PipelinePolicy
from shardwise.spec.shape import known_shape
from tests.report.test_pages import Page, charts


def made(plan: ParallelPlan, *, model: str = "llama-3-8b", global_batch: int = 128, **workload: int) -> Estimate:
    cluster = Cluster(gpu="H100-80GB-SXM", num_gpus=64)
    asked = Workload(seq_len=8192, global_batch=global_batch, **workload)
    return estimate(known_shape(model), plan, cluster, asked)


def test_every_plan_is_in_the_table_with_its_figures() -> None:
    plans = [made(ParallelPlan(strategy="zero3")), made(ParallelPlan(strategy="zero2", tp=2))]
    too_large = made(ParallelPlan(strategy="ddp"))
    text = Page(plan_report([*plans, too_large])).text
    for each in plans:
        assert each.fits
        for words in (
            seconds(each.step_time_s),
            f"{each.tflops_per_gpu:.1f}",
            gib(each.memory.device_bytes),
            f"compute {each.time.by_category['compute'] / each.step_time_s:.0%}, ",
        ):
            assert words in text
        for held in each.memory.by_category.values():
            assert gib(held) in text
    assert "3 plans, of which 2 fit." in text
    assert "Plan 1 is the fastest by prediction." in text
    assert f"no n/a n/a n/a n/a {gib(too_large.memory.device_bytes)}" in text
    text = Page(plan_report([*plans[::-1], too_large])).text
    faster = plans[1].step_time_s / plans[0].step_time_s - 1
    assert f"Plan 2 would be {faster:.1%} faster by prediction, with zero3." in text


def test_a_faster_plan_that_only_lacks_something_is_named_by_what_it_lacks() -> None:
    plans = [made(ParallelPlan(strategy="zero3", tp=2)), made(ParallelPlan(strategy="zero3"))]
    assert recommendation(plans).endswith(" faster by prediction, without tp2.")


def test_where_nothing_fits_the_page_says_what_would_help() -> None:
    text = Page(plan_report([made(ParallelPlan(strategy="ddp"))], remedies=["128 GPUs <b>"])).text
    assert "It does not fit" in text
    assert "It would fit with: 128 GPUs <b>" in text
    with pytest.raises(PlanError, match="there is no plan to report"):
        plan_report([])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_the_drawn_step_takes_the_time_of_the_estimate(strategy: str) -> None:
    each = made(ParallelPlan(strategy=strategy))
    step = simulated(each)
    assert isinstance(step, SimulatedStep)
    assert step.seconds == pytest.approx(each.step_time_s, rel=0.02)
    spans, note = simulated_spans(step)
    assert note == "Drawn is the last of 2 microbatches, with the optimizer's step."
    last = step.microbatches[-1][0].end_s + step.optimizer_s
    assert max(span.end_s for span in spans) == pytest.approx(last)
    assert {"compute", "optimizer", "reduce"} <= {span.stream for span in spans}


def test_the_drawn_pipeline_has_the_bubble_of_its_schedule() -> None:
    each = made(ParallelPlan(strategy="zero1", pp=4, tp=4, pipeline=PipelinePolicy("1f1b")), global_batch=512)
    step = simulated(each)
    assert isinstance(step, SimulatedPipeline)
    page = Page(plan_report([each]))
    assert "Of 128 microbatches 32 are drawn." in page.text
    labels = [row["label"] for row in charts(page, "lanes")[0]["rows"]]
    assert labels.count("F0") == labels.count("B31") == 4
    assert f"{float(step.timing.bubble_share):.1%}" in page.text
