"""Text that is tokenized on the way: every sample once an epoch, the same order on any ranks, little done before."""

from __future__ import annotations

import collections
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train.config.resolve import RunConfig, data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data import records
from shardwise.train.data import stream as module
from shardwise.train.data.records import read_rows
from shardwise.train.data.sampler import Permutation
from shardwise.train.data.source import find_source
from shardwise.train.data.stream import StreamRows, StreamSampler
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import FolderTokenizer
from tests.common.store import s3_server
from tests.common.tokenizers import TEMPLATE, TEXT, save_model, save_tokenizer
from tests.train.train_here import losses, sets, train_here

pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama", "datasets")

CONFIG = """
model: {hf: llama}
data: {source: texts, seq_len: 16, streaming: true}
train: {steps: 40, micro_batch_size: 2, global_batch_size: 8, eval_every: 20, eval_batches: 1}
checkpoint: {every: 20}
schedule: {name: constant}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "WINDOW_TOKENS", 500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    save_model(save_tokenizer(tmp_path / "llama", template=TEMPLATE), vocab_size=300)
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(TEXT[600 * number : 600 * (number + 1)])
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def small_windows() -> None:
    os.environ["XDG_CACHE_HOME"] = str(Path.cwd() / "cache")
    module.WINDOW_TOKENS = 500


def run(*settings: str) -> RunConfig:
    return resolve(read_config("run.yaml", settings), 1)


def sampler_of(resolved: RunConfig, *share: int) -> StreamSampler:
    rows = data_of(resolved).train
    assert isinstance(rows, StreamRows)
    rows.data.for_reader(*share)
    return rows.data


def taken(sampler: StreamSampler) -> list[tuple[int, ...]]:
    return [tuple(sampler[place].tolist()) for each in sampler.next_step() for place in each]


def test_an_epoch_has_every_sample_once_and_the_order_is_that_of_any_world(folder: Path) -> None:
    """The samples by hand: windows of whole files in the epoch's order, each cut into samples of 16."""
    resolved, tokenizer = run("train.seed=5"), FolderTokenizer(folder / "llama")
    files = [Path(f"texts/{number}.txt") for number in range(7)]  # the last one is held out
    epochs = []
    for epoch in range(2):
        window, samples = [], []
        for place in range(7):
            text = files[Permutation(7, seed=5, epoch=epoch)[place]].read_text()
            window += [*tokenizer.encode_pieces([text])[0], tokenizer.ends[0]]
            if len(window) >= 500 or place == 6:
                samples += [tuple(window[i : i + 17]) for i in range(0, len(window) - 16, 16)]
                window = []
        epochs.append(samples)
    total = len(epochs[0])
    alone = sampler_of(resolved, 1, 1, 0, 1)
    seen = [taken(alone)[0] for _ in range(total + len(epochs[1]))]
    assert collections.Counter(seen[:total]) == collections.Counter(epochs[0])
    assert collections.Counter(seen[total:]) == collections.Counter(epochs[1])
    assert seen[:total] not in (epochs[0], seen[total:])
    ranks = [sampler_of(resolved, 2, 2, rank, 3) for rank in range(3)]
    together: list[tuple[int, ...]] = []
    for _ in range(total // 12):
        assert list(ranks[0].global_batch()) == list(range(len(together), len(together) + 12))
        together += [sample for rank in ranks for sample in taken(rank)]
    assert together == seen[: len(together)]
    later = sampler_of(resolved, 1, 1, 0, 1)
    later.load_state(ranks[1].state())
    assert taken(later)[0] == seen[len(together)]
    with pytest.raises(CheckpointError, match="seed=5, this run has 6"):
        sampler_of(run("train.seed=6"), 1, 1, 0, 1).load_state(later.state())
    with pytest.raises(CheckpointError, match="no such place"):
        later.load_state(later.state() | {"place": 7, "taken": 999})


def test_little_is_read_before_training_and_the_next_window_while_one_is_trained_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(module, "read_rows", lambda source: opened.append(source.files[0].name) or read_rows(source))
    sampler = sampler_of(run(), 1, 1, 0, 1)
    assert opened == []
    sampler.next_step()
    deadline = time.monotonic() + 60
    while len(opened) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert 4 <= len(opened) < 20  # this window of two files, and the one or two that follow


def test_a_process_that_ends_does_not_wait_for_the_window_being_made(tmp_path: Path) -> None:
    code = """
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from shardwise.train.data import stream
from shardwise.train.data.source import Source

class Slow:
    def encode(self, rows):
        with Path("notes").open("a") as notes:
            notes.write("x")
        time.sleep(0.1)
        return [SimpleNamespace(ids=range(100))]

stream.WINDOW_TOKENS = 200
stream.read_rows = lambda source: itertools.repeat(("rows.jsonl:1", {}))
source = Source("rows", "records", (Path("rows.jsonl"),), (1,), 256)
sampler = stream.StreamSampler(data=source, form=Slow(), seq_len=16)
sampler.next_step()
stream.WINDOW_TOKENS = 100 * 1200  # of the windows that follow: two minutes
while len(Path("notes").read_text()) < 5:
    time.sleep(0.01)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len((tmp_path / "notes").read_text()) < 50


def test_what_cannot_be_streamed_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"texts/0.txt is one file, and the last files of a stream are held out"):
        run("data.source=texts/0.txt")
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="conversations are tokenized before training"):
        run("data.source=chat.jsonl")
    assert run("data.streaming=false").source.streams is None
    # The files of a cache are as many as processes wrote it; bytes are not tokens yet.
    assert re.fullmatch(r"[0-9,]+ tokens", run("data.streaming=false").source.amount)
    assert re.fullmatch(r"[0-9,]+ bytes in 7 files, tokenized during training", run().source.amount)
    sampler = sampler_of(
        run(
            "data.seq_len=60000",
            "model.hf=null",
            "model.vocab_size=300",
            "model.seq_len=60000",
            "data.tokenizer=llama",
            "data.eval_source=random",
        ),
        1,
        1,
        0,
        1,
    )
    with pytest.raises(DataError, match="texts: no whole sample"):
        sampler.next_step()


def test_rows_of_a_data_set_are_streamed_too_and_a_bad_one_is_named(folder: Path) -> None:
    Path("rows").mkdir()
    for number in range(3):
        rows = [{"text": TEXT[200 * i : 200 * (i + 1)]} for i in range(number, 20)]
        Path(f"rows/{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sampler = sampler_of(run("data.source=rows"), 2, 1, 0, 1)
    state, first = sampler.state(), [taken(sampler) for _ in range(40)]
    assert len({tuple(step) for step in first}) > 30
    again = sampler_of(run("data.source=rows"), 2, 1, 0, 1)
    again.load_state(state)
    assert [taken(again) for _ in range(40)] == first
    Path("rows/0.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"rows/0.jsonl:2 has no text in column text: int"):
        [taken(sampler_of(run("data.source=rows", "train.seed=1"), 64, 1, 0, 1))]


@pytest.fixture
def store() -> Iterator[Any]:
    import fsspec

    yield fsspec.filesystem("memory")
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


@pytest.mark.parametrize("kind", ["txt", "jsonl.gz", "parquet"])
def test_a_remote_folder_gives_the_samples_of_the_same_files_here(
    folder: Path, store: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_BLOCK_BYTES", 100)
    monkeypatch.setattr(records, "_NEAR_BYTES", 20)
    Path("local").mkdir()
    for number in range(4):
        path, rows = Path(f"local/{number}.{kind}"), [{"text": TEXT[300 * i :][:300]} for i in range(number, 9)]
        if kind == "txt":
            path.write_text(TEXT[900 * number :][:900])
        elif kind == "parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        else:
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        store.pipe(f"/bucket/{path}", path.read_bytes())
    for name in ("", f"/*.{kind}"):
        here, there = (run(f"data.source={place}local{name}") for place in ("", "memory://bucket/"))
        one, other = (sampler_of(each, 2, 1, 0, 1) for each in (here, there))
        assert [taken(one) for _ in range(60)] == [taken(other) for _ in range(60)]
        assert (data_of(here).held_out.rows([0, 1]).inputs == data_of(there).held_out.rows([0, 1]).inputs).all()
    whole = [data_of(run(f"data.source={place}local", "data.streaming=false")) for place in ("", "memory://bucket/")]
    assert (whole[0].train.rows([0, 9]).inputs == whole[1].train.rows([0, 9]).inputs).all()
    before = there.source.fingerprint()
    assert run("data.source=memory://bucket/local/*").source.fingerprint() == before
    content = store.cat(f"/bucket/local/1.{kind}")
    store.pipe(f"/bucket/local/1.{kind}", content)  # written anew
    assert run("data.source=memory://bucket/local").source.fingerprint() != before


def test_files_of_an_object_store_are_read_line_by_line(tmp_path: Path) -> None:
    """Their file objects are fsspec's own: not those of ``memory``, which can more."""
    texts = [f"{number}, of a store" for number in range(3000)]
    table = datasets.Dataset.from_dict({"text": texts, "n": range(3000)})
    table.to_json(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(table.to_list()))
    table.to_json(tmp_path / "a.jsonl.gz", compression="gzip")
    table.to_csv(tmp_path / "a.csv")
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("\n".join(texts))
    with s3_server():
        import s3fs

        for file in tmp_path.iterdir():
            s3fs.S3FileSystem().pipe(f"bucket/rows/{file.name}/{file.name}", file.read_bytes())
            source = find_source(f"s3://bucket/rows/{file.name}")
            found = [row for _, row in read_rows(source)]
            if source.kind == "text":
                assert "".join(map(records.block_text, found)) == file.read_text()
            else:
                assert [row["text"] for row in found] == texts, file.name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memory://bucket/none", "no files are there"),
        ("file::memory://bucket", "stores are s3, gs"),
        ("memory://bucket::file://tmp", "stores are s3, gs"),
        ("ftp://host/folder", "stores are s3, gs"),
        ("https://host/a.jsonl", r"stores are (?!.*http).*\n.*hf://datasets/OWNER/NAME.*, or download the files"),
        ("az://bucket/folder", r"az://bucket/folder cannot be listed: .*\n.*whether the package of fsspec for it"),
    ],
)
def test_remote_folders_that_cannot_be_read_are_refused(folder: Path, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run(f"data.source={name}")


def test_a_streamed_run_goes_on_at_the_sample_on_another_number_of_ranks(folder: Path) -> None:
    whole = train_here(folder, 1, ("--run-dir", "whole"), config=CONFIG, before=small_windows)
    begun = train_here(folder, 2, ("--run-dir", "half", *sets("train.steps=20")), config=CONFIG, before=small_windows)
    again = train_here(folder, 1, ("--run-dir", "half", "--resume"), config=CONFIG, before=small_windows)
    assert [code for code, _ in whole + begun + again] == [0, 0, 0], again
    assert losses(folder / "half") == pytest.approx(losses(folder / "whole"), rel=2e-5)
    assert "bytes in 7 files, tokenized during training; samples" in whole[0][1]


def test_all_of_a_stream_is_trained_on_where_there_is_other_data_to_evaluate_on(folder: Path) -> None:
    (folder / "held.txt").write_text(TEXT[:900])
    usual, apart = run(), run("data.eval_source=held.txt")
    whole = data_of(run("data.source=held.txt", "data.streaming=false", "data.held_out=0.2")).train
    assert [len(each.source.files) for each in (usual, apart)] == [7, 8]
    assert (data_of(apart).held_out.rows([0, 3]).inputs == whole.rows([0, 3]).inputs).all()
    with pytest.raises(ConfigError, match=r"the number of samples of texts is not known beforehand; set train.steps"):
        run("train.epochs=1")
    assert run("train.steps=3").config.train.steps == 3
