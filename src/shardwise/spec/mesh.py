"""The device mesh: named axes, and the arithmetic between a rank and its coordinate.

Axes in order, outermost first: ``pp, dp_replicate, dp_shard, cp, tp``. A rank is the row-major index of its coordinate,
so neighbours on the innermost axis have neighbouring ranks. With ``pp=2, dp_shard=2, tp=2``::

    rank        0  1  2  3  4  5  6  7
    pp          0  0  0  0  1  1  1  1
    dp_shard    0  0  1  1  0  0  1  1
    tp          0  1  0  1  0  1  0  1
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.errors import MeshError

#: Mesh axes, outermost first.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of all axes; their product is the world size.

    ``ep`` is not a separate axis: its groups are runs of ``ep`` neighbours among the ``dp_shard * cp`` ranks over which
    parameters are sharded.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive integers, and an ``ep`` that does not divide ``dp_shard * cp``."""
        for axis, size in {**self.sizes, "ep": self.ep}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"axis {axis} has size {size!r}; sizes are positive integers.\n"
                    f"  Set {axis} to 1 or more" + (", or to -1 in a plan." if axis == "dp_shard" else ".")
                )
        if self.shard_size % self.ep:
            divisors = ", ".join(str(n) for n in range(1, self.shard_size + 1) if self.shard_size % n == 0)
            raise MeshError(
                f"ep={self.ep} does not divide the dp_shard={self.dp_shard} * cp={self.cp} = {self.shard_size} ranks"
                f" that share parameters.\n  Set ep to one of {divisors}, or change dp_shard."
            )

    @classmethod
    def build(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        dp_replicate: int = 1,
        dp_shard: int = -1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
    ) -> Mesh:
        """The mesh of ``world_size`` ranks; ``dp_shard=-1`` is ``world_size`` divided by the other axes.

        Raises:
            MeshError: The sizes do not multiply to ``world_size``, or ``ep`` does not divide ``dp_shard * cp``.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise MeshError(f"the world has {world_size!r} ranks.\n  Launch at least 1 rank.")
        others = cls(pp=pp, dp_replicate=dp_replicate, cp=cp, tp=tp)
        known = others.world_size
        given = {axis: size for axis, size in others.sizes.items() if size != 1}
        if dp_shard == -1:
            if world_size % known:
                product = " * ".join(f"{axis}={size}" for axis, size in given.items())
                raise MeshError(
                    f"axes {product} make groups of {known} ranks, which do not divide the world of {world_size}.\n"
                    f"  Launch a multiple of {known} ranks, or lower one of {', '.join(given)}."
                )
            return cls(pp, dp_replicate, world_size // known, cp, tp, ep)
        made = cls(pp, dp_replicate, dp_shard, cp, tp)
        if made.world_size != world_size:
            shown = [f"{axis}={size}" for axis, size in made.sizes.items() if size != 1 or axis == "dp_shard"]
            ranks = f"{made.world_size} rank{'s' if made.world_size != 1 else ''}"
            makes = f"axes {' * '.join(shown)} make" if len(shown) > 1 else f"axis {shown[0]} makes"
            fits = f"Set dp_shard={world_size // known}, or launch" if world_size % known == 0 else "Launch"
            raise MeshError(f"{makes} {ranks}, but the world has {world_size}.\n  {fits} {ranks}.")
        return cls(pp, dp_replicate, dp_shard, cp, tp, ep)

    @property
    def sizes(self) -> dict[str, int]:
        """Size by axis name, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples: ``dp_replicate * dp_shard``."""
        return self.dp_replicate * self.dp_shard

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``.

        Raises:
            MeshError: ``axis`` is not a mesh axis.
        """
        if axis not in AXES:
            raise MeshError(f"unknown mesh axis {axis!r}.\n  Use one of: {', '.join(AXES)}.")
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> dict[str, int]:
        """The position of ``rank`` on every axis, outermost first.

        Raises:
            MeshError: ``rank`` is outside the world.
        """
        self._check(rank)
        position: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.size(axis))
        return {axis: position[axis] for axis in AXES}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at ``coordinate``; axes that it leaves out are 0.

        Raises:
            MeshError: An axis is unknown, or a position is outside of its axis.
        """
        for axis, position in coordinate.items():
            if not 0 <= position < self.size(axis):
                raise MeshError(
                    f"position {position} is outside axis {axis} of size {self.size(axis)}.\n"
                    f"  Use 0 to {self.size(axis) - 1}."
                )
        rank = 0
        for axis in AXES:
            rank = rank * self.size(axis) + coordinate.get(axis, 0)
        return rank

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``axis`` only, ``rank`` included, in order of their position."""
        coordinate = self.coordinate(rank)
        return tuple(self.rank({**coordinate, axis: position}) for position in range(self.size(axis)))

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ``axis``: a partition of the world, ordered by their first rank."""
        self.size(axis)
        return tuple(self.group(axis, rank) for rank in range(self.world_size) if self.coordinate(rank)[axis] == 0)

    @property
    def shard_size(self) -> int:
        """Number of ranks over which parameters are sharded: ``dp_shard * cp``."""
        return self.dp_shard * self.cp

    def shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` on ``dp_shard`` and ``cp`` only, ``dp_shard`` outermost."""
        coordinate = self.coordinate(rank)
        return tuple(
            self.rank({**coordinate, "dp_shard": shard, "cp": context})
            for shard in range(self.dp_shard)
            for context in range(self.cp)
        )

    def expert_shard_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same experts as ``rank``: every ``ep``-th rank of its shard group.

        With ``dp_shard=4, ep=2`` ranks 0 and 1 have all experts between them, and so have 2 and 3. Ranks 0 and 2 have
        the same experts.
        """
        group = self.shard_group(rank)
        return group[group.index(rank) % self.ep :: self.ep]

    def data_parallel_rank(self, rank: int) -> int:
        """Index of ``rank`` among the ranks that read different samples, ``dp_replicate`` outermost."""
        coordinate = self.coordinate(rank)
        return coordinate["dp_replicate"] * self.dp_shard + coordinate["dp_shard"]

    def data_parallel_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that train the same parameters as ``rank``, ``dp_replicate`` outermost.

        They differ on ``dp_replicate``, ``dp_shard`` and ``cp`` only.
        """
        coordinate = self.coordinate(rank)
        return tuple(
            member
            for replica in range(self.dp_replicate)
            for member in self.shard_group(self.rank({**coordinate, "dp_replicate": replica}))
        )

    def inner_group(self, rank: int, size: int) -> tuple[int, ...]:
        """The run of ``size`` neighbours that contains ``rank``, among the ranks over which parameters are sharded.

        Raises:
            MeshError: ``size`` does not divide ``dp_shard * cp``.
        """
        if self.shard_size % size:
            raise MeshError(
                f"inner groups of {size} ranks do not divide dp_shard={self.shard_size}.\n  Use a divisor of it."
            )
        group = self.shard_group(rank)
        first = group.index(rank) // size * size
        return group[first : first + size]

    def __str__(self) -> str:
        """The axes with more than one rank, for example ``pp=2 x dp_shard=4``, or ``dp_shard=4 (ep=2)``."""
        axes = " x ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size != 1) or "dp_shard=1"
        return axes if self.ep == 1 else f"{axes} (ep={self.ep})"

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise MeshError(
                f"rank {rank} is outside the world of {self.world_size} ({self}).\n  Use 0 to {self.world_size - 1}."
            )
