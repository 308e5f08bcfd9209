"""Training data: text or token files as one long array of tokens, cut into samples, split into train and held-out.

A *source* is a file, a folder (every visible file below it), a glob, a token file, ``stdlib`` (the source text of
Python's own standard library) or ``random``. Files are taken in the order of their paths. Text must be UTF-8 and
becomes one token per byte, or what a tokenizer makes of it (``train.tokenizer``).

A run starts in seconds however much data there is. Before the first step names and sizes are read, and of the content
at most ``LOOKED_AT_BYTES`` of at most ``LOOKED_AT_FILES`` files, evenly spaced. A file is opened and mapped when a
sample asks for it, and a sample's ids are compared with the vocabulary then.

Sample ``i`` of a part is ``seq_len + 1`` tokens from ``i * seq_len`` on: inputs are all but the last, targets all but
the first. The last ``held_out`` of the tokens is the held-out part, so the two share no token.
"""

from __future__ import annotations

import bisect
import codecs
import functools
import glob
import hashlib
import itertools
import os
import struct
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardwise.launch.file import replacing
from shardwise.spec.errors import CheckpointError, ConfigError

MAGIC = b"SWTOKENS"
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sIIQQ32s")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_AT_ONCE = 1 << 24


class DataError(CheckpointError):
    """Training data that is missing, damaged, too small, or does not fit the model. Exit code 65."""


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """What the first 64 bytes of a token file say."""

    item_bytes: int
    vocab_size: int
    num_tokens: int


def is_token_file(path: Path) -> bool:
    """Whether ``path`` begins as a token file does."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: Path) -> TokenHeader:
    """Read and check the header against the file's real size.

    Raises:
        DataError: The header is damaged, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path}: {size} bytes, a token file has at least {HEADER_BYTES}.\n  {_AGAIN}")
    magic, version, item_bytes, vocab_size, num_tokens, zero = _HEADER.unpack(raw)
    if magic != MAGIC or version != 1 or item_bytes not in _DTYPES or zero != bytes(32):
        raise DataError(f"{path}: the header is not that of a token file of version 1.\n  {_AGAIN}")
    expected = HEADER_BYTES + num_tokens * item_bytes
    if size != expected:
        raise DataError(
            f"{path}: {num_tokens:,} tokens of {item_bytes} bytes need {expected:,} bytes, the file has {size:,}: "
            f"{'truncated' if size < expected else 'bytes are left over'}.\n  {_AGAIN}"
        )
    if not 1 <= vocab_size <= 1 << (8 * item_bytes):
        raise DataError(f"{path}: a vocabulary of {vocab_size:,} in tokens of {item_bytes} bytes.\n  {_AGAIN}")
    return TokenHeader(item_bytes, vocab_size, num_tokens)


def map_tokens(path: Path) -> np.ndarray:
    """The tokens of a file as a read-only memory map; nothing is read yet."""
    header = read_header(path)
    if header.num_tokens == 0:
        return np.zeros(0, _DTYPES[header.item_bytes])
    return np.memmap(path, _DTYPES[header.item_bytes], "r", offset=HEADER_BYTES, shape=(header.num_tokens,))


