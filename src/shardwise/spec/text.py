"""Formatting of quantities, tables, hints and untrusted text."""

from __future__ import annotations

import difflib
import io
import unicodedata
from collections.abc import Container, Iterable, Sequence


def size(num_bytes: float) -> str:
    """A number of bytes as text, such as ``512 B`` or ``1.5 MB``; powers of 1000, one decimal."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def aligned(rows: Iterable[Sequence[str]], *, words: Container[int] = (0,)) -> list[str]:
    """Lines of a table: columns two blanks apart, each as wide as its widest cell, whatever the terminal's width.

    Columns in ``words`` are aligned on the left, others, numbers, on the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = list(rows)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(lines[0])):
        grid.add_column(justify="left" if index in words else "right", no_wrap=True)
    for row in lines:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(file=io.StringIO(), width=100_000, color_system=None)
    with console.capture() as capture:
        console.print(grid)
    return [line.rstrip() for line in capture.get().splitlines()]


def similar(word: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.5) -> list[str]:
    """At most ``most`` known words similar to ``word``, ignoring case: those that begin with it, then the nearest.

    ``cutoff`` is the least similarity of a word that does not begin with ``word``, from 0 to 1 (equal).
    """
    by_small = {name.casefold(): name for name in reversed(list(known))}
    small = word.casefold()
    begin = sorted((name for name in by_small if small and name.startswith(small)), key=len)
    near = [*begin, *difflib.get_close_matches(small, by_small, n=most, cutoff=cutoff)]
    return [by_small[name] for name in dict.fromkeys(near)][:most]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The hint `` Did you mean 'x'?``, with its leading blank, or an empty string if no known word is similar."""
    near = similar(word, known, most=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, escaped; the name of its class if the message is empty."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0])


def printable(text: object, *, is_block: bool = False) -> str:
    r"""``str(text)`` with control, bidirectional and other invisible characters escaped (``\x1b``, ``\u202e``).

    ``is_block`` keeps line ends, for messages of several lines.
    """
    return "".join(
        c if (c == "\n" and is_block) or unicodedata.category(c) not in _HIDDEN else _escaped(c) for c in str(text)
    )


#: Unicode categories: control, format (bidirectional marks), surrogate, line separator, paragraph separator.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
