"""Data: sources found, split and checked; every kind of bad input is a typed error that names its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import ConfigError
from shardwise.train.data.samples import MAPPED_FILES, Part, check_size, open_data, split_point
from shardwise.train.data.source import CHECKED_BYTES, CHECKED_FILES, find_source
from shardwise.train.data.token_files import (
    HEADER_BYTES,
    DataError,
    check_tokens,
    map_tokens,
    read_header,
    write_tokens,
)
from shardwise.train.data.tokenizer import ByteTokenizer
from tests.common.tokenizers import ids_of


def data(name: object, seq_len: int = 4, **options: object):
    return open_data(
        find_source(str(name)), **{"seq_len": seq_len, "held_out": 0.2, "vocab_size": 256, "seed": 0} | options
    )


def test_text_is_one_token_per_byte_and_targets_follow_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    parts = data(tmp_path / "a.txt")
    assert bytes(parts.train.sample(0).tolist()) == b"abcde"
    assert bytes(parts.train.sample(1).tolist()) == b"efghi"
    assert parts.train.sample(0).dtype == np.int64


def test_folders_and_globs_take_files_in_order_and_samples_cross_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("34567")
    (tmp_path / "a.txt").write_text("012")
    (tmp_path / "sub" / "c.txt").write_text("89" * 20)
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / "empty").write_text("")
    assert [file.name for file in find_source(str(tmp_path)).files] == ["a.txt", "b.txt", "c.txt"]
    assert bytes(data(tmp_path).train.sample(0).tolist()) == b"01234"
    assert bytes(data(tmp_path).train.sample(1).tolist()) == b"45678"
    assert [file.name for file in find_source(f"{tmp_path}/**/[bc].txt").files] == ["b.txt", "c.txt"]


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=5), seq_len=st.integers(1, 9))
def test_samples_tile_a_part_without_gaps(lengths: list[int], seq_len: int) -> None:
    whole = np.arange(sum(lengths), dtype=np.uint16)
    arrays = tuple(np.split(whole, np.cumsum(lengths)[:-1]))
    part = Part(arrays, 0, len(whole), seq_len)
    for index in range(part.num_samples):
        assert part.sample(index).tolist() == whole[index * seq_len : index * seq_len + seq_len + 1].tolist()
    assert len(whole) - 1 - part.num_samples * seq_len < seq_len


@given(st.integers(4, 10**9), st.floats(0.001, 0.999), st.integers(1, 4096))
def test_the_split_covers_all_tokens(num_tokens: int, held_out: float, seq_len: int) -> None:
    assert 0 < split_point(num_tokens, held_out, seq_len) < num_tokens


def test_the_held_out_part_shares_no_token_with_the_training_part(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", [np.arange(100)], vocab_size=256)
    parts = data(tmp_path / "t.bin")
    train = {int(t) for i in range(parts.train.num_samples) for t in parts.train.sample(i)}
    held = {int(t) for i in range(parts.held_out.num_samples) for t in parts.held_out.sample(i)}
    assert max(train) == 79 - (79 % 4) + 0 or max(train) < 80
    assert min(held) == 80
    assert not train & held


def test_the_standard_library_needs_no_download_and_does_not_change() -> None:
    first, second = find_source("stdlib"), find_source("stdlib")
    assert first == second
    assert first.num_tokens == 4_000_000
    assert first.fingerprint() == second.fingerprint()
    first.check(256)


def test_random_tokens_depend_on_seed_and_index_only() -> None:
    one, two = (data("random", vocab_size=50, seed=3) for _ in range(2))
    assert one.train.sample(7).tolist() == two.train.sample(7).tolist()
    assert one.train.sample(7).tolist() != one.train.sample(8).tolist()
    assert one.train.sample(7).tolist() != one.held_out.sample(7).tolist()
    assert max(t for i in range(50) for t in one.train.sample(i)) < 50


@pytest.mark.parametrize(("vocab_size", "item_bytes"), [(256, 2), (65536, 2), (65537, 4), (2**20, 4)])
def test_token_files_round_trip_in_the_smallest_dtype(tmp_path: Path, vocab_size: int, item_bytes: int) -> None:
    tokens = np.array([0, 1, vocab_size - 1] * 5)
    path = tmp_path / "t.tokens"
    assert write_tokens(path, [tokens[:4], tokens[4:]], vocab_size=vocab_size) == 15
    assert read_header(path).dtype.itemsize == item_bytes
    assert map_tokens(path).tolist() == tokens.tolist()
    assert path.stat().st_size == HEADER_BYTES + 15 * item_bytes
    with pytest.raises(ConfigError, match=r"exists"):
        write_tokens(path, [tokens], vocab_size=vocab_size)
    assert list(tmp_path.iterdir()) == [path]


def test_tokenizing_text_gives_the_same_samples(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("héllo wörld, again and again")
    write_tokens(tmp_path / "a.tokens", ids_of(find_source(str(tmp_path / "a.txt")), ByteTokenizer()), vocab_size=256)
    text, tokens = data(tmp_path / "a.txt"), data(tmp_path / "a.tokens")
    assert text.train.num_samples == tokens.train.num_samples
    assert all((text.train.sample(i) == tokens.train.sample(i)).all() for i in range(text.train.num_samples))


def test_a_changed_source_has_another_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one text")
    first = find_source(str(path)).fingerprint()
    path.write_text("two text")
    assert find_source(str(path)).fingerprint() != first


def test_missing_and_empty_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "folder").mkdir()
    for name, message in [
        ("none.txt", "no such file"),
        ("empty.txt", "the text is empty"),
        ("folder", "no files in this folder"),
        ("*.md", "no file matches"),
    ]:
        with pytest.raises(DataError, match=message) as caught:
            find_source(str(tmp_path / name))
        assert name in str(caught.value)
        assert caught.value.exit_code == 65
    with pytest.raises(DataError, match=r"data\.source is empty"):
        find_source(" ")


def test_the_current_folder_is_a_source(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert find_source(".").files == (Path("a.txt"),)


def test_too_little_text_shows_the_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 50)
    source = find_source(str(tmp_path / "a.txt"))
    parts = data(tmp_path / "a.txt", seq_len=9)
    with pytest.raises(DataError, match=r"a.txt: 50 tokens leave 4 samples of 9 for the training part; 8 are"):
        check_size(source, parts, seq_len=9, needed=8)


def test_invalid_utf8_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good\n")
    (tmp_path / "b.txt").write_bytes(b"one\ntwo\nthr\xffee\n")
    with pytest.raises(DataError, match=r"b.txt:3: byte 0xff is not UTF-8"):
        find_source(str(tmp_path)).check(256)


def test_invalid_utf8_after_a_block_boundary_names_the_right_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 1023 + b"\n" + (b"y" * 1023 + b"\n") * 4100 + b"\xc3")
    (tmp_path / "a.txt").write_bytes((tmp_path / "a.txt").read_bytes() + b"(")
    with pytest.raises(DataError, match=r"a.txt:4102: "):
        find_source(str(tmp_path)).check(256)


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", [np.array([1, 2, 300, 3])], vocab_size=1000)
    check_tokens(tmp_path / "t.bin", 301)
    with pytest.raises(DataError, match=r"t.bin: token 2 is 300, but the vocabulary has 256 ids"):
        find_source(str(tmp_path / "t.bin")).check(256)


@pytest.mark.parametrize("cut", [-1, -3, 30, 10, 64])
def test_truncated_token_files_name_both_sizes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [np.arange(50)], vocab_size=256)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"t.bin"):
        find_source(str(path))


def test_headers_with_flipped_bits_are_refused_or_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    write_tokens(path, [np.arange(50)], vocab_size=256)
    good = path.read_bytes()
    for place in range(HEADER_BYTES):
        raw = bytearray(good)
        raw[place] ^= 0x80
        path.write_bytes(raw)
        if place < 8 or 16 <= place < 24:
            continue  # the magic itself (then it is a text file), or another vocabulary size
        with pytest.raises(DataError):
            find_source(str(path))


def test_text_beside_token_files_is_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t.bin", [np.arange(50)], vocab_size=256)
    (tmp_path / "u.txt").write_text("x")
    with pytest.raises(DataError, match=r"u.txt: a text file among token files"):
        find_source(str(tmp_path))


# -- nothing is read before it is needed

STARTED = """
import json, sys
from pathlib import Path
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.samples import open_data

