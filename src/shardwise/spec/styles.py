"""How tensor parallelism cuts the modules of a model: styles by name pattern, as plain data.

==============================  =====================================================================================
style                           of a module or parameter at a pattern
==============================  =====================================================================================
``colwise``                     linear layer, its output features divided over the ranks
``packed_colwise[:N]``          the same of N fused layers of equal size (2 where none is given), each divided
``colwise_gather_output``       linear layer, divided as evenly as can be; every rank gets all features of the output
``rowwise``                     linear layer, its input features divided; outputs are added up, then the bias
``rowwise_split_input``         the same where every rank has all features of the input
``embedding_rowwise``           embedding, its ids divided as evenly as can be
``divide:NAME[,NAME]``          attributes of the module, such as a number of heads, divided by the number of ranks
``colwise_vocabulary``          output projection, its ids divided as evenly as can be; its output stays divided
``vocabulary_loss:NAME``        loss of our GPT, of the output projection that is called so beside it
``replicate``                   left as it is
==============================  =====================================================================================

In a pattern ``*`` stands for any part of a name without a dot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.spec.errors import PlanError

#: Styles, and whether they take an argument: ``""`` none, ``"count"`` perhaps a number, ``"names"`` always names.
STYLES = {
    "colwise": "",
    "packed_colwise": "count",
    "colwise_gather_output": "",
    "rowwise": "",
    "rowwise_split_input": "",
    "embedding_rowwise": "",
    "divide": "names",
    "colwise_vocabulary": "",
    "vocabulary_loss": "names",
    "replicate": "",
}

#: Styles by pattern, by qualified class name of the model or part that the patterns are relative to.
TABLES: dict[str, dict[str, str]] = {
    "shardwise.models.transformer.GPT": {
        "token_embedding": "embedding_rowwise",
        "blocks.*.attention": "divide:num_heads",
        "blocks.*.attention.qkv": "packed_colwise:3",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "blocks.*.mlp.experts.*.up": "colwise",
        "blocks.*.mlp.experts.*.down": "rowwise",
        "lm_head": "colwise_vocabulary",
        "loss": "vocabulary_loss:lm_head",
    },
}


@dataclass(frozen=True, slots=True)
class Style:
    """A style as it was written: its name, and what came after the colon."""

    name: str
    argument: str = ""

    @property
    def count(self) -> int:
        """Of fused layers."""
        return int(self.argument or 2)

    @property
    def names(self) -> tuple[str, ...]:
        """Of attributes."""
        return tuple(name.strip() for name in self.argument.split(","))

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name


def parse_style(text: object, where: str) -> Style:
    """The style that ``text`` writes.

    Raises:
        PlanError: There is no such style, or its argument is missing or wrong.
    """
    name, _, argument = str(text).partition(":")
    takes = STYLES.get(name) if isinstance(text, str) else None
    if takes is None:
        raise PlanError(
            f"tensor parallelism: {where!r} has the style {text!r}, which is not known.\n  Use one of"
            f" {', '.join(STYLES)} (tp_plan={{pattern: style}})."
        )
    is_right = {
        "": not argument,
        "count": not argument or (argument.isdigit() and int(argument) > 0),
        "names": bool(re.fullmatch(r"\w+(\s*,\s*\w+)*", argument)),
    }[takes]
    if not is_right:
        meant = {"": name, "count": f"{name}:3", "names": f"{name}:num_heads"}[takes]
        raise PlanError(
            f"tensor parallelism: {where!r} has the style {text!r}, whose argument is not right.\n"
            f"  Write for example {meant!r}."
        )
    return Style(name, argument)


def parse_table(table: object) -> dict[str, str] | None:
    """``ParallelPlan.tp_plan``, checked; ``None``: the model's own table.

    Raises:
        PlanError: It is no mapping from patterns to styles.
    """
    if table is None:
        return None
    if not isinstance(table, Mapping) or not table or not all(isinstance(key, str) and key for key in table):
        raise PlanError(
            f"tp_plan={table!r}: expected a mapping from name patterns to styles.\n"
            "  Write for example {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}, or leave it out."
        )
    for pattern, style in table.items():
        parse_style(style, pattern)
    return dict(table)


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern means the module or parameter of this name."""
    parts = [re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split(".")]
    return re.fullmatch(r"\.".join(parts), name) is not None


def near_even_range(size: int, parts: int, part: int) -> tuple[int, int]:
    """What rank ``part`` of ``parts`` holds of a dimension that is cut as evenly as can be."""
    return part * size // parts, (part + 1) * size // parts
