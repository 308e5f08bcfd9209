"""Between text and token ids: one token per byte, or the tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.spec.bound import read_json
from shardwise.spec.errors import ConfigError
from shardwise.spec.hub import hub_name
from shardwise.spec.text import first_line, printable
from shardwise.train.data.chat import rendered
from shardwise.train.data.source import BYTE_VOCAB

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


class Bytes:
    """One token per byte."""

    ends: tuple[int, ...] = ()  # ids that end a text, the tokenizer's own end-of-text token first
    vocab_size = BYTE_VOCAB

    def encode(self, text: str) -> list[int]:
        """A prompt's ids."""
        return list(text.encode())

    def encode_pieces(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of pieces of training text, with nothing put before or behind them."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids. Those that are no byte, or no UTF-8, become U+FFFD."""
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
    """The tokenizer of a Hugging Face folder (``held`` is that of transformers), used as :class:`Bytes` is."""

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
        self.folder, self.held, end = folder, held, held.eos_token_id
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


Tokenizer = Bytes | OfFolder


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
    """The tokens that end an answer by the folder's settings for generation: chat models often have one."""
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
    """``bytes``, or that of the folder ``name``."""
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


def tokenizer_files(tokenizer: Tokenizer) -> list[Path]:
    """The files that decide about a tokenizer's ids."""
    folder = tokenizer.folder if isinstance(tokenizer, OfFolder) else None
    return [] if folder is None else [path for name in (*_FILES, *_SETTINGS) if (path := folder / name).is_file()]
