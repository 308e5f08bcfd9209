"""How quantities, hints and tables are put into text."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence


def size(num_bytes: float) -> str:
    """A number of bytes for people: ``512 B``, ``1.5 MB``; powers of 1000, one decimal."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, columns two blanks apart: the first column is a name, on the left; the others are numbers."""
    columns = list(zip(*rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    padded = [
        [cell.rjust(width) if place else cell.ljust(width) for cell in column]
        for place, (column, width) in enumerate(zip(columns, widths, strict=True))
    ]
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def similar(word: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.5) -> list[str]:
    """The known words most like ``word``, the nearest first.

    Args:
        word: What was given.
        known: The words that exist.
        most: Number of words to return at most.
        cutoff: Least similarity of a returned word, from 0 (nothing in common) to 1 (equal).
    """
    return difflib.get_close_matches(word, list(known), n=most, cutoff=cutoff)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint `` Did you mean 'x'?`` (it begins with a blank), or an empty string where no known word is similar."""
    near = similar(word, known, most=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def printable(text: object, *, is_block: bool = False) -> str:
    r"""``text`` with control, bidirectional and other invisible characters escaped (``\x1b``, ``\u202e``).

    Args:
        text: Anything; its ``str`` is taken.
        is_block: Keep line ends, for messages of several lines.
    """
    return "".join(
        c if (c == "\n" and is_block) or unicodedata.category(c) not in _HIDDEN else _escaped(c) for c in str(text)
    )


#: Control, format (bidirectional marks), surrogate, line separator, paragraph separator.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
