"""``python -m shardwise``, which then imports nothing from the current folder: it may be that of a stranger's model."""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109  as the interpreter has put it there
    del sys.path[0]

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
