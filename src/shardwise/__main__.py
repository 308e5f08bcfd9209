"""Entry point of ``python -m shardwise``. It imports nothing from the current folder, which may be untrusted."""

from __future__ import annotations

import os
import sys

if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # noqa: PTH109  compared with the interpreter's text
    del sys.path[0]

from shardwise.cli import main

if __name__ == "__main__":
    sys.exit(main())
