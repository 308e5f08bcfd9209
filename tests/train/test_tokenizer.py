"""Tokenizers of folders: found, checked against the model, and run over text once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.cli import main
from shardwise.spec.errors import ConfigError, StorageError
from shardwise.train.config.resolve import RunConfig, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data import records as module
from shardwise.train.data.examples import Examples, Texts, prepare
from shardwise.train.data.records import Example, Placed
from shardwise.train.data.source import Source, find_source, mixture_of
from shardwise.train.data.token_files import DataError, map_tokens, read_header, write_tokens
from shardwise.train.data.tokenizer import ByteTokenizer, FolderTokenizer, find_tokenizer, has_tokenizer
from tests.common.tokenizers import TEXT, ids_of, save_model, save_tokenizer

pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
pa = pytest.importorskip("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path / "tokenizer")


def resolved(text: Path, *settings: str, said: list[str] | None = None) -> RunConfig:
    base: dict[str, Any] = {"data": {"source": str(text), "seq_len": 8}, "train": {"micro_batch_size": 1}}
    return resolve(read_config(None, settings, base=base), 2, say=None if said is None else said.append)


def test_a_folder_gives_its_ids_back_as_text_and_knows_its_size_and_end(folder: Path) -> None:
    found = find_tokenizer(str(folder))
    assert isinstance(found, FolderTokenizer)
    assert found.decode(found.encode(TEXT)) == TEXT
    assert len(found.encode(TEXT)) < len(TEXT) / 2
    assert found.vocab_size == len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
    assert len(found.ends) == 1
    assert isinstance(find_tokenizer("bytes"), ByteTokenizer)
    assert not has_tokenizer(folder.parent)


@pytest.mark.parametrize("block", [64, 1000, 1 << 23])
def test_pieces_of_a_text_give_the_tokens_of_the_whole(
    folder: Path, text: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", block)
    found = FolderTokenizer(folder)
    ids = np.concatenate(list(ids_of(find_source(str(text)), found))).tolist()
    assert ids == [*found.encode(TEXT), *found.ends]


def test_every_file_is_a_document_and_what_is_not_utf8_is_named_by_line(folder: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("one text")
    (texts / "b.txt").write_text("another text, cut in the middle of é")
    found = FolderTokenizer(folder)
    ids = np.concatenate(list(ids_of(find_source(str(texts), max_bytes=8 + 36), found)))
    assert (ids == found.ends[0]).sum() == 2
    assert found.decode(ids.tolist()) == "one textanother text, cut in the middle of "
    (texts / "b.txt").write_bytes(b"two\nthr\xffee")
    with pytest.raises(DataError, match=r"b.txt:2: byte 0xff"):
        list(ids_of(find_source(str(texts)), found))


def test_text_is_tokenized_once_and_again_when_it_or_the_tokenizer_has_changed(folder: Path, text: Path) -> None:
    said: list[str] = []
    settings = (f"data.tokenizer={folder}", "model.vocab_size=400")
    first = resolved(text, *settings, said=said)
    assert first.config.data.tokenizer == str(folder)
    assert (first.source.kind, first.source.name, first.source.vocab_size) == ("tokens", str(text), 300)
    assert first.source.num_tokens == len(FolderTokenizer(folder).encode(TEXT)) + 1
    assert resolved(text, *settings, said=said).source == first.source
    assert len(said) == 1
    assert "tokenizing" in said[0]
    text.write_text(TEXT + "more")
    assert resolved(text, *settings, said=said).source.num_tokens > first.source.num_tokens
    save_tokenizer(folder, vocab_size=290)
    assert resolved(text, *settings, said=said).source.vocab_size == 290
    assert len(said) == 3


def test_a_folder_s_model_is_trained_with_its_own_tokenizer_unless_told(folder: Path, text: Path) -> None:
    save_model(folder, vocab_size=300)
    own = resolved(text, f"model.hf={folder}")
    assert own.config.data.tokenizer == str(folder)
    assert own.source.kind == "tokens"
    as_bytes = resolved(text, f"model.hf={folder}", "data.tokenizer=bytes")
    assert (as_bytes.source.kind, as_bytes.config.data.tokenizer) == ("text", "bytes")
    assert resolved(text, "model.vocab_size=256").config.data.tokenizer == "bytes"


def test_what_cannot_be_tokenized_for_the_model_is_refused_before_anything_starts(
    folder: Path, text: Path, tmp_path: Path
) -> None:
    small = save_model(tmp_path / "small", vocab_size=299)
    for settings, message in [
        ((f"model.hf={small}",), "is not a folder with a tokenizer"),
        ((f"model.hf={small}", f"data.tokenizer={folder}"), "has 300 ids, the model's embedding 299 rows"),
        ((f"data.tokenizer={folder}", "model.vocab_size=256"), "has 300 ids, the model's embedding 256 rows"),
        (("data.tokenizer=byte",), "'byte' is not a folder with a tokenizer"),
        ((f"data.tokenizer={small}",), "is not a folder with a tokenizer"),
    ]:
        with pytest.raises(ConfigError) as caught:
            resolved(text, *settings)
        assert message in str(caught.value)
    assert resolved(text, f"model.hf={small}", "data.source=random").config.data.tokenizer is None


def test_data_tokenize_writes_what_a_folder_s_tokenizer_makes_of_text(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.tokens"
    assert main(["data", "tokenize", str(text), str(out), "--tokenizer", str(folder)]) == 0
    assert "vocabulary 300" in capsys.readouterr().out
    found = FolderTokenizer(folder)
    assert map_tokens(out).tolist() == [*found.encode(TEXT), *found.ends]
    assert read_header(out).vocab_size == 300
    (tmp_path / "rows.jsonl").write_text('{"told": "one"}\n{"told": "two"}\n')
    rows = ["data", "tokenize", str(tmp_path / "rows.jsonl"), str(tmp_path / "rows.tokens"), "--column", "told"]
    assert main([*rows, "--tokenizer", str(folder)]) == 0
    end = found.ends[0]
    assert map_tokens(tmp_path / "rows.tokens").tolist() == [*found.encode("one"), end, *found.encode("two"), end]
    capsys.readouterr()
    assert main(["data", "tokenize", str(text), str(tmp_path / "b"), "--tokenizer", str(tmp_path)]) == 78
    assert "has no tokenizer: it holds none of tokenizer.json" in capsys.readouterr().err


def made_of(source: Path, column: str | None = None) -> Source:
    return prepare(find_source(str(source)), ByteTokenizer(), [column], lambda _: Texts(ByteTokenizer(), column))


def prepared(source: Path, column: str | None = None) -> list[int]:
    found = made_of(source, column)
    return np.concatenate(Examples.of(found.files).documents()).tolist()


def test_many_files_are_tokenized_side_by_side_and_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (tmp_path / "rows").mkdir()
    for number in range(16):
        text = "".join(json.dumps({"text": f"{number}:{i};"}) + "\n" for i in range(number % 5 + 1))
        (tmp_path / "rows" / f"{number:02}.jsonl").write_text(text)
    assert bytes(prepared(tmp_path / "rows", "text")) == b"".join(
        b"%d:%d;" % (number, i) for number in range(16) for i in range(number % 5 + 1)
    )
    here = made_of(tmp_path / "rows", "text")
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another machine"))
    there = made_of(tmp_path / "rows", "text")
    assert [len(here.files), len(there.files)] == [2, 1]
    assert here.fingerprint() == there.fingerprint()  # a run goes on with either
    mixed = [mixture_of([each, each], ["a", "b"], [1, 2]).fingerprint() for each in (here, there)]
    assert mixed[0] == mixed[1]
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    (tmp_path / "rows" / "11.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(DataError, match=r"11.jsonl:2 has no text in column text: int"):
        prepared(tmp_path / "rows", "text")


def test_a_first_row_without_text_is_named_as_such_and_not_as_a_conversation(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": null}\n{"text": "a"}\n')
    (tmp_path / "run.yaml").write_text("data: {source: rows.jsonl, tokenizer: bytes}\n")
    with pytest.raises(DataError, match=r"rows.jsonl:1 has no text in column text: NoneType"):
        resolve(read_config(tmp_path / "run.yaml", [f"data.source={tmp_path / 'rows.jsonl'}"]), 1)


def test_of_two_processes_one_makes_the_tokens_and_the_other_waits(text: Path, tmp_path: Path) -> None:
    """Both begin while nothing is there; each makes a note when it tokenizes."""
    code = """
