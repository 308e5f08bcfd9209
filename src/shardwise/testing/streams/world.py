"""The collectives of every rank of a large world in a step, from dry runs of a few ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.api import dry_run
from shardwise.comm.axes import Comms, open_mesh_comms
from shardwise.comm.base import Comm, Handle, Stamped
from shardwise.comm.record import RecordComm
from shardwise.comm.stall import Stamp
from shardwise.spec.mesh import Mesh
from shardwise.spec.plan import ParallelPlan
from shardwise.testing.streams.deadlocks import Program
from shardwise.testing.streams.patches import Patches
from shardwise.testing.streams.report import Collective
from shardwise.testing.streams.stacks import here

#: Axes along which ranks send each other messages. A rank's collectives depend only on its coordinates on these axes.
_UNLIKE = ("pp", "cp")
#: Prefix of messages with the shapes that stages exchange in the first step. In a dry run they are sent, not received.
_HEADER = "shapes of stage"


class _Noting(RecordComm):
    """Records the collectives of all Comms of a rank in one list."""

    def __init__(self, name: str, ranks: tuple[int, ...], own: int, log: list[Collective], axis: str) -> None:
        super().__init__(axis, rank=ranks.index(own), size=len(ranks), device="meta")
        self._name, self._ranks, self._log = name, ranks, log
        self._host = RecordComm(axis, rank=self.rank, size=self.size, device="meta")

    @property
    def host(self) -> Comm:
        """A separate Comm for the host's messages, whose sends do not wait."""
        return self._host

    def _note_issued(self, kind: str, unit: str, numel: int, messages: tuple[tuple[int, int], ...] = ()) -> None:
        if self.size > 1 and not unit.startswith(_HEADER):
            self._log.append(Collective(kind, unit, self._name, self._ranks, numel, messages, 0, {}, here(3)))

    def _start(
        self, kind: str, unit: str, buffer: Tensor, numel: int, sent_numel: int, *, direction: str | None = None
    ) -> Stamp:
        stamp = super()._start(kind, unit, buffer, numel, sent_numel, direction=direction)
        if direction is None:
            self._note_issued(kind, unit, stamp.numel)
        return stamp

    def _do_send(self, stamp: Stamp, buffer: Tensor, to: int) -> Handle:
        self._note_issued("send", stamp.unit, 0, ((self.rank, to),))
        return super()._do_send(stamp, buffer, to)

    def _do_receive(self, stamp: Stamp, buffer: Tensor, source: int) -> Handle:
        self._note_issued("recv", stamp.unit, 0, ((source, self.rank),))
        return super()._do_receive(stamp, buffer, source)

    def _do_exchange(self, sends: Sequence[Stamped], receives: Sequence[Stamped]) -> Handle:
        pairs = [(self.rank, to) for _, _, to in sends] + [(source, self.rank) for _, _, source in receives]
        units = [stamp.unit for stamp, _, _ in (*sends, *receives)]
        if pairs:
            self._note_issued("exchange", units[0], 0, tuple(pairs))
        for stamp, buffer, to in sends:
            super()._do_send(stamp, buffer, to)
        for stamp, buffer, source in receives:
            super()._do_receive(stamp, buffer, source)
        return super()._do_exchange((), ())


def world_traces(
    build_model: Callable[[], nn.Module],
    plan: ParallelPlan,
    *,
    world_size: int,
    ranks_per_machine: int | None = None,
    **options: Any,
) -> list[Program]:
    """The collectives of each rank of a world in two steps and an update, in the order of issue.

    Ranks that differ only on data-parallel axes, ``tp`` and ``ep`` issue the same collectives with different peers, so
    only one of them is run.

    Arguments are those of ``sw.dry_run``.

    Returns:
        The program of each rank, for :func:`refuse_deadlocks`.
    """
    mesh = plan.mesh(world_size, ranks_per_machine)
    found: dict[tuple[int, ...], list[Collective]] = {}
    for place in itertools.product(*(range(mesh.size(axis)) for axis in _UNLIKE)):
        rank = mesh.rank({**dict.fromkeys(mesh.sizes, 0), **dict(zip(_UNLIKE, place, strict=True))})
        log: list[Collective] = []
        patches = Patches()
        patches.set(dry_run, "record_comms", _recorder(log))
        try:
            dry_run.dry_run(
                build_model,
                plan,
                world_size=world_size,
                rank=rank,
                backend="nccl",
                ranks_per_machine=ranks_per_machine,
                **options,
            )
        finally:
            patches.undo()
        found[place] = log
    return [
        Program(found[tuple(mesh.coordinate(rank)[axis] for axis in _UNLIKE)], _groups(mesh, rank, plan))
        for rank in range(world_size)
    ]


def _recorder(log: list[Collective]) -> Callable[..., Comms]:
    def record_comms(mesh: Mesh, rank: int, *, is_replicated: bool = False, **_options: Any) -> Comms:
        def open_axis(axis: str, purpose: str, ranks: Sequence[int]) -> _Noting:
            return _Noting(_name(axis, purpose, ranks), tuple(ranks), rank, log, axis)

        return open_mesh_comms(mesh, rank, open_axis, is_replicated=is_replicated)

    return record_comms


def _groups(mesh: Mesh, rank: int, plan: ParallelPlan) -> dict[str, tuple[int, ...]]:
    """The ranks of each communicator of a rank, by name."""
    groups: dict[str, tuple[int, ...]] = {}

    def open_axis(axis: str, purpose: str, ranks: Sequence[int]) -> RecordComm:
        groups[_name(axis, purpose, ranks)] = tuple(ranks)
        return RecordComm(axis, rank=ranks.index(rank), size=len(ranks), device="meta")

    comms = open_mesh_comms(mesh, rank, open_axis, is_replicated=plan.is_replicated)
    for size in range(2, mesh.shard_size + 1):
        if mesh.shard_size % size == 0:
            comms.inner_comm(size)
    return groups


def _name(axis: str, purpose: str, ranks: Sequence[int]) -> str:
    return f"{axis}/{purpose}/{len(ranks)}"
