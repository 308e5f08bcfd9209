"""Token files that others write: NumPy arrays, and Megatron's ``.bin`` with ``.idx``."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from shardwise.train.data.samples import open_data
from shardwise.train.data.source import find_source
from shardwise.train.data.token_files import DataError, check_tokens, map_tokens, read_header

IDS = np.arange(40) * 7 % 50


def save_megatron(prefix: Path, ids: np.ndarray, lengths: list[int], *, dtype: str = "<u2", code: int = 8) -> None:
    """As Megatron-LM's IndexedDatasetBuilder writes it."""
    ids.astype(dtype).tofile(prefix.with_suffix(".bin"))
    pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
        + np.asarray(lengths, "<i4").tobytes()
        + pointers.astype("<i8").tobytes()
        + np.arange(len(lengths) + 1, dtype="<i8").tobytes()
    )


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
def test_arrays_of_numpy_are_mapped(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", IDS.astype(dtype))
    source = find_source(str(tmp_path / "a.npy"))
    assert (source.kind, source.num_tokens, source.vocab_size) == ("tokens", 40, None)
    data = open_data(source, seq_len=4, held_out=0.2, vocab_size=50, seed=0)
    assert data.train.rows([1]).inputs.tolist() == [IDS[4:8].tolist()]
    assert data.train.rows([1]).targets.tolist() == [IDS[5:9].tolist()]


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
@pytest.mark.parametrize("name", ["corpus", "corpus.bin", "corpus.idx", "."])
def test_megatron_s_pair_is_named_by_either_file_the_prefix_or_the_folder(
    tmp_path: Path, dtype: str, code: int, name: str
) -> None:
    save_megatron(tmp_path / "corpus", IDS, [10, 25, 5], dtype=dtype, code=code)
    source = find_source(str(tmp_path / name))
    assert source.files == (tmp_path / "corpus.bin",)
    assert map_tokens(source.files[0]).tolist() == IDS.tolist()


def test_what_is_wrong_with_a_foreign_file_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "negative.npy", np.array([3, -1, 4], "<i4"))
    with pytest.raises(DataError, match=r"negative.npy: token 1 is 4294967295, but the vocabulary has 50 ids"):
        check_tokens(tmp_path / "negative.npy", 50)
    np.save(tmp_path / "table.npy", np.zeros((2, 3), np.int32))
    with pytest.raises(DataError, match=r"an array of int32 with shape \(2, 3\), expected integers in one dimension"):
        read_header(tmp_path / "table.npy")
    save_megatron(tmp_path / "short", IDS, [10, 25, 5])
    (tmp_path / "short.bin").write_bytes((tmp_path / "short.bin").read_bytes()[:-6])
    with pytest.raises(DataError, match=r"short.bin: 74 bytes, its index ends at 80: truncated"):
        read_header(tmp_path / "short.bin")
    save_megatron(tmp_path / "floats", IDS, [40], code=7)
    with pytest.raises(DataError, match="dtype code 7, expected version 1 and integers"):
        read_header(tmp_path / "floats.bin")
