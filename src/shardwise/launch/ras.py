"""What NCCL says of its processes: which of them do not answer, and which are behind.

Since 2.24 every process with NCCL has a thread (RAS) that keeps in touch with those of the others and answers questions
on a port of this machine, as text: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html.
All processes share the port: any of them may take a connection, also one that is stopped and never answers, so that it
is tried again. Our launcher gives each run a port of its own (:func:`own_address`); elsewhere the port is that of all
jobs of the machine, and only what is about this run's processes counts.

Everything here is for a message that can do without: where nobody answers, or not as expected, there is nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

#: Where RAS listens: ``address:port``.
ADDRESS = "NCCL_RAS_ADDR"
_DEFAULT_ADDRESS = "localhost:28028"

#: A process that takes the connection and says nothing is given up after this time.
_GREETING_S = 1.0
#: RAS waits so long for processes that do not answer it, and the whole question may take so long.
_PATIENCE_S, _LONGEST_S = 2, 8.0
_MOST_BYTES = 1 << 20
_MOST_LINES = 16

_PROCESS = re.compile(r"  Process (\d+) on node ")
_RANK = re.compile(r"  Rank \d+ (?:(.*) )?-- .*managed by process (\d+) on node ")
_MANY = re.compile(r"  \d+ ranks (.*)")
_TOPIC = re.compile(r"  Communicator ranks have different (.*)")
_HEAD = re.compile(r"(?:#\S+ \(\w+\) )?([A-Z]+)$")
_MEANS = {"INCOMPLETE": "does not answer", "DEAD": "does not answer and is considered dead"}


def own_address() -> str:
    """An address of this machine's loopback on which nobody listens now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def ask() -> str | None:
    """The status of all processes and communicators, as NCCL words it; ``None`` where nobody answers."""
    host, _, port = os.environ.get(ADDRESS, _DEFAULT_ADDRESS).rpartition(":")
    deadline = time.monotonic() + _LONGEST_S
    while port.isdigit() and time.monotonic() + _GREETING_S < deadline:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_GREETING_S) as connection:
                return _status(connection, deadline)
        except TimeoutError:  # a process that is stopped has the connection
            continue
        except (OSError, ValueError, OverflowError):
            return None
    return None


def _status(connection: socket.socket, deadline: float) -> str:
    answers = connection.makefile("rb")
    for sent, expected in (("CLIENT PROTOCOL 2", b"SERVER PROTOCOL"), (f"TIMEOUT {_PATIENCE_S}", b"OK")):
        connection.sendall(f"{sent}\n".encode())
        answer = answers.readline(1024)
        if not answer.startswith(expected):
            raise ValueError(f"expected {expected!r}, got {answer!r}")
    connection.sendall(b"VERBOSE STATUS\n")
    text = b""
    with contextlib.suppress(TimeoutError):  # what has come until then is better than nothing
        while len(text) < _MOST_BYTES:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            read = answers.read1(1 << 16)
            if not read:
                break
            text += read
    return text.decode(errors="replace")


def findings(text: str, ranks: Mapping[int, int]) -> dict[int, list[str]]:
    """What an answer says of this run's ranks, by rank.

    Args:
        text: What :func:`ask` returned.
        ranks: Rank by process number. RAS counts ranks in each communicator by themselves, so that its own do not do.
    """
    found: dict[int, list[str]] = {}
    kind = topic = many = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            kind, topic, many = head[1], "", ""
        elif match := _TOPIC.match(line):
            topic, many = match[1], ""
        elif match := _MANY.match(line):
            many = re.sub(r"^have\b", "has", match[1])
        elif match := _PROCESS.match(line):
            _note(found, ranks, match[1], _MEANS.get(kind, ""))
        elif match := _RANK.match(line):
            said = match[1] or many
            _note(found, ranks, match[2], _MEANS.get(kind) or (f"{said} ({topic})" if topic and said else said))
    return found


def _note(found: dict[int, list[str]], ranks: Mapping[int, int], pid: str, said: str) -> None:
    rank = ranks.get(int(pid))
    if rank is not None and said and said not in found.setdefault(rank, []):
        found[rank].append(said)


def summary(directory: Path, ranks: Mapping[int, int]) -> list[str]:
    """Lines for a message: what NCCL says of which rank, and the file with the whole answer, ``ras.txt``.

    Args:
        directory: Where the file goes.
        ranks: Rank by process number.
    """
    text = ask()
    found = findings(text, ranks) if text is not None else {}
    if text is None or not (found or ADDRESS in os.environ):  # else it may be another job's
        return []
    path = directory / "ras.txt"
    with contextlib.suppress(OSError):
        path.write_text(text)
    lines = [f"    rank {rank} {', '.join(said)}" for rank, said in sorted(found.items())]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"    and {len(lines) - _MOST_LINES} more ranks"]
    return ["  NCCL's RAS:", *(lines or ["    all processes answer"]), f"    file: {path}"]
