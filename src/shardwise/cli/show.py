"""Printing for people: safe text, errors as one block."""

from __future__ import annotations

import sys

from shardwise.spec.errors import ShardwiseError
from shardwise.spec.text import printable


def show_error(error: ShardwiseError) -> None:
    """One block on stderr: the kind of error, what happened, what to do."""
    sys.stderr.write(f"{type(error).__name__}: {printable(error, is_block=True)}\n")
    sys.stderr.flush()


def show(text: str) -> None:
    """Lines on stdout, control characters escaped."""
    sys.stdout.write(printable(text, is_block=True) + "\n")
    sys.stdout.flush()
