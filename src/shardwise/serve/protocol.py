"""Requests and answers of OpenAI's protocol, as far as a model that continues text supports them.

An unsupported field that would change the answer is refused, unless its value has no effect.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator

from shardwise.generation.decode import check_fit
from shardwise.generation.sample import Sampling
from shardwise.generation.score import Row, Score
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import printable
from shardwise.train.data.tokenizer import FolderTokenizer, Tokenizer

#: Unsupported fields, unless the type of request has them, and their values without effect.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
#: Fields that do not change the answer.
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
#: Default number of new tokens of a completion, as OpenAI's.
_COMPLETION_TOKENS = 16
#: Default number of new tokens of a chat if the model's positions are not limited.
_CHAT_TOKENS = 4096
_MOST_STOPS = 4
#: Maximum number of most likely tokens per position that a request may ask for.
_MOST_TOP = 20
#: Replaces minus infinity, which JSON does not have.
_LEAST_LOGPROB = -9999.0


class RequestError(Exception):
    """A refused request.

    Attributes:
        status: HTTP status of the answer.
        retry_after_s: Seconds after which to try again, if that can help.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}  # the answer


@dataclass(frozen=True, slots=True)
class Served:
    """The served model."""

    name: str  # the model's name in requests
    tokenizer: Tokenizer
    vocab_size: int
    positions: int | None  # maximum number of tokens of a row, if limited
    chat_template: str | None = None  # converts conversations to text; ``None``: the tokenizer's template, if any
    created: int = 0  # start of the server, in seconds since the epoch
    max_answers: int = 1  # maximum number of answers to one request


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The parsed fields of a request."""

    is_chat: bool  # whether the answer is a chat message
    prompts: list[list[int]]  # token ids of each prompt
    num_answers: int  # answers to each prompt
    max_new_tokens: int  # maximum number of new tokens for each prompt
    sampling: Sampling  # how tokens are chosen
    seed: int  # seed of the sampling
    ends: tuple[int, ...]  # ids that end an answer
    stops: list[str]  # strings at which an answer ends
    is_stream: bool  # whether the answer is streamed
    has_usage: bool  # whether the last piece of a stream counts tokens
    #: Number of most likely tokens to report per position, with log-probabilities; ``None``: no log-probabilities.
    num_top: int | None = None
    echoes: list[str] | None = None  # texts of the prompts, if answers begin with them

    @property
    def has_echo(self) -> bool:
        """Whether answers begin with their prompts."""
        return self.echoes is not None


def _as_list(value: Any) -> Any:
    """Return a single text as a list."""
    return [value] if isinstance(value, str) else value


def _in_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """Remove null fields, which are allowed even for unknown fields."""
        return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None


class _Common(_Fields):
    model: str
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[str], FailFast(), BeforeValidator(_as_list)] = []
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _Completion(_Common):
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=_MOST_TOP)
    prompt: Any  # checked by _prompts, because pydantic's errors for every token and alternative would take minutes


class _Part(_Fields):
    type: Literal["text"]
    text: str


class _Message(_Fields):
    role: str
    content: Annotated[list[_Part], FailFast(), BeforeValidator(_in_parts)]
    name: str | None = None


class _Chat(_Common):
    messages: Annotated[list[_Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


def read_completion(body: Any, served: Served) -> ParsedRequest:
    """Parse a request for completions."""
    fields = _validate(_Completion, body, served)
    prompts = _prompts(fields.prompt)
    _check_count(len(prompts), fields, served)
    for number, each in enumerate(prompts):
        if isinstance(each, str):
            _check_begin(each, f"prompt {number}", "prompt", served)
    rows = [served.tokenizer.encode(each) if isinstance(each, str) else each for each in prompts]
    most = _COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    if most == 0 and not (fields.echo and fields.logprobs is not None):
        raise RequestError("max_tokens=0 asks for no text: set echo and logprobs too, or 1 or more", param="max_tokens")
    for field in ("stream", "stop"):
        if fields.logprobs is not None and getattr(fields, field):
            raise RequestError(f"logprobs come with an answer as a whole: leave {field} out", param=field)
    parsed = _parsed_request(fields, rows, most, served, is_chat=False)
    if fields.echo:
        texts = [each if isinstance(each, str) else served.tokenizer.decode(each) for each in prompts]
        parsed = replace(parsed, echoes=texts)
    return replace(parsed, num_top=fields.logprobs)


def read_chat(body: Any, served: Served) -> ParsedRequest:
    """Parse a request for the next message of a conversation.

    Raises:
        RequestError: The request is not supported.
    """
    fields = _validate(_Chat, body, served)
    _check_count(1, fields, served)
    texts = [part.text for message in fields.messages for part in message.content]
    _check_begin("\n".join(texts), "the conversation", "messages", served)
    row = _conversation(fields.messages, served)
    most = fields.max_completion_tokens or fields.max_tokens
    if most is None:
        most = _CHAT_TOKENS if served.positions is None else max(1, served.positions - len(row) + 1)
    return _parsed_request(fields, [row], most, served, is_chat=True)


def _check_begin(text: str, what: str, param: str, served: Served) -> None:
    """Refuse a text whose beginning already has too many tokens, because tokenizing all of it would take long."""
    for per_token in (4, 16):
        most = per_token * (served.positions or len(text))
        if len(text) <= most:
            return
        count = len(served.tokenizer.encode_pieces([text[:most]])[0])
        if count > (served.positions or count):
            raise RequestError(
                f"{what}: the first {most:,} of {len(text):,} characters have {count:,} tokens, and there are"
                f" {served.positions} positions",
                param=param,
                code="context_length_exceeded",
            )


def _prompts(prompt: Any) -> list[Any]:
    """Return the prompts of a request: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if prompt and _are_ids(prompt):
            return [prompt]
        if all(isinstance(each, str) for each in prompt) or all(
            isinstance(each, list) and _are_ids(each) for each in prompt
        ):
            return prompt
    raise RequestError(
        "prompt: expected a text, a list of token ids, a list of texts, or a list of lists of token ids", param="prompt"
    )


