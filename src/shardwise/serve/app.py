"""The HTTP interface: OpenAI's paths, with a queue of requests."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from shardwise.serve.protocol import (
    Answer,
    Choice,
    ParsedRequest,
    RequestError,
    Served,
    read_chat,
    read_completion,
    shown_score,
)
from shardwise.serve.queue import Event, GenerationRequest, Queue, QueueClosedError, QueueFullError
from shardwise.serve.text import Text

#: Maximum bytes of a request's body.
MOST_BYTES = 4 << 20
_RETRY_AFTER_S = 1
#: Maximum number of large requests that are parsed at a time; tokenizing the largest body takes up to 700 MB.
_READERS = 2
#: Bodies of up to this many bytes are parsed at once, even while others are being parsed.
_SHORT_BYTES = 1 << 16


class _GenerationFailedError(Exception):
    """The model failed to continue a prompt."""


def make_app(
    served: Served,
    queue: Queue,
    num_running: Callable[[], int],
    *,
    hosts: Sequence[str],
    api_key: str | None,
) -> Starlette:
    """Make the application.

    Only requests with one of ``hosts`` in the header ``Host`` are answered. This protects a server on a loopback
    address from web pages that reach it under another name.
    """
    readers = asyncio.Semaphore(_READERS)

    def health(_request: Request) -> Response:
        state = "stopping" if queue.is_closed else "ok"
        body = {"status": state, "running": num_running(), "waiting": len(queue)}
        return JSONResponse(body, 503 if queue.is_closed else 200)

    def models(request: Request) -> Response:
        _check_key(request, api_key)
        return JSONResponse({"object": "list", "data": [_model(served)]})

    def model(request: Request) -> Response:
        _check_key(request, api_key)
        if request.path_params["name"] != served.name:
            raise RequestError(f"there is no such model here: this server has {served.name}", status=404)
        return JSONResponse(_model(served))

    async def completions(request: Request) -> Response:
        _check_key(request, api_key)
        return await _answer(request, await _read(request, read_completion, served, readers), served, queue)

    async def chat(request: Request) -> Response:
        _check_key(request, api_key)
        return await _answer(request, await _read(request, read_chat, served, readers), served, queue)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
        exception_handlers={
            RequestError: _refusal_answer,
            HTTPException: _not_found_answer,
            ClientDisconnect: _disconnected_answer,
            Exception: _failed_answer,
        },
    )


def _model(served: Served) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "shardwise"}


def _check_key(request: Request, api_key: str | None) -> None:
    if api_key is None:
        return
    received = (
        request.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")
    )  # the bytes as received
    expected = os.fsencode(api_key), api_key.encode("latin-1", "backslashreplace")  # clients use either encoding
    if not any(hmac.compare_digest(received, each) for each in expected):
        raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")


async def _read(
    request: Request, read: Callable[[Any, Served], ParsedRequest], served: Served, readers: asyncio.Semaphore
) -> ParsedRequest:
    """Parse a request.

    Tokenizing a long text takes seconds, so it runs in a thread, and other answers continue to stream.
    """
    body = await _body(request)
    async with readers if len(body) > _SHORT_BYTES else contextlib.nullcontext():
        return await run_in_threadpool(lambda: read(_parse_json(body), served))


async def _body(request: Request) -> bytes:
    """Return the body of a request. Other content types are refused, because web pages may send them to any server."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestError("the content type is not application/json", status=415)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise RequestError(f"the body has more than {MOST_BYTES:,} bytes", status=413)
    return bytes(body)


def _parse_json(body: bytes) -> Any:
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # refuses lone surrogates, which no tokenizer accepts
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    return value


def _refusal_answer(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return JSONResponse(error.body, error.status, headers)


def _not_found_answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    error_answer = RequestError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code)
    return JSONResponse(error_answer.body, error_answer.status, error.headers)


