"""Tensor parallelism against one plain process: float64, where only the order of sums differs, and fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.comm.record import RecordComm
from shardwise.parallel.tensor.linear import ColumnPlan
from shardwise.parallel.tensor.sharding_plan import plan_sharding
from shardwise.spec.errors import PlanError
from shardwise.testing import part_of, probe, run_on_ranks
from tests.common.ranks import on_ranks
from tests.common.split import SEQ, VOCAB, Case, batch, check

SEQUENCE = (("sequence_parallel", True),)


@pytest.mark.transports
def test_two_ranks_equal_one_process():
    check(
        2,
        Case(),
        Case(dtype=torch.float32),
        Case(strategy="ddp", max_norm=0.3),
        Case(model=(("tied", True),), num_microbatches=2),
        Case(model=(("tied", True), ("num_experts", 3)), plan=SEQUENCE),
        Case(dtype=torch.float32, plan=(*SEQUENCE, ("activation_checkpointing", "full"))),
        Case(model=(("num_experts", 3),), num_microbatches=2, accumulation="unsharded"),
        Case(model=(("bias", False), ("dropout", 0.3)), plan=(("activation_checkpointing", "full"),)),
    )


def test_two_by_two_ranks_equal_one_process():
    check(
        4,
        Case(num_microbatches=2, max_norm=0.3, model=(("dropout", 0.2),)),
        Case(dtype=torch.float32, num_microbatches=2, max_norm=0.3),
        Case(tp=4, model=(("tied", True),)),
        Case(num_microbatches=2, max_norm=0.3, model=(("dropout", 0.2),), plan=SEQUENCE),
    )


IDS, POSITIONS = 1001, 64 * SEQ  # logits are by far the largest


def largest_tensors() -> list[tuple[int, int]]:
    """Elements of the largest tensor of a step, with targets and without, of each kind of output projection."""
    found = []
    for is_tied in (False, True):
        model = sw.parallelize(Case(model=(("tied", is_tied), ("vocab_size", IDS))).build(), sw.ParallelPlan(tp=2))
        tokens = torch.arange(POSITIONS).view(-1, SEQ)
        sizes = []
        for arguments in ((tokens, tokens), (tokens,)):
            with Largest() as largest:
                model(*arguments).sum().backward()
            sizes.append(largest.numel)
        found.append((sizes[0], sizes[1]))
    return found


class Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return output


def test_no_rank_holds_the_full_logits():
    for rank, by_head in enumerate(run_on_ranks(largest_tensors, 2)):
        width = IDS // 2 + rank
        assert by_head == [(POSITIONS * width, POSITIONS * IDS)] * 2


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "shard_grad_op", "zero3", "hsdp"])
def test_every_strategy_equals_one_process(strategy):
    plan = (("dp_replicate", 2),) if strategy == "hsdp" else ()
    dtypes = (torch.float64, torch.float32)
    check(4, *(Case(strategy=strategy, dtype=dtype, num_microbatches=2, max_norm=0.3, plan=plan) for dtype in dtypes))


@pytest.mark.filterwarnings("ignore:the ranks held different values")
@on_ranks(2)
def test_every_way_to_begin_gives_the_parts_of_the_plain_model():
    """Whether what each way to begin gives this rank is its part of what the plain model begins with."""
    found = []
    sizes = {"num_layers": 2, "hidden": 24, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ, "tied": True}
    torch.manual_seed(3)
    plain = dict(sw.models.gpt("gpt-tiny", **sizes).named_parameters())
    torch.manual_seed(3 + distributed.get_rank())  # rank 0's are sent
    other = sw.models.gpt("gpt-tiny", **sizes)
    torch.manual_seed(3)
    deferred = sw.deferred_init(lambda: sw.models.gpt("gpt-tiny", **sizes))
    with torch.device("meta"):
        empty = sw.models.gpt("gpt-tiny", **sizes)
    if distributed.get_rank() == 0:
        torch.manual_seed(3)
        empty = sw.models.gpt("gpt-tiny", **sizes)
    for model, sync in ((other, "warn"), (deferred, "warn"), (empty, "rank0")):
        sw.parallelize(model, sw.ParallelPlan(tp=2, strategy="ddp", sync=sync))
        is_right = {
            extent.name: torch.equal(part_of(extent, plain[extent.name]), values)
            for extent, values in probe(model).extents()
        }
        found.append(all(is_right[name] for name, _ in model.named_parameters()))
    assert found == [True] * 3


@on_ranks(2)
def test_the_summary_says_who_has_the_logits():
    gathers = {"lm_head": "colwise_gather_output", "loss": "replicate"}
    plans = sw.ParallelPlan(tp=2), sw.ParallelPlan(tp=2, tp_plan=gathers)
    divided, gathered = [str(sw.summary(sw.parallelize(Case().build(), plan))) for plan in plans]
    assert "output of 'lm_head': with targets each rank has its part; else gathered" in divided
    assert "output of 'lm_head': gathered, whole on every rank of tp" in gathered


def table() -> tuple[float, str]:
    """``sw.parity`` of a plan with tp: the ranks of a group read the same samples."""
    batches = [tuple(torch.cat(both) for both in zip(batch(s, 0, 0), batch(s, 0, 1), strict=True)) for s in range(2)]
    case = Case(model=(("dropout", 0.0),))
    row = sw.parity(case.build, batches, None, {"tp": sw.ParallelPlan(tp=2)}).rows[0]
    return row.largest_difference, row.where


def test_parity_gives_ranks_of_one_group_the_same_samples():
    for largest, where in run_on_ranks(table, 4):
        assert largest < 1e-9, where


def refusals() -> list[str]:
    found = []
    for model, plan in (
        (sw.models.gpt("gpt-nano", num_heads=1), sw.ParallelPlan(tp=2)),
        (sw.models.gpt("gpt-nano", ffn=31), sw.ParallelPlan(tp=2)),
        (nn.Sequential(nn.Linear(4, 4)), sw.ParallelPlan(tp=2)),
        (nn.Sequential(nn.Linear(4, 4)), sw.ParallelPlan(tp=2, tp_plan={"1": "colwise"})),
        (nn.Sequential(nn.Linear(4, 4)), sw.ParallelPlan(tp=2, tp_plan={"0": "colwise"}, sequence_parallel=True)),
        (nn.Sequential(nn.LayerNorm(4)), sw.ParallelPlan(tp=2, tp_plan={"0": "colwise"})),
        (sw.models.gpt("gpt-nano"), sw.ParallelPlan(tp=2, tp_plan={"lm_head": "replicate", "loss": "replicate"})),
        (
            sw.models.gpt("gpt-nano"),
            sw.ParallelPlan(
                tp=2,
                sequence_parallel=True,
                tp_plan={"blocks.*.mlp.up": "replicate", "blocks.*.mlp.down": "replicate"},
            ),
        ),
    ):
        with pytest.raises(PlanError) as caught:
            sw.parallelize(model, plan)
        assert not distributed.is_initialized()
        found.append(str(caught.value))
    return found


def test_what_cannot_be_cut_is_refused_before_any_rank_is_met():
    heads, width, unknown, unmatched, divided, kind, tied, whole = refusals()
    assert "'blocks.0.attention' (divide:num_heads) with tp=2: num_heads=1 is not divisible: 1 / 2 = 0.5" in heads
    assert (
        "'blocks.0.mlp.up' (colwise) with tp=2: a dimension of 31 cannot be divided evenly over 2 ranks: 31 / 2 = 15.5"
        in width
    )
    assert "Use a degree that divides it: 1, 31" in width
    assert "no styles are known for Sequential" in unknown
    assert "tp_plan={pattern: style}" in unknown
    assert "'1' matches nothing in Sequential" in unmatched
    assert "sequence_parallel=True is not known for Sequential, only for our GPT" in divided
    assert "a LayerNorm is not a linear layer" in kind
    assert "'lm_head.weight' is tied to 'token_embedding.weight'" in tied
    assert "divides the positions that 'blocks.0.mlp.up.weight' is used for, but it is left whole" in whole


class Adapted(nn.Module):
    """As a LoRA: a linear layer beside two small ones."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer, self.first = nn.Linear(inputs, outputs), nn.Linear(inputs, 2)
        self.second = nn.ModuleDict({"default": nn.Linear(2, outputs)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.second["default"](self.first(x))


def test_a_parametrized_layer_is_left_whole_on_advice():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    with pytest.raises(PlanError, match=r"a parametrization computes its weight.\n  Leave it whole: tp_plan={'0': 're"):
        plan_sharding(nn.Sequential(layer), {"0": "colwise"}, 2)


@pytest.mark.parametrize(
    ("layer", "style", "words"),
    [
        (nn.Linear(4, 8), "colwise_heads", "'attention' does not tell the width of its heads .head_dim.*Use colwise"),
        (nn.Linear(4, 8), "embedding_heads", "a Linear is not an nn.Embedding.*Leave it out"),
        (nn.Linear(4, 8), "vocabulary_loss:head", "'attention.head' is not divided by its ids.*colwise_vocabulary"),
        (nn.Embedding(8, 4, max_norm=1.0), "embedding_rowwise", "without max_norm and sparse gradients.*Leave it out"),
        (nn.Embedding(8, 4, scale_grad_by_freq=True), "embedding_rowwise", "counts ids that other ranks.*Leave it out"),
        (nn.Linear(4, 8), "divide:heads", "Linear has no number 'heads' to divide.*Name one that it has"),
        (nn.Linear(4, 8), "dropout_features", "a Linear is not an nn.Dropout.*Leave it out"),
        (nn.Linear(4, 1), "colwise_vocabulary", "its 1 ids are fewer than the 2 ranks of tp.*Set tp to 1 or less"),
    ],
)
def test_a_style_that_does_not_go_with_its_module_is_refused_with_what_to_do(layer, style, words):
    model = nn.ModuleDict({"attention": nn.ModuleDict({"layer": layer})})
    with pytest.raises(PlanError, match=f"(?s)'attention.layer' .{style}. with tp=2: .*{words}"):
        plan_sharding(model, {"attention.layer": style}, 2)


def test_the_entry_of_one_layer_holds_over_that_of_all():
    table = {"0.up": "replicate", "*.up": "colwise", "*.down": "rowwise", "0.down": "rowwise_split_input"}
    model = nn.Sequential(*(nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}) for _ in range(2)))
    expected = {"0.down.weight", "1.up.weight", "1.up.bias", "1.down.weight"}
    cuts = plan_sharding(model, table, 2)
    assert expected <= {name for name, parameter in model.named_parameters() if id(parameter) in cuts.slices}
    assert id(model[0]["up"].weight) not in cuts.slices


