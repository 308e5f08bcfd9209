"""Conversion between text and token ids: one token per byte, or the tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.spec.bound import read_json
from shardwise.spec.errors import ConfigError
from shardwise.spec.hf_cache import hub_name
from shardwise.spec.text import first_line, printable
from shardwise.train.data.chat import render
from shardwise.train.data.source import BYTE_VOCAB

#: The name of the tokenizer that needs no folder.
BYTES = "bytes"

#: A folder with one of these files has a tokenizer.
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
#: Further files that ids depend on.
_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.jinja",
)


class ByteTokenizer:
    """One token per byte."""

    ends: tuple[int, ...] = ()  # end-of-text ids; the tokenizer's own one first
    vocab_size = BYTE_VOCAB

    def encode(self, text: str) -> list[int]:
        """Return a prompt's ids."""
        return list(text.encode())

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of pieces of training text, without special tokens."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text. Ids that are not bytes, or not UTF-8, become U+FFFD."""
        return bytes(token if token < BYTE_VOCAB else 0xFF for token in ids).decode("utf-8", "replace")


def byte_tokenizer() -> Any:
    """Return :class:`ByteTokenizer` as a tokenizer of transformers, for folders that other programs load."""
    from tokenizers import Tokenizer as FastTokenizer  # pyrefly: ignore[missing-import]
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # pyrefly: ignore[missing-import]

    # GPT-2 writes a byte as the character of this number if it is visible, else as a character from 256 on, in order.
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTE_VOCAB) if byte not in visible]
    vocab = {chr(byte): byte for byte in visible} | {chr(0x100 + index): byte for index, byte in enumerate(others)}
    tokenizer = FastTokenizer(models.BPE(vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


class FolderTokenizer:
    """The tokenizer of a Hugging Face folder, with the methods of :class:`ByteTokenizer`.

    ``hf_tokenizer`` is the tokenizer of transformers.
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
            hf_tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError, RecursionError) as error:
            raise ConfigError(
                f"{printable(folder)} has no tokenizer that can be loaded: {first_line(error)}\n"
                "  Name a folder with a tokenizer.json; for `generate`, ids can be given: --tokens '12 7 9'."
            ) from None
        self.folder, self.hf_tokenizer, end = folder, hf_tokenizer, hf_tokenizer.eos_token_id
        own = () if end is None else (end,)
        self.ends: tuple[int, ...] = (*own, *(token for token in _further_ends(folder) if token not in own))
        self.vocab_size = 1 + max(hf_tokenizer.get_vocab().values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Return a prompt's ids, with the tokenizer's special tokens."""
        return list(self.hf_tokenizer.encode(text))

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of pieces of training text, without special tokens."""
        return self.hf_tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template: str | None) -> list[int]:
        """Return the ids of a conversation in a chat template, with the header of the next answer.

        With ``template=None`` the tokenizer's own template is used. Templates may raise any exception.
        """
        text = render(self.hf_tokenizer, list(messages), chat_template=template, add_generation_prompt=True)
        return self.encode_pieces([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without special tokens."""
        return str(self.hf_tokenizer.decode(list(ids), skip_special_tokens=True))


Tokenizer = ByteTokenizer | FolderTokenizer


def _check_links(folder: Path) -> None:
    """Refuse chat templates that are links to files outside of the folder (or of the hub's cache)."""
    root = folder.resolve()
    root = root if hub_name(root) is None else root.parents[1]
    for path in folder.rglob("*.jinja"):
        if not path.resolve().is_relative_to(root):
            raise ConfigError(
                f"{printable(path)} is a link to {printable(path.resolve())}, outside of its folder.\n"
                "  Copy the file into the folder, if it belongs there."
            )


def _further_ends(folder: Path) -> list[int]:
    """Return further tokens that end an answer, from ``generation_config.json``; chat models often have one."""
    return _read_ends(folder / "generation_config.json")


def folder_ends(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer by a model folder's configuration, as transformers' ``generate`` does."""
    path = folder / "generation_config.json"
    return tuple(_read_ends(path if path.is_file() else folder / "config.json"))


def _read_ends(path: Path) -> list[int]:
    try:
        ends = read_json(path).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    found = ends if isinstance(ends, list) else [ends]
    return [token for token in found if isinstance(token, int) and not isinstance(token, bool)]


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains a tokenizer's files."""
    return any((folder / name).is_file() for name in _FILES)


def find_tokenizer(name: str) -> Tokenizer:
    """Return the byte-level tokenizer for ``bytes``, else that of the folder ``name``."""
    if name == BYTES:
        return ByteTokenizer()
    folder = Path(name).expanduser()
    if not has_tokenizer(folder):
        missing = "there is no such folder" if not folder.is_dir() else f"it holds none of {', '.join(_FILES)}"
        raise ConfigError(
            f"{printable(folder)} has no tokenizer: {missing}.\n"
            f"  Name a Hugging Face folder with a tokenizer, or {BYTES!r}: one token per byte."
        )
    return FolderTokenizer(folder)


def tokenizer_files(tokenizer: Tokenizer) -> list[Path]:
    """Return the files that a tokenizer's ids depend on."""
    folder = tokenizer.folder if isinstance(tokenizer, FolderTokenizer) else None
    return [] if folder is None else [path for name in (*_FILES, *_SETTINGS) if (path := folder / name).is_file()]
