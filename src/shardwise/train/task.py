"""The tasks for which Hugging Face models can be trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The next token; masked tokens; an answer, by an encoder-decoder model; the class of a text.
NEXT, MASKED, ANSWER, CLASS = "next token", "masked", "sequence to sequence", "classification"


@dataclass(frozen=True, slots=True)
class Task:
    """A task, with the token ids that it needs."""

    name: str
    #: The number of each class by name; ``None``: targets are no classes
    labels: Mapping[str, int] | None = None
    mask: int | None = None  # id of masked tokens, if tokens are masked
    pad: int = 0  # id of padding

    @property
    def has_pairs(self) -> bool:
        """Whether inputs and targets are separate."""
        return self.name in {ANSWER, CLASS}


CAUSAL = Task(NEXT)
