"""Activations on the host: numbers bit by bit as without, bytes copied and bytes held as the formula says."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise as sw
from shardwise.engine.extensions.activation_offload import ActivationOffload
from shardwise.engine.storage.attachment import engine_of
from shardwise.measure.storage import StorageCount
from shardwise.spec.errors import PlanError, StateError
from shardwise.testing.probe import checks
from tests.common.oracle import Block, Chain, compare_each, plain_loss, sample
from tests.common.ranks import on_ranks, refusal

EVERYTHING = sw.ActivationOffloadPolicy(least_bytes=1)

#: Every way to say what is offloaded, with what is recomputed.
WAYS: tuple[tuple[Any, Any], ...] = (
    (EVERYTHING, "none"),
    (EVERYTHING, "full"),
    ({"every": 2, "least_bytes": 1}, "none"),
    (sw.ActivationOffloadPolicy(sw.wrap_by_name("blocks.*"), least_bytes=1), {"every": 2}),
    (sw.ActivationOffloadPolicy(sw.wrap_by_class(nn.Linear), least_bytes=1), "none"),
    (EVERYTHING, sw.wrap_by_name("blocks.*.up", "head")),
)


class Dropping(Block):
    """Draws random numbers, and saves views of one storage, a tensor that the next block saves too, and its output."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = super().forward(x).chunk(2, dim=-1)
        y = torch.cat([a * b, torch.tanh(a)], dim=-1)
        return torch.tanh(x + F.dropout(y, 0.2, training=self.training))


@on_ranks(1, 2, 3)
def test_every_policy_gives_the_numbers_without_it_dropout_included():
    for offloaded, recomputed in WAYS:
        compare_each(
            lambda: Chain(Dropping),
            plain_loss,
            steps=3,
            offload_activations=offloaded,
            activation_checkpointing=recomputed,
        )


@on_ranks(2)
def test_parameters_that_were_saved_are_there_again() -> None:
    with checks():
        compare_each(lambda: Chain(Dropping), plain_loss, steps=3, offload_activations=EVERYTHING)


# -- bytes

BLOCKS, DIM, WIDE, ROWS = 6, 64, 256, 2048
#: Bytes of a block's input; of what autograd saves in a block besides: the input of GELU and its output.
INPUT, INNER = 4 * ROWS * DIM, 2 * 4 * ROWS * WIDE


def wide() -> nn.Module:
    return Chain(lambda: Block(DIM, WIDE), BLOCKS, DIM)


def moved_and_held(**options: Any) -> tuple[list[int], int]:
    """Bytes that a step copies to the host and back, bytes of the host's buffers, and the peak besides what is kept."""
    model = sw.parallelize(wide(), sw.ParallelPlan(strategy="zero3", merge_units=False, **options))
    offload = engine_of(model, "test").extras.find(ActivationOffload)

    def step() -> None:
        model(sample(0, 0, ROWS, DIM)).square().mean().backward()
        model.zero_grad()

    step()
    step()
    before = (offload.sent_bytes, offload.returned_bytes) if offload else (0, 0)
    gc.collect()
    with StorageCount("cpu", sees_arguments=False) as seen:
        seen.see_all_objects()
        measured = seen.live_bytes
        step()
    seen.forget()
    after = (offload.sent_bytes, offload.returned_bytes, 0) if offload else (0, 0, 0)
    moved = [after[0] - before[0], after[1] - before[1], offload.host.num_bytes if offload else 0]
    return moved, seen.peak_bytes - measured


def dry(**options: Any) -> sw.DryRun:
    return sw.dry_run(
        wide,
        sw.ParallelPlan(strategy="zero3", merge_units=False, **options),
        world_size=1,
        batch=(torch.empty(ROWS, DIM),),
        loss_fn=lambda output, _: output.square().mean(),
        optimizer="sgd",
        backend="gloo",
    )


