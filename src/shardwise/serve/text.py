"""Converts new tokens to text incrementally, without partial characters or anything after a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.train.data.tokenizer import Tokenizer

#: Number of prompt tokens that are decoded together with the first new ones, because a word may begin with a space
#: depending on the text before it.
_CONTEXT = 6
#: Replacement for bytes that are not a complete character.
_INCOMPLETE = "\ufffd"
#: Number of tokens after which an incomplete character is no longer waited for.
_MOST_INCOMPLETE = 16


class Text:
    """The text of an answer.

    It begins after ``prompt`` and ends before the first of ``stops``.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.is_stopped = False  # whether a stop string was found
        self._tokenizer, self._stops = tokenizer, stops
        self._num_held_back = max((len(stop) for stop in stops), default=1) - 1  # a stop string may begin there
        self._ids = list(prompt[-_CONTEXT:])
        self._first, self._num_decoded = (
            0,
            len(self._ids),
        )  # start of the decoded tokens, and end of those already decoded
        self._text, self._num_returned = "", 0

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now certain."""
        self._ids.append(token)
        return self._take(is_last=False)

    def end(self) -> str:
        """Return the text that was held back."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        before = self._tokenizer.decode(self._ids[self._first : self._num_decoded])
        decoded = self._tokenizer.decode(self._ids[self._first :])
        is_certain = len(decoded) > len(before) and not decoded.endswith(_INCOMPLETE)
        if is_last or is_certain or len(self._ids) - self._num_decoded > _MOST_INCOMPLETE:
            self._text += decoded[len(before) :]
            self._first, self._num_decoded = self._num_decoded, len(self._ids)
        begin = max(0, self._num_returned - self._num_held_back)
        ends = [at for stop in self._stops if (at := self._text.find(stop, begin)) >= 0]
        end = len(self._text) if is_last else max(self._num_returned, len(self._text) - self._num_held_back)
        if ends:
            self.is_stopped, end = True, min(ends)
        piece, self._num_returned = self._text[self._num_returned : end], end
        return piece
