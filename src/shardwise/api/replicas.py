"""``sw.check_replicas``: compares tensors of which several ranks have copies, to find corrupted memory."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.comm.digest import Digester
from shardwise.engine.engine import Engine
from shardwise.engine.group import Group
from shardwise.engine.storage.attachment import engine_of
from shardwise.engine.storage.flat_parameters import group_of
from shardwise.spec.errors import RankDisagreement

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

#: Maximum number of differences in an error message.
_MOST_NAMED = 8


def check_replicas(model: nn.Module, optimizer: Optimizers = (), *, after_backward: bool = False) -> None:
    """Raise if copies of parameters or optimizer state, which must be bitwise equal, differ between ranks.

    A bit flip in one rank's memory changes what that rank trains, and no collective detects it. This function computes
    a 128-bit digest of each unit on its device and compares:

    * under ``ddp`` the parameters and the optimizer's state, on all data-parallel ranks;
    * with ``dp_replicate`` each rank's slice of them, on the ranks that hold the same slice;
    * with ``tp`` the parameters that are replicated over ``tp``;
    * with ``after_backward`` the gathered parameters that ``zero1`` and ``zero2`` keep, on all data-parallel ranks.

    The settings of the optimizer, such as its learning rate, are compared on all data-parallel ranks under any plan.
    Tensors that only one rank stores, as under ``zero3`` without ``dp_replicate``, cannot be compared. ::

        loss.backward()
        if step % 100 == 0:
            sw.check_replicas(model, optimizer, after_backward=True)
        optimizer.step()

    Args:
        model: A parallelized model.
        optimizer: An optimizer of its parameters, or several. Left out: only parameters are compared.
        after_backward: Whether the call is between a backward and the update, when gathered copies are up to date.

    Raises:
        RankDisagreement: On all ranks. Names units and ranks, and the odd rank if most of three or more agree.

    Collective:
        An all-gather of about 60 bytes per unit and rank for each axis along which there are copies, and one over all
        ranks. The host waits for the device. All ranks must call.
    """
    engine = engine_of(model, "sw.check_replicas")
    engine.need_values("sw.check_replicas()")
    engine.apply_user_changes()
    optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    control = engine.comms.control
    by_comm: dict[Comm, dict[str, Tensor]] = {control: {}} if control.size > 1 and optimizers else {}
    digester = Digester()
    for comm, name, tensors in _copies(engine, optimizers, after_backward=after_backward):
        if comm is not None and comm.size > 1:
            by_comm.setdefault(comm, {})[name] = digester.of(tensors)
    world = engine.comms.world
    problems: list[str] = []
    for comm, digests in by_comm.items():
        own: dict[str, Any] = {name: digest.tolist() for name, digest in digests.items()}
        own |= _settings(optimizers) if comm is control else {}
        problems += _differences(all_gather_json(comm, [world.rank, own]))
    problems_of_all = list(dict.fromkeys(problem for rank in all_gather_json(world, problems) for problem in rank))
    if problems_of_all:
        lines = "".join(f"\n  - {problem}" for problem in problems_of_all[:_MOST_NAMED])
        more = f"\n  - and {len(problems_of_all) - _MOST_NAMED} more" if len(problems_of_all) > _MOST_NAMED else ""
        raise RankDisagreement(
            f"copies that must be equal on several ranks are not:{lines}{more}\n"
            "  A bit has changed in the memory of one of them, or a program changes parameters on some ranks only. Go"
            " back to a checkpoint from before; if the same machine is named again, take it out."
        )


def _copies(
    engine: Engine, optimizers: Sequence[torch.optim.Optimizer], *, after_backward: bool
) -> Iterator[tuple[Comm | None, str, list[Tensor]]]:
    """Yield replicated tensors: the Comm of the ranks with copies, a name, the tensors; in one order on all ranks."""
    states = _states(optimizers)
    for group in engine.groups:
        dtype = str(group.dtype).removeprefix("torch.")
        name = f"{group.unit.name} ({dtype}{'' if group.wants_gradients else ', frozen'})"
        copies = group.comms.replicate if group.placements.shards_optimizer else group.comms.control
        yield copies, f"parameters of {name}", [group.master]
        if state := states.get(id(group)):
            yield copies, f"optimizer state of {name}", state
        if after_backward and group.replica is not None and group.replica is not group.master:
            yield group.comms.control, f"gathered parameters of {name}", [group.replica]
        specs = enumerate(group.layout.params)
        if undivided := [group.view_in(index, group.master) for index, spec in specs if spec.slice is None]:
            yield engine.comms.tp, f"parameters of {name} that tp does not divide", undivided


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Mapping[int, list[Tensor]]:
    """Return the optimizers' state tensors by the id of the group that owns the parameters."""
    found: dict[int, list[Tensor]] = {}
    for optimizer in optimizers:
        for settings in optimizer.param_groups:
            for parameter in settings["params"]:
                group: Group | None = group_of(parameter)
                tensors = [
                    value
                    for _, value in sorted(optimizer.state.get(parameter, {}).items())
                    if type(value) is Tensor and value.dim() > 0
                ]
                if group is not None and tensors:
                    found.setdefault(id(group), []).extend(tensors)
    return found


def _settings(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the scalar settings of the optimizers, by setting and parameter group."""
    groups = [settings for optimizer in optimizers for settings in optimizer.param_groups]
    return {
        f"{key} of parameter group {index} of the optimizer": [str(value)]
        for index, settings in enumerate(groups)
        for key, value in settings.items()
        if isinstance(value, (bool, int, float, str, tuple)) or (isinstance(value, Tensor) and value.dim() == 0)
    }


def _differences(everyones: Sequence[Any]) -> list[str]:
    """Return one line for each name whose digests differ between ranks."""
    found = []
    for name in dict.fromkeys(name for _, digests in everyones for name in digests):
        ranks: dict[Any, list[int]] = collections.defaultdict(list)
        for rank, digests in everyones:
            ranks[tuple(digests.get(name, ()))].append(rank)
        if len(ranks) > 1:
            groups = sorted(ranks.values(), key=lambda ranks_alike: (-len(ranks_alike), ranks_alike))
            most, others = groups[0], sorted(rank for ranks_alike in groups[1:] for rank in ranks_alike)
            if len(most) > len(others):
                found.append(f"{name}: {_ranks(others)} differ{'s' * (len(others) == 1)} from {_ranks(most)}")
            else:
                found.append(f"{name}: {' and '.join(map(_ranks, groups))} differ")
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
