"""The command line. Importing it loads neither torch nor the modules of commands that need torch."""

from __future__ import annotations

import signal
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``shardwise`` with ``arguments`` (by default those of the process) and return the exit code."""
    try:
        from shardwise.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:  # while the commands are imported; later typer catches it
        return 128 + signal.SIGINT