def read_bytes():
    return int(Path("/proc/self/io").read_text().split()[1])

folder, num_samples, opened = sys.argv[1], int(sys.argv[2]), set()
sys.addaudithook(lambda event, args: event == "open" and str(args[0]).startswith(folder) and opened.add(str(args[0])))
settings = [f"data.source={folder}/*.data", "data.max_bytes=null", "model.preset=gpt-nano", "model.vocab_size=256"]
before = read_bytes()
resolved = resolve(read_config(None, settings, base={}), 2)
resolved.source.check(resolved.vocab_size)
resolved.source.fingerprint()
data = open_data(resolved.source, seq_len=16, held_out=0.05, vocab_size=resolved.vocab_size, seed=0)
started, num_opened = read_bytes() - before, len(opened)
for index in range(0, data.train.num_samples, data.train.num_samples // num_samples + 1):
    data.train.sample(index)
print(json.dumps([started, num_opened, len(opened), len(list(Path("/proc/self/map_files").iterdir()))]))
"""


def start(folder: Path, num_samples: int) -> list[int]:
    """Bytes read and files opened before the first sample; files opened after so many, and files mapped then."""
    command = [sys.executable, "-c", STARTED, str(folder), str(num_samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_of_a_large_token_file_little_is_read_before_training(tmp_path: Path) -> None:
    path = tmp_path / "large.data"
    write_tokens(path, [np.zeros(1, np.int64)], vocab_size=256)
    num_tokens = 4 << 30
    raw = path.read_bytes()[:24] + num_tokens.to_bytes(8, "little") + bytes(32)
    path.write_bytes(raw)
    os.truncate(path, HEADER_BYTES + 2 * num_tokens)  # sparse: 8 GiB that take no place
    read, opened, *_ = start(tmp_path, 5)
    assert opened == 1
    assert read < 3 * CHECKED_BYTES  # of 512 times as much


def test_of_many_files_few_are_opened_before_training_and_few_are_mapped_at_a_time(tmp_path: Path) -> None:
    raw = None
    for index in range(1500):
        path = tmp_path / f"{index:05}.data"
        if raw is None:
            write_tokens(path, [np.arange(200)], vocab_size=256)
            raw = path.read_bytes()
        path.write_bytes(raw)
    _, opened, in_the_end, mapped = start(tmp_path, 2000)
    assert opened == CHECKED_FILES
    assert in_the_end > 1000
    assert mapped < MAPPED_FILES + 400  # libraries are mapped too


def test_an_unknown_id_that_nobody_looked_at_is_found_when_its_sample_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.train.data.source.CHECKED_BYTES", 64)
    write_tokens(tmp_path / "t.bin", [np.zeros(1000, np.int64), np.array([300])], vocab_size=1000)
    write_tokens(tmp_path / "u.bin", [np.zeros(100, np.int64)], vocab_size=1000)
    find_source(str(tmp_path)).check(256)
    train = data(tmp_path, held_out=0.01).train
    train.sample(5)
    with pytest.raises(DataError, match=r"t.bin: token 1,000 is 300, but the vocabulary has 256 ids"):
        [train.sample(index) for index in range(train.num_samples)]


def test_a_file_that_is_not_like_those_looked_at_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.train.data.source.CHECKED_FILES", 2)
    for name in "abc":
        write_tokens(tmp_path / f"{name}.bin", [np.arange(100)], vocab_size=256)
    (tmp_path / "b.bin").write_text("x" * 264)
    train = data(tmp_path).train
    with pytest.raises(DataError, match=r"b.bin: a text file among token files"):
        [train.sample(index) for index in range(train.num_samples)]
    write_tokens(tmp_path / "b.bin", [np.arange(100)], vocab_size=100_000, should_replace=True)
    train = data(tmp_path).train
    with pytest.raises(DataError, match=r"b.bin: 100 tokens, but .* stands for 200"):
        [train.sample(index) for index in range(train.num_samples)]


def test_a_change_in_the_middle_of_small_data_and_at_the_ends_of_large_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"

    def fingerprint(text: str) -> str:
        path.write_text(text)
        return find_source(str(path)).fingerprint()

    texts = ["a" * 100, "b" + "a" * 99, "a" * 50 + "b" + "a" * 49, "a" * 99 + "b", "a" * 101]
    assert len({fingerprint(text) for text in texts}) == 5
    monkeypatch.setattr("shardwise.train.data.source.CHECKED_BYTES", 20)
    assert len({fingerprint(text) for text in texts}) == 4


def test_of_a_saved_data_set_the_rows_are_read_and_of_other_names_everything(tmp_path: Path) -> None:
    for name in ("a.jsonl", "us_state.jsonl", "state.json", "dataset_info.json"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert [file.name for file in find_source(str(tmp_path)).files] == ["a.jsonl", "us_state.jsonl"]
    (tmp_path / "us_state.json").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"us_state.json lies beside .*a.jsonl"):
        find_source(str(tmp_path))


def test_what_datasets_writes_beside_a_saved_data_set_is_not_read_as_its_rows(tmp_path: Path) -> None:
    for name in ("cache-1f.arrow", "cache-1f_00000_of_00002.arrow", "data-00000-of-00001.arrow", "state.json"):
        (tmp_path / name).touch()
    for name in (tmp_path, tmp_path / "*.arrow"):
        assert [file.name for file in find_source(str(name)).files] == ["data-00000-of-00001.arrow"]
    (tmp_path / "state.json").unlink()
    assert len(find_source(str(tmp_path)).files) == 3


def test_a_data_set_of_a_hub_is_its_rows(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    for name in (".gitattributes", "README.md", "data/train-00000-of-00001.parquet"):
        fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/hub/{name}", b"x")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for source in (f"memory://{tmp_path.name}/hub", str(tmp_path)):
        (file,) = find_source(source).files
        assert str(file).endswith("data/train-00000-of-00001.parquet")


def test_a_folder_with_other_splits_beside_that_for_training_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "train" / "data"  # names above the files are not looked at
    data.mkdir(parents=True)
    for name in ("train-00000-of-00001.jsonl", "latest.jsonl"):
        (data / name).write_text('{"text": "a"}\n')
    assert len(find_source(str(data)).files) == 2
    (data / "Test").mkdir()
    (data / "Test" / "0.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=r"holds several splits: test, train.\n.*'(.*)', and name") as caught:
        find_source(str(data))
    pattern = str(caught.value).split("'")[1]
    assert [file.name for file in find_source(pattern).files] == ["train-00000-of-00001.jsonl"]
    assert len(find_source(f"{data}/**/*.jsonl").files) == 3
