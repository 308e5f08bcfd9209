"""The owner of each element of each unit, for plan.json."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

import shardwise as sw
from shardwise.spec.mesh import Mesh
from shardwise.train.control import Control


def owned_units(model: nn.Module, mesh: Mesh, control: Control) -> list[dict[str, Any]]:
    """Each unit with its elements and how many of them each rank keeps between steps, in the order of the model.

    ``owned`` is 0 on ranks of other pipeline stages. What ``tp`` replicates, several ranks own. Every stage of a
    pipeline has a root. One all-gather of small JSON.
    """
    mine = [
        (
            unit.name,
            unit.type_name,
            sum(math.prod(shape) for group in unit.groups for _, shape, _ in group.parameters),
            sum(held for group in unit.groups for _, _, held in group.parameters),
        )
        for unit in sw.summary(model).units
    ]
    found: dict[str, dict[str, Any]] = {}
    for rank, units in enumerate(control.all_json(mine)):
        stage = mesh.coordinate(rank)["pp"]
        for name, kind, numel, held in units:
            shown = f"{name}, stage {stage}" if mesh.pp > 1 and name == "root" else name
            new = {"name": shown, "class": kind, "numel": numel, "owned": [0] * control.size}
            found.setdefault(shown, new)["owned"][rank] = held
    return list(found.values())
