"""Messages of pipelines are those that are predicted; a stage that fails or disagrees ends all ranks."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import distributed

import shardwise as sw
from shardwise.spec.errors import RankDisagreement
from shardwise.spec.schedule import build
from shardwise.testing import RankFailure, probe, run_on_ranks
from tests.common.pipelines import peak_stored_pairs
from tests.common.ranks import refusal
from tests.parallel.pipeline.messages import Copies, CrossingBytes, messages

HIDDEN, SEQ, MICRO_BATCH, NUM_MICROBATCHES = 24, 6, 2, 4
CASES = (("gpipe", 2, 1), ("1f1b", 2, 1), ("interleaved-1f1b", 2, 2), ("zb-h1", 2, 1), ("zb-v", 2, 2))


def build_gpt():
    torch.manual_seed(0)
    return sw.models.gpt("gpt-tiny", num_layers=5, hidden=HIDDEN, num_heads=2, vocab_size=31, seq_len=SEQ)


def tokens(rows=MICRO_BATCH * NUM_MICROBATCHES, seq=SEQ):
    return torch.randint(0, 31, (rows, seq), generator=torch.Generator().manual_seed(1))


def record(cases):
    results = []
    for schedule, pp, _ in cases:
        model = sw.parallelize(build_gpt(), sw.ParallelPlan(pp=pp, pipeline=schedule))
        batch = tokens(), tokens()
        sw.train_step(model, batch, num_microbatches=NUM_MICROBATCHES)
        with sw.record_collectives(model) as events:
            sw.train_step(model, batch, num_microbatches=NUM_MICROBATCHES)
        kinds = {"send", "receive"}
        found = [(e.kind, e.unit, e.sent_bytes, e.axis) for e in events if e.axis == "pp" and e.kind in kinds]
        gathers = [e.unit for e in events if e.kind == "all_gather" and e.axis != "pp"]
        results.append(
            (
                found,
                probe(model).peak_microbatches,
                gathers,
                sum(unit.padded_numel > 0 for unit in probe(model).units),
            )
        )
    return results


def test_messages_and_activations_in_flight_are_those_predicted():
    ranks = run_on_ranks(record, 4, CASES, timeout_s=120)
    copies = Copies("token_embedding.weight", (0, 1), 31 * HIDDEN * 4)
    each = CrossingBytes(MICRO_BATCH * SEQ * HIDDEN * 4)
    for place, (name, pp, virtual) in enumerate(CASES):
        schedule = build(name, pp, NUM_MICROBATCHES, virtual)
        for rank, results in enumerate(ranks):
            found, peak, gathers, num_units = results[place]
            stage = rank // 2  # two replicas
            shared = [] if name == "zb-v" else [copies]  # rank 0 has the first and the last stage
            assert found == messages(schedule, stage, [[each]] * (pp * virtual - 1), shared), (name, rank)
            assert peak == peak_stored_pairs(name, pp, NUM_MICROBATCHES, virtual, stage).activations, (name, rank)
            assert len(gathers) == len(set(gathers)) == num_units, "a unit is gathered once a step"


def message_of(step, *args, **options):
    try:
        step(*args, **options)
    except RankDisagreement as error:
        return str(error)
    return None


def disagreements():
    is_odd = distributed.get_rank() == 1
    found = []
    model = sw.parallelize(build_gpt(), sw.ParallelPlan(pp=2))
    usual, short = [(tokens(seq=seq), tokens(seq=seq)) for seq in (SEQ, SEQ - 1)]
    for knows_all in (False, True):
        if knows_all:
            sw.train_step(model, short)
            sw.eval_step(model, usual)
        texts = [
            message_of(sw.train_step, model, short if is_odd else usual),
            message_of(sw.eval_step if is_odd else sw.train_step, model, usual),
            message_of(sw.train_step, model, usual, num_microbatches=4 if is_odd else 2),
            message_of(sw.train_step, model.train(not is_odd), usual),
        ]
        found.append(texts)
        model.train()
        sw.train_step(model, usual)
    return found


def disagree():
    model = sw.parallelize(build_gpt(), sw.ParallelPlan(pp=2))
    shorter = distributed.get_rank() == 1
    sw.train_step(model, (tokens(seq=SEQ - shorter), tokens(seq=SEQ - shorter)), num_microbatches=2)


def test_ranks_that_disagree_about_a_step_say_so_and_go_on():
    told_so = run_on_ranks(disagreements, 2, timeout_s=60)
    assert told_so[0] == told_so[1]
    for found in told_so[0]:
        starts = "the ranks of a pipeline disagree about the step: rank 0 along pp has "
        usual = "2 microbatches of [4, 6], [4, 6] with gradients in training mode, rank 1 along pp has "
        assert all(text.startswith(starts + usual) for text in found)
        ends = [text.removeprefix(starts + usual).partition(".\n")[0] for text in found]
        assert ends == [
            "2 microbatches of [4, 5], [4, 5] with gradients in training mode",
            "2 microbatches of [4, 6], [4, 6] without gradients in training mode",
            "4 microbatches of [2, 6], [2, 6] with gradients in training mode",
            "2 microbatches of [4, 6], [4, 6] with gradients in evaluation mode",
        ]


def test_a_stage_that_disagrees_in_shape_ends_all_ranks_with_one_message():
    text = refusal(RankFailure, run_on_ranks, disagree, 2, timeout_s=60)
    shown = "rank 0 along pp has 2 microbatches of [4, 6], [4, 6] with gradients"
    assert text.count("RankDisagreement") >= 2
    assert shown in text


def die():
    model = sw.parallelize(build_gpt(), sw.ParallelPlan(pp=2))
    sw.train_step(model, (tokens(), tokens()))
    if distributed.get_rank() == 1:
        raise OSError("the device is gone")
    sw.train_step(model, (tokens(), tokens()))


def test_a_rank_that_dies_ends_its_pipeline():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="the device is gone"):
        run_on_ranks(die, 2, timeout_s=60)
    assert time.monotonic() - start < 50


@pytest.mark.cases(2)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("zb-v", 2)])
def test_a_dry_run_sends_what_is_predicted(name, virtual, backend):
    each = CrossingBytes(MICRO_BATCH * SEQ * HIDDEN * 4)
    batch = tokens(MICRO_BATCH), tokens(MICRO_BATCH)
    plan = sw.ParallelPlan(pp=2, pipeline=name, activation_checkpointing="full")
    for rank in range(4):
        run = sw.dry_run(
            build_gpt, plan, world_size=4, rank=rank, backend=backend, batch=batch, num_microbatches=NUM_MICROBATCHES
        )
        found = [(e.kind, e.unit, e.sent_bytes, e.axis) for e in run.events if e.axis == "pp"]
        shared = [] if name == "zb-v" else [Copies("token_embedding.weight", (0, 1), 31 * HIDDEN * 4)]
        schedule = build(name, 2, NUM_MICROBATCHES, virtual)
        is_early = backend == "gloo"  # NCCL works in order
        assert found == messages(schedule, rank // 2, [[each]] * (2 * virtual - 1), shared, is_early=is_early)


def measure():
    model = sw.parallelize(build_gpt(), sw.ParallelPlan(pp=2, pipeline="zb-v"))
    with sw.record_pipeline(model) as steps:
        sw.train_step(model, (tokens(), tokens()), num_microbatches=NUM_MICROBATCHES)
        sw.eval_step(model, (tokens(), tokens()), num_microbatches=2)
    sw.train_step(model, (tokens(), tokens()))
    return [(step.schedule, step.timing, step.bubble, str(step)) for step in steps]


def test_a_recorded_step_knows_when_every_rank_computed():
    first, second = run_on_ranks(measure, 2, timeout_s=60)
    assert first == second
    assert len(first) == 2, "what is outside is not recorded"
    for schedule, timing, bubble, drawing in first:
        for rank, spans in enumerate(timing.spans):
            assert tuple(span.action for span in spans) == schedule.computations(rank)
            assert all(start <= end for start, end, _ in spans)
            assert all(before.end <= after.start for before, after in itertools.pairwise(spans))
        assert bubble >= 0
        assert drawing.splitlines()[0].startswith("rank 0 ")
