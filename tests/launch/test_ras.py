"""What a message about a hang says from NCCL's RAS: a server on loopback speaks its documented text protocol."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardwise.launch import ras

#: In the form of NCCL 2.24 to 2.31: one process of four was stopped, another one is behind.
STATUS = """NCCL version 2.29.3+cuda13.0 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         7         8         7   RUNNING  INCOMPLETE,MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 105 on node 127.0.0.1 managing GPU 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 106 on node 127.0.0.1 managing GPU 6

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 managed by process 105 on node 127.0.0.1

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (cf264af53edbe986) MISMATCH
  Communicator ranks have different AllGather operation counts
  4 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 2 -- GPU 2 managed by process 102 on node 127.0.0.1
  Rank 3 -- GPU 3 managed by process 103 on node 127.0.0.1
  Rank 4 has not launched any operations -- GPU 4 managed by process 104 on node 127.0.0.1
  Rank 9 -- [process information not found]

"""


class Server:
    """Answers as RAS does. The first ``num_silent`` connections get no answer, as from a process that is stopped."""

    def __init__(self, status: str, num_silent: int, greeting: bytes) -> None:
        self.status, self.num_silent, self.greeting = status, num_silent, greeting
        self.asked: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.kept: list[socket.socket] = []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            if self.num_silent:
                self.num_silent -= 1
                self.kept.append(connection)
                continue
            with connection:
                for line in connection.makefile("rb"):
                    self.asked.append(line)
                    if line == b"VERBOSE STATUS\n":
                        connection.sendall(self.status.encode())
                        break
                    connection.sendall(self.greeting if line.startswith(b"CLIENT") else b"OK\n")

    def close(self) -> None:
        for held in (self.listener, *self.kept):
            held.close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def start(status: str, num_silent: int = 0, greeting: bytes = b"SERVER PROTOCOL 2\n") -> Server:
        made.append(Server(status, num_silent, greeting))
        monkeypatch.setenv("NCCL_RAS_ADDR", made[-1].address)
        return made[-1]

    yield start
    for server in made:
        server.close()


def test_ranks_that_do_not_answer_and_ranks_that_are_behind_are_named_by_their_process(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve(STATUS, num_silent=1)
    ranks = {100 + rank: 8 + rank for rank in range(8)}  # ranks in a communicator are not those of the run
    assert ras.summary(tmp_path, ranks) == [
        "  NCCL's RAS:",
        "    rank 10 has launched up to operation 6649 (AllGather operation counts)",
        "    rank 11 has launched up to operation 6649 (AllGather operation counts)",
        "    rank 12 has not launched any operations (AllGather operation counts)",
        "    rank 13 does not answer",
        "    rank 14 does not answer and is considered dead",
        f"    file: {tmp_path / 'ras.txt'}",
    ]
    assert (tmp_path / "ras.txt").read_text() == STATUS
    assert server.asked == [b"CLIENT PROTOCOL 2\n", b"TIMEOUT 2\n", b"VERBOSE STATUS\n"]


def test_where_nothing_is_wrong_the_message_says_so(serve: Callable[..., Server], tmp_path: Path) -> None:
    serve(STATUS[: STATUS.index("Errors")])
    assert ras.summary(tmp_path, {105: 5})[1] == "    all processes answer"


def test_another_jobs_answer_on_the_common_port_is_left_out(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ras, "_DEFAULT_ADDRESS", serve(STATUS).address)
    monkeypatch.delenv("NCCL_RAS_ADDR")
    assert ras.summary(tmp_path, {1: 0}) == []
    assert not (tmp_path / "ras.txt").exists()


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\n", b"\n", b""])
def test_a_server_that_is_not_ras_is_left_alone(
    serve: Callable[..., Server], tmp_path: Path, greeting: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ras, "_GREETING_S", 0.1)
    monkeypatch.setattr(ras, "_LONGEST_S", 0.5)
    serve(STATUS, greeting=greeting)
    assert ras.summary(tmp_path, {105: 5}) == []


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", "localhost:x", "127.0.0.1:99999999", "free"])
def test_where_nobody_listens_there_is_no_message(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", ras.own_address() if address == "free" else address)
    assert ras.summary(tmp_path, {105: 5}) == []
