"""``sw.launch``: a function on several processes, from a script or a notebook; and the program of its workers.

The function travels by cloudpickle, so that one that a notebook's cell has defined is found by fresh processes. Nothing
is forked: threads and CUDA of the calling process do not matter.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.launch.elastic import launch as launch_module
from shardwise.launch.elastic import num_workers
from shardwise.launch.exit_codes import run_worker, show_error
from shardwise.launch.world import read_world
from shardwise.spec.errors import ShardwiseError

_CALL = "call.pkl"


def packed(value: Any) -> bytes:
    """``value`` by cloudpickle, with the folders in which this process looks for modules."""
    import cloudpickle

    return cloudpickle.dumps((sys.path, cloudpickle.dumps(value)))


def unpacked(raw: bytes) -> Any:
    """Undo :func:`packed`. Modules are looked for where the packing process looked, after this one's own places."""
    import cloudpickle

    path, value = cloudpickle.loads(raw)
    sys.path += [folder for folder in path if folder not in sys.path]
    return cloudpickle.loads(value)


def launch(
    fn: Callable[..., Any], /, *args: Any, nproc: int | None = None, max_restarts: int = 0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on several processes of this machine.

    Each is one rank of a world, as under ``torchrun``: ``sw.parallelize`` in it joins the others. Rank 0 writes to the
    terminal or the cell. In a process that is one of several already the function is called here, so that a script
    works under ``torchrun`` too.

    Args:
        fn: A function; also one that a notebook's cell has defined.
        *args: Its arguments, which are copied.
        nproc: Processes; by default one for each GPU, or two on a CPU.
        max_restarts: How often all processes are started again after one was lost.
        **kwargs: Further arguments of ``fn``.

    Returns:
        What ``fn`` returned, by rank; under ``torchrun`` of this rank alone.

    Raises:
        ConfigError: ``nproc`` makes no sense here.
        ShardwiseError: A rank failed: what it said has been shown; ``exit_code`` is the launcher's.
    """
    import cloudpickle

    if read_world().source != "alone":
        return [fn(*args, **kwargs)]
    count = num_workers(nproc)
    with tempfile.TemporaryDirectory(prefix="shardwise-call-") as private:
        folder = Path(private)
        (folder / _CALL).write_bytes(packed((fn, args, kwargs)))
        code = launch_module(__name__, [private], count, max_restarts=max_restarts)
        if code:
            failed = ShardwiseError(
                f"sw.launch({getattr(fn, '__name__', 'fn')}): its ranks ended with exit code {code}.\n"
                "  See above for what they said."
            )
            failed.exit_code = code
            raise failed
        return [cloudpickle.loads((folder / f"result-{rank}.pkl").read_bytes()) for rank in range(count)]


def _work(folder: Path) -> int:
    """As one of the ranks: call the function and leave what it returns."""
    import cloudpickle

    world = read_world()

    def call() -> int:
        fn, args, kwargs = unpacked((folder / _CALL).read_bytes())
        (folder / f"result-{world.rank}.pkl").write_bytes(cloudpickle.dumps(fn(*args, **kwargs)))
        return 0

    return run_worker(call, world, show_error)


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1])))
