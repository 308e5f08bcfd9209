"""Pipelines in fp16: the scaled loss, and one decision on all ranks about gradients that are not finite."""

from __future__ import annotations

import torch

import shardwise as sw
from shardwise.testing import probe, run_on_ranks
from tests.common import models
from tests.common.own import own
from tests.parallel.pipeline.test_pipeline import batch

CASES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
POLICY = sw.PrecisionPolicy(param_dtype="fp16", output_dtype="fp32")


def train(options):
    """Losses, norms and scales; the third step has an inf in the gradients of one parameter of one stage."""
    torch.manual_seed(5)
    plan = sw.ParallelPlan(
        strategy="zero3", mp_policy=POLICY, accumulation="unsharded" if "pp" not in options else "auto", **options
    )
    model = sw.parallelize(models.build("gpt"), plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = sw.GradScaler(init_scale=2.0**10)
    results = []
    for step in range(4):
        loss = sw.train_step(model, batch(step, 0), num_microbatches=4, scaler=scaler)
        if step == 2:
            first = dict(model.named_parameters()).get("blocks.0.mlp.up.weight")
            if first is not None and first.shape.numel() and first.grad is not None:
                own(first.grad).view(-1)[0] = torch.inf
        scaler.unscale_(optimizer)
        norm = sw.clip_grad_norm(model, 1.0)
        has_found = scaler.has_found_inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results.append((loss.item(), None if has_found else norm.item(), has_found, scaler.get_scale()))
    assert probe(model).num_updates == 3, "one step was skipped"
    return results


def train_all():
    return [train({"pp": 2, "pipeline": name}) for name in CASES]


def test_fp16_with_a_scaler_equals_one_process_and_an_inf_in_one_stage_skips_the_step_of_all():
    expected = run_on_ranks(train, 1, {})[0]
    ranks = run_on_ranks(train_all, 2, timeout_s=120)
    assert [has_found for _, _, has_found, _ in expected] == [False, False, True, False]
    for results in ranks:
        for name, found in zip(CASES, results, strict=True):
            assert found == expected, name