def check_tokens(path: Path, vocab_size: int, *, num_bytes: int | None = None) -> None:
    """Refuse ids that the model has no embedding for, in the first ``num_bytes`` of tokens or in all. About 1 GB/s.

    Raises:
        DataError: A token id is too large; file and position are named.
    """
    header = read_header(path)
    dtype = _DTYPES[header.item_bytes]
    count = header.num_tokens if num_bytes is None else min(header.num_tokens, num_bytes // header.item_bytes)
    for start in range(0, count, _AT_ONCE):
        chunk = np.fromfile(path, dtype, min(_AT_ONCE, count - start), offset=HEADER_BYTES + start * header.item_bytes)
        if int(chunk.max()) >= vocab_size:
            raise unknown_token(path, start, chunk, vocab_size)


def unknown_token(path: Path | int, start: int, chunk: np.ndarray, vocab_size: int) -> DataError:
    """The error for a file's tokens from ``start`` on, of which one is not below ``vocab_size``."""
    place = int(np.argmax(chunk >= vocab_size))
    return DataError(
        f"{path}: token {start + place:,} is {int(chunk[place])}, but the vocabulary has {vocab_size:,} ids.\n"
        "  Use a model whose vocab_size covers the file, or tokenize the text again."
    )


def write_tokens(path: Path, chunks: Iterable[np.ndarray], *, vocab_size: int, should_replace: bool = False) -> int:
    """Write a token file: beside its place, flushed, then renamed. uint16 where the vocabulary fits, else uint32.

    Returns:
        The number of tokens.

    Raises:
        ConfigError: The file exists and ``should_replace`` is false.
    """
    if path.exists() and not should_replace:
        raise ConfigError(f"{path} exists.\n  Name another file, or pass --force to replace it.")
    item_bytes = 2 if vocab_size <= 1 << 16 else 4
    count = 0
    with replacing(path, is_durable=True) as file:
        file.write(bytes(HEADER_BYTES))
        for chunk in chunks:
            file.write(_packed(chunk, item_bytes, vocab_size))
            count += len(chunk)
        file.seek(0)
        file.write(_HEADER.pack(MAGIC, 1, item_bytes, vocab_size, count, bytes(32)))
    return count


def _packed(chunk: np.ndarray, item_bytes: int, vocab_size: int) -> bytes:
    if chunk.size and int(chunk.max()) >= vocab_size:
        raise DataError(
            f"token id {int(chunk.max())} does not fit a vocabulary of {vocab_size:,}.\n  Raise the vocabulary size."
        )
    return chunk.astype(_DTYPES[item_bytes]).tobytes()


_AGAIN = "Write it again with `shardwise data tokenize`."


T = TypeVar("T")

#: Tokens of the byte-level tokenizer.
BYTE_VOCAB = 256

#: How much of the standard library's text is used unless ``max_bytes`` says otherwise.
STDLIB_BYTES = 4_000_000

#: What is opened and read before training begins: of more files, or more bytes, only so many.
LOOKED_AT_FILES, LOOKED_AT_BYTES = 256, 1 << 24

#: Files that are mapped at a time.
MAPPED_FILES = 64

_CHUNK = 1 << 22
_LEFT_OUT = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "lib2to3", "turtledemo"}


