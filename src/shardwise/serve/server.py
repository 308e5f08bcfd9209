"""A server: HTTP in a thread of the first rank, the model in the main thread of every rank."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h11
import uvicorn
from torch import nn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardwise.generation.continuous import ContinuousBatcher
from shardwise.launch.stop_request import StopRequest
from shardwise.serve.app import make_app
from shardwise.serve.protocol import Served
from shardwise.serve.queue import Queue
from shardwise.serve.scheduler import Scheduler
from shardwise.spec.errors import ConfigError, ShardwiseError
from shardwise.train.data.tokenizer import Tokenizer

#: Seconds for open connections to close at the end, after their answers are complete.
_CLOSING_S = 2
#: Seconds in which a request, headers and body, must arrive.
_REQUEST_S = 30.0
#: Maximum connections in addition to one for each prompt that can run: for clients that keep connections open.
_SPARE_CONNECTIONS = 128
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. It does not listen, so that clients are refused until the model is loaded.

    Raises:
        ConfigError: The address is not on this machine, or is in use.
    """
    with _refusals(f"{host}:{port}"):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    return sock


@contextlib.contextmanager
def _refusals(where: str) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot listen on {where}: {getattr(error, 'strerror', None) or error}.\n"
            "  Name a free port (--port) and an address of this machine (--host)."
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether a server at ``host`` is reachable only from this machine."""
    return host in _LOOPBACK or host.startswith("127.")


def serve(
    model: nn.Module,
    tokenizer: Tokenizer,
    sock: socket.socket,
    stop: StopRequest,
    *,
    name: str,
    host: str,
    max_rows: int,
    max_waiting: int,
    max_length: int | None = None,
    grace_s: float,
    chat_template: str | None = None,
    api_key: str | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> None:
    """Answer requests until ``stop`` is requested, on the first rank. Other ranks call :meth:`ContinuousBatcher.run`.

    After ``stop`` no more requests are accepted, and running ones have ``grace_s`` to finish. ``say`` is called with
    the address when the server is ready.

    Collective:
        Those of :meth:`ContinuousBatcher.run`.
    """
    batcher = ContinuousBatcher(model)
    queue = Queue(max_waiting)

    def time_left_s() -> float | None:
        if not thread.is_alive():
            raise ShardwiseError("the thread that answers HTTP has ended; its log says why.\n  Start the server again.")
        return grace_s - (time.monotonic() - stop.received_at_s) if stop.signal_number else None

    scheduler = Scheduler(queue, batcher.num_batches, max_rows, time_left_s)
    served = Served(
        name,
        tokenizer,
        batcher.vocab_size,
        max_length or batcher.positions,
        chat_template,
        created=int(time.time()),
        max_answers=max_waiting,
    )
    hosts = [*_LOOPBACK, "[::1]", host] if is_loopback(host) else ["*"]
    app = make_app(served, queue, lambda: scheduler.num_running, hosts=hosts, api_key=api_key)
    with _serve_http(app, sock, max_rows + max_waiting + _SPARE_CONNECTIONS) as thread:
        address, port = sock.getsockname()[:2]
        say(f"http://{f'[{address}]' if ':' in address else address}:{port}/v1")
        try:
            batcher.run(scheduler, scheduler.report)
        except BaseException:
            scheduler.fail("the server ends: a process of the model has failed")
            raise


class _Protocol(H11Protocol):
    """uvicorn's HTTP protocol with a time limit for the rest of a request, which uvicorn lacks."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > 2 * (self.limit_concurrency or 0):
            transport.abort()
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._time(is_over=True)
        super().connection_lost(exc)

    def handle_events(self) -> None:  # also at the end of an answer, if another request has arrived
        super().handle_events()
        self._time(is_over=self.conn.their_state not in {h11.IDLE, h11.SEND_BODY})

    def _time(self, *, is_over: bool = False) -> None:
        if is_over and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        elif not is_over and self._timer is None:
            self._timer = self.loop.call_later(_REQUEST_S, self.transport.abort)


@contextlib.contextmanager
def _serve_http(app: Any, sock: socket.socket, most_connections: int) -> Iterator[threading.Thread]:
    """Answer HTTP in a thread; at the end of the block, complete the running answers.

    Requests on more than ``most_connections`` get status 503. Connections beyond twice that number are closed.
    """
    config = uvicorn.Config(
        app,
        http=_Protocol,
        limit_concurrency=most_connections,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_CLOSING_S,
    )
    with _refusals("{}:{}".format(*sock.getsockname()[:2])):
        sock.listen()  # another program may be listening by now
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_run, args=(server, [sock]), name="shardwise-http", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        yield thread
    finally:
        server.should_exit = True
        thread.join(2 * _CLOSING_S)


def _run(server: uvicorn.Server, sockets: Sequence[socket.socket]) -> None:
    server.run(sockets=list(sockets))
