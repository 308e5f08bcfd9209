"""What is trained in a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Steps of every engine before the first turn: orders are recorded, buckets rebuilt, optimizer state made.
WARM_UP_STEPS = 3
#: Of tokens and of the initial weights.
SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batches, and how its steps are timed.

    Attributes:
        name: Name, for people.
        model: Fields of ``GPTConfig``; empty where a configuration says it all.
        seq_len: Tokens per sample.
        batch: Samples per rank and step.
        steps: Steps that an engine makes in one turn.
        statistic: What stands for a turn: ``median`` of its steps, or ``min`` where a step is so short that whatever
            else the machine does would be measured with it.
        config: Path of a run configuration that gives model and data.
    """

    name: str
    seq_len: int
    batch: int
    steps: int
    statistic: str = "median"
    model: Mapping[str, Any] = field(default_factory=dict)
    config: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"model": dict(self.model)}

    def __str__(self) -> str:
        """One line: shape, batch and steps."""
        shape = (
            ", ".join(f"{key} {value}" for key, value in self.model.items())
            or f"configuration {Path(self.config or '').name}"
        )
        return f"{self.name}: {shape}; sequence {self.seq_len}, {self.batch} per rank and step"


def _gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden": hidden,
        "num_heads": heads,
        "vocab_size": vocab,
        "seq_len": seq_len,
        "tied": False,
    }


#: ``host``: the cost of hooks and launches. ``compute``: arithmetic, which all share. ``wide``: communication.
CASES = {
    case.name: case
    for case in (
        Case("host", seq_len=16, batch=1, steps=20, statistic="min", model=_gpt(48, 64, 8, 256, 16)),
        Case("compute", seq_len=256, batch=2, steps=3, model=_gpt(8, 512, 8, 8192, 256)),
        Case("wide", seq_len=64, batch=1, steps=4, model=_gpt(4, 1024, 16, 2048, 64)),
    )
}
