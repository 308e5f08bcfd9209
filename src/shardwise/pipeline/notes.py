"""The stages of a pipeline in words, for ``sw.summary``."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.pipeline.element import Element


def describe_stages(elements: Sequence[Element], ranks: Sequence[int], num_world_ranks: int) -> list[str]:
    """A line for each stage: its ranks, modules and parameters.

    Args:
        elements: Of the whole model, with their stages.
        ranks: Of each stage along ``pp``, which is the outermost axis of the mesh.
        num_world_ranks: Of all axes.
    """
    width = num_world_ranks // (max(ranks) + 1)
    lines = ["pipeline stages:"]
    for stage, rank in enumerate(ranks):
        held = [element for element in elements if stage in element.stages]
        names = held[0].name if len(held) == 1 else f"{held[0].name} to {held[-1].name}, {len(held)} modules"
        first, last = rank * width, (rank + 1) * width - 1
        where = f"rank {first}" if width == 1 else f"ranks {first} to {last}"
        numel = sum(parameter.numel() for parameter in _parameters(held))
        trained = "" if _trains(held) else ", none of them trained"
        lines.append(f"  stage {stage + 1} of {len(ranks)} on {where}: {names}; {numel:,} parameters{trained}")
    return lines


def untrained(elements: Sequence[Element], ranks: Sequence[int]) -> list[int]:
    """The ranks along ``pp`` none of whose modules has a trained parameter, where others have."""
    found = [
        rank
        for rank in sorted(set(ranks))
        if not _trains([e for e in elements if any(ranks[stage] == rank for stage in e.stages)])
    ]
    return found if len(found) < len(set(ranks)) else []


def _parameters(elements: Sequence[Element]) -> list[nn.Parameter]:
    return list({id(p): p for element in elements for p in element.module.parameters()}.values())


def _trains(elements: Sequence[Element]) -> bool:
    return any(parameter.requires_grad for parameter in _parameters(elements))
