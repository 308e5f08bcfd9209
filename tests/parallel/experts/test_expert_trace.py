"""What experts send and hold is what arithmetic says of the counts of tokens and of the layouts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor, distributed, nn

import shardwise as sw
from shardwise.models.transformer import GPT
from shardwise.spec.slice import slice_of
from shardwise.spec.traffic.data import Collective
from shardwise.spec.traffic.rows import capacity, even_counts
from shardwise.testing import probe, run_on_ranks
from tests.engine import test_memory
from tests.parallel.experts.traffic import MixtureTraffic
from tests.sim.inside import inside

pytestmark = pytest.mark.preload("transformers.models.mixtral.modeling_mixtral")

BATCH, SEQ, HIDDEN, LAYERS, EXPERTS = 3, 6, 24, 3, 4
CASES: dict[str, tuple[int, dict]] = {
    "zero3": (2, {}),
    "ddp": (2, {"strategy": "ddp"}),
    "zero1, hsdp": (2, {"strategy": "zero1", "dp_replicate": 2}),
    "16 bit": (4, {"mp_policy": sw.PrecisionPolicy(param_dtype="bf16"), "strategy": "zero2"}),
    "recomputed": (2, {"activation_checkpointing": "full", "strategy": "shard_grad_op"}),
    "capacity": (4, {"expert_capacity": 0.75, "quantized_reduce": "int8"}),
}


def build() -> GPT:
    torch.manual_seed(0)
    sizes = {"num_layers": LAYERS, "hidden": HIDDEN, "num_heads": 2, "vocab_size": 33, "seq_len": SEQ}
    return sw.models.gpt("gpt-tiny", num_experts=EXPERTS, **sizes)


def tokens(reader: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(distributed.get_rank() if reader is None else reader)
    ids = torch.randint(0, 33, (BATCH, SEQ), generator=generator)
    return ids, ids


def count_choices(model: GPT, counts: list[list[int]]) -> None:
    """Keep how many tokens choose each expert, of every block, as the router's scores say."""

    def note(_module: object, _inputs: object, scores_BTE: Tensor) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            counts.append(scores_BTE.detach().topk(2, dim=-1).indices.flatten().bincount(minlength=EXPERTS).tolist())

    for block in model.blocks:
        block.mlp.router.register_forward_hook(note)


def layers_of(name: str, rank: int, counts: list[list[list[int]]]) -> list[MixtureTraffic]:
    """The mixture of each block, by every rank's counts."""
    ep, options = CASES[name]
    limit = capacity(options.get("expert_capacity"), BATCH * SEQ, 2, EXPERTS)
    first = rank // ep * ep
    return [
        MixtureTraffic(
            f"blocks.{layer}.mlp",
            HIDDEN,
            rank - first,
            [
                [count if limit is None else min(count, limit) for count in of_rank[layer]]
                for of_rank in counts[first : first + ep]
            ],
            item_bytes=2 if name == "16 bit" else 4,
        )
        for layer in range(LAYERS)
    ]


def moved(name: str, layers: list[MixtureTraffic]) -> tuple[list[Collective], list[Collective]]:
    """What forward and backward send on ``ep``."""
    backward: list[Collective] = []
    for layer in reversed(layers):
        backward += [*(layer.forward() if name == "recomputed" else ()), *layer.backward()]
    return [event for layer in layers for event in layer.forward()], backward


def record() -> dict[str, tuple[list, list, list, list]]:
    """Of each case's second step: the events, what is predicted of other axes, every rank's counts by block, and what
    the simulated step issues."""
    found = {}
    for name, (ep, options) in CASES.items():
        model = sw.parallelize(build(), sw.ParallelPlan(ep=ep, **options))
        counts: list[list[int]] = []
        count_choices(model, counts)
        for _ in range(2):
            counts.clear()
            with sw.record_collectives(model) as events:
                model(*tokens()).backward()
            for parameter in model.parameters():
                parameter.grad = None
        everyone: list = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, counts)
        seen = probe(model)
        predicted = [tuple(collective) for collective in seen.predicted_collectives()]
        computed = inside(seen.unit_facts, *moved(name, layers_of(name, distributed.get_rank(), everyone)))
        timeline = seen.simulated_step(computation=computed.__getitem__)
        simulated = [tuple(span.task.collective) for span in timeline.spans if span.task.collective is not None]
        found[name] = [(e.kind, e.unit, e.sent_bytes, e.axis) for e in events], predicted, everyone, simulated
    return found


