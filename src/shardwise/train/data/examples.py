"""Text and rows as ids: made once, in an Arrow cache of ``datasets``, and mapped from there by every rank.

The cache is ``shardwise/data`` below ``$XDG_CACHE_HOME`` or ``~/.cache`` and may be deleted. A row of it is an example:
its ``ids``, and of conversations, answers and classes the ``spans`` of them that are learned, as first, one past the
last, first, ... Where the cache has the data, pyarrow alone is imported to map it.
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
    """Texts as documents: each ends with the tokenizer's end-of-text token, where it has one."""

    tokenizer: Tokenizer  # what makes ids of them
    column: str | None  # of a data set: that of the texts. ``None``: the rows are blocks of text files.

    def encode(self, rows: Sequence[Placed]) -> list[Example]:
        """The examples of rows. A block that is not the last of its file goes on in the next one."""
        texts = [block_text(row) if self.column is None else text_of(place, row, self.column) for place, row in rows]
        ends = [self.tokenizer.ends[:1] if row.get("is_last", True) else () for _, row in rows]
        found = zip(self.tokenizer.encode_pieces(texts), ends, strict=True)
        return [Example(np.array([*ids, *end], np.int64)) for ids, end in found]


def read_examples(source: Source, form: Form) -> Iterator[Example]:
    """The examples of a source, in order; nothing is kept."""
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
    """The examples of text or of the rows of a data set: those in the cache, or they are made now.

    Of several processes that come here for the same data one makes them, and the others wait.

    Args:
        source: Text, or the rows of a data set.
        tokenizer: What makes ids of it.
        settings: What decides about the examples beside source and tokenizer.
        form_of: How rows become examples, by the first of them.
        say: Told what is done where it takes time.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shardwise" / "data"
    digest = hashlib.sha256(f"2\0{source.fingerprint()}\0{json.dumps(settings)}".encode())
    for file in tokenizer_files(tokenizer):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    content = digest.hexdigest()
    times = [file.stat().st_mtime_ns for file in source.files]  # of large data only a part of the content is read
    key = hashlib.sha256(f"{content}{times}".encode()).hexdigest()[:40]
    if not (files := _made(cache, key)):
        if say is not None:
            say(f"tokenizing {printable(source.name)}, {sum(file.stat().st_size for file in source.files):,} bytes")
        _make(source, cache, key, form_of(first_row(source)), tokenizer.vocab_size)
        files = _made(cache, key)
    found = [Examples.of((file,)) for file in files]
    return replace(
        source,
        kind="tokens" if found[0].spans is None else "examples",
        files=files,
        lengths=tuple(int(each.lengths().sum()) for each in found),
        vocab_size=tokenizer.vocab_size,
        content=content,
    )


def _made(cache: Path, key: str) -> tuple[Path, ...]:
    """The files of the cache; while they are written, their folder has another name."""
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
    num_proc = 1 if source.content else min(os.cpu_count() or 1, len(files) // 8)  # stores are not for forks
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
        for _ in _rows(source, form, files) if num_proc else ():  # what a process raises loses its class on the way
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
    """Neighbouring examples."""

    ids: Any  # a list for each, as a chunked array of pyarrow
    spans: Any = None  # the same; ``None``: all ids are learned

    @classmethod
    def of(cls, files: Sequence[Path]) -> Examples:
        """The examples of Arrow files, as memory maps."""
        import pyarrow as pa  # pyrefly: ignore[missing-import]

        try:
            found = pa.concat_tables(pa.ipc.open_stream(pa.memory_map(str(file))).read_all() for file in files)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{files[0].parent} is damaged: {first_line(error)}.\n  Remove this folder; it is made again."
            ) from None
        return cls(found["ids"], found["spans"] if "spans" in found.column_names else None)

    def __len__(self) -> int:
        """The number of examples."""
        return len(self.ids)

    def split(self, held_out: float | None) -> tuple[Examples, Examples]:
        """The first examples, and the last ``held_out`` of them, at least one where there are two; ``None``: none."""
        held = 0 if held_out is None else max(int(len(self) * held_out), min(1, len(self) // 2))
        train = len(self) - held
        return Examples(self.ids[:train], self.spans[:train]), Examples(self.ids[train:], self.spans[train:])

    def documents(self) -> list[np.ndarray]:
        """All ids, one example behind the other, in parts."""
        return [chunk.flatten().to_numpy() for chunk in self.ids.chunks]

    def lengths(self) -> np.ndarray:
        """Tokens of each, int64."""
        return _lengths(self.ids)

    def edges(self) -> np.ndarray:
        """First and one past the last token of every span, (S, 2) int64."""
        return np.concatenate([np.zeros(0, np.int64), *(chunk.flatten() for chunk in self.spans.chunks)]).reshape(-1, 2)

    def num_targets(self, most: int) -> np.ndarray:
        """The number of learned tokens of each example cut to ``most``: the first has nothing before it."""
        starts, ends = self.edges().T
        learned = np.maximum(np.minimum(ends, most) - np.maximum(starts, 1), 0)
        numbers = np.repeat(np.arange(len(self)), _lengths(self.spans) // 2)
        return np.bincount(numbers, learned, minlength=len(self)).astype(np.int64)

    def read(self, number: int, most: int = 1 << 62) -> Example:
        """An example, cut to ``most`` tokens."""
        ids = self.ids[number].values.to_numpy()[:most]
        spans = self.spans[number].values.to_numpy().reshape(-1, 2).tolist()
        return Example(ids, [(begin, min(end, len(ids))) for begin, end in spans if begin < len(ids)])


def _lengths(lists: Any) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(chunk.value_lengths() for chunk in lists.chunks)]).astype(np.int64)
