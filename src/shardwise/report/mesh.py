"""The mesh and who owns what: a table of ranks, and a picture of the shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.report.element import Content, Element
from shardwise.report.page import figure, folded, scroll, table
from shardwise.report.svg import CHARACTER, box, fits, picture, text
from shardwise.spec.errors import MeshError
from shardwise.spec.mesh import AXES, Mesh

#: Ranks and units that are drawn, at most.
RANKS, UNITS = 64, 48
AXIS_WORDS = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas of the shards",
    "dp_shard": "shards of every unit",
    "cp": "parts of a sequence",
    "tp": "slices of a matrix",
}


def mesh_of(sizes: Mapping[str, Any], ep: int = 1) -> Mesh | None:
    """The mesh of such sizes; ``None`` where they make none."""
    try:
        return Mesh(**{axis: sizes.get(axis, 1) for axis in AXES}, ep=ep)
    except (MeshError, TypeError):
        return None


def axes_table(mesh: Mesh) -> Element:
    """Every axis with more than one rank."""
    rows: list[Sequence[Content]] = [
        (axis, str(size), words, _cut(", ".join(map(str, mesh.group(axis, 0)))))
        for axis, words in AXIS_WORDS.items()
        if (size := mesh.sizes[axis]) > 1
    ]
    if mesh.ep > 1:
        rows.append(("ep", str(mesh.ep), "parts of the experts, inside dp_shard and cp", ""))
    if not rows:
        return table("The mesh", ["axis", "ranks"], [("none", "1")])
    return table("The mesh", ["axis", "ranks", "what it cuts", "the group of rank 0"], rows, numbers=[1])


def _cut(ranks: str) -> str:
    return ranks if len(ranks) < 60 else ranks[:56].rsplit(" ", 1)[0] + " ..."


def ranks_table(mesh: Mesh) -> Element:
    """Coordinates of the ranks."""
    axes = [axis for axis in AXES if mesh.sizes[axis] > 1] or ["dp_shard"]
    shown = range(min(mesh.world_size, RANKS))
    rows = [[str(rank), *(str(mesh.coordinate(rank)[axis]) for axis in axes)] for rank in shown]
    caption = "Coordinates" + (f" of the first {RANKS} of {mesh.world_size} ranks" if mesh.world_size > RANKS else "")
    return table(caption, ["rank", *axes], rows)


def ownership(units: Sequence[Mapping[str, Any]]) -> list[Content]:
    """Which elements of which unit are on which rank.

    Args:
        units: For each unit ``name``, ``numel`` (elements with padding) and ``owned`` (elements by rank).
    """
    if not units:
        return []
    num_ranks = max(len(unit["owned"]) for unit in units)
    ranks, drawn = min(num_ranks, RANKS), units[:UNITS]
    left = 16 + CHARACTER * max(len(str(unit["name"])) for unit in drawn)
    each = max(14.0, min(120.0, (1060 - left) / ranks))
    parts: list[Content] = [
        text(left + (rank + 0.5) * each, 14, f"{'rank ' * (each > 60)}{rank}", class_="faint", anchor="middle")
        for rank in range(ranks)
    ]
    for row, unit in enumerate(drawn):
        y = 22 + row * 26
        parts.append(text(left - 8, y + 15, str(unit["name"]), anchor="end"))
        for rank, owned in enumerate(unit["owned"][:ranks]):
            share = owned / unit["numel"] if unit["numel"] else 0
            words = f"{100 * share:.3g}%"
            parts.append(box(left + rank * each, y, each - 2, 22, "k8", title=f"rank {rank}: {owned:,} elements"))
            if owned:
                parts.append(box(left + rank * each, y, (each - 2) * min(1.0, share), 22, "k0"))
            if fits(words, each):
                parts.append(text(left + rank * each + each / 2 - 1, y + 15, words, class_="on", anchor="middle"))
    title = f"Share of each of {len(units)} units that each of {num_ranks} ranks owns; the table below has the numbers."
    whole = picture(left + ranks * each + 4, 26 + 26 * len(drawn), title, parts)
    some = [f"the first {ranks} of {num_ranks} ranks"] * (ranks < num_ranks)
    some += [f"the first {len(drawn)} of {len(units)} units"] * (len(drawn) < len(units))
    columns = ["unit", "elements", *(f"rank {rank}" for rank in range(ranks))]
    rows = [
        [str(unit["name"]), f"{unit['numel']:,}", *(f"{owned:,}" for owned in unit["owned"][:ranks])] for unit in drawn
    ]
    caption = (
        "A row is a unit, a column a rank: the filled part of a box is the share of the unit's elements that the rank"
        " keeps between steps."
    )
    if some:
        caption += f" Drawn: {', '.join(some)}."
    return [
        figure("Who owns what", [scroll(whole, "Who owns what")], caption),
        folded("Values", table("Elements of each unit by rank", columns, rows)),
    ]