@dataclass(frozen=True, slots=True)
class Source:
    """What a source name means: the files, what their tokens are, and how many.

    Attributes:
        name: As it was configured.
        kind: ``text``, ``tokens`` or ``random``.
        files: In order.
        lengths: Tokens taken from each file.
        vocab_size: Ids are below this; ``random`` takes the model's.
    """

    name: str
    kind: str
    files: tuple[Path, ...]
    lengths: tuple[int, ...]
    vocab_size: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens in all."""
        return sum(self.lengths)

    def check(self, vocab_size: int) -> None:
        """Look at the data: text must be UTF-8, token ids must be below ``vocab_size``.

        Of much data only the beginnings of some files are read; ids beyond are compared when their sample is read.

        Raises:
            DataError: File, line or position are named.
        """
        for file, length, most in self._looked_at():
            if self.kind == "tokens":
                check_tokens(file, vocab_size, num_bytes=most)
            else:
                check_text(file, min(length, most))

    def fingerprint(self) -> str:
        """A hash that changes when the data does.

        Covers kind, file names and lengths, and of the content what is looked at: of much data the beginnings and ends
        of some files.
        """
        digest = hashlib.sha256(f"{self.kind}\0{self.vocab_size}\0".encode())
        for file, length in zip(self.files, self.lengths, strict=True):
            digest.update(f"{file.name}\0{length}\0".encode())
        for file, _, most in self._looked_at():
            size = file.stat().st_size
            digest.update(f"{size}\0".encode())
            with file.open("rb") as handle:
                if size <= most:
                    digest.update(handle.read())
                    continue
                digest.update(handle.read(most // 2))
                handle.seek(size - most // 2)
                digest.update(handle.read())
        return digest.hexdigest()

    def _looked_at(self) -> list[tuple[Path, int, int]]:
        """The files that are opened before training, their tokens, and how many bytes are read of each."""
        held = _spaced(list(zip(self.files, self.lengths, strict=True)))
        whole = sum(file.stat().st_size for file, _ in held) <= LOOKED_AT_BYTES
        most = LOOKED_AT_BYTES if whole else LOOKED_AT_BYTES // len(held)
        return [(file, length, most) for file, length in held]


def find_source(name: str, *, max_bytes: int | None = None) -> Source:
    """Find the files behind a source name; reads names, sizes and headers only.

    Raises:
        DataError: Nothing is there, it is empty, or a token file is damaged.
    """
    if name == "random":
        return Source(name, "random", (), (), None)
    if name == "stdlib":
        return _text(name, _stdlib_files(), STDLIB_BYTES if max_bytes is None else max_bytes)
    try:
        files = _find_files(name)
        looked_at = _spaced(files)
        kinds = [is_token_file(file) for file in looked_at]
        if any(kinds):
            if not all(kinds):
                raise _mixed(looked_at[kinds.index(False)], name)
            return _tokens(name, files, looked_at, max_bytes)
        return _text(name, files, max_bytes)
    except OSError as error:
        raise DataError(f"{error.filename}: {error.strerror}.\n  Check data.source and its permissions.") from None


def _spaced(items: Sequence[T]) -> list[T]:
    """At most ``LOOKED_AT_FILES`` of them, evenly spaced, the first and the last among them."""
    count = min(len(items), LOOKED_AT_FILES)
    return [items[index * (len(items) - 1) // max(count - 1, 1)] for index in range(count)]


def _mixed(file: Path, name: str) -> DataError:
    return DataError(f"{file}: a text file beside token files in {name!r}.\n  Keep them in separate folders.")


def _tokens(name: str, files: Sequence[Path], looked_at: Sequence[Path], max_bytes: int | None) -> Source:
    if max_bytes is not None:
        raise DataError(f"data.max_bytes is for text, and {name!r} holds token files.\n  Take max_bytes out.")
    headers = {file: read_header(file) for file in looked_at}
    usual = headers[looked_at[0]]
    lengths = [
        headers[file].num_tokens if file in headers else (file.stat().st_size - HEADER_BYTES) // usual.item_bytes
        for file in files
    ]
    if sum(lengths) == 0:
        raise DataError(f"{files[0]}: no tokens.\n  Name another source.")
    vocab = {header.vocab_size for header in headers.values()}
    if len(vocab) > 1:
        raise DataError(
            f"the token files of {name!r} have different vocabularies: {sorted(vocab)}.\n  Use one of them."
        )
    return Source(name, "tokens", tuple(files), tuple(lengths), vocab.pop())


def _text(name: str, files: Iterable[Path], limit: int | None) -> Source:
    held: list[Path] = []
    lengths: list[int] = []
    left = limit
    for file in files:
        size = file.stat().st_size
        take = size if left is None else min(size, left)
        if take:
            held.append(file)
            lengths.append(take)
        if left is not None:
            left -= take
            if left == 0:
                break
    if not held:
        raise DataError(f"{name}: the text is empty.\n  Name a source with text in it.")
    return Source(name, "text", tuple(held), tuple(lengths), BYTE_VOCAB)


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise DataError(f"{path}: no files in this folder.\n  Name a folder with text or token files.")
        return files
    if glob.has_magic(name):
        matches = glob.iglob(str(path), recursive=True)  # noqa: PTH207  Path.glob takes no absolute patterns
        files = sorted(Path(match) for match in matches if Path(match).is_file())
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
    """Refuse a text file of which the first ``length`` bytes are not UTF-8.

    Raises:
        DataError: The line is named.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, left = 1, length
    with file.open("rb") as handle:
        while left and (block := handle.read(min(_CHUNK, left))):
            left -= len(block)
            try:
                decoder.decode(block)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise DataError(
                    f"{file}:{line}: byte 0x{error.object[error.start]:02x} is not UTF-8 text.\n"
                    "  Convert the file, or leave it out of data.source with a glob."
                ) from None
            line += block.count(b"\n")
    if left:
        raise DataError(f"{file}: shorter than it was a moment ago.\n  Do not change data while a run reads it.")


@dataclass(frozen=True, slots=True)
class Part:
    """Samples of one part of a source.

    Attributes:
        arrays: One array of tokens per file.
        start: First token of the part, counted over all files.
        num_tokens: Tokens of the part.
        seq_len: Tokens per sample.
        vocab_size: Ids have to be below; ``None``: they are.
    """

    arrays: Sequence[np.ndarray]
    start: int
    num_tokens: int
    seq_len: int
    vocab_size: int | None = None
    _ends: list[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        arrays = self.arrays
        lengths = arrays.lengths if isinstance(arrays, MappedFiles) else [len(array) for array in arrays]
        object.__setattr__(self, "_ends", list(itertools.accumulate(lengths)))

    @property
    def num_samples(self) -> int:
        """Samples of the part."""
        return max(0, (self.num_tokens - 1) // self.seq_len)

    def sample(self, index: int) -> np.ndarray:
        """The ``seq_len + 1`` tokens of a sample, int64.

        Raises:
            IndexError: There is no such sample.
            DataError: A file of it is damaged, or an id is not in the vocabulary.
        """
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        return self._read(self.start + index * self.seq_len, self.seq_len + 1)

    def _read(self, start: int, count: int) -> np.ndarray:
        out = np.empty(count, np.int64)
        done = 0
        file = bisect.bisect_right(self._ends, start)
        while done < count:
            array, before = self.arrays[file], self._ends[file - 1] if file else 0
            piece = array[start + done - before : start + count - before]
            if self.vocab_size is not None and piece.size and int(piece.max()) >= self.vocab_size:
                raise self._unknown(file, start + done - before, piece, self.vocab_size)
            out[done : done + len(piece)] = piece
            done += len(piece)
            file += 1
        return out

    def _unknown(self, file: int, place: int, piece: np.ndarray, vocab_size: int) -> DataError:
        path = self.arrays.files[file] if isinstance(self.arrays, MappedFiles) else file
        return unknown_token(path, place, piece, vocab_size)


@dataclass(frozen=True, slots=True)
class RandomPart:
    """Endless uniform tokens; sample ``i`` depends on the seed and ``i`` only."""

    seed: int
    stream: int
    vocab_size: int
    seq_len: int
    num_samples: int = 1 << 40

    def sample(self, index: int) -> np.ndarray:
        """The ``seq_len + 1`` tokens of a sample, int64."""
        key = np.array([self.seed, self.stream], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, index], np.uint64)))
        return generator.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Data:
    """Both parts of a source."""

    train: Part | RandomPart
    held_out: Part | RandomPart


