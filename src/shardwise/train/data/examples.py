"""Text and rows as token ids: written once to an Arrow cache of ``datasets``, and mapped from there by every rank.

The cache is ``shardwise/data`` below ``$XDG_CACHE_HOME`` or ``~/.cache`` and may be deleted. Each of its rows is an
example: its ``ids``, and for conversations, answers and classes the learned ``spans`` of them, as start, end
(exclusive), start, ... Only pyarrow is imported if the cache already has the data.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.spec.errors import ConfigError, ShardwiseError, StorageError
from shardwise.spec.text import first_line, printable
from shardwise.train.data.records import Example, Form, Placed, block_text, first_row, read_rows, text_of
from shardwise.train.data.source import Source
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import Tokenizer, tokenizer_files


@dataclass(frozen=True, slots=True)
class Texts:
    """Converts texts to documents, which end with the tokenizer's end-of-text token if there is one."""

    tokenizer: Tokenizer
    column: str | None  # column of the texts in a data set. ``None``: the rows are blocks of text files.

    def encode(self, rows: Sequence[Placed]) -> list[Example]:
        """Convert rows to examples. A block that is not the last of its file continues in the next one."""
        column = self.column
        texts = [block_text(row) if column is None else text_of(location, row, column) for location, row in rows]
        ends = [self.tokenizer.ends[:1] if row.get("is_last", True) else () for _, row in rows]
        found = zip(self.tokenizer.encode_pieces(texts), ends, strict=True)
        return [Example(np.array([*ids, *end], np.int64)) for ids, end in found]


def read_examples(source: Source, form: Form) -> Iterator[Example]:
    """Yield the examples of a source, in order, without storing them."""
    rows, at_once = read_rows(source), 8 if source.kind == "text" else 1000
    while some := list(itertools.islice(rows, at_once)):
        yield from form.encode(some)