def test_what_is_inside_of_a_wrapped_linear_layer_is_named():
    block = nn.ModuleDict({"up": Adapted(4, 8), "down": Adapted(8, 4)})
    table: dict[str, str] = {"0.up": "colwise", "0.down": "rowwise"}
    for path, style, small in (("up", "colwise", "second.default"), ("down", "rowwise", "first")):
        with pytest.raises(PlanError) as caught:
            plan_sharding(nn.Sequential(block), table, 2)
        expected_plan = {f"*.{path}": "replicate", f"*.{path}.base_layer": style, f"*.{path}.{small}": style}
        assert f"'0.{path}' ({style}) with tp=2: a Adapted is not a linear layer, but has such inside" in str(
            caught.value
        )
        assert f"tp_plan={expected_plan}." in str(caught.value)
        del table[f"0.{path}"]
        table |= expected_plan
    assert len(plan_sharding(nn.Sequential(block), table, 2).slices) == 6


@pytest.mark.parametrize(
    ("style", "inner"),
    [
        ("vocabulary_head", "colwise_gather_output"),
        ("packed_colwise:2", "packed_colwise:2"),
        ("colwise_heads", "colwise"),
    ],
)
def test_layers_inside_of_a_wrapped_one_get_a_style_that_divides_its_outputs_alike(style, inner):
    with pytest.raises(PlanError, match=rf"'\*.base_layer': '{inner}'"):
        plan_sharding(nn.Sequential(Adapted(4, 8)), {"0": style}, 2)