def build_stacked() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "intermediate_size": 40, "vocab_size": 33}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=EXPERTS))


def record_stacked() -> tuple[list, list, list, set]:
    """As :func:`record`, of experts that tp and ep cut both; and of these the elements and shapes on this rank."""
    model = sw.parallelize(build_stacked(), sw.ParallelPlan(tp=2, ep=2))
    counts: list[list[int]] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(
                lambda _module, given: counts.append(given[1].flatten().bincount(minlength=EXPERTS).tolist())
            )
    ids, _ = tokens(distributed.get_rank() // 2)
    for _ in range(2):
        counts.clear()
        with sw.record_collectives(model) as events:
            model(input_ids=ids, labels=ids).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
    everyone: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, counts)
    predicted = [tuple(collective) for collective in probe(model).predicted_collectives()]
    slices = {p: slice_of(p) for name, p in model.named_parameters() if ".experts." in name}
    shapes = {(p.shape.numel(), mark.local_shape, mark.shape) for p, mark in slices.items() if mark is not None}
    return [(e.kind, e.unit, e.sent_bytes, e.axis) for e in events], predicted, everyone, shapes


def record_all() -> tuple[dict[str, tuple[list, list, list, list]], tuple]:
    return record(), record_stacked()


@pytest.fixture(scope="module")
def both() -> list[tuple[dict[str, tuple[list, list, list, list]], tuple]]:
    return run_on_ranks(record_all, 4)


@pytest.fixture(scope="module")
def recorded(both) -> list[dict[str, tuple[list, list, list, list]]]:
    return [of_ours for of_ours, _ in both]


@pytest.mark.parametrize("name", CASES)
def test_what_a_step_sends_follows_from_the_counts(recorded, name):
    ep, _ = CASES[name]
    for rank, found in enumerate(recorded):
        events, others, counts, simulated = found[name]
        assert len({tuple(map(tuple, of_rank)) for of_rank in counts}) > 1, "ranks choose alike: a blind test"
        forward, backward = moved(name, layers_of(name, rank, counts))
        assert [event for event in events if event[3] == "ep"] == [tuple(event) for event in [*forward, *backward]]
        assert [event for event in events if event[3] != "ep"] == others
        assert events == simulated
        edp = [event for event in others if event[3] == "edp"]
        assert edp
        assert (sum(event[2] for event in edp) > 0) == (ep == 2 and "hsdp" not in name)  # else nobody shares experts


