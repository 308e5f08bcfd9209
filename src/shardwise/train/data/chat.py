"""The tokens of a conversation, or of a prompt and its answer, and which of them are learned.

The tokenizer's chat template converts a conversation to text. If the template marks the assistant's text (``{%
generation %}``), the marked tokens are learned. Any other template is applied twice for each answer, to the
conversation before it and to the conversation including it. The difference is learned, with the mark that ends the
answer. If the text of the whole conversation contains the answer without its reasoning, only that part is learned. A
token that begins before an answer and extends into it is learned too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.spec.bound import bounded
from shardwise.spec.errors import ConfigError
from shardwise.spec.text import did_you_mean, first_line, printable
from shardwise.train.data.records import Example, Placed
from shardwise.train.data.token_files import DataError

#: Columns that are tried, in this order.
MESSAGES, SHARED, PROMPT, COMPLETION, TEXT = "messages", "conversations", "prompt", "completion", "text"
#: The names of roles in templates, by the names in ShareGPT's format.
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "function_call": "tool"}
_MOST_CHARACTERS = 1 << 26


def column_of(columns: Sequence[str], wanted: str | None, name: str) -> str:
    """Return the column that is trained on: ``wanted``, or the first column with a known name."""
    shown = ", ".join(printable(column) for column in columns)
    if wanted is not None:
        if wanted not in columns:
            raise ConfigError(
                f"data.column={printable(wanted)}: {printable(name)} has the columns {shown}."
                f"{did_you_mean(wanted, columns)}\n  Name one of them."
            )
        return wanted
    for column in (MESSAGES, SHARED, PROMPT, TEXT):
        if column in columns and (column != PROMPT or COMPLETION in columns):
            return column
    raise ConfigError(
        f"{printable(name)} has the columns {shown}, none of which is {MESSAGES}, {SHARED}, {PROMPT} with {COMPLETION},"
        f" or {TEXT}.\n  Name the column of the text or of the messages: data.column=NAME"
    )


def _end_of(text: str, before: str, with_answer: str, content: Any) -> int | None:
    """Return the end of an answer in a conversation's text, exclusive; ``None`` if the answer cannot be found.

    ``before`` is the text before the answer, with the header of the answer; ``with_answer`` is the text up to its end.
    """
    if not (text.startswith(before) and with_answer.startswith(before)):
        return None
    if text.startswith(with_answer):
        return len(with_answer)
    # Templates of reasoning models write the last answer with its reasoning, and earlier answers without.
    for answer in (str(content), str(content).rpartition("</think>")[2].strip()):
        at = with_answer.rfind(answer) if answer else -1
        if at >= len(before) and text.startswith(before + with_answer[at:]):
            return len(before) + len(with_answer) - at
    return None


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Convert a conversation to text by a chat template of ``tokenizer``. Templates raise any exception.

    A MemoryError, TimeoutError or ValueError means that the template exceeded the limits.
    """
    with bounded():
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"it makes {len(text):,} characters of one conversation, at most {_MOST_CHARACTERS:,} are read"
        )
    return text


