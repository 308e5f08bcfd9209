"""Queries and settings of a parallelized model: its share of the data, its collectives, gradient accumulation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shardwise.comm.base import CollectiveEvent, Recorder
from shardwise.engine.extensions import batch_norm
from shardwise.engine.storage.attachment import attachment_of, engine_of, group_and_index
from shardwise.engine.storage.waiting import set_gradient_sync
from shardwise.optim.in_backward import refuse_sums
from shardwise.spec.slice import slice_of


def data_parallel_rank(model: nn.Module) -> int:
    """Return this rank's share of the samples, from 0 to :func:`data_parallel_size` - 1.

    Use both numbers to divide samples in a custom sampler, and this rank to seed dropout: ranks that differ only on
    ``tp``, ``cp`` or ``pp`` compute one model together, from the same samples. No communication.

    Raises:
        StateError: The model is not parallelized.
    """
    return engine_of(model, "sw.data_parallel_rank").comms.reader[0]


def data_parallel_size(model: nn.Module) -> int:
    """Return the number of shares of the samples: ``dp_replicate * dp_shard``. No communication.

    Raises:
        StateError: The model is not parallelized.
    """
    return engine_of(model, "sw.data_parallel_size").comms.reader[1]


@contextlib.contextmanager
def gradient_sync(model: nn.Module, is_enabled: bool) -> Iterator[None]:  # noqa: FBT001 - the public contract
    """Accumulate gradients: put all backwards of a step except the last into ``with sw.gradient_sync(model, False)``.

    * accumulation ``sharded`` (zero2, shard_grad_op, zero3): each backward is reduced into the shard as usual: the sum
      over ranks of each microbatch is divided by the number of ranks, then added.
    * accumulation ``unsharded`` (ddp, zero1, ``sw.fully_shard``): inside, no gradient is sent; each rank adds up its
      microbatches in full-size buffers, and the backward outside reduces the sums, divided by the number of ranks.
    * accumulation ``defer_replicate``: inside, each backward is reduced over ``dp_shard`` and added to the sum of the
      earlier microbatches; the backward outside also reduces over ``dp_replicate`` and divides by the number of ranks.

    Parameters must not change between the first backward inside and the one outside, because gathered copies are
    reused. Sums that wait for their reduction are not in ``.grad``: reading ``.grad``, ``optimizer.step()`` and
    ``sw.clip_grad_norm`` raise until the reduction. As in one process, ``zero_grad()`` of the model, or of an optimizer
    over a part of it, drops the microbatches so far. All ranks must call it: with accumulation ``unsharded`` a rank
    that calls it alone drops only its own sums.

    Collective:
        No collective here. All ranks must use it alike.
    """
    engine = engine_of(model, "sw.gradient_sync", on_shards=False)
    if not is_enabled:
        refuse_sums(engine, "sw.gradient_sync(model, False)")
    before = engine.window.syncs
    set_gradient_sync(engine, is_enabled=is_enabled)
    try:
        yield
    finally:
        engine.window.sync(is_last=before)


def logical_shape(parameter: Tensor) -> torch.Size:
    """Return the unsharded shape of a parameter, which may be a shard, a slice or any other tensor."""
    place = group_and_index(parameter)
    if place is None:
        part = slice_of(parameter)
        return parameter.shape if part is None else torch.Size(part.shape)
    return torch.Size(place[0].layout.params[place[1]].logical_shape)


@contextlib.contextmanager
def record_collectives(model: nn.Module) -> Iterator[list[CollectiveEvent]]:
    """Record an event for every collective of this model, in the order of issue on this rank.

    ``sent_bytes`` of an event is complete when the collective has finished; the collectives of backward have finished
    when ``backward()`` returns. ``data_parallel`` and ``sw.DataParallel`` communicate with no other process: their
    events, on the axis ``devices``, are the exchanges between the first replica and the others.
    """
    recorder = recorder_of(model)
    recorders = [recorder] if recorder is not None else []
    if recorder is None or attachment_of(model) is not None:
        engine = engine_of(model, "sw.record_collectives", on_shards=False)
        recorders += [*engine.comms, *batch_norm.comms_of(model)]
    events: list[CollectiveEvent] = []
    with contextlib.ExitStack() as stack:
        for each in recorders:
            stack.enter_context(each.record(events))
        yield events


_RECORDER_KEY = "_shardwise_recorder"


def attach_recorder(module: nn.Module, recorder: Recorder) -> None:
    """Attach the recorder of the exchanges in the forward of ``module``."""
    module.__dict__[_RECORDER_KEY] = recorder


def recorder_of(module: nn.Module) -> Recorder | None:
    """Return the recorder that :func:`attach_recorder` attached, or ``None``."""
    return module.__dict__.get(_RECORDER_KEY)
