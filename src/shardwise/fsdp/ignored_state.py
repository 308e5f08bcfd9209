"""Ignored parameters in checkpoints: each rank's own where ranks differ, once where all hold the same.

A tensor that is each rank's own is stored as ``rank-00003/<name>``, and its optimizer state accordingly; it loads on
the same rank of as many ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.comm.dtype import dtype_name, torch_dtype
from shardwise.fsdp.ignore import Ignored
from shardwise.fsdp.sync import digest_of
from shardwise.spec.errors import CheckpointError, StateError
from shardwise.spec.extent import Extent


class SavedIgnored:
    """What this rank writes of the ignored parameters.

    Args:
        ignored: The parameters.
        optimizers: Whose state of them is saved too.
        comm: Over all ranks.

    Attributes:
        extents: Ranges, as ``fsdp.state.owned_extents`` gives those of sharded parameters.
        scalars: Of all ranks, as ``fsdp.state.optimizer_scalars``.

    Collective:
        Where there are ignored parameters, an all-gather of a hash of each, and one of the optimizer's scalars.
    """

    def __init__(self, ignored: Ignored, optimizers: Sequence[torch.optim.Optimizer], comm: Comm) -> None:
        self.extents: list[tuple[Extent, Tensor]] = []
        self.scalars: dict[str, dict[str, Any]] = {}
        if not ignored.parameters:
            return
        states = {parameter: state for each in optimizers for parameter, state in each.state.items()}
        held = {name: _Held(parameter, states.get(parameter, {})) for name, parameter in ignored.parameters.items()}
        everyone = all_gather_json(comm, {name: each.digest for name, each in held.items()})
        mine: dict[str, dict[str, Any]] = {}
        for name, each in held.items():
            is_own = any(digests[name] != each.digest for digests in everyone)
            if comm.rank > 0 and not is_own:
                continue
            stored = own_name(name, comm.rank) if is_own else name
            self.extents.append(_whole(stored, each.parameter))
            self.extents += [_whole(f"optimizer/{stored}/{key}", value) for key, value in each.tensors.items()]
            if each.scalars:
                mine[stored] = each.scalars
        for part in all_gather_json(comm, mine):
            self.scalars |= part


class LoadedIgnored:
    """What this rank reads of the ignored parameters; optimizer state is fresh until it is installed.

    Args:
        ignored: The parameters.
        optimizers: Whose state of them is loaded too.
        comm: Over all ranks.
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
        comm: Comm,
        stored: Mapping[str, Extent],
    ) -> None:
        self.extents: list[tuple[Extent, Tensor]] = []
        self._fresh: dict[nn.Parameter, dict[str, Any]] = {}
        self._stored: dict[nn.Parameter, str] = {}
        self._optimizer_of = {
            parameter: each for each in optimizers for settings in each.param_groups for parameter in settings["params"]
        }
        for name, parameter in ignored.parameters.items():
            if not parameter.is_contiguous():
                raise StateError(f"ignored parameter {name!r} is not contiguous and cannot be loaded in place.")
            found = self._stored[parameter] = _find(name, comm, stored)
            self.extents.append(_whole(found, parameter))
            if parameter not in self._optimizer_of:
                continue
            state = self._fresh[parameter] = {}
            for full_name, extent in stored.items():
                owner, _, key = full_name.removeprefix("optimizer/").rpartition("/")
                if full_name.startswith("optimizer/") and owner == found:
                    state[key] = torch.zeros(extent.shape, dtype=torch_dtype(extent.dtype), device=parameter.device)
                    self.extents.append(_whole(full_name, state[key]))

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
        self.digest = f"{digest_of([parameter, *self.tensors.values()]).hex()} {sorted(self.scalars.items())}"


def _whole(name: str, tensor: Tensor) -> tuple[Extent, Tensor]:
    flat = tensor.detach().contiguous().view(-1)
    return Extent(name, tuple(tensor.shape), dtype_name(tensor.dtype), 0, flat.numel()), flat


def _find(name: str, comm: Comm, stored: Collection[str]) -> str:
    """Under which name a checkpoint holds this rank's value; the same error on every rank."""
    num_own = sum(other.startswith("rank-") and other.partition("/")[2] == name for other in stored)
    if num_own not in {0, comm.size}:
        raise CheckpointError(
            f"ignored parameter {name!r} was each rank's own and was saved by {num_own} ranks, but this world has"
            f" {comm.size}.\n  Load on {num_own} ranks, or build the model so that it is not ignored on both sides."
        )
    return own_name(name, comm.rank) if num_own else name