def test_stacked_experts_under_tp_send_their_rows_once_a_rank_and_sums_of_tokens(both):
    for rank, (_, (events, others, counts, shapes)) in enumerate(both):
        group = [rank % 2, rank % 2 + 2]  # of ep: those with the same place on tp
        assert counts[group[0]] != counts[group[1]], "ranks choose alike: a blind test"
        assert counts[group[0]] == counts[1 - group[0]], "ranks of tp choose alike"
        units = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
        mixtures = [
            MixtureTraffic(unit, HIDDEN, rank // 2, [counts[other][layer] for other in group])
            for layer, unit in enumerate(units)
        ]
        num_bytes = BATCH * SEQ * HIDDEN * 4
        expected = []
        for unit, layer in zip(units, mixtures, strict=True):
            expected += [*layer.forward(), ("all_reduce", unit, num_bytes, "tp")]
        for unit, layer in zip(reversed(units), reversed(mixtures), strict=True):
            weights = ("all_reduce", unit, BATCH * SEQ * 2 * 4, "tp")
            expected += [weights, *layer.backward(), ("all_reduce", unit, num_bytes, "tp")]
        found = [event for event in events if event[1] in units and event[3] in {"tp", "ep"}]
        assert sorted(found) == sorted(tuple(event) for event in expected)
        assert [event for event in found if event[3] == "ep"] == [tuple(e) for e in expected if tuple(e)[3] == "ep"]
        assert [event for event in events if event[3] not in {"tp", "ep"}] == others
        assert shapes == {  # a quarter of the experts' elements
            (EXPERTS * 80 * HIDDEN // 4, (EXPERTS // 2, 40, HIDDEN), (EXPERTS, 80, HIDDEN)),
            (EXPERTS * HIDDEN * 40 // 4, (EXPERTS // 2, HIDDEN, 20), (EXPERTS, HIDDEN, 40)),
        }


def test_a_dry_run_sends_the_same_but_for_tokens_which_it_takes_to_choose_evenly(recorded):
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    for rank in (0, 3):
        run = sw.dry_run(build, sw.ParallelPlan(ep=2), world_size=4, rank=rank, batch=(ids, ids), backend="gloo")
        events = [(e.kind, e.unit, e.sent_bytes, e.axis) for e in run.events]
        assert [event for event in events if event[3] != "ep"] == recorded[rank]["zero3"][1]
        even = [even_counts(BATCH * SEQ * 2, EXPERTS)] * 2
        layers = [MixtureTraffic(f"blocks.{layer}.mlp", HIDDEN, rank % 2, even) for layer in range(LAYERS)]
        expected = [event for layer in layers for event in layer.forward()]
        expected += [event for layer in reversed(layers) for event in layer.backward()]
        assert [event for event in events if event[3] == "ep"] == [tuple(event) for event in expected]


def test_even_choices_send_all_but_one_part_of_the_rows():
    for ep in (2, 4, 8):
        sent = [even_counts(512 * 2, 8)] * ep
        counts, dispatch, combine = MixtureTraffic("mlp", 64, 1, sent, item_bytes=2).forward()
        assert counts.sent_bytes == 8 * (8 - 8 // ep)
        assert dispatch.sent_bytes == combine.sent_bytes == (ep - 1) * 512 * 2 * 64 * 2 // ep
    assert sum(even_counts(7, 4)) == 7
    assert even_counts(100, 4, capacity(0.5, 50, 2, 4)) == [13] * 4


def build_wide() -> GPT:
    torch.manual_seed(0)
    sizes = {
        "num_layers": 3,
        "hidden": 128,
        "num_heads": 4,
        "vocab_size": test_memory.VOCAB,
        "seq_len": test_memory.SEQ,
    }
    return sw.models.gpt("gpt-tiny", num_experts=EXPERTS, **sizes)


def measure() -> dict[str, tuple]:
    with mock.patch.object(test_memory, "build", build_wide):
        return {
            strategy: (*test_memory.measure_categories(strategy, ep=ep), expert_numel(strategy, ep))
            for strategy, ep in (("zero3", 2), ("ddp", 4), ("zero1", 2))
        }


def expert_numel(strategy: str, ep: int) -> tuple[int, int]:
    """Elements of experts on this rank: of the optimizer's parameters, and of whole ones where a unit computes."""
    model = sw.parallelize(build_wide(), sw.ParallelPlan(strategy=strategy, ep=ep))
    named = [
        (parameter.shape.numel(), sw.logical_shape(parameter).numel())
        for name, parameter in model.named_parameters()
        if ".experts." in name
    ]
    return sum(measured for measured, _ in named), sum(whole for _, whole in named)


@pytest.mark.slow
def test_bytes_of_experts_are_those_of_the_closed_form():
    whole = sum(p.numel() for name, p in build_wide().named_parameters() if ".experts." in name)
    assert whole == 3 * EXPERTS * (2 * 4 * 128 * 128 + 5 * 128)
    for found in run_on_ranks(measure, 4):
        for strategy, (measured, predicted, (owned, computed)) in found.items():
            assert {name: size for name, size in measured.items() if name in predicted} == predicted, strategy
            ep = {"zero3": 2, "ddp": 4, "zero1": 2}[strategy]
            assert computed == whole // ep
            assert owned == whole // 4  # of 4 ranks; under ddp because no two ranks hold the same experts