def prepare(
    source: Source,
    tokenizer: Tokenizer,
    settings: Sequence[object],
    form_of: Callable[[Mapping[str, Any]], Form],
    say: Callable[[str], None] | None = None,
) -> Source:
    """Return the examples of text or of a data set's rows from the cache, or write them to the cache first.

    If several processes need the same data, one of them writes, and the others wait.

    Args:
        source: Text, or the rows of a data set.
        tokenizer: Converts text to ids.
        settings: Everything else that the examples depend on.
        form_of: Returns the conversion of rows to examples, from the first row.
        say: Called with a line of text before slow work.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardwise" / "data"
    digest = hashlib.sha256(f"3\0{source.fingerprint()}\0{json.dumps(settings)}".encode())
    for file in tokenizer_files(tokenizer):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    content = digest.hexdigest()
    times = [file.stat().st_mtime_ns for file in source.files]  # because only a part of large data is hashed
    key = hashlib.sha256(f"{content}{times}".encode()).hexdigest()[:40]
    if not (files := _find_cached(cache, key)):
        if say is not None:
            say(f"tokenizing {printable(source.name)}, {sum(file.stat().st_size for file in source.files):,} bytes")
        _make(source, cache, key, form_of(first_row(source)), tokenizer.vocab_size)
        files = _find_cached(cache, key)
    found = [Examples.of((file,)) for file in files]
    return replace(
        source,
        kind="tokens" if found[0].spans is None else "examples",
        files=files,
        lengths=tuple(int(each.lengths().sum()) for each in found),
        vocab_size=tokenizer.vocab_size,
        content=content,
    )


def _find_cached(cache: Path, key: str) -> tuple[Path, ...]:
    """Return the files of the cache for ``key``. Folders of unfinished files are skipped."""
    found = cache.glob(f"generator/*{key}/*/*.arrow")
    return tuple(sorted(file for file in found if file.parent.suffix != ".incomplete"))


def _make(source: Source, cache: Path, key: str, form: Form, vocab_size: int) -> None:
    """Write the examples of a source into the cache."""
    try:
        import datasets  # pyrefly: ignore[missing-import]
    except ImportError:
        raise ConfigError(
            f"data.source={printable(source.name)} is tokenized by the datasets package, which is not installed.\n"
            "  Install shardwise[hf]."
        ) from None
    spans = {} if isinstance(form, Texts) else {"spans": datasets.List(datasets.Value("int64"))}
    ids = datasets.Value("uint16" if vocab_size <= 1 << 16 else "uint32")
    files = [*zip(source.files, source.lengths, strict=True)]
    num_proc = 1 if source.content else min(os.cpu_count() or 1, len(files) // 8)  # no forks with stores
    num_proc = num_proc if num_proc > 1 else None
    try:
        datasets.Dataset.from_generator(
            functools.partial(_rows, source, form),
            features=datasets.Features({"ids": datasets.List(ids), **spans}),
            cache_dir=str(cache),
            gen_kwargs={"files": files},
            num_proc=num_proc,
            fingerprint=key,
            writer_batch_size=16 if source.kind == "text" else 1000,
        )
    except (datasets.exceptions.DatasetsError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, ShardwiseError):
            raise cause from None
        for _ in _rows(source, form, files) if num_proc else ():  # again here, to get the error's own class
            pass
        if not (num_proc or isinstance(cause, OSError)):  # an error of the form, not of the disk
            raise cause from None
        raise StorageError(
            f"{printable(cache)} cannot be written: {first_line(cause)}.\n  Set XDG_CACHE_HOME to a"
            f" folder that can, or write a token file: shardwise data tokenize {printable(source.name)} FILE."
        ) from None


def _rows(source: Source, form: Form, files: Sequence[tuple[Path, int]]) -> Iterator[dict[str, Any]]:
    paths, lengths = zip(*files, strict=True)
    for example in read_examples(replace(source, files=paths, lengths=lengths), form):
        spans = {} if isinstance(form, Texts) else {"spans": np.ravel(example.spans).astype(np.int64)}
        yield {"ids": example.ids, **spans}


@dataclass(frozen=True, slots=True)
class Examples:
    """A range of consecutive examples."""

    ids: Any  # a chunked array of pyarrow, with a list of ids per example
    spans: Any = None  # the same for spans; ``None``: all ids are learned

    @classmethod
    def of(cls, files: Sequence[Path]) -> Examples:
        """Map the examples of Arrow files."""
        import pyarrow as pa  # pyrefly: ignore[missing-import]

        try:
            found = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{files[0].parent} is damaged: {first_line(error)}.\n  Remove this folder; it is made again."
            ) from None
        return cls(found["ids"], found["spans"] if "spans" in found.column_names else None)

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.ids)

    def split(self, held_out: float | None) -> tuple[Examples, Examples]:
        """Split off the last ``held_out`` of the examples, at least one if there are two; ``None`` splits off none."""
        num_held_out = 0 if held_out is None else max(int(len(self) * held_out), min(1, len(self) // 2))
        train = len(self) - num_held_out
        return Examples(self.ids[:train], self.spans[:train]), Examples(self.ids[train:], self.spans[train:])

    def documents(self) -> list[np.ndarray]:
        """Return the ids of all examples concatenated, in chunks."""
        return [chunk.flatten().to_numpy() for chunk in self.ids.chunks]

    def lengths(self) -> np.ndarray:
        """Return the number of tokens of each example, int64."""
        return _lengths(self.ids)

    def edges(self) -> np.ndarray:
        """Return start and end (exclusive) of every span, (S, 2) int64."""
        return np.concatenate([np.zeros(0, np.int64), *(chunk.flatten() for chunk in self.spans.chunks)]).reshape(-1, 2)

    def num_targets(self, most: int) -> np.ndarray:
        """Return the number of learned tokens of each example cut to ``most`` tokens; the first token never counts."""
        starts, ends = self.edges().T
        learned = np.maximum(np.minimum(ends, most) - np.maximum(starts, 1), 0)
        numbers = np.repeat(np.arange(len(self)), _lengths(self.spans) // 2)
        return np.bincount(numbers, learned, minlength=len(self)).astype(np.int64)

    def read(self, number: int, most: int = 1 << 62) -> Example:
        """Return an example, cut to ``most`` tokens."""
        ids = self.ids[number].values.to_numpy()[:most]
        spans = self.spans[number].values.to_numpy().reshape(-1, 2).tolist()
        return Example(ids, [(begin, min(end, len(ids))) for begin, end in spans if begin < len(ids)])


def _lengths(lists: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(chunk.value_lengths() for chunk in lists.chunks)]).astype(np.int64)
