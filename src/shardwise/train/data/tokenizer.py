"""Between text and token ids: one token per byte, or the tokenizer of a Hugging Face folder.

Text of a run with a folder's tokenizer, and rows of data sets, are tokenized once, before any process starts, into
files that later runs over the same data find again: in ``shardwise/tokens`` below ``$XDG_CACHE_HOME`` or ``~/.cache``.
What lies there may be deleted. Each file of text, and each row, is a document and ends with the tokenizer's end-of-text
token, where it has one.
"""

from __future__ import annotations

import codecs
import fcntl
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.spec.bound import read_json
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.spec.hub import hub_name
from shardwise.spec.text import first_line, printable
from shardwise.train.data.chat import Chat, rendered
from shardwise.train.data.examples import TOKENS, write_examples
from shardwise.train.data.pairs import Pairs
from shardwise.train.data.records import read_records
from shardwise.train.data.source import BYTE_VOCAB, Source, check_text
from shardwise.train.data.token_files import DataError, read_header, write_tokens

#: The name of the tokenizer that needs no folder.
BYTES = "bytes"

#: One of these in a folder makes it a tokenizer's.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
#: These decide about ids as well.
_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)

#: Characters that are handed to the tokenizer at a time: many pieces, which it works on side by side.
_BLOCK, _PIECE = 1 << 23, 1 << 20
#: Rows that are.
_ROWS = 1000


class Tokenizer(Protocol):
    """Between text and token ids.

    Attributes:
        ends: Ids that end a text, the tokenizer's own end-of-text token first.
        vocab_size: All ids are below.
    """

    ends: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """A prompt's ids."""
        ...

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of pieces of training text, with nothing put before or behind them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        ...