@dataclass(frozen=True, slots=True)
class Chat:
    """Converts rows with conversations to examples."""

    tokenizer: Any  # the tokenizer of transformers
    column: str  # column of the messages, or of the prompts
    learns: str  # the learned tokens: ``assistant``: all answers; ``last``: the last answer; ``all``: every token
    template: str | None = None  # chat template; ``None``: the tokenizer's

    def check(self) -> None:
        """Refuse a tokenizer that cannot convert these conversations."""
        if not getattr(self.tokenizer, "is_fast", False):
            raise ConfigError(
                "the tokenizer does not say where in the text its tokens begin, which answers are found by.\n"
                "  Save it in the form of the tokenizers package (tokenizer.json)."
            )
        if self.column != PROMPT and self.template is None and not self.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, by which conversations become text.\n"
                "  Name a file with one: data.chat_template=FILE.jinja."
            )

    def encode(self, rows: Sequence[Placed]) -> list[Example]:
        """Convert rows to examples."""
        if self._is_marked:
            return [self._encode_marked(location, row) for location, row in rows]
        groups = itertools.groupby(rows, self._is_bare)
        return [example for is_bare, group in groups for example in self._encode_texts([*group], is_bare=is_bare)]

    def _is_bare(self, placed: Placed) -> bool:
        """Whether a row is text without a template: a template writes the begin-of-text token itself."""
        return self.column == PROMPT and not isinstance(placed[1].get(PROMPT), list)

    def _encode_texts(self, rows: Sequence[Placed], *, is_bare: bool) -> list[Example]:
        texts, spans = zip(*(self._text_of(location, row) for location, row in rows), strict=True)
        options = {"return_offsets_mapping": True, "verbose": False, "padding": False}
        encoded = self.tokenizer(list(texts), add_special_tokens=is_bare, **options)
        found = zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        return [self._example(ids, offsets, learned, ends=is_bare) for ids, offsets, learned in found]

    def _example(self, ids: list[int], offsets: Sequence[Any], learned: Any, *, ends: bool) -> Example:
        end = self.tokenizer.eos_token_id
        if learned is None:
            spans = [(0, len(ids))]
        else:
            begins, stops = np.asarray(offsets, np.int64).reshape(-1, 2).T
            found = [np.flatnonzero((begins < last) & (stops > first) & (stops > begins)) for first, last in learned]
            spans = [(int(places[0]), int(places[-1]) + 1) for places in found if places.size]
        if ends and end is not None:  # a text without template ends with the end-of-text token, which is learned
            if ids[-1:] == [end]:
                ids = ids[:-1]
            spans[-1:] = [(spans[-1][0], len(ids) + 1)] if spans else []
            ids = [*ids, end]
        return Example(ids, spans)

    def _text_of(self, location: str, row: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]] | None]:
        """Return a row's text, and the character ranges that are learned; ``None``: all."""
        value, tools = row.get(self.column), row.get("tools") or None
        if self.column == PROMPT:
            answer = row.get(COMPLETION)
            if isinstance(value, str) and isinstance(answer, str):
                return value + answer, None if self.learns == "all" else [(len(value), len(value) + len(answer))]
            if not isinstance(value, list) or not isinstance(answer, list):
                raise self._wrong(location, f"{PROMPT} and {COMPLETION} are texts, or both lists of messages")
            begin = self._messages(location, value)
            return self._render(location, begin + self._messages(location, answer), tools, first=len(begin))
        return self._render(location, self._messages(location, value), tools)

    def _messages(self, location: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, list):
            raise self._wrong(location, f"{self.column} is a list of messages, each with a role and a content")
        found = []
        for message in value:
            if not isinstance(message, Mapping):
                raise self._wrong(location, "every message has a role and a content")
            fields = {key: value for key, value in message.items() if value is not None}
            if "from" in fields and "value" in message:
                fields = {"role": _SPEAKERS.get(str(fields["from"]), fields["from"]), "content": fields.get("value")}
            is_said = fields.get("content") is not None or fields.keys() & {"tool_calls", "function_call"}
            if not isinstance(fields.get("role"), str) or not is_said:
                raise self._wrong(location, "every message has a role and a content, or an assistant's tool_calls")
            found.append(fields)
        if not found:
            raise self._wrong(location, "a conversation has messages")
        return found

    def _render(
        self, location: str, messages: list[dict[str, Any]], tools: Any, *, first: int = 0
    ) -> tuple[str, list[tuple[int, int]] | None]:
        text = self._apply(location, messages, tools)
        if self.learns == "all":
            return text, None
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant" and at >= first]
        if self.learns == "last":
            answers = answers[-1:]
        spans = []
        for at in answers:
            before = self._apply(location, messages[:at], tools, add_generation_prompt=True)
            with_answer = self._apply(location, messages[: at + 1], tools)
            end = _end_of(text, before, with_answer, messages[at].get("content"))
            if end is None:
                raise ConfigError(
                    f"{location}: the chat template writes the conversation up to answer {at} otherwise when more"
                    " follows, so that the answer cannot be found in the whole.\n"
                    "  Mark answers in the template with {% generation %} (data.chat_template=FILE), or set"
                    " data.learns=last."
                )
            spans.append((len(before), end))
        return text, spans

    @property
    def _is_marked(self) -> bool:
        """Whether the template marks the assistant's text, and only that is learned."""
        if self.column == PROMPT or self.learns != "assistant":
            return False
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.tokenizer.get_chat_template(self.template)) is not None

    def _encode_marked(self, location: str, row: Mapping[str, Any]) -> Example:
        """Convert a row by a template that marks the assistant's text."""
        messages = self._messages(location, row.get(self.column))
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(location, messages, row.get("tools") or None, **options)
        edges = np.flatnonzero(np.diff(np.asarray(found["assistant_masks"]), prepend=0, append=0)).tolist()
        return Example(found["input_ids"], list(itertools.pairwise(edges))[::2])

    def _apply(self, location: str, messages: list[dict[str, Any]], tools: Any, **options: Any) -> Any:
        if not messages:
            return ""
        settings = {"tools": tools, "chat_template": self.template}
        try:
            text = render(
                self.tokenizer, messages, **settings, add_generation_prompt="add_generation_prompt" in options
            )
            return (
                self.tokenizer.apply_chat_template(messages, **settings, **options)
                if "return_dict" in options
                else text
            )
        except Exception as error:  # noqa: BLE001  a template may raise anything
            raise self._wrong(location, f"the chat template takes it ({first_line(error)})") from None

    def _wrong(self, location: str, expected: str) -> DataError:
        return DataError(f"{location} cannot be used: expected that {expected}.\n  Correct the row, or leave it out.")
