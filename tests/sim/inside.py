"""The collectives inside units (``tp``, ``cp``, ``ep``), put into a simulated step where they are issued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.sim.step import Transfer, UnitSeconds
from shardwise.spec.traffic.data import Collective
from shardwise.spec.unit_facts import UnitFacts


def inside(
    units: Mapping[int, UnitFacts], forward: Sequence[Collective], backward: Sequence[Collective]
) -> dict[int, UnitSeconds]:
    """What each unit computes: a block's collectives belong to it, the others to the root, before or after the blocks.

    Args:
        units: By number; blocks are units of their own, ``blocks.3``.
        forward: The collectives of a forward inside units, in order.
        backward: Those of a backward.
    """
    found = {}
    for number, unit in units.items():
        if number:
            found[number] = UnitSeconds(
                forward_exchanges=_transfers(c for c in forward if _is_in(c, unit)),
                backward_exchanges=_transfers(c for c in backward if _is_in(c, unit)),
            )
    blocks = [unit for number, unit in units.items() if number]
    ahead, behind = _around(forward, blocks)
    first, last = _around(backward, blocks)
    found[0] = UnitSeconds(1.0, 2.0, 1.0, 1.0, ahead, first, behind, last)
    return found


def _is_in(collective: Collective, unit: UnitFacts) -> bool:
    return collective.unit == unit.name or collective.unit.startswith(f"{unit.name}.")


def _around(
    trace: Sequence[Collective], blocks: Sequence[UnitFacts]
) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
    """The collectives of the root before those of the first block, and after."""
    own = [any(_is_in(c, unit) for unit in blocks) for c in trace]
    first = own.index(True) if True in own else len(trace)
    before = [c for c, is_block in zip(trace[:first], own, strict=False) if not is_block]
    after = [c for c, is_block in zip(trace[first:], own[first:], strict=True) if not is_block]
    return _transfers(before), _transfers(after)


def _transfers(trace) -> tuple[Transfer, ...]:
    return tuple(Transfer(0.5, c, c.axis) for c in trace)