class Bytes:
    """One token per byte."""

    ends = ()
    vocab_size = BYTE_VOCAB

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """UTF-8."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """What is no byte, or no UTF-8, becomes U+FFFD."""
        return bytes(token if token < BYTE_VOCAB else 0xFF for token in ids).decode("utf-8", "replace")


def byte_tokenizer() -> Any:
    """:class:`Bytes` as a tokenizer of transformers, for folders that others load."""
    from tokenizers import Tokenizer as Held  # pyrefly: ignore[missing-import]
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # pyrefly: ignore[missing-import]

    # GPT-2 writes a byte as the character of this number where that is visible, else as one above 255, in order.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTE_VOCAB) if byte not in visible]
    vocab = {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
    held = Held(models.BPE(vocab, merges=[]))
    held.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    held.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=held, clean_up_tokenization_spaces=False)


class OfFolder:
    """The tokenizer of a Hugging Face folder.

    Attributes:
        held: That of transformers.

    Raises:
        ConfigError: There is none that can be loaded.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer  # pyrefly: ignore[missing-import]
        except ImportError:
            raise ConfigError(
                "a Hugging Face folder needs the transformers package.\n  Install shardwise[hf]."
            ) from None
        _check_links(folder)
        try:
            held: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError, RecursionError) as error:
            raise ConfigError(
                f"{printable(folder)} has no tokenizer that can be loaded: {first_line(error)}\n"
                "  Name a folder with a tokenizer.json; for `generate`, ids can be given: --tokens '12 7 9'."
            ) from None
        self.held, end = held, held.eos_token_id
        own = () if end is None else (end,)
        self.ends: tuple[int, ...] = (*own, *(token for token in _further_ends(folder) if token not in own))
        self.vocab_size = 1 + max(held.get_vocab().values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer puts before a text."""
        return list(self.held.encode(text))

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Without special tokens."""
        return self.held(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template: str | None) -> list[int]:
        """A conversation in its chat template, with what announces the next answer; ``None``: the tokenizer's own.

        Templates raise exceptions of any class.
        """
        text = rendered(self.held, list(messages), chat_template=template, add_generation_prompt=True)
        return self.encode_pieces([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""
        return str(self.held.decode(list(ids), skip_special_tokens=True))


def _check_links(folder: Path) -> None:
    """Refuse chat templates that are links to files elsewhere, which may be the user's, or have no end.

    Raises:
        ConfigError: One is. Links of the hub's cache lead to its own folder.
    """
    root = folder.resolve()
    root = root if hub_name(root) is None else root.parents[1]
    for path in folder.rglob("*.jinja"):
        if not path.resolve().is_relative_to(root):
            raise ConfigError(
                f"{printable(path)} is a link to {printable(path.resolve())}, outside of its folder.\n"
                "  Copy the file into the folder, if it belongs there."
            )


def _further_ends(folder: Path) -> list[int]:
    """What ends an answer by the folder's settings for generation: chat models often have a token for it."""
    try:
        ends = read_json(folder / "generation_config.json").get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    found = ends if isinstance(ends, list) else [ends]
    return [token for token in found if isinstance(token, int) and not isinstance(token, bool)]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer's files."""
    return any((folder / name).is_file() for name in _FILES)


def find_tokenizer(name: str) -> Tokenizer:
    """``bytes``, or that of the folder ``name``.

    Raises:
        ConfigError: There is no such folder, or no tokenizer in it.
    """
    if name == BYTES:
        return Bytes()
    folder = Path(name).expanduser()
    if not has_tokenizer(folder):
        missing = "there is no such folder" if not folder.is_dir() else f"it holds none of {', '.join(_FILES)}"
        raise ConfigError(
            f"{printable(folder)} has no tokenizer: {missing}.\n"
            f"  Name a Hugging Face folder with a tokenizer, or {BYTES!r}: one token per byte."
        )
    return OfFolder(folder)


def tokenize(source: Source, tokenizer: Tokenizer, column: str = "text") -> Iterator[np.ndarray]:
    """The tokens of text, or of a column of a data set, in blocks; every document ends with the end-of-text token.

    Text is cut where a line begins that does not begin with a space, so that pieces give the tokens of the whole.

    Raises:
        DataError: A file is not UTF-8, or a row holds no text.
    """
    end = np.array(tokenizer.ends[:1], np.int64)
    if source.kind == "records":
        numbered = enumerate(read_records(source))
        while some := list(itertools.islice(numbered, _ROWS)):
            for ids in tokenizer.encode_pieces([_text_of(number, row, column) for number, row in some]):
                yield np.concatenate([np.asarray(ids, np.int64), end])
        return
    for file, length in zip(source.files, source.lengths, strict=True):
        for block in _blocks(file, length):
            for ids in tokenizer.encode_pieces(_pieces(block)):
                yield np.asarray(ids, np.int64)
        yield end


def _text_of(number: int, row: Mapping[str, Any], column: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        raise DataError(
            f"row {number:,} of the data has no text in column {printable(column)}: {printable(type(text).__name__)}.\n"
            "  Correct the row, or name another column: data.column=..."
        )
    return text


def _blocks(file: Path, length: int) -> Iterator[str]:
    """The text of a file; a character that ``length`` cuts in two is left out."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    left, text = length, ""
    with file.open("rb") as handle:
        while left and (raw := handle.read(min(_BLOCK, left))):
            left -= len(raw)
            try:
                text += decoder.decode(raw)
            except UnicodeDecodeError:
                check_text(file, length)  # names the line
                raise
            at = _last_cut(text)
            if at:
                yield text[:at]
                text = text[at:]
    if text:
        yield text


def _last_cut(text: str) -> int:
    at = len(text)
    while (at := text.rfind("\n", 0, at)) >= 0:
        if at + 1 < len(text) and not text[at + 1].isspace():
            return at + 1
    return 0


def _pieces(block: str) -> list[str]:
    starts = [0]
    for match in re.finditer(r"\n(?=\S)", block):
        if match.end() - starts[-1] >= _PIECE:
            starts.append(match.end())
    return [block[start:end] for start, end in zip(starts, [*starts[1:], len(block)], strict=True) if start < end]


def tokenized(
    source: Source,
    name: str,
    tokenizer: Tokenizer,
    say: Callable[[str], None] | None = None,
    *,
    column: str = "text",
    chat: Chat | Pairs | None = None,
) -> Source:
    """The tokens of text, or the examples of conversations, from the cache or written there now.

    Args:
        source: Text, or the rows of a data set.
        name: The tokenizer's folder, or ``bytes``.
        tokenizer: This tokenizer.
        say: Told what is done where it takes time.
        column: Of a data set of texts.
        chat: How the rows of a data set become examples; ``None``: they are texts.

    Raises:
        DataError: A file is not UTF-8, or a row cannot be used.
        StorageError: The cache cannot be written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardwise" / "tokens"
    options = [column] if chat is None else chat.key
    key = _key(source, Path(name).expanduser(), options if source.kind == "records" else [])
    path = folder / key / TOKENS
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with (path.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that torchrun started come here together: one writes
                if not path.exists():
                    if say is not None:
                        size = sum(file.stat().st_size for file in source.files)
                        say(f"tokenizing {printable(source.name)}, {size:,} bytes, with {printable(name)}")
                    if chat is None:
                        write_tokens(path, tokenize(source, tokenizer, column), vocab_size=tokenizer.vocab_size)
                    else:
                        rows = read_records(source)
                        write_examples(path.parent, chat.examples(rows), vocab_size=tokenizer.vocab_size)
        header = read_header(path)
    except OSError as error:
        raise StorageError(
            f"{printable(error.filename or path)} cannot be written: {error.strerror}.\n"
            "  Set XDG_CACHE_HOME to a folder that can, or write a token file: shardwise data tokenize --tokenizer"
            f" {printable(name)} {printable(source.name)} FILE."
        ) from None
    kind = "tokens" if chat is None else "examples"
    return replace(source, kind=kind, files=(path,), lengths=(header.num_tokens,), vocab_size=header.vocab_size)


def _key(source: Source, folder: Path, options: Sequence[str]) -> str:
    """A hash over what decides about the tokens."""
    digest = hashlib.sha256(b"1\0" + source.fingerprint().encode())
    for file in source.files:
        digest.update(f"{file.stat().st_mtime_ns}\0".encode())
    for name in (*_FILES, *_SETTINGS):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
    for option in options:
        digest.update(f"{len(option)}\0{option}".encode())
    return digest.hexdigest()[:40]
