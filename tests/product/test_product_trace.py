"""What a step sends on every axis of a mesh of pipeline, data- and tensor-parallel ranks is what is predicted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.sim.pipeline import StageSeconds, simulate_pipeline
from shardwise.sim.streams import Timeline
from shardwise.spec.memory.footprint import Replicas, reduce_bytes
from shardwise.spec.schedule import Action, Kind
from shardwise.spec.schedule import build as build_schedule
from shardwise.spec.traffic.data import Collective
from shardwise.testing import Probe, probe, run_on_ranks
from tests.parallel.pipeline.messages import Copies, CrossingBytes
from tests.parallel.tensor.step import TensorStep, gpt_elements
from tests.product.step import ProductStep, agreement_trace, gpt_stages, loss_trace, totals
from tests.sim.inside import inside
from tests.sim.rank_timeline import rank_timeline

LAYERS, HIDDEN, VOCAB, SEQ, MICRO_BATCH, M = 8, 24, 33, 6, 2, 4
STAGES_PER_RANK = {"interleaved-1f1b": 2, "zb-v": 2}
Trace = dict[str, list[tuple[str, str, int, str]]]


@dataclass(frozen=True)
class Case:
    """A plan, and how many ranks it is for."""

    world: int
    plan: dict[str, Any] = field(default_factory=dict)
    tied: bool = False

    @property
    def pp(self) -> int:
        return self.plan.get("pp", 1)

    @property
    def tp(self) -> int:
        return self.plan.get("tp", 1)

    @property
    def schedule(self) -> str:
        return self.plan.get("pipeline", "1f1b")

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return sw.models.gpt(
            "gpt-tiny",
            num_layers=LAYERS,
            hidden=HIDDEN,
            num_heads=2,
            vocab_size=VOCAB,
            seq_len=SEQ,
            tied=self.tied,
        )

    def replicas(self, rank: int) -> Replicas | None:
        mesh = sw.ParallelPlan(**self.plan).mesh(self.world)
        return Replicas(mesh.dp_replicate, mesh.coordinate(rank)["dp_replicate"]) if mesh.dp_replicate > 1 else None

    def predict(self, rank: int, seen: Probe, *, is_dry: bool) -> Trace:
        """From the plan and the shape of the model; of the engine only what its units are."""
        plan = sw.ParallelPlan(**self.plan)
        mesh = plan.mesh(self.world)
        at = mesh.coordinate(rank)
        item_bytes = 2 if plan.mp_policy else 4
        tensor = TensorStep(
            LAYERS,
            HIDDEN,
            MICRO_BATCH * SEQ,
            size=self.tp,
            rank=at["tp"],
            item_bytes=item_bytes,
            is_recomputed=plan.activation_checkpointing == "full",
        )
        if self.pp == 1:
            found = [*seen.predicted_collectives(), *(tensor.trace() if self.tp > 1 else [])]
            return by_axis([*found, *([] if is_dry else loss_trace("dp_shard", at["dp_shard"], mesh.dp_shard))])
        num_stages = self.pp * STAGES_PER_RANK.get(self.schedule, 1)
        step = ProductStep(
            build_schedule(self.schedule, self.pp, M, num_stages // self.pp),
            at["pp"],
            gpt_stages(LAYERS, 12 * HIDDEN**2, VOCAB * HIDDEN, num_stages),
            MICRO_BATCH * SEQ * HIDDEN * item_bytes,
            seen.unit_facts,
            at["dp_shard"],
            self.replicas(rank),
            tensor if self.tp > 1 else None,
            [Copies("token_embedding.weight", (0, self.pp - 1), VOCAB * HIDDEN * 4)] if self.tied else [],
        )
        found = [collective for axis in step.by_axis().values() for collective in axis]
        samples = mesh.data_parallel_group(rank)
        control = "dp" if mesh.dp_replicate > 1 else "dp_shard"
        if not is_dry:
            found = [*agreement_trace(self.pp), *found]
            found += loss_trace(control, samples.index(rank), len(samples), pp_rank=at["pp"], pp=self.pp)
        return by_axis(found)

    def simulate(self, rank: int, seen: Probe) -> Trace:
        """What the simulated step begins, in order, by axis; stages take made-up times, no two of them the same."""
        mesh = sw.ParallelPlan(**self.plan).mesh(self.world)
        at = mesh.coordinate(rank)
        tensor = TensorStep(LAYERS, HIDDEN, MICRO_BATCH * SEQ, size=self.tp, rank=at["tp"])
        elements = gpt_elements(LAYERS)
        if self.pp == 1:
            computed = inside(seen.unit_facts, tensor.forward(elements), tensor.backward(elements))
            return begun(seen.simulated_step(computation=computed.__getitem__))
        num_stages = self.pp * STAGES_PER_RANK.get(self.schedule, 1)
        stages = gpt_stages(LAYERS, 12 * HIDDEN**2, VOCAB * HIDDEN, num_stages)

        def exchanges(action: Action) -> list[Collective]:
            if action.kind is Kind.FORWARD:
                return tensor.forward(stages[action.stage])
            return tensor.backward(stages[action.stage]) if action.kind.gives_input_gradient else []

        seconds = [StageSeconds(1 + stage / 7, 1 + stage / 5, 1 - stage / 9, 0.1) for stage in range(num_stages)]
        schedule = build_schedule(self.schedule, self.pp, M, num_stages // self.pp)
        timeline = rank_timeline(
            simulate_pipeline(self.schedule, self.pp, M, seconds, num_virtual_stages=num_stages // self.pp),
            at["pp"],
            schedule,
            crossing=[[CrossingBytes(MICRO_BATCH * SEQ * HIDDEN * 4)]] * (num_stages - 1),
            window=seen.predicted_collectives(),
            exchanges=exchanges if self.tp > 1 else lambda _action: [],
        )
        return begun(timeline)


def begun(timeline: Timeline) -> Trace:
    return by_axis([collective for _, collective in timeline.collectives])


def by_axis(events: Any) -> Trace:
    found: Trace = {}
    for event in events:
        found.setdefault(event.axis, []).append((event.kind, event.unit, event.sent_bytes, event.axis))
    return found


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(rows * SEQ).view(rows, SEQ) % VOCAB
    return ids, ids


# -- real runs

THREE = {"pp": 2, "tp": 2, "dp_shard": 2}
REAL = (
    Case(8, THREE),
    Case(8, THREE | {"strategy": "zero1", "pipeline": "zb-v"}),
    Case(8, {"pp": 2, "dp_shard": 4, "pipeline": "interleaved-1f1b", "activation_checkpointing": "full"}),
    Case(8, {"tp": 2, "dp_shard": 4}),
    Case(8, {"tp": 2, "dp_shard": 4, "strategy": "zero1"}),
)


def record() -> list[tuple[Trace, Trace, Trace]]:
    """Of each case the events of the second step, those predicted, and those of the simulated step."""
    results = []
    for case in REAL:
        model = sw.parallelize(case.build(), sw.ParallelPlan(**case.plan))
        count = M if case.pp > 1 else 1
        for _ in range(2):
            with sw.record_collectives(model) as events:
                sw.train_step(model, tokens(MICRO_BATCH * count), num_microbatches=count)
            for parameter in model.parameters():
                parameter.grad = None
        rank, seen = distributed.get_rank(), probe(model)
        simulated = case.simulate(rank, seen)
        results.append((by_axis(events), case.predict(rank, seen, is_dry=False), simulated))
    return results


def test_on_eight_ranks_a_step_sends_what_is_predicted_on_every_axis():
    for rank, results in enumerate(run_on_ranks(record, 8, timeout_s=200)):
        for case, (recorded, predicted, simulated) in zip(REAL, results, strict=True):
            assert recorded == predicted, (case, rank)
            moved = {
                axis: [event for event in events if axis == "tp" or event[1] not in BETWEEN_RANKS]
                for axis, events in recorded.items()
            }
            for axis, events in moved.items():
                for kinds in ({"all_gather"}, {"reduce_scatter", "all_reduce"}, {"send", "receive"}):
                    stream = [event for event in events if event[0] in kinds]
                    assert stream == [event for event in simulated.get(axis, []) if event[0] in kinds], (case, rank)
            assert set(simulated) == {axis for axis, events in moved.items() if events}


#: Words by which ``sw.train_step`` agrees on a step and tells its loss: no part of the step's work.
BETWEEN_RANKS = ("loss", "step")


# -- dry runs, of larger meshes

DRY = (
    Case(64, {"pp": 4, "tp": 2, "dp_replicate": 2, "dp_shard": 4, "strategy": "hsdp", "pipeline": "zb-h1"}),
    Case(16, {"pp": 4, "tp": 2, "dp_shard": 2, "strategy": "zero2", "pipeline": "gpipe"}),
    Case(8, THREE | {"mp_policy": sw.PrecisionPolicy(param_dtype="bf16"), "activation_checkpointing": "full"}),
    Case(8, THREE | {"strategy": "ddp", "pipeline": "interleaved-1f1b"}),
    Case(8, {"pp": 2, "dp_shard": 4, "strategy": "zero3"}, tied=True),
)


def dry(case: Case, rank: int) -> tuple[sw.DryRun, Probe]:
    models = []

    def build() -> nn.Module:
        models.append(case.build())
        return models[-1]

    plan = sw.ParallelPlan(**case.plan)
    run = sw.dry_run(build, plan, world_size=case.world, rank=rank, batch=tokens(MICRO_BATCH), num_microbatches=M)
    return run, probe(models[0])


@pytest.mark.parametrize("case", DRY, ids=lambda case: f"{case.world}-{case.schedule}")
def test_dry_runs_send_what_is_predicted_on_every_axis(case):
    for rank in (case.world // 2 - 1, case.world - 1):
        run, seen = dry(case, rank)
        assert by_axis(run.events) == case.predict(rank, seen, is_dry=True), rank
        held_bytes = reduce_bytes(
            [shape for unit in seen.unit_facts.values() for shape in unit.groups],
            rank=sw.ParallelPlan(**case.plan).mesh(case.world).coordinate(rank)["dp_shard"],
            replicas=case.replicas(rank),
            accumulations={"unsharded"},
        )
        assert seen.held_bytes()["reduce"] == held_bytes, rank
        # gpipe holds most in its first backward, with all microbatches' activations. The root's buffer comes after it.
        later = seen.unit_facts[0].groups if case.schedule == "gpipe" else ()
        later_bytes = sum(group.reduce_layout.numel * group.reduce_item_bytes for group in later)
        assert run.bytes_by_category["reduce"] == held_bytes - later_bytes, rank


def test_the_number_of_microbatches_changes_nothing_on_the_data_parallel_axes():
    """No unit is gathered or reduced twice, and the bytes are those of one microbatch under the same strategy."""
    run, seen = dry(DRY[0], 20)
    traffic = {axis: totals_of(run, axis) for axis in ("dp_shard", "dp_replicate", "tp", "pp")}
    units = [unit for unit in seen.units if unit.padded_numel]
    assert {kind: count for kind, (count, _) in traffic["dp_shard"].items()} == {
        "all_gather": len(units),
        "reduce_scatter": len(units),
    }
    assert traffic["dp_replicate"]["all_reduce"][0] == len(units)
    # two blocks a stage, each adding up 2 b s h four times: planner.md
    (count, sent) = traffic["tp"]["all_reduce"]
    assert (count, sent) == (M * 2 * 4, M * 2 * 4 * 2 * (2 - 1) * MICRO_BATCH * SEQ * HIDDEN * 4 // 2)
    assert traffic["pp"]["send"] == (2 * M, 2 * M * MICRO_BATCH * SEQ * HIDDEN * 4)
    assert traffic["pp"]["receive"] == (2 * M, 0)


def totals_of(run: sw.DryRun, axis: str) -> dict[str, tuple[int, int]]:
    return totals([event for event in run.events if event.axis == axis])
