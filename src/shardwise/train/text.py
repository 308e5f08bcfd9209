"""What others wrote, made safe to print: names, paths and messages cannot move the cursor or forge a line."""

from __future__ import annotations

import unicodedata


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
