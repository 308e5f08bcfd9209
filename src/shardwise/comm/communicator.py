"""NCCL communicators over some ranks of a process group: opened by these ranks alone, and shared by all models.

torch's ``new_group`` cannot be used for them. Where the default group was given a ``device_id``, torch makes a group by
splitting the default group's communicator, which all its ranks must take part in, and ``new_group`` does not call the
others. And the name under which the members find each other counts the groups that a process holds already, which
differs between ranks of which only some have opened a group before. Here the name says who the members are and what the
communicator is for, and nothing is split.

Models that communicate among the same ranks for the same purpose share a communicator, as those of FSDP2 do. The number
of communicators therefore does not grow with the number of models; they go with the process group.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardwise.spec.errors import CommError

#: How much longer than the group's own time limit NCCL's watchdog waits: ``comm.watch`` comes first and says why.
MARGIN_S = 60.0

_Key = tuple[str, str, tuple[int, ...]]
_opened: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def communicator(
    parent: dist.ProcessGroup,
    ranks: Sequence[int],
    axis: str,
    purpose: str,
    device: torch.device,
    *,
    backend: str = "nccl",
) -> dist.ProcessGroup:
    """The process group of these ranks of ``parent`` for one purpose on one axis.

    Args:
        parent: Holds the ranks; its store is where the members find each other.
        ranks: In the numbers of ``parent``, this one among them, in coordinate order.
        axis: Name of the mesh axis.
        purpose: ``gather``, ``reduce``, ``control``, ``activations`` or ``samples``.
        device: Of the tensors that move.
        backend: Of the group.

    Collective:
        The first call for these ranks and this purpose connects them: all of them must call, in the same order. The
        other ranks of ``parent`` need not.

    Raises:
        CommError: The members did not find each other.
    """
    opened = _opened.setdefault(parent, {})
    key = axis, purpose, tuple(ranks)
    if key not in opened:
        opened[key] = _open(parent, key, device, backend)
    return opened[key]


def timeout_s_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """How long a collective of ``group`` may take."""
    timeout: dt.timedelta = group._get_backend(device).options._timeout  # noqa: SLF001 - there is no public way to ask
    return timeout.total_seconds()


def _open(parent: dist.ProcessGroup, key: _Key, device: torch.device, backend: str) -> dist.ProcessGroup:
    axis, purpose, ranks = key
    world = dist.get_process_group_ranks(parent)
    members = [world[rank] for rank in ranks]
    digest = hashlib.blake2b(repr(members).encode(), digest_size=8).hexdigest()
    name: Any = f"shardwise/{parent.group_name}/{axis}/{purpose}/{digest}"
    timeout_s = timeout_s_of(parent, device)
    try:
        with _splits_nothing():
            group, _ = c10d._new_process_group_helper(  # noqa: SLF001 - the only way to choose the name
                len(members),
                ranks.index(parent.rank()),
                members,
                dist.Backend(backend),
                parent.get_group_store(),
                name,
                timeout=dt.timedelta(seconds=timeout_s + MARGIN_S),
                # Connects now. Otherwise the first message between two ranks would connect these two alone, which
                # blocks both hosts, and a ring of ranks that each send first would block for ever.
                device_id=device if device.type == "cuda" else None,
                group_desc=f"{axis}: {purpose}",
            )
    except RuntimeError as error:
        raise CommError(
            f"ranks {members} did not all connect for {axis}/{purpose} within {timeout_s:g} s: {error}\n"
            "  See whether all of these ranks build the same model, and the first error among the ranks' logs."
        ) from error
    assert isinstance(group, dist.ProcessGroup)
    # What new_group does beside.
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(members)}  # noqa: SLF001
    return group


@contextlib.contextmanager
def _splits_nothing() -> Iterator[None]:
    """Torch splits the default group's communicator where the default group is bound to a device."""
    default = dist.group.WORLD
    assert default is not None
    bound = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound
