"""Parameters that nobody would synchronise: those that came into a model, or beside it, after it was parallelized.

Each rank would train its own: an adapter or a head registered later, a plain module whose parameters are in the same
optimizer. And ``DistributedDataParallel`` around shards, which would send rank 0's shards to the others, or torch's
FSDP, which would cut them again.

Looked for in the first forward of each kind, and when an optimizer steps with parameters that it has not stepped with
before: nothing is asked in a step like the one before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from shardwise.comm.control import all_gather_json
from shardwise.engine import attach, torch_private
from shardwise.init.digest import digest_of
from shardwise.optim.flat_parameters import group_of
from shardwise.spec.errors import StateError, Uncopyable

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def watch(engine: Engine, root: nn.Module) -> None:
    """Have optimizers that step from now on compared with what is registered below ``root``."""
    _engines.add(engine)
    torch_private.set_ignored_by_ddp(root, _RefusesDDP(root))
    torch_private.set_refusal_of_fsdp(root, functools.partial(_refuse_fsdp, type(root).__name__))


def refuse_added(engine: Engine, only: Callable[[nn.Parameter], bool] = lambda _: True) -> None:
    """Refuse trained parameters in the model that are no unit's, where several ranks train.

    Args:
        engine: Of the model.
        only: Which of them count.

    Raises:
        StateError: There is one.
    """
    root = engine.units[0].members[0].module()
    if root is None or engine.comms.world.size == 1:
        return
    known = {id(p) for group in engine.groups for p in (*group.shards, *group.fulls)}
    for name, parameter in root.named_parameters():
        is_ours = id(parameter) in known or parameter in engine.ignored
        if not is_ours and parameter.requires_grad and only(parameter):
            raise StateError(
                f"parameter {name!r} of shape {list(parameter.shape)} was added after sw.parallelize(): no rank would"
                " send its gradient, and every rank would train its own.\n"
                "  Add it (an adapter, a head) before sw.parallelize(), freeze it, or name it in"
                " sw.ParallelPlan(ignored=[...]) if each rank is to have its own."
            )


def refuse_ddp(engine: Engine) -> None:
    """Refuse a forward inside a ``DistributedDataParallel`` that has parameters of this model.

    Raises:
        StateError: It is inside of one.
    """
    held = torch_private.parameters_of_ddp_forward()
    if any(attach.mark_of(parameter) is not None for parameter in held):
        root = engine.units[0].members[0].module()
        _refuse_ddp(type(root).__name__)


def _refuse_ddp(name: str) -> NoReturn:
    raise StateError(
        f"torch's DistributedDataParallel around {name}, which is parallelized: it would send rank 0's shards to the"
        " other ranks.\n"
        "  Leave it out: sw.parallelize() sums gradients over the ranks. If it has been built, build the model again."
    )


def _refuse_fsdp(name: str) -> NoReturn:
    raise StateError(
        f"torch's FSDP around {name}, which is parallelized: it would cut this rank's shards once more.\n"
        "  Leave out FullyShardedDataParallel, torch's fully_shard and replicate: sw.parallelize() shards the model as"
        " its strategy says."
    )


class _RefusesDDP(Uncopyable):
    """The names of parameters that ``DistributedDataParallel(model)`` asks the model to leave out."""

    def __init__(self, root: nn.Module) -> None:
        self._name = type(root).__name__

    def __iter__(self) -> Iterator[str]:
        _refuse_ddp(self._name)


# -- at an optimizer's step


def check_optimizer(optimizer: torch.optim.Optimizer, engines: list[Engine]) -> bool:
    """Refuse an optimizer that would train parameters on each rank alone.

    Those registered in a parallelized model are refused. Others beside it may be synchronised by other means: their
    gradients are compared.

    Args:
        optimizer: Before a step.
        engines: Whose parameters it has as well.

    Returns:
        All of its parameters have been decided about; not so before those beside a model have gradients.

    Collective:
        With parameters beside a model all-gather of a text over the ranks that train the model.

    Raises:
        StateError: Such a parameter.
    """
    given = [p for settings in optimizer.param_groups for p in settings["params"]]
    others = {id(p): p for p in given if group_of(p) is None and p.requires_grad}
    if not others:
        return True
    for engine in tuple(_engines):
        current = engine.units[0].engine
        if current is not None and current() is engine:
            refuse_added(engine, only=lambda parameter: id(parameter) in others)
    known = {id(p) for engine in engines for p in engine.ignored.parameters.values()}
    beside = [p for key, p in others.items() if key not in known and type(p.data) is torch.Tensor]
    if not beside or not engines or engines[0].comms.control.size == 1:
        return True
    return _compare_gradients(beside, engines[0])


def _compare_gradients(parameters: list[Tensor], engine: Engine) -> bool:
    gradients = [
        p.grad if p.grad.layout is torch.strided else p.grad.to_dense() for p in parameters if p.grad is not None
    ]
    digests = all_gather_json(engine.comms.control, str(digest_of(gradients).tolist()))
    if len(set(digests)) > 1:
        shapes = ", ".join(str(list(p.shape)) for p in parameters[:3])
        raise StateError(
            f"the optimizer holds {len(parameters)} parameters (of shape {shapes}) that are in no parallelized model,"
            " and their gradients differ from rank to rank: every rank would train its own.\n"
            "  Put the modules into one model before sw.parallelize(), or into an optimizer of their own if each rank"
            " is to have its own."
        )
    return bool(gradients)