import sys, time
from pathlib import Path
from shardwise.train.data.examples import Examples, Texts, prepare
from shardwise.train.data.examples import Examples, Texts, prepare
from shardwise.train.data.source import find_source
from shardwise.train.data.tokenizer import ByteTokenizer
import datasets

class Slow(Texts):
    def encode(self, rows):
        with open("notes", "a") as notes:
            notes.write("made ")
        time.sleep(3)
        return Texts.encode(self, rows)

Path(sys.argv[1]).touch()
while not (Path("0").exists() and Path("1").exists()):
    time.sleep(0.01)
found = prepare(find_source("text.txt"), ByteTokenizer(), [], lambda _: Slow(ByteTokenizer(), None))
print(found.lengths)
"""
    words = [sys.executable, "-c", code]
    both = [subprocess.Popen([*words, name], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for name in "01"]
    assert [each.communicate(timeout=120)[0] for each in both] == [f"({len(TEXT.encode())},)\n"] * 2
    assert (tmp_path / "notes").read_text() == "made "


def test_a_damaged_or_unwritable_cache_is_told_with_what_to_do(
    text: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prepared(text)
    (made,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("*.arrow")
    made.write_bytes(made.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"0.0.0 is damaged: .*\n  Remove this folder; it is made again"):
        prepared(text)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"file/shardwise/data cannot be written: .*\n  Set XDG_CACHE_HOME"):
        prepared(text)


@pytest.mark.parametrize("cores", [1, 2])
def test_what_is_wrong_with_rows_is_not_said_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    rows = tmp_path / "rows"
    rows.mkdir()
    for number in range(16):
        (rows / f"{number:02}.jsonl").write_text('{"text": "a"}\n')
    (rows / "11.jsonl").write_text('{"text": "a"}\n"hello"\n')
    with pytest.raises(DataError, match=r"11.jsonl:2 cannot be read: it is not a JSON object"):
        prepared(rows, "text")
    text = tmp_path / "text.txt"
    text.write_text("a")
    source = find_source(str(text))
    form = Texts(ByteTokenizer(), None)
    with pytest.raises(DataError, match=r"gone.txt cannot be read: .*No such file"):
        list(form.encode([("", {"file": tmp_path / "gone.txt", "begin": 0, "end": 1})]))
    with pytest.raises(ZeroDivisionError):
        prepare(source, ByteTokenizer(), [], lambda _: Wrong(ByteTokenizer(), None))


class Wrong(Texts):
    def encode(self, rows: Sequence[Placed]) -> list[Example]:
        raise ZeroDivisionError


def test_no_server_is_asked_about_files_that_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **_: asked.append(words))
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    rows.to_parquet(tmp_path / "a.parquet")
    rows.to_csv(tmp_path / "a.csv")
    rows.save_to_disk(tmp_path / "saved")
    table = rows.data.table
    with pa.ipc.new_file(
        tmp_path / "a.arrow", table.schema
    ) as file:  # Feather's form; that of save_to_disk is a stream
        file.write_table(table)
    for name in ("a.parquet", "a.csv", "saved", "a.arrow"):
        assert bytes(prepared(tmp_path / name, "text")) == b"onetwo"
    assert asked == []


def test_ranks_import_what_their_data_needs_and_no_more(text: Path, tmp_path: Path) -> None:
    """Token files need no package of others; tokens that are in the cache need pyarrow, and not ``datasets``."""
    ids = prepared(text)
    write_tokens(tmp_path / "a.tokens", [np.array(ids)], vocab_size=256)
    code = """
import sys
from shardwise.train.config.resolve import resolve
from shardwise.train.data.examples import Examples, Texts, prepare
from shardwise.train.data.samples import open_data
from shardwise.train.data.source import find_source
from shardwise.train.data.tokenizer import ByteTokenizer
asked = {"seq_len": 8, "held_out": 0.1, "vocab_size": 256, "seed": 0}
seen = []
for find in (lambda: find_source("a.tokens"), lambda: prepare(find_source(sys.argv[1]), ByteTokenizer(), [None], None)):
    seen.append(open_data(find(), **asked).train.rows([3]).inputs.tolist())
    print([name for name in ("torch", "transformers", "datasets", "pyarrow") if name in sys.modules])
assert seen[0] == seen[1]
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(text)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "['pyarrow']"], done.stderr
