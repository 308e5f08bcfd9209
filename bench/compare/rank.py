"""One worker of a comparison: ``python -m bench.compare.rank REQUEST FOLDER``.

It owns one process per entrant and gives them their turns. All entrants of a case are alive at once, each in processes
of its own that block in ``read`` while others have their turn: no engine inherits another's heap, caches or threads,
so times do not depend on who is compared, and the memory of a process is the memory of one engine. The ranks need no
agreement about turns: they follow from the round's number, and every turn begins with the engine's own barrier.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.compare.request import Request, turns
from shardwise.launch.exit_codes import note_exit
from shardwise.launch.file import replace
from shardwise.launch.world import RENDEZVOUS_DIR
from shardwise.spec.errors import ShardwiseError

_MODULE = "bench.compare.process"


class EngineError(ShardwiseError):
    """An engine's process failed; the error that it raised is in its rank's log."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Keep the code with which the engine would have ended a run of its own."""
        super().__init__(message)
        self.exit_code = exit_code


class _Child:
    """One entrant's process on this rank."""

    def __init__(self, request_path: Path, index: int, name: str, environ: dict[str, str]) -> None:
        self.name = name
        self.rounds: list[list[float]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", _MODULE, str(request_path), str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def order(self, what: str) -> None:
        """Send an order and do not wait."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why
            self.process.stdin.write(what + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer.

        Raises:
            EngineError: The process has failed.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise EngineError(f"{self.name}: its process ended with code {code}", 128 - code if code < 0 else code or 1)
        values = json.loads(line)
        if "error" in values:
            raise EngineError(f"{self.name}: {values['error']}", values["exit_code"])
        return values

    def ask(self, what: str) -> dict[str, Any]:
        self.order(what)
        return self.answer()

    def close(self) -> None:
        """Let the process end by itself."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.process.kill()


def run(request_path: Path, folder: Path) -> None:
    """Play all rounds on this rank and write ``rank-RANK.json`` into ``folder``.

    Raises:
        EngineError: An engine has failed.
    """
    request = Request.from_dict(json.loads(request_path.read_text("utf-8")))
    rank = int(os.environ["RANK"])
    children: dict[int, _Child] = {}
    try:
        for index, entrant in enumerate(request.entrants):
            if rank < request.size_of(entrant):
                children[index] = _start(request, index, request_path, folder)
        found = _play(request, children, is_talking=rank == 0)
        replace(folder / f"rank-{rank}.json", json.dumps(found))
    finally:
        for child in children.values():
            child.close()


def _play(request: Request, children: dict[int, _Child], *, is_talking: bool) -> dict[int, dict[str, Any]]:
    """All rounds, then what each child has found out, by number of the entrant."""
    for child in children.values():
        child.order("build")
    for child in children.values():
        child.answer()
    for number in range(request.rounds):
        if is_talking:
            sys.stderr.write(f"{request.case.name}: round {number + 1} of {request.rounds}\n")
        for index in turns(len(request.entrants), number):
            if index in children:
                children[index].rounds.append(children[index].ask("turn")["seconds"])
    return {
        index: child.ask("finish") | {"rounds": child.rounds, "check": child.ask("check")}
        for index, child in children.items()
    }


def _start(request: Request, index: int, request_path: Path, folder: Path) -> _Child:
    entrant = request.entrants[index]
    size = str(request.size_of(entrant))
    meeting = folder / f"meeting-{index}"
    meeting.mkdir(mode=0o700, exist_ok=True)
    world = {RENDEZVOUS_DIR: str(meeting), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return _Child(request_path, index, entrant.name, os.environ | world)


def main(arguments: list[str]) -> int:
    """Be a worker. Returns the exit code."""
    try:
        run(Path(arguments[0]), Path(arguments[1]))
    except EngineError as error:
        note_exit(error.exit_code, str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