@on_ranks(1)
def test_each_saved_storage_is_copied_once_and_the_peak_falls_by_all_but_two_calls_of_them() -> None:
    for recomputed, per_block in (("full", INPUT), ("none", INPUT + INNER)):
        options = {"activation_checkpointing": recomputed}
        nothing, plain = moved_and_held(**options)
        moved, offloaded = moved_and_held(**options, offload_activations=True)
        assert nothing == [0, 0, 0]
        assert moved == [BLOCKS * per_block, (BLOCKS - 1) * per_block, BLOCKS * per_block], (recomputed, moved)
        # Less gradients: they grow during backward, and offloaded activations move the peak towards its end.
        missing = (BLOCKS - 2) * per_block - (plain - offloaded)
        assert 0 <= missing <= 4 * BLOCKS * (2 * DIM * WIDE + DIM + WIDE), (recomputed, plain, offloaded)
        ran = [dry(**options), dry(**options, offload_activations=True)]
        measured = [run.bytes_by_category for run in ran]
        assert measured[1]["host"] - measured[0]["host"] == BLOCKS * per_block
        assert ran[0].peak_bytes - ran[1].peak_bytes == plain - offloaded


class Masked(Block):
    """Multiplies by a tensor that every block is given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


class Masking(Chain):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.sigmoid(x)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


@on_ranks(1)
def test_what_every_block_saves_is_copied_once_and_what_the_host_holds_is_used_again() -> None:
    model = sw.parallelize(
        Masking(lambda: Masked(DIM, WIDE), BLOCKS, DIM),
        sw.ParallelPlan(activation_checkpointing="full", offload_activations=True, merge_units=False),
    )
    offload = engine_of(model, "test").extras.find(ActivationOffload)
    for step in range(4):
        rows = ROWS + 64 * step
        model(sample(0, 0, rows, DIM)).square().mean().backward()
        one = 4 * rows * DIM
        assert offload.sent_bytes == (BLOCKS + 1) * one
        assert offload.returned_bytes == (BLOCKS - 1) * one  # the mask was saved by the last block, too
        assert offload.host.most_used_bytes == (BLOCKS + 1) * one
        assert offload.host.num_bytes <= offload.host.most_used_bytes  # buffers of earlier sizes are gone
        offload.sent_bytes = offload.returned_bytes = 0
    with torch.no_grad():
        model(sample(0, 0, ROWS, DIM))
    assert offload.sent_bytes == 0


@on_ranks(1)
def test_a_backward_brings_nothing_of_the_forward_before_its_own() -> None:
    model = sw.parallelize(
        wide(), sw.ParallelPlan(activation_checkpointing="full", offload_activations=True, merge_units=False)
    )
    offload = engine_of(model, "test").extras.find(ActivationOffload)
    first, second = (model(sample(0, step, ROWS, DIM)).square().mean() for step in range(2))
    second.backward()
    assert offload.returned_bytes == (BLOCKS - 1) * INPUT
    first.backward()
    assert offload.returned_bytes == (2 * BLOCKS - 1) * INPUT


def in_any_order(model: nn.Module, rank: int, step: int) -> Any:
    """A forward whose backward never comes, two forwards before one backward, then a graph that is used twice."""
    plain_loss(model, rank, step + 70)
    first, second = plain_loss(model, rank, step), plain_loss(model, rank, step + 50)
    second.backward()
    yield second
    first.backward()
    yield first
    third = plain_loss(model, rank, step + 60)
    third.backward(retain_graph=True)
    yield third
    third.backward()
    yield third


@on_ranks(2)
def test_backwards_may_come_in_any_order_twice_or_never() -> None:
    for way in ("none", "full"):
        compare_each(
            Chain,
            in_any_order,
            ("zero2", "zero3"),
            steps=2,
            offload_activations=EVERYTHING,
            activation_checkpointing=way,
        )


@on_ranks(2)
def test_a_forward_that_raised_leaves_nothing_open() -> None:
    class Failing(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if Failing.fails:
                raise ValueError("no")
            return y

    model = sw.parallelize(Chain(Failing), sw.ParallelPlan(offload_activations=EVERYTHING))
    offload = engine_of(model, "test").extras.find(ActivationOffload)
    for fails in (False, True, False):
        Failing.fails = fails
        if fails:
            refusal(ValueError, model, sample(0, 0))
        else:
            model(sample(dist.get_rank(), 0)).square().mean().backward()
        assert not offload.is_open
    gc.collect()
    assert offload.host._used_bytes == 0


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(x)
        z = super().forward(y)
        y.add_(1.0)
        return z + y


@on_ranks(1)
def test_a_saved_tensor_that_is_changed_in_place_is_refused_as_torch_does() -> None:
    model = sw.parallelize(Chain(InPlace), sw.ParallelPlan(offload_activations=EVERYTHING))
    assert "modified by an inplace operation" in refusal(StateError, model(sample(0, 0)).sum().backward)


@on_ranks(1)
def test_the_summary_names_the_modules() -> None:
    model = sw.parallelize(Chain(), sw.ParallelPlan(offload_activations={"every": 3}))
    assert "activations on the host: blocks.0 blocks.3" in str(sw.summary(model))
    layers = {"auto_wrap_policy": sw.wrap_by_class(nn.Linear), "activation_checkpointing": sw.wrap_by_class(Block)}
    model = sw.parallelize(Chain(num_blocks=2), sw.ParallelPlan(offload_activations=True, **layers))
    assert "activations on the host: stem blocks.0 blocks.1 head" in str(sw.summary(model))


REFUSED = {
    "names 'blocks.0.up' inside 'blocks.0', which is recomputed": {
        "offload_activations": sw.wrap_by_name("blocks.*.up"),
        "activation_checkpointing": "full",
    },
    "names 'blocks.0' and, inside it, 'blocks.0.up'": {
        "offload_activations": sw.wrap_by_name("blocks.*", "blocks.*.up")
    },
    "offload_activations offloads units, but the model has none": {
        "offload_activations": True,
        "auto_wrap_policy": "none",
    },
}


@on_ranks(1)
def test_modules_that_cannot_be_offloaded_are_refused_by_name() -> None:
    for words, options in REFUSED.items():
        assert words in refusal(PlanError, sw.parallelize, Chain(), sw.ParallelPlan(**options))


def pipelined(schedule: str, **options: Any) -> tuple[list[str], list[Tensor], int]:
    """Losses and weights of three steps of a pipeline, and the bytes that this rank has copied to the host.

    A stage has two blocks; with interleaving a rank has two stages.
    """
    torch.manual_seed(0)
    num_layers = 8 if schedule == "interleaved-1f1b" else 4
    pipeline = sw.PipelinePolicy(schedule=schedule, num_microbatches=4)
    model = sw.parallelize(
        sw.models.gpt("gpt-nano", num_layers=num_layers),
        sw.ParallelPlan(pp=2, pipeline=pipeline, merge_units=False, **options),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step))
        losses.append(sw.train_step(model, (tokens[:, :-1], tokens[:, 1:])).item().hex())
        optimizer.step()
        optimizer.zero_grad()
    offload = engine_of(model, "test").extras.find(ActivationOffload)
    return losses, list(sw.full_state_dict(model).values()), offload.sent_bytes if offload else 0


@on_ranks(2)
def test_microbatches_of_a_pipeline_come_back_each_in_its_turn() -> None:
    for schedule in ("1f1b", "zb-h1", "interleaved-1f1b"):
        for way in ("none", "full"):
            losses, weights, _ = pipelined(schedule, activation_checkpointing=way)
            got, others, sent = pipelined(schedule, activation_checkpointing=way, offload_activations=EVERYTHING)
            assert got == losses, (schedule, way)
            assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True)), (schedule, way)
            assert sent > 0
