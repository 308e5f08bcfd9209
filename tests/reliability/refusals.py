"""What a refusal has to look like: one block that names what is wrong and what to do, and nothing else."""

from __future__ import annotations

import re

from tests.reliability.box import Box, Ended, Kind

#: A refusal of one thing needs no more lines.
MOST_LINES = 30


def refuses(box: Box, ended: Ended, *patterns: str, begins: bool = False) -> None:
    """The output is a refusal with these words (regular expressions).

    Args:
        box: Where the checks go.
        ended: The command.
        patterns: What the refusal says.
        begins: Whether ranks were at work before. If not, the refusal must be all that is printed.
    """
    box.check("one block: the kind of error, what is wrong, what to do", _has_block(ended))
    box.check("no traceback", "Traceback (most recent" not in ended.output)
    if not begins:
        most = ended.output.count("\n") <= MOST_LINES
        box.check(f"at most {MOST_LINES} lines", most, Kind.WORDS)
    box.says(ended, *patterns)


def untouched(box: Box, name: str = "run") -> None:
    """No rank was started, and no folder of a run was made."""
    box.check("nothing was started", not (box.folder / name).exists())


def _has_block(ended: Ended) -> bool:
    return re.search(r"^(shardwise: .*)?[A-Z]\w+: .*(\n  .*)*\n  \S", ended.tail, re.MULTILINE) is not None
