"""The text that torchrun prints about a failed rank: our error instead of "To enable traceback see ...".

torchrun's agent gives each rank the path of a file, ``TORCHELASTIC_ERROR_FILE``. When ranks fail, the agent reads these
files, takes the earliest as the root cause, and prints its text at the end of the output.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from shardwise.launch import heartbeat
from shardwise.launch.exit_codes import is_consequence
from shardwise.launch.root_cause import Cause, describe
from shardwise.launch.world import World
from shardwise.spec.errors import ShardwiseError
from shardwise.spec.text import printable

#: Environment variable of torch.distributed.elastic.multiprocessing.errors.
_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def with_error_file(work: Callable[[], int], world: World, advice: str) -> Callable[[], int]:
    """Return ``work``, extended so that torchrun gets the reason if ``work`` raises.

    The traceback of an error that is not ours is appended to ``logs/rank-RANK.log`` in the run's folder.
    """

    def run() -> int:
        try:
            return work()
        except Exception as error:
            logs = heartbeat.directory()
            if logs is not None and world.source != "launcher" and not isinstance(error, ShardwiseError):
                with contextlib.suppress(OSError), (logs / f"rank-{world.rank}.log").open("a") as log:
                    log.write(traceback.format_exc())
            if path := os.environ.get(_VARIABLE):
                _write(Path(path), error, world.rank, logs, advice)
            raise

    return run


def _write(path: Path, error: Exception, rank: int, logs: Path | None, advice: str) -> None:
    """Write the message and its time; one second later for a rank whose peer is gone, which is not the cause."""
    code = error.exit_code if isinstance(error, ShardwiseError) else 1
    text = str(error) if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    if logs is not None:
        text = describe(Cause(code, rank, text), logs, advice=advice)
    when = {"timestamp": str(int(time.time()) + is_consequence(code, text))}
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"message": {"message": printable(text, is_block=True), "extraInfo": when}}))
