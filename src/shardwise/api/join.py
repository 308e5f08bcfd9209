"""The context in which ranks may have different numbers of batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from shardwise.features import batch_norm
from shardwise.features.uneven import Join
from shardwise.forms.attachment import engine_of
from shardwise.forms.ignored import ignored_of
from shardwise.optim.clip import clip_grad_norm
from shardwise.optim.in_backward import optimizers_in_backward
from shardwise.spec.errors import StateError


@contextlib.contextmanager
def join(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    divide_by_initial_world_size: bool = True,
    throw_on_early_termination: bool = False,
) -> Iterator[None]:
    """Let ranks have different numbers of batches, as ``torch.distributed.algorithms.Join`` and DDP's ``join``.

    ::

        with sw.join(model, optimizer):
            for batch in my_batches:  # some ranks have more of them
                model(**batch).loss.backward()
                sw.clip_grad_norm(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()

    A rank whose loop has ended stays at the end of the context and takes part in what the others do: forward and
    backward (with gradients of zero), ``sw.clip_grad_norm``, ``sw.train_step``'s loss, ``optimizer.step()`` of the
    optimizers named here with the others' settings. All ranks leave the context together. It also serves evaluation and
    ``generate()``, where no optimizer is needed; ``generate()`` then keeps no further step with other ranks.

    While a rank has no batch left, ``sw.save`` and whatever else works on the whole model is refused; do it outside of
    the context. A scheduler that steps with every batch steps more often on some ranks: set rates by a count that all
    ranks share. Gradient scalers and batch norm over all ranks are refused.

    Args:
        model: A parallelized model.
        optimizers: Those that step inside.
        divide_by_initial_world_size: Sums of gradients are divided by the number of all ranks; else by the number of
            ranks that still have a batch, and every sample weighs the same.
        throw_on_early_termination: Raise on all ranks as soon as one has no batch left and another begins one.

    Collective:
        A small all-gather for each outermost forward; once a rank has no batch left, for each collective. All ranks
        must enter.

    Raises:
        RankDisagreement: ``throw_on_early_termination``, or ranks that have batches do different things.
        CommError: Another rank has left by an exception.
        StateError: The context is entered twice; the optimizers' settings differ; something that is refused.
    """
    engine = engine_of(model, "sw.join")
    engine.settle("sw.join()")
    if engine.observers.find(Join) is not None:
        raise StateError("sw.join() inside sw.join() of the same model.\n  Leave one out.")
    if batch_norm.comms_of(model) and not throw_on_early_termination:
        raise StateError(
            "sw.join(): batch norm over all ranks needs samples of every rank.\n"
            "  Use plain batch norm, drop_last=True, or sw.join(..., throw_on_early_termination=True)."
        )
    if engine.comms.ep is not None:
        raise StateError(
            "sw.join(): experts on other ranks wait for the tokens of every rank (ep).\n"
            "  Use drop_last=True, or set ep=1."
        )
    if ignored_of(engine).spread:
        raise StateError(
            "sw.join(): lookups in rows on other ranks wait for every rank (row_sharded).\n"
            "  Use drop_last=True, or leave row_sharded out."
        )
    group = Join(
        engine,
        optimizers_in_backward(engine) or optimizers,
        lambda max_norm: clip_grad_norm(model, max_norm),
        divides_by_all=divide_by_initial_world_size,
        throws=throw_on_early_termination,
    )
    with _generating_alone(model):
        engine.observers.add(group, is_first=True)
        try:
            yield
        except BaseException:
            group.fail()
            raise
        else:
            group.follow()
        finally:
            engine.observers.remove(group)
            group.restore()


@contextlib.contextmanager
def _generating_alone(model: nn.Module) -> Iterator[None]:
    """Without the collective of its own by which transformers keeps ``generate()`` in step over the ranks.

    A rank without a batch has no part in it; and inside ``join`` ranks may call the model more or less often.
    """
    key = "_is_fsdp_managed_module"
    before = model.__dict__.get(key)
    if before is not None:
        model.__dict__[key] = False
    try:
        yield
    finally:
        if before is not None:
            model.__dict__[key] = before
