"""``sw.launch``: runs a function on several processes, from a script or a notebook; also the program of its workers.

The function is sent by cloudpickle, so that new processes can run functions that are defined in a notebook's cell.
Processes are not forked: threads and CUDA state of the calling process do not matter.
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


def serialize(value: Any) -> bytes:
    """Serialize ``value`` by cloudpickle, with the module search path of this process."""
    import cloudpickle

    return cloudpickle.dumps((sys.path, cloudpickle.dumps(value)))


def deserialize(raw: bytes) -> Any:
    """Undo :func:`serialize`. Modules are searched in this process's folders, then in the other one's."""
    import cloudpickle

    path, value = cloudpickle.loads(raw)
    sys.path += [folder for folder in path if folder not in sys.path]
    return cloudpickle.loads(value)


def launch(
    fn: Callable[..., Any], /, *args: Any, nproc: int | None = None, max_restarts: int = 0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on several processes of this machine.

    Each process is one rank of a world, as under ``torchrun``: ``sw.parallelize`` in it joins the others. Rank 0 writes
    to the terminal or the notebook's cell. If this process is already one of several, the function is called directly,
    so that a script also works under ``torchrun``.

    Args:
        fn: A function, which may be defined in a notebook's cell.
        *args: Its arguments, which are copied.
        nproc: Number of processes; by default one for each GPU, or two on a CPU.
        max_restarts: How many times all processes are restarted after one was lost.
        **kwargs: Keyword arguments of ``fn``.

    Returns:
        The results of ``fn`` by rank, ``None`` after ``sys.exit(0)``; under ``torchrun`` only this rank's.

    Raises:
        ConfigError: ``nproc`` is not possible here.
        ShardwiseError: A rank failed, and its error was printed; ``exit_code`` is the launcher's.
    """
    import cloudpickle

    if read_world().source != "alone":
        return [fn(*args, **kwargs)]
    count = num_workers(nproc)
    with tempfile.TemporaryDirectory(prefix="shardwise-call-") as private:
        folder = Path(private)
        (folder / _CALL).write_bytes(serialize((fn, args, kwargs)))
        code = launch_module(__name__, [private], count, max_restarts=max_restarts)
        if code:
            failed = ShardwiseError(
                f"sw.launch({getattr(fn, '__name__', 'fn')}): its ranks ended with exit code {code}.\n"
                "  See above for what they said."
            )
            failed.exit_code = code
            raise failed
        results = [folder / f"result-{rank}.pkl" for rank in range(count)]
        return [cloudpickle.loads(result.read_bytes()) if result.exists() else None for result in results]


def _work(folder: Path) -> int:
    """Call the function as one of the ranks, and store its result."""
    import cloudpickle

    world = read_world()

    def call() -> int:
        fn, args, kwargs = deserialize((folder / _CALL).read_bytes())
        (folder / f"result-{world.rank}.pkl").write_bytes(cloudpickle.dumps(fn(*args, **kwargs)))
        return 0

    return run_worker(call, world, show_error)


if __name__ == "__main__":
    sys.exit(_work(Path(sys.argv[1])))
