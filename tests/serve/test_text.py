"""Text of tokens as they come: joined it is the text of all tokens, and it ends before a stop string."""

from __future__ import annotations

import itertools

import pytest

from shardwise.serve.text import Text
from shardwise.train.data.tokenizer import ByteTokenizer, FolderTokenizer
from tests.common.tokenizers import save_tokenizer

WORDS = "naïve — 你好 🙂 end"


def pieces(text, ids):
    return [*(text.add(token) for token in ids), text.end()]


def test_pieces_of_bytes_are_whole_characters_and_join_to_the_text():
    ids = list(WORDS.encode())
    found = pieces(Text(ByteTokenizer(), [65]), ids)
    assert "".join(found) == WORDS
    assert all("\ufffd" not in piece for piece in found)
    cut = pieces(Text(ByteTokenizer(), []), ids[:3])
    assert "".join(cut) == "na\ufffd"  # the answer ends inside a character


def test_pieces_of_a_tokenizer_join_to_what_it_says_of_all_tokens(tmp_path):
    tokenizer = FolderTokenizer(save_tokenizer(tmp_path))
    for prompt, said in itertools.product(["def", "One"], [WORDS, " number_1(x):\n  return", "x"]):
        begin, ids = tokenizer.encode(prompt), tokenizer.encode(said)
        assert "".join(pieces(Text(tokenizer, begin), ids)) == tokenizer.decode([*begin, *ids])[len(prompt) :]


def test_bytes_that_never_become_a_character_are_given_in_the_end():
    text = Text(ByteTokenizer(), [])
    found = [text.add(0x80) for _ in range(40)]
    assert 20 < len("".join(found)) <= 40
    assert "".join(found) + text.end() == "\ufffd" * 40


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["three"], "one two "),
        (["t"], "one "),
        (["\n\n", "wo t"], "one t"),
        (["threes", "four!"], "one two three four"),
        (["one"], ""),
    ],
)
def test_an_answer_ends_before_the_first_stop_string_wherever_tokens_end(stops, expected):
    said = "one two three four"
    text = Text(ByteTokenizer(), [], stops)
    found = ""
    for token in said.encode():
        found += text.add(token)
        assert expected.startswith(found)
    found += text.end()
    assert found == expected
    assert text.is_stopped == (expected != said)
    assert text.add(65) == "" or not text.is_stopped
