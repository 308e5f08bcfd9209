"""Sources by name: their files, the kind of the files, and checks before training.

A *source* is a file, a folder (every visible file below it), a glob, ``stdlib`` (the source text of Python's standard
library) or ``random``. Its files contain text, token ids (``token_files``), or rows of a data set (``records``), but
only one of these kinds. They are read in the order of their paths. Text must be UTF-8.

A run starts in seconds, whatever the amount of data. Before the first step only names and sizes are read, and at most
``CHECKED_BYTES`` of content from at most ``CHECKED_FILES`` files, evenly spaced.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from shardwise.spec.text import first_line, printable
from shardwise.train.data.token_files import DataError, check_tokens, is_index_of_tokens, is_token_file, read_header

T = TypeVar("T")

#: Vocabulary size of the byte-level tokenizer.
BYTE_VOCAB = 256

#: Default of ``max_bytes`` for the text of the standard library.
STDLIB_BYTES = 4_000_000

#: Maximum number of files and bytes that are read before training starts.
CHECKED_FILES, CHECKED_BYTES = 256, 1 << 24

_CHUNK = 1 << 22
#: File name endings of data set rows, before an ending such as ``.gz``. Files with an ending of the second group are
#: text if there are other files in the folder.
RECORDS, RECORDS_OR_TEXT = (".jsonl", ".parquet", ".arrow"), (".json", ".csv")
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
#: Names of splits in the paths of a data set's files, as ``datasets`` finds them.
_SPLIT = re.compile(r"(?:^|[-_. /])(train|test|val|valid|validation|dev|eval)(?:ing|uation)?(?=[-_. /])")
#: Files beside the rows of a data set: of ``datasets.Dataset.save_to_disk``, and the card of a data set of a hub.
_SAVED = ("state.json", "dataset_info.json", "dataset_dict.json", "README.md")

#: Stores of fsspec that report a file's size and whether the file has changed; web servers may not.
_PROTOCOLS = ("s3", "gs", "az", "abfs", "hf", "memory")

_LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib2to3", "turtledemo"}


@dataclass(frozen=True, slots=True)
class Source:
    """A source: its files, their kind, and their numbers of tokens."""

    name: str  # the name in the configuration
    #: ``text``, ``tokens``, ``records``, ``examples`` (``data.examples``), ``random``, a ``mixture`` of several
    #: sources, or ``given`` by a spec
    kind: str
    files: tuple[Path, ...]
    lengths: tuple[int, ...]  # tokens of each file; of records, which are not read yet, bytes
    vocab_size: int | None  # ids are below it; ``None``: unknown, as for ``random`` and some files
    streams: Any | None = None  # the form that tokenizes text or rows during training
    #: Replaces the content of files in the fingerprint, for files of a cache or a store and a user's data set
    content: str = ""
    num_samples: int | None = None  # items of a user's data set; ``None`` for an iterable
    #: Of a mixture (``data.mixture``): its sources, each with its name in metrics and its weight
    parts: tuple[tuple[Source, str, float], ...] = ()
    evaluated: Source | None = None  # source of the held-out samples; ``None``: the end of this one

    @property
    def kinds(self) -> set[str]:
        """The kind of the source, or the kinds of all sources of a mixture."""
        return {part.kind for part, *_ in self.parts} or {self.kind}

    @property
    def _others(self) -> list[Source]:
        return [part for part, *_ in self.parts] + ([] if self.evaluated is None else [self.evaluated])

    @property
    def num_tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.lengths)

    @property
    def amount(self) -> str:
        """The number of tokens, or of bytes to tokenize during training; and of files, unless they are a cache's."""
        files = f" in {len(self.files):,} file{'s' if len(self.files) > 1 else ''}"
        if self.streams is not None:
            return f"{self.num_tokens:,} bytes{files}, tokenized during training"
        is_cached = self.content or any(part.content for part, *_ in self.parts)
        return f"{self.num_tokens:,} tokens{'' if is_cached else files}"

    def check(self, vocab_size: int) -> None:
        """Refuse text that is not UTF-8, and token ids that are not below ``vocab_size``.

        Of large data only the beginnings of some files are read; other ids are checked when their sample is read.
        """
        for file, length, most in self._files_to_check():
            if self.kind in {"tokens", "examples"}:
                check_tokens(file, vocab_size, num_bytes=most)
            elif self.kind == "text":
                check_text(file, min(length, most))
        for other in self._others:
            other.check(vocab_size)

    def fingerprint(self) -> str:
        """Return a hash of kind, names, lengths and content; of large data only parts of some files are hashed."""
        if self.kind == "given":
            return hashlib.sha256(f"given\0{self.num_samples}\0{self.content}".encode()).hexdigest()
        digest = hashlib.sha256(f"{self.kind}\0{self.vocab_size}\0{self.content}".encode())
        files = [("" if self.content else file.name, num) for file, num in zip(self.files, self.lengths, strict=True)]
        if self.parts or (self.content and self.kind in {"tokens", "examples"}):
            files = [("", self.num_tokens)]  # the number of files of a cache depends on the machine
        for name, length in files:
            digest.update(f"{name}\0{length}\0".encode())
        for file, _, most in self._files_to_check():
            size = file.stat().st_size
            digest.update(f"{size}\0".encode())
            with file.open("rb") as handle:
                if size <= most:
                    digest.update(handle.read())
                    continue
                digest.update(handle.read(most // 2))
                handle.seek(size - most // 2)
                digest.update(handle.read())
        for other in self._others:
            digest.update(other.fingerprint().encode())
        return digest.hexdigest()

    def _files_to_check(self) -> list[tuple[Path, int, int]]:
        """Return the files to read before training, each with its tokens and the maximum bytes to read."""
        if self.content or self.parts:
            return []
        chosen = _evenly_spaced(list(zip(self.files, self.lengths, strict=True)))
        fits_limit = sum(file.stat().st_size for file, _ in chosen) <= CHECKED_BYTES
        most = CHECKED_BYTES if fits_limit else CHECKED_BYTES // len(chosen)
        return [(file, length, most) for file, length in chosen]


class RemoteFile(str):
    """The URL of a file that fsspec reads, with the methods of a local path that are used here."""

    __slots__ = ("size",)
    size: int  # in bytes

    def open(self, mode: str) -> Any:
        """Open the file; only the parts that are read are transferred."""
        from fsspec.core import url_to_fs  # pyrefly: ignore[missing-import]

        system, path = url_to_fs(str(self))
        return system.open(path, mode)

    def stat(self) -> os.stat_result:
        """Return the size; the time of the last change is part of ``Source.content``."""
        return os.stat_result((0, 0, 0, 0, 0, 0, self.size, 0, 0, 0))


def _remote(name: str, max_bytes: int | None) -> Source:
    """Return the source of a folder, file or glob that fsspec reads."""
    from fsspec.core import url_to_fs  # pyrefly: ignore[missing-import]

    if (scheme := name.partition("://")[0]) not in _PROTOCOLS or "::" in name:  # the rest may contain a password
        raise DataError(
            f"{printable(scheme)}://... cannot be read: stores are {', '.join(_PROTOCOLS)}.\n  Name a folder of one of"
            " them (of huggingface.co: hf://datasets/OWNER/NAME), or download the files and name their folder."
        )
    try:
        system, path = url_to_fs(name)
        listed = system.glob(path, detail=True) if glob.has_magic(path) else system.find(path, detail=True)
        visible = {each: info for each, info in listed.items() if glob.has_magic(path) or "/." not in each[len(path) :]}
        found = {system.unstrip_protocol(each): info for each, info in visible.items() if info["type"] == "file"}
        marks = [system.ukey(each) for each in sorted(found)]
    except Exception as error:  # noqa: BLE001  stores raise errors of their own classes
        raise DataError(
            f"{printable(name)} cannot be listed: {first_line(error)}.\n  Look at its name, at your credentials, and"
            " whether the package of fsspec for it is installed, such as s3fs or gcsfs."
        ) from None
    files: list[Any] = [RemoteFile(each) for each in sorted(found)]
    for file in files:
        file.size = found[file]["size"]
    if not files:
        raise DataError(f"{printable(name)}: no files are there.\n  Name a folder, file or glob with some.")
    source = _records(name, files, max_bytes) if holds_records(files) else _text(name, files, max_bytes)
    return replace(source, content=hashlib.sha256(repr(marks).encode()).hexdigest(), vocab_size=None)


def mixture_of(sources: Sequence[Source], names: Sequence[str], weights: Sequence[float]) -> Source:
    """Combine several sources, under their names in metrics, into a mixture."""
    shares = [f"{name} ({weight / sum(weights):.3g})" for name, weight in zip(names, weights, strict=True)]
    files = tuple(file for source in sources for file in source.files)
    lengths = tuple(length for source in sources for length in source.lengths)
    return Source(
        ", ".join(shares), "mixture", files, lengths, None, parts=tuple(zip(sources, names, weights, strict=True))
    )


def user_source(data: Any) -> Source:
    """Return the source of a run on a user's data set or iterable."""
    count = len(data) if is_indexed(data) else None
    content = getattr(data, "_fingerprint", "")  # datasets.Dataset: hash of the content and its origin
    name = getattr(data, "__name__", type(data).__name__)
    return Source(name, "given", (), (), None, content=str(content), num_samples=count)


def is_indexed(data: Any) -> bool:
    """Return whether items are read by index."""
    is_iterable = any(
        kind.__name__ == "IterableDataset" for kind in type(data).__mro__
    )  # torch's IterableDataset may have both methods
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not is_iterable


def is_loader(data: Any) -> bool:
    """Return whether calling ``data`` makes a reader's loader: it is a function or a class, and no data itself."""
    return callable(data) and not is_indexed(data) and (isinstance(data, type) or not hasattr(data, "__iter__"))


def find_source(name: str, *, max_bytes: int | None = None) -> Source:
    """Find the files of a source by its name; reads only names, sizes and headers."""
    if name == "random":
        return Source(name, "random", (), (), None)
    if name == "stdlib":
        return _text(name, _stdlib_files(), STDLIB_BYTES if max_bytes is None else max_bytes)
    if not name.strip():
        raise DataError("data.source is empty.\n  Name a file, a folder or a pattern, or `stdlib` or `random`.")
    if "://" in name:
        return _remote(name, max_bytes)
    try:
        files = _find_files(name)
        checked = _evenly_spaced(files)
        if holds_records(files):
            return _records(name, files, max_bytes)
        kinds = [is_token_file(file) for file in checked]
        if any(kinds):
            if not all(kinds):
                raise text_among_tokens(checked[kinds.index(False)], name)
            return _tokens(name, files, checked, max_bytes)
        return _text(name, files, max_bytes)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}.\n  Check data.source and its permissions.") from None


def _evenly_spaced(items: Sequence[T]) -> list[T]:
    """Return at most ``CHECKED_FILES`` items, evenly spaced, including the first and the last."""
    count = min(len(items), CHECKED_FILES)
    return [items[index * (len(items) - 1) // max(count - 1, 1)] for index in range(count)]


def text_among_tokens(file: Path, name: str) -> DataError:
    """Return the error for a file without token ids among token files."""
    return DataError(f"{file}: a text file among token files in {name!r}.\n  Keep them in separate folders.")


def ending(file: Path) -> str:
    """Return the ending of a file's name, without the ending of a compression."""
    endings = [part for part in Path(str(file)).suffixes if part not in _COMPRESSED]
    return endings[-1] if endings else ""


def holds_records(files: Sequence[Path]) -> bool:
    """Return whether the file names indicate rows of a data set."""
    endings = {ending(file) for file in files if Path(str(file)).name not in _SAVED}
    return not endings.isdisjoint(RECORDS) or (bool(endings) and endings.issubset(RECORDS_OR_TEXT))


def _records(name: str, files: Sequence[Path], max_bytes: int | None) -> Source:
    if max_bytes is not None:
        raise DataError(f"data.max_bytes is for text, and {name!r} holds rows of a data set.\n  Take max_bytes out.")
    files = [file for file in files if Path(str(file)).name not in _SAVED and not _is_cache(file)] or files
    if not glob.has_magic(name):
        _check_splits(name, files)
    kinds = {ending(file): file for file in reversed(files)}
    if len(kinds) > 1:
        raise DataError(
            f"{kinds[min(kinds)]} lies beside {kinds[max(kinds)]} in {name!r}, and a data set has files of one kind.\n"
            "  Keep them in separate folders, or choose with a glob, such as 'folder/*.parquet'."
        )
    return Source(name, "records", tuple(files), tuple(file.stat().st_size for file in files), None)


def _is_cache(file: Path) -> bool:
    """Return whether ``datasets`` wrote a file for a result of ``map`` or ``filter``, beside a saved data set."""
    return Path(str(file)).name.startswith("cache-") and Path(str(file)).with_name("state.json").is_file()


def _check_splits(name: str, files: Sequence[Path]) -> None:
    """Refuse a folder with a split for training and others, which are for evaluation."""
    paths = [str(file) for file in files]
    folder = os.path.commonpath(paths)
    splits = {split for path in paths for split in _SPLIT.findall(path[len(folder) :].lower())}
    if "train" in splits and len(splits) > 1:
        raise DataError(
            f"{printable(name)} holds several splits: {', '.join(sorted(splits))}.\n  Choose the files to train on with"
            f" a glob, such as '{printable(name.rstrip('/'))}/**/*train*', and name the others in data.eval_source."
        )


def _tokens(name: str, files: Sequence[Path], checked: Sequence[Path], max_bytes: int | None) -> Source:
    if max_bytes is not None:
        raise DataError(f"data.max_bytes is for text, and {name!r} holds token files.\n  Take max_bytes out.")
    headers = {file: read_header(file) for file in checked}
    first = headers[checked[0]]
    lengths = [
        headers[file].num_tokens if file in headers else (file.stat().st_size - first.offset) // first.dtype.itemsize
        for file in files
    ]
    if sum(lengths) == 0:
        raise DataError(f"{files[0]}: no tokens.\n  Name another source.")
    vocab = {header.vocab_size for header in headers.values()}
    if len(vocab) > 1:
        raise DataError(
            f"the token files of {name!r} have different vocabularies: {', '.join(map(str, vocab))}.\n"
            "  Use one of them."
        )
    return Source(name, "tokens", tuple(files), tuple(lengths), vocab.pop())


def _text(name: str, files: Iterable[Path], limit: int | None) -> Source:
    file_sizes: dict[Path, int] = {}
    bytes_left = limit or sys.maxsize
    for file in files:
        if bytes_left and (size := min(file.stat().st_size, bytes_left)):
            file_sizes[file] = size
            bytes_left -= size
    if not file_sizes:
        raise DataError(f"{name}: the text is empty.\n  Name a source with text in it.")
    return Source(name, "text", tuple(file_sizes), tuple(file_sizes.values()), BYTE_VOCAB)


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    pair = path.parent / f"{path.name}.bin"  # Megatron names a pair of files by their common stem
    path = pair if not path.exists() and pair.is_file() and is_token_file(pair) else path
    if path.is_file():
        return [path.with_suffix(".bin") if is_index_of_tokens(path) else path]
    if (path / "dataset_dict.json").is_file():  # several splits, as datasets.DatasetDict.save_to_disk writes them
        if not (path / "train").is_dir():
            raise DataError(f"{path}: a data set without a split named train.\n  Name the folder of one of its splits.")
        path /= "train"
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
            and not is_index_of_tokens(file)
        )
        if not files:
            raise DataError(f"{path}: no files in this folder.\n  Name a folder with text or token files.")
        return files
    if glob.has_magic(name):
        matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  Path.glob does not accept absolute patterns
        files = sorted(
            Path(match) for match in matches if Path(match).is_file() and not is_index_of_tokens(Path(match))
        )
        if not files:
            raise DataError(f"{name}: no file matches this pattern.\n  Quote the pattern, and mind the current folder.")
        return files
    if path.exists():
        raise DataError(f"{path}: neither a file nor a folder.\n  Name a regular file.")
    raise DataError(f"{name}: no such file or folder.\n  data.source is a path, a glob, 'stdlib' or 'random'.")


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT and not name.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def check_text(file: Path, length: int) -> None:
    """Refuse a text file whose first ``length`` bytes are not UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, bytes_left = 1, length
    with file.open("rb") as handle:
        while bytes_left and (block := handle.read(min(_CHUNK, bytes_left))):
            bytes_left -= len(block)
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise DataError(
                    f"{file}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text.\n"
                    "  Convert the file, or leave it out of data.source with a glob."
                ) from None
            line += block.count(b"\n")
    if bytes_left:
        raise DataError(f"{file}: shorter than it was a moment ago.\n  Do not change data while a run reads it.")
