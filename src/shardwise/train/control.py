"""Communication of the ranks outside of training steps: outcomes, requests to stop, recorded numbers.

It uses a separate communicator on the run's device, so that its messages never mix with the engine's collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.comm.base import Comm
from shardwise.comm.control import all_gather_json
from shardwise.launch.exit_codes import to_storage_error
from shardwise.spec.errors import CheckpointError, ConfigError, NonFiniteError, ShardwiseError, StateError, StorageError
from shardwise.spec.text import printable
from shardwise.train.data.token_files import DataError
from shardwise.train.lock import RunLockedError

T = TypeVar("T")

_KINDS: dict[str, type[ShardwiseError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        CheckpointError,
        DataError,
        StorageError,
        RunLockedError,
        StateError,
        NonFiniteError,
        ShardwiseError,
    )
}


class Control:
    """The ranks' communication outside of training steps; with one rank every call returns this rank's own values."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size

    @property
    def is_first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def on_first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 and return its result (JSON), or raise its ShardwiseError or OSError, on every rank.

        Collective:
            One all-gather of small JSON.
        """
        outcome: dict[str, Any] = {}
        caught: ShardwiseError | None = None
        if self.is_first:
            try:
                outcome = {"value": action()}
            except (ShardwiseError, OSError) as error:
                caught = error if isinstance(error, ShardwiseError) else to_storage_error(error)
                kind = next((k.__name__ for k in type(caught).__mro__ if k.__name__ in _KINDS), "ShardwiseError")
                outcome = {"kind": kind, "text": str(caught), "code": caught.exit_code}
        outcome = all_gather_json(self.comm, outcome)[0]
        if caught is not None:
            raise caught
        if "kind" in outcome:
            error = _KINDS[outcome["kind"]](outcome["text"])
            error.exit_code = outcome["code"]
            raise error
        return outcome["value"]

    def all_json(self, value: Any) -> list[Any]:
        """Return every rank's ``value``, in rank order. One all-gather."""
        return list(all_gather_json(self.comm, value))

    def rows(self, values: list[float], tensors: Sequence[Tensor | float | None] = ()) -> list[list[float]]:
        """Return each rank's ``values`` and scalar ``tensors`` (``None`` becomes 0), in rank order; all of one length.

        Collective:
            One all-gather of 8 bytes per value and rank. The host waits for the device.
        """
        device, count = self.comm.device, len(values)
        table = torch.zeros(self.size, count + len(tensors), dtype=torch.float64, device=device)
        table[self.rank, :count] = torch.tensor(values, dtype=torch.float64)
        for index, tensor in enumerate(tensors, count):
            if isinstance(tensor, Tensor):
                table[self.rank, index].copy_(tensor.detach().reshape(()))
            elif tensor is not None:
                table[self.rank, index] = tensor
        self.comm.all_gather(table.view(-1), unit="step").wait()
        return table.tolist()

    def check_same(
        self, value: Mapping[str, Any], what: str, advice: str = "Give every rank the same configuration and versions."
    ) -> None:
        """Refuse to go on if the ranks have different values. One all-gather of JSON: all ranks must call."""
        values = self.all_json(value)
        different = next((rank for rank, other in enumerate(values) if other != values[0]), None)
        if different is None:
            return
        lines = "".join(
            f"\n  - {key}: rank 0 has {printable(here)}, rank {different} has {printable(there)}"
            for key, here, there in differences(values[0], values[different])[:20]
        )
        raise ConfigError(f"the ranks do not have the same {what}:{lines}\n  {advice}")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Return dotted key, old value and new value of everything that differs between two nested mappings.

    The mappings in lists are compared one by one.
    """
    result: list[tuple[str, Any, Any]] = []
    for key in [*old, *(k for k in new if k not in old)]:
        left, right = (_by_index(mapping.get(key)) for mapping in (old, new))
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            result += differences(left, right, f"{prefix}{key}.")
        elif left != right:
            result.append((f"{prefix}{key}", left, right))
    return result


def _by_index(value: Any) -> Any:
    is_list = isinstance(value, list) and value and isinstance(value[0], Mapping)
    return dict(enumerate(value)) if is_list else value
