"""Ignored parameters in checkpoints: under which name each is stored, and which rank writes it.

A parameter that differs between ranks is each rank's own: it is stored as ``rank-00003/<name>``, with its optimizer
state, and loads on the same rank of as many ranks. One that all ranks hold alike is stored once. One of which the ranks
hold slices (``spec.slice``) is stored as the logical tensor, and loads wherever slices make the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.control import all_gather_json
from shardwise.comm.digest import digest_of
from shardwise.forms.ignored import Ignored
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.spec.slice import slice_of
from shardwise.state.extents import Pairs
from shardwise.state.held import extent_of

#: The name under which a checkpoint holds each ignored parameter.
Names = Mapping[nn.Parameter, str]


def written_names(ignored: Ignored, optimizers: Sequence[torch.optim.Optimizer], comms: Comms) -> Names:
    """The ignored parameters that this rank writes, with the names under which it does.

    Collective:
        Where there are ignored parameters, or stages that may have some, an all-gather of a hash of each.
    """
    if not ignored.parameters and comms.pp is None:
        return {}
    rank = comms.world.rank
    states = {parameter: state for each in optimizers for parameter, state in each.state.items()}
    own = {name: _digest(parameter, states.get(parameter, {})) for name, parameter in ignored.parameters.items()}
    everyone = all_gather_json(comms.world, own)
    found: dict[nn.Parameter, str] = {}
    for name, parameter in ignored.parameters.items():
        part = slice_of(parameter)
        digests = {other: told[name] for other, told in enumerate(everyone) if name in told}
        if part is None and len(set(digests.values())) > 1:
            found[parameter] = _own_name(name, rank)
        elif rank == min(digests) if part is None else part.is_counted:
            found[parameter] = name
    return found


def _digest(parameter: nn.Parameter, state: Mapping[str, Any]) -> str:
    """A text that is equal on two ranks where they hold the same values and optimizer state."""
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0]
    numbers = {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in state.items()
        if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
    }
    return f"{digest_of([parameter, *tensors]).tolist()} {sorted(numbers.items())}"


def stored_names(ignored: Ignored, comms: Comms, holders: Mapping[str, int], stored: Collection[str]) -> Names:
    """The ignored parameters, with the names under which a checkpoint holds this rank's values."""
    found: dict[nn.Parameter, str] = {}
    for name, parameter in ignored.parameters.items():
        if not parameter.is_contiguous():
            raise StateError(f"ignored parameter {name!r} is not contiguous and cannot be loaded in place.")
        num_own = sum(other.startswith("rank-") and other.partition("/")[2] == name for other in stored)
        if num_own not in {0, holders[name]}:
            raise CheckpointError(
                f"ignored parameter {name!r} was each rank's own and was saved by {num_own} ranks, but this world has"
                f" {holders[name]}.\n"
                f"  Load on {num_own} ranks, or build the model so that it is not ignored on both sides."
            )
        found[parameter] = _own_name(name, comms.world.rank) if num_own else name
    return found


def ignored_extents(names: Names) -> Pairs:
    """The ranges of ignored parameters that lie on this rank, flat views of live memory where that is contiguous."""
    found = []
    for parameter, name in names.items():
        flat = parameter.detach().contiguous().view(-1)
        found.append((extent_of(name, flat, parameter.shape, slice_of(parameter)), flat))
    return found


def count_holders(ignored: Ignored, comms: Comms) -> dict[str, int]:
    """How many ranks hold each ignored parameter of this rank.

    Collective:
        With ``pp``, an all-gather of their names; without, all ranks hold the same.
    """
    if comms.pp is None:
        return dict.fromkeys(ignored.parameters, comms.world.size)
    everyone = all_gather_json(comms.world, list(ignored.parameters))
    return {name: sum(name in names for names in everyone) for name in ignored.parameters}


def _own_name(name: str, rank: int) -> str:
    return f"rank-{rank:05d}/{name}"
