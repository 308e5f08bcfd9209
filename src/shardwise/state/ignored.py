"""Ignored parameters in checkpoints: each rank's own where ranks differ, once where all hold the same.

A tensor that is each rank's own is stored as ``rank-00003/<name>``, and its optimizer state accordingly; it loads on
the same rank of as many ranks. One of which the ranks hold slices (``spec.slice``) is stored as the logical tensor, and
loads wherever slices make the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.axes import Comms
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import torch_dtype
from shardwise.engine.unit import Ignored
from shardwise.init.digest import digest_of
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.spec.extent import Extent
from shardwise.spec.slice import Slice, slice_of
from shardwise.state.extents import Pairs
from shardwise.state.held import extent_of


class SavedIgnored:
    """What this rank writes of the ignored parameters.

    Args:
        ignored: The parameters.
        optimizers: Whose state of them is saved too.
        comms: Of the model.

    Attributes:
        extents: Ranges, as ``state.model.owned_extents`` gives those of sharded parameters.
        scalars: Of all ranks, as ``state.model.optimizer_scalars``.

    Collective:
        Where there are ignored parameters, or stages that may have some, an all-gather of a hash of each, and one of
        the optimizer's scalars.

    Raises:
        CheckpointError: Optimizer state of a slice has not one value per element; on every rank alike.
    """

    def __init__(self, ignored: Ignored, optimizers: Sequence[torch.optim.Optimizer], comms: Comms) -> None:
        self.extents: Pairs = []
        self.scalars: dict[str, dict[str, Any]] = {}
        if not ignored.parameters and comms.pp is None:
            return
        comm = comms.world
        states = {parameter: state for each in optimizers for parameter, state in each.state.items()}
        held = {name: _Held(parameter, states.get(parameter, {})) for name, parameter in ignored.parameters.items()}
        everyone = all_gather_json(comm, {name: each.digest for name, each in held.items()})
        mine: dict[str, dict[str, Any]] = {}
        problems: list[str] = []
        for name, each in held.items():
            part = slice_of(each.parameter)
            digests = {rank: told[name] for rank, told in enumerate(everyone) if name in told}
            is_own = part is None and len(set(digests.values())) > 1
            if not (is_own or (comm.rank == min(digests) if part is None else part.counts)):
                continue
            stored = own_name(name, comm.rank) if is_own else name
            self.extents.append(_pair(stored, each.parameter, part))
            for key, value in each.tensors.items():
                if part is not None and value.shape != each.parameter.shape:
                    problems.append(f"{key!r} of {name!r} has shape {list(value.shape)}, of which no whole can be made")
                self.extents.append(_pair(f"optimizer/{stored}/{key}", value, part))
            if each.scalars:
                mine[stored] = each.scalars
        for scalars, found in all_gather_json(comm, [mine, problems]):
            self.scalars |= scalars
            problems += [problem for problem in found if problem not in problems]
        if problems:
            raise CheckpointError(f"optimizer state of a slice cannot be saved: {'; '.join(sorted(problems)[:8])}.")


class LoadedIgnored:
    """What this rank reads of the ignored parameters; optimizer state is fresh until it is installed.

    Args:
        ignored: The parameters.
        optimizers: Whose state of them is loaded too.
        place: This rank, and of each parameter how many ranks hold it (:func:`count_holders`).
        stored: Every tensor of the checkpoint, by name.

    Attributes:
        extents: Targets to load into.

    Raises:
        CheckpointError: What is each rank's own was saved by another number of ranks.
        StateError: An ignored parameter cannot be loaded in place.
    """

    def __init__(
        self,
        ignored: Ignored,
        optimizers: Sequence[torch.optim.Optimizer],
        place: tuple[int, Mapping[str, int]],
        stored: Mapping[str, Extent],
    ) -> None:
        self.extents: Pairs = []
        self._fresh: dict[nn.Parameter, dict[str, Any]] = {}
        self._stored: dict[nn.Parameter, str] = {}
        self._optimizer_of = {
            parameter: each for each in optimizers for settings in each.param_groups for parameter in settings["params"]
        }
        for name, parameter in ignored.parameters.items():
            if not parameter.is_contiguous():
                raise StateError(f"ignored parameter {name!r} is not contiguous and cannot be loaded in place.")
            part = slice_of(parameter)
            found = self._stored[parameter] = _find(name, place[0], place[1][name], stored)
            self.extents.append(_pair(found, parameter, part))
            if parameter not in self._optimizer_of:
                continue
            state = self._fresh[parameter] = {}
            for full_name, extent in stored.items():
                owner, _, key = full_name.removeprefix("optimizer/").rpartition("/")
                if full_name.startswith("optimizer/") and owner == found:
                    shape = extent.shape if part is None else parameter.shape
                    state[key] = torch.zeros(shape, dtype=torch_dtype(extent.dtype), device=parameter.device)
                    self.extents.append(_pair(full_name, state[key], part))

    def install(self, scalars: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizers' state by the fresh one and ``scalars``."""
        for parameter, state in self._fresh.items():
            state |= {key: as_scalar(value) for key, value in scalars.get(self._stored[parameter], {}).items()}
            if state:
                self._optimizer_of[parameter].state[parameter] = state
            else:
                self._optimizer_of[parameter].state.pop(parameter, None)


def own_name(name: str, rank: int) -> str:
    """Under which a rank's own value of a parameter is stored."""
    return f"rank-{rank:05d}/{name}"


def as_scalar(value: Any) -> Any:
    """Torch's optimizers keep counts as float32 tensors on the CPU, which they change in place."""
    return torch.tensor(value, dtype=torch.float32) if isinstance(value, float) else value


class _Held:
    """An ignored parameter with its optimizer state: tensors with one value per element, and scalars."""

    def __init__(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        self.parameter = parameter
        self.tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}
        self.scalars = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in state.items()
            if isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)
        }
        self.digest = f"{digest_of([parameter, *self.tensors.values()]).tolist()} {sorted(self.scalars.items())}"


def _pair(name: str, tensor: Tensor, part: Slice | None) -> tuple[Extent, Tensor]:
    flat = tensor.detach().contiguous().view(-1)
    return extent_of(name, flat, tensor.shape, part), flat


def count_holders(ignored: Ignored, comms: Comms) -> dict[str, int]:
    """How many ranks hold each ignored parameter of this rank.

    Collective:
        With ``pp``, an all-gather of their names; without, all ranks hold the same.
    """
    if comms.pp is None:
        return dict.fromkeys(ignored.parameters, comms.world.size)
    everyone = all_gather_json(comms.world, list(ignored.parameters))
    return {name: sum(name in names for names in everyone) for name in ignored.parameters}


def _find(name: str, rank: int, num_holders: int, stored: Collection[str]) -> str:
    """Under which name a checkpoint holds this rank's value."""
    num_own = sum(other.startswith("rank-") and other.partition("/")[2] == name for other in stored)
    if num_own not in {0, num_holders}:
        raise CheckpointError(
            f"ignored parameter {name!r} was each rank's own and was saved by {num_own} ranks, but this world has"
            f" {num_holders}.\n  Load on {num_own} ranks, or build the model so that it is not ignored on both sides."
        )
    return own_name(name, rank) if num_own else name
