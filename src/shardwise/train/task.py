"""The tasks that Hugging Face models are trained for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The next token; hidden tokens; an answer, by an encoder and a decoder; a class of a text.
NEXT, MASKED, ANSWER, CLASS = "next token", "masked", "sequence to sequence", "classification"


@dataclass(frozen=True, slots=True)
class Task:
    """One of them, with what it needs of the tokenizer."""

    name: str  # Which
    #: Of classes: the number of each by its name, where there are names; else ``None``
    labels: Mapping[str, int] | None = None
    mask: int | None = None  # the id that stands for a hidden token, where tokens are hidden
    pad: int = 0  # the id of padding

    @property
    def has_pairs(self) -> bool:
        """Inputs and targets are different texts."""
        return self.name in {ANSWER, CLASS}


CAUSAL = Task(NEXT)