def _disconnected_answer(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # the client has disconnected


def _failed_answer(_request: Request, _error: Exception) -> Response:
    error_answer = RequestError("the server failed; its log says why", status=500, kind="server_error")
    return JSONResponse(error_answer.body, error_answer.status)


# -- one request


async def _answer(request: Request, parsed: ParsedRequest, served: Served, queue: Queue) -> Response:
    running = _RunningRequest(parsed, served)
    try:
        queue.add(running.requests)
    except QueueFullError:
        raise RequestError(
            f"{len(queue)} prompts wait already, of at most {queue.max_waiting}",
            status=429,
            kind="rate_limit_error",
            code="queue_full",
            retry_after_s=_RETRY_AFTER_S,
        ) from None
    except QueueClosedError:
        raise RequestError(
            "the server is about to end", status=503, kind="server_error", retry_after_s=_RETRY_AFTER_S
        ) from None
    if parsed.is_stream:
        headers = {"Cache-Control": "no-cache"}
        return StreamingResponse(running.lines(), media_type="text/event-stream", headers=headers)
    answer = asyncio.ensure_future(running.whole())
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(answer.result()) if answer.done() else _disconnected_answer(request, ClientDisconnect())
    except _GenerationFailedError as error:
        raise RequestError(str(error), status=500, kind="server_error") from None
    finally:
        running.cancel()
        for task in (answer, disconnected):
            task.cancel()
        await asyncio.gather(answer, disconnected, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _RunningRequest:
    """A client's request, with a request to the model for each answer."""

    def __init__(self, parsed: ParsedRequest, served: Served) -> None:
        self._parsed, self._form = parsed, Answer(parsed, served)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        prompts = [prompt for prompt in parsed.prompts for _ in range(parsed.num_answers)]
        self._echoes = [text for text in parsed.echoes or [""] * len(parsed.prompts) for _ in range(parsed.num_answers)]
        self._tokenizer = served.tokenizer
        self._texts = [Text(served.tokenizer, prompt, parsed.stops) for prompt in prompts]
        self._num_new = 0
        self.requests = [
            GenerationRequest(
                prompt,
                max_new_tokens=parsed.max_new_tokens,
                sampling=parsed.sampling,
                seed=parsed.seed,
                index=index,
                ends=parsed.ends,
                scored_from=None if parsed.num_top is None else 1 if parsed.has_echo else len(prompt),
                num_top=parsed.num_top or 0,
                on_event=self._listener(index),
            )
            for index, prompt in enumerate(prompts)
        ]

    def cancel(self) -> None:
        """Cancel all answers to this request."""
        for request in self.requests:
            request.is_cancelled = True

    async def whole(self) -> dict[str, Any]:
        """Return the complete answer."""
        found = [Choice(index) for index in range(len(self.requests))]
        async for piece in self._pieces():
            found[piece.index].text += piece.text
            found[piece.index].finish = piece.finish or found[piece.index].finish
            found[piece.index].logprobs = piece.logprobs
        return self._form.whole(found, self._num_new)

    async def lines(self) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""
        try:
            async for piece in self._pieces():
                if piece.text or piece.finish or piece.is_first:
                    yield _line(self._form.piece(piece))
            if self._parsed.has_usage:
                yield _line(self._form.last_piece(self._num_new))
            yield "data: [DONE]\n\n"
        except _GenerationFailedError as error:
            yield _line(RequestError(str(error), status=500, kind="server_error").body)
        finally:
            self.cancel()

    async def _pieces(self) -> AsyncIterator[Choice]:
        """Yield pieces of all answers as they are generated."""
        begun: set[int] = set()
        running = set(range(len(self.requests)))
        while running:
            index, event = await self._events.get()
            if event.finish == "error":
                raise _GenerationFailedError(event.error)
            if index not in running:  # already ended by a stop string
                continue
            piece = self._piece(index, event)
            if index not in begun:
                piece.is_first, piece.text = self._parsed.is_chat, self._echoes[index] + piece.text
            begun.add(index)
            if piece.finish is not None:
                running.discard(index)
            yield piece

    def _piece(self, index: int, event: Event) -> Choice:
        text = self._texts[index]
        self._num_new += event.token is not None
        new_text = "" if event.token is None or event.finish == "stop" else text.add(event.token)
        if event.finish is not None:
            new_text += text.end()
        finish = event.finish
        if text.is_stopped:
            self.requests[index].is_cancelled = True
            finish = "stop"
        choice = Choice(index, new_text, finish)
        if event.score is not None:
            row = self.requests[index].scored_row()
            num_top, has_echo = self._parsed.num_top or 0, self._parsed.has_echo
            choice.logprobs = shown_score(row, event.score, self._tokenizer, num_top, has_echo=has_echo)
        return choice

    def _listener(self, index: int) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

        return listen


def _line(value: Any) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