def test_a_dora_is_refused():
    layer = Adapted(4, 8)
    layer.lora_B, layer.lora_magnitude_vector = (
        nn.ModuleDict({"default": nn.Linear(2, 8)}),
        nn.ModuleDict({"a": layer.first}),
    )
    with pytest.raises(
        PlanError, match=r"adapter is a DoRA, which needs norms of the full weight.\n  Set use_dora=False"
    ):
        plan_sharding(nn.Sequential(layer), {"0": "colwise"}, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vocabulary_that_no_degree_divides_is_cut_as_evenly_as_can_be(size):
    with torch.device("meta"):
        model = sw.models.gpt("gpt-nano", num_heads=4, vocab_size=50257, tied=True)
    slices = [plan_sharding(model, None, size, rank).slices[id(model.lm_head.weight)] for rank in range(size)]
    edges = [cut.ranges[0] for part in slices for cut in part.cuts]
    assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
    assert edges[-1][1] == 50257
    assert {stop - start for start, stop in edges} == {50257 // size, 50257 // size + 1}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_layer_without_tokens_has_gradients_without_rows(is_transposed):
    """Under ep an expert may get none."""
    way = ColumnPlan(RecordComm("tp", rank=0, size=2, device="cpu"), "up", is_transposed=is_transposed)
    weight = torch.ones(3, 5) if is_transposed else torch.ones(5, 3)
    assert way.input_grad(torch.ones(0, 5), weight).shape == (0, 3)
    assert way.weight_grad(torch.ones(0, 5), torch.ones(0, 3)).equal(torch.zeros_like(weight))
