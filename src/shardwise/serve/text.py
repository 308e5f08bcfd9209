"""Text of tokens as they come: no half characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.train.data.tokenizer import Tokenizer

#: Tokens of the prompt that are decoded with the first new ones: whether a word begins with a space depends on what is
#: before it.
_CONTEXT = 6
#: What stands for bytes that are no whole character.
_INCOMPLETE = "\ufffd"
#: After so many tokens what is no character will not become one.
_MOST_INCOMPLETE = 16


class Text:
    """The text of an answer.

    It begins after ``prompt`` and ends at any of ``stops``, which are left out.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self.is_stopped = False  # a stop string has come
        self._tokenizer, self._stops = tokenizer, stops
        self._held = max((len(stop) for stop in stops), default=1) - 1  # characters that a stop string may begin with
        self._ids = list(prompt[-_CONTEXT:])
        self._first, self._shown = 0, len(self._ids)  # decoded together, and those of them whose text has been taken
        self._text, self._given = "", 0

    def add(self, token: int) -> str:
        """The text that is certain with one more token."""
        self._ids.append(token)
        return self._take(is_last=False)

    def end(self) -> str:
        """The text that has been held back."""
        return self._take(is_last=True)

    def _take(self, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        before = self._tokenizer.decode(self._ids[self._first : self._shown])
        whole = self._tokenizer.decode(self._ids[self._first :])
        is_certain = len(whole) > len(before) and not whole.endswith(_INCOMPLETE)
        if is_last or is_certain or len(self._ids) - self._shown > _MOST_INCOMPLETE:
            self._text += whole[len(before) :]
            self._first, self._shown = self._shown, len(self._ids)
        begin = max(0, self._given - self._held)
        places = [at for stop in self._stops if (at := self._text.find(stop, begin)) >= 0]
        end = len(self._text) if is_last else max(self._given, len(self._text) - self._held)
        if places:
            self.is_stopped, end = True, min(places)
        piece, self._given = self._text[self._given : end], end
        return piece