def open_data(source: Source, *, seq_len: int, held_out: float, vocab_size: int, seed: int) -> Data:
    """Split a source. Its files are opened when samples are read.

    Raises:
        DataError: A part has no whole sample.
    """
    if source.kind == "random":
        return Data(RandomPart(seed, 0, vocab_size, seq_len), RandomPart(seed, 1, vocab_size, seq_len))
    train_tokens = split_point(source.num_tokens, held_out, seq_len)
    arrays, below = MappedFiles(source), vocab_size if source.kind == "tokens" else None
    data = Data(
        Part(arrays, 0, train_tokens, seq_len, below),
        Part(arrays, train_tokens, source.num_tokens - train_tokens, seq_len, below),
    )
    check_size(source, seq_len=seq_len, held_out=held_out, needed=1)
    return data


def split_point(num_tokens: int, held_out: float, seq_len: int) -> int:
    """How many of the tokens are for training; the rest, at least one sample where there are two, is held out."""
    held = max(int(num_tokens * held_out), min(seq_len + 1, num_tokens // 2))
    return num_tokens - held


def check_size(source: Source, *, seq_len: int, held_out: float, needed: int, needed_held_out: int = 1) -> None:
    """Refuse a source with fewer than ``needed`` training or ``needed_held_out`` held-out samples.

    Raises:
        DataError: With the arithmetic.
    """
    if source.kind == "random":
        return
    train = split_point(source.num_tokens, held_out, seq_len)
    parts = {"training": (train, needed), "held-out": (source.num_tokens - train, needed_held_out)}
    for label, (tokens, least) in parts.items():
        samples = max(0, (tokens - 1) // seq_len)
        if samples < least:
            raise DataError(
                f"{source.name}: {source.num_tokens:,} tokens leave "
                f"{tokens:,} for the {label} part, that is {samples:,} samples of {seq_len:,}; {least:,} "
                f"{'is' if least == 1 else 'are'} needed.\n"
                "  Use more text, a smaller data.seq_len, or a smaller global batch."
            )


class MappedFiles(Sequence[np.ndarray]):
    """The tokens of each file of a source: mapped when they are first read, the ``MAPPED_FILES`` used last at a time.

    Attributes:
        files: In order.
        lengths: Tokens of each.
    """

    def __init__(self, source: Source) -> None:
        self.files, self.lengths = source.files, source.lengths
        self._open = functools.lru_cache(MAPPED_FILES)(
            lambda index: _open(source, self.files[index], self.lengths[index])
        )

    def __len__(self) -> int:
        """Number of files."""
        return len(self.files)

    def __getitem__(self, index: int) -> np.ndarray:  # pyrefly: ignore[bad-override]
        """The tokens of a file.

        Raises:
            DataError: It is damaged, or another than it was when the run began.
        """
        return self._open(index)


def _open(source: Source, file: Path, length: int) -> np.ndarray:
    if source.kind == "tokens":
        if not is_token_file(file):
            raise _mixed(file, source.name)
        tokens = map_tokens(file)
        if len(tokens) != length:
            raise DataError(
                f"{file}: {len(tokens):,} tokens, but the other files of {source.name!r} are such that its size stands"
                f" for {length:,}.\n  Write all of them with one vocabulary, and do not change them while a run reads"
                " them."
            )
        return tokens
    return np.memmap(file, np.uint8, "r", shape=(length,))