def _are_ids(values: Sequence[Any]) -> bool:
    return all(type(each) is int for each in values)


def _check_count(num_prompts: int, fields: _Common, served: Served) -> None:
    """Refuse more answers than fit into the queue, before any text is tokenized."""
    count = num_prompts * fields.n
    if count > served.max_answers:
        raise RequestError(
            f"{count} answers are asked for (prompts: {num_prompts}, n={fields.n}), and a request gets at most"
            f" {served.max_answers}",
            param="n" if num_prompts == 1 else "prompt",
        )


def _validate(kind: type[Any], body: Any, served: Served) -> Any:
    if not isinstance(body, dict):
        raise RequestError(f"the body is {type(body).__name__}, expected a JSON object")
    body = {key: value for key, value in body.items() if key not in _IGNORED}
    for field, neutral in _REFUSED.items():
        value = None if field in kind.model_fields else body.pop(field, None)
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
        ):
            raise RequestError(f"{field} is not supported by this server: leave it out", param=field)
    try:
        fields = kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise RequestError(f"{printable(path)}: there is no such field", param=path) from None
        raise RequestError(f"{printable(path)}: {first['msg']}", param=path or None) from None
    if fields.model != served.name:
        raise RequestError(
            f"there is no model {printable(fields.model)} here: this server has {served.name}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return fields


def _conversation(messages: Sequence[_Message], served: Served) -> list[int]:
    """Return a conversation, with the header of the next answer, as token ids."""
    if not isinstance(served.tokenizer, FolderTokenizer):
        raise RequestError(
            "the model's tokens are bytes, which have no chat template: use /v1/completions", param="messages"
        )
    if not (served.chat_template or served.tokenizer.hf_tokenizer.chat_template):
        raise RequestError(
            "the model's tokenizer has no chat template, by which conversations become text: use /v1/completions, or"
            " start the server with --chat-template FILE",
            param="messages",
        )
    conversation = [
        {
            "role": message.role,
            "content": "".join(part.text for part in message.content),
            **({} if message.name is None else {"name": message.name}),
        }
        for message in messages
    ]
    try:
        return served.tokenizer.encode_chat(conversation, served.chat_template)
    except Exception as error:  # noqa: BLE001 - templates may raise anything, for example for wrong roles
        raise RequestError(
            f"the chat template refuses the messages: {printable(str(error))}", param="messages"
        ) from None


def _parsed_request(
    fields: _Common, rows: list[list[int]], most: int, served: Served, *, is_chat: bool
) -> ParsedRequest:
    if len(fields.stop) > _MOST_STOPS or not all(fields.stop):
        raise RequestError(f"stop: expected at most {_MOST_STOPS} strings, none of them empty", param="stop")
    top_k = None if fields.top_k in {-1, 0} else fields.top_k  # vLLM's clients use these values for all tokens
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = None if fields.top_p == 1 or temperature == 0 else fields.top_p
    try:
        sampling = Sampling(temperature, None if temperature == 0 else top_k, top_p)
        check_fit(rows, max(1, most), vocab_size=served.vocab_size, positions=served.positions)
    except ConfigError as error:
        param = "messages" if is_chat else "prompt" if "prompt" in str(error) else None
        if (field := str(error).partition("=")[0]) in {"temperature", "top_k", "top_p"}:
            param = field
        is_long = "positions" in str(error)
        raise RequestError(
            " ".join(str(error).replace("max_new_tokens", "max_tokens").split()),
            param=param,
            code="context_length_exceeded" if is_long else None,
        ) from None
    return ParsedRequest(
        is_chat,
        rows,
        fields.n,
        most,
        sampling,
        secrets.randbits(62) if fields.seed is None else fields.seed,
        () if fields.ignore_eos else served.tokenizer.ends,
        fields.stop,
        bool(fields.stream),
        bool(fields.stream_options and fields.stream_options.include_usage),
    )


# -- answers


@dataclass(slots=True)
class Choice:
    """An answer to one prompt, or a piece of it."""

    index: int  # the number of the answer in the request
    text: str = ""  # new text
    finish: str | None = None  # why the answer ended: ``stop`` or ``length``; ``None`` while it continues
    is_first: bool = False  # whether this is the first piece
    logprobs: dict[str, list[Any]] | None = None  # result of :func:`shown_score`


def shown_score(row: Row, score: Score, tokenizer: Tokenizer, num_top: int, *, has_echo: bool) -> dict[str, list[Any]]:
    """Return log-probabilities of the tokens of an answer in the form of OpenAI's completions.

    Each position has the ``num_top`` most likely tokens and the answer's token. A prompt's first token has no value.
    """

    def text(position: int, token: int) -> str:
        before = tokenizer.decode(row.ids[position - 1 : position]) if position else ""
        return tokenizer.decode([*row.ids[max(0, position - 1) : position], token])[len(before) :]

    start = 0 if has_echo else row.start
    tokens = [text(position, token) for position, token in enumerate(row.ids) if position >= start]
    fields: dict[str, list[Any]] = {"tokens": tokens, "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    fields["text_offset"] = [0, *itertools.accumulate(map(len, tokens[:-1]))] if tokens else []
    if has_echo:
        fields["token_logprobs"], fields["top_logprobs"] = [None], [None]
    for at, logprob in enumerate(score.logprobs):
        position = row.start + at
        own_logprob = max(logprob, _LEAST_LOGPROB)
        likeliest = list(score.top[at].items())[:num_top] if score.top else []
        top: dict[str, float] = {}
        for token, each in [*likeliest, (row.ids[position], own_logprob)]:
            top.setdefault(text(position, token), max(each, _LEAST_LOGPROB))
        fields["token_logprobs"].append(own_logprob)
        fields["top_logprobs"].append(top)
    return fields


class Answer:
    """Formats everything that is sent for one request."""

    def __init__(self, parsed: ParsedRequest, served: Served) -> None:
        self._parsed = parsed
        prefix = "chatcmpl" if parsed.is_chat else "cmpl"
        self._head = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}

    def whole(self, choices: Sequence[Choice], num_new: int) -> dict[str, Any]:
        """Return the complete answer."""
        kind = "chat.completion" if self._parsed.is_chat else "text_completion"
        answers = [self._choice(each, "message") for each in choices]
        return {**self._head, "object": kind, "choices": answers, "usage": self._usage(num_new)}

    def piece(self, choice: Choice) -> dict[str, Any]:
        """Return a piece of a stream."""
        return self._piece([self._choice(choice, "delta")], None)

    def last_piece(self, num_new: int) -> dict[str, Any]:
        """Return the piece of a stream that counts tokens."""
        return self._piece([], self._usage(num_new))

    def _piece(self, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._parsed.is_chat else "text_completion"
        counted = {"usage": usage} if self._parsed.has_usage else {}
        return {**self._head, "object": kind, "choices": choices, **counted}

    def _choice(self, choice: Choice, message: str) -> dict[str, Any]:
        tail = {"logprobs": choice.logprobs, "finish_reason": choice.finish}
        if not self._parsed.is_chat:
            return {"index": choice.index, "text": choice.text, **tail}
        is_whole = message == "message"
        fields: dict[str, Any] = {"role": "assistant"} if is_whole or choice.is_first else {}
        if is_whole or choice.is_first or choice.text:
            fields["content"] = choice.text
        return {"index": choice.index, message: fields, **tail}

    def _usage(self, num_new: int) -> dict[str, int]:
        num_given = sum(map(len, self._parsed.prompts))
        return {"prompt_tokens": num_given, "completion_tokens": num_new, "total_tokens": num_given + num_new}
