"""Files of strangers that would take memory or time without bound, or end the process, are refused with a reason."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.checkpoint.weights import WeightFiles
from shardwise.spec.bound import read_json
from shardwise.spec.errors import CheckpointError, ConfigError
from shardwise.train.config.hf import NotTrainedError, read_language_model
from shardwise.train.data import records
from shardwise.train.data.chat import Chat
from shardwise.train.data.source import find_source
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import FolderTokenizer
from tests.common.tokenizers import TEMPLATE, save_tokenizer

pytest.importorskip("datasets", reason="the hf extra is not installed")

DEEP = "[" * 200_000 + "]" * 200_000
LONG = "x" * 3000
LIMITS = {"_ROW_BYTES": 2000, "_LIST_BYTES": 4000, "_CSV_BYTES": 1000}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", f'{{"text": "a"}}\n{{"text": {DEEP}}}\n', "a.jsonl:2 cannot be read: it is nested too deep"),
        ("a.json", f'[{{"text":\n{DEEP}}}]', "a.json cannot be read: it is nested too deep"),
        ("a.jsonl.gz", f'{{"text": "a"}}\n{{"text": "{LONG}"}}\n', "a.jsonl.gz:2 .* longer than 2,000 bytes"),
        ("a.json.gz", "[" + ",\n".join(['{"text": "abc"}'] * 400) + "]", "a.json.gz .* longer than 4,000 bytes"),
        ("a.csv", f'text,b\n"{LONG}",1\n', "a.csv:2 cannot be read: its row is longer than 1,000 bytes"),
        ("a.csv.gz", 'text,b\n"' + "line\n" * 600 + '",1\n', "a.csv.gz:200 .*: its row is longer than 1,000 bytes"),
        ("b.csv", 'text,b\na,1\n"b\xff",1\n', "b.csv:3 cannot be read: it is not CSV .*0xff"),
        ("b.jsonl", '{"text": "a"}\n\n{"text": "b\xff"}\n', "b.jsonl:3 cannot be read: it is not JSON .*0xff"),
        ("c.jsonl", '{"text": "a"}\n{"text": \n', "c.jsonl:2 cannot be read: it is not JSON"),
        ("e.jsonl", '{"text": "\\ud83d\\ude42"}\n{"text": "\\ud83d"}\n', "e.jsonl:2 cannot be read: it has half a"),
        ("d.jsonl", '{"text": "a"}\n42\n', "d.jsonl:2 cannot be read: it is not a JSON object"),
        ("d.json", '[{"text": "a"},\n"b"]', "d.json: row 1 cannot be read: it is not a JSON object"),
        ("cut.jsonl.gz", '{"text": "a"}\n' * 2, "cut.jsonl.gz:3 cannot be read: Compressed file ended before"),
        ("cut.json.gz", '[{"text": "a"},\n{"text": "b"}]', "cut.json.gz:2 cannot be read: Compressed file ended"),
        ("cut.csv.gz", "text,b\na,1\n", "cut.csv.gz:3 cannot be read: Compressed file ended before"),
        ("damaged.jsonl.gz", '{"text": "a"}\n', "damaged.jsonl.gz:1 cannot be read: .*decompressing"),
        ("a.parquet", "PAR1", "a.parquet cannot be read: it is not parquet"),
    ],
)
def test_rows_without_bound_and_those_that_are_none_are_refused_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    for limit, most in LIMITS.items() if "deep" not in message else ():
        monkeypatch.setattr(records, limit, most)
    raw = text.encode("latin-1")
    raw = gzip.compress(raw) if name.endswith(".gz") else raw
    raw = raw[: -8 if "cut" in name else None]  # the length and the checksum
    (tmp_path / name).write_bytes(raw[:10] + b"\xff" * 9 + raw[19:] if "damaged" in name else raw)
    with pytest.raises(DataError, match=message):
        list(records.read_rows(find_source(str(tmp_path / name))))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "".join(f'{{"text": "{"[{" * 600}", "b": {"[" * 50}{"]" * 50}}}\n' for _ in range(3))),
        (
            "a.json",
            "[" + ",\n".join(json.dumps({"text": '"]\\' + "[{" * 600, "b": [[1]] * 400}) for _ in range(3)) + "]",
        ),
        ("b.json", '{"text": "a"}\n\n{"text": 3}\n{"text": "b", "only here": {"a": 1}}\n'),
        ("a.csv", "text,b\n" + '"two\nlines, and a "" quote",1\n' * 300),
        ("b.csv", "text,b\n" + 'pipe 5" long,3\n' + "a,b\n" * 299),
        ("c.csv", "\ufefftext,b\n" + 'pipe 5" long,"a ""\n"" \n,"\n"""a\n",\n"",b"\n' * 100),
    ],
)
def test_rows_that_only_look_so_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    if name.endswith(".csv"):
        monkeypatch.setattr(records, "_CSV_BYTES", LIMITS["_CSV_BYTES"])
    (tmp_path / name).write_text(text)
    source = find_source(str(tmp_path / name))
    found = [row for _, row in records.read_rows(source)]
    assert len(found) == (300 if name.endswith(".csv") else 3)
    assert records.first_row(source) == found[0]
    assert "text" in found[0]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "it takes more than 2 s"),
        ("{{ 'a' * 3000000000 }}", "MemoryError"),
        ("{{ 'a' * 100000000 }}", "it makes 100,000,000 characters of one conversation"),
    ],
)
def test_a_chat_template_that_never_ends_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    monkeypatch.setattr("shardwise.spec.bound._WORK_S", 2.0)
    folder = FolderTokenizer(save_tokenizer(tmp_path, template=TEMPLATE))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(DataError, match=rf"a.jsonl:1 cannot be used: .*\({reason}"):
        Chat(folder.hf_tokenizer, "messages", "all", template).encode([("a.jsonl:1", {"messages": messages})])
    with pytest.raises((MemoryError, TimeoutError, ValueError)):
        folder.encode_chat(messages, template)
    assert folder.encode_chat(messages, None) == folder.encode("<|user|>a<end>\n<|assistant|>b<end>\n<|assistant|>")


def test_a_chat_template_that_is_a_link_to_somewhere_else_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "models--a--b" / "snapshots" / "1", template=TEMPLATE)
    blob = folder.parents[1] / "blobs" / "1"  # as the hub's cache has it
    blob.parent.mkdir()
    (folder / "chat_template.jinja").replace(blob)
    (folder / "chat_template.jinja").symlink_to(blob)
    assert FolderTokenizer(folder).hf_tokenizer.chat_template == TEMPLATE
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to("/etc/hostname")
    with pytest.raises(
        ConfigError, match=r"chat_template.jinja is a link to /etc/hostname, outside(?s:.)*Copy the file"
    ):
        FolderTokenizer(folder)


def _tokenizer(folder: Path) -> None:
    save_tokenizer(folder)
    (folder / "tokenizer.json").write_text(DEEP)
    FolderTokenizer(folder)


def _tokenizer_config(folder: Path) -> None:
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(DEEP)
    FolderTokenizer(folder)


def _header(folder: Path) -> None:
    raw = f'{{"a": {DEEP}}}'.encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    WeightFiles.open(folder)


def _index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(DEEP)
    WeightFiles.open(folder)


def _json(folder: Path) -> None:
    with (folder / "a.json").open("wb") as file:
        file.truncate(1 << 30)  # takes no room
    try:
        read_json(folder / "a.json")
    except ValueError as error:
        raise ConfigError(str(error)) from None


@pytest.mark.parametrize("read", [_tokenizer, _tokenizer_config, _header, _index, _json])
def test_json_without_bound_is_an_error_with_a_reason(tmp_path: Path, read: Callable[[Path], None]) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=r"deep|recursion|more than|no tokenizer"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ('"num_attention_heads": 0', "num_attention_heads is 0, expected 1 to 10,000"),
        ('"n_head": -1', "n_head is -1"),
        (r'"model_type": "\u001b[2Jllama"', r"model_type is '\\\\x1b\[2Jllama', which is not a name"),
        ('"num_hidden_layers": 1000000', "num_hidden_layers is 1,000,000, expected 1 to 10,000"),
        (f'"a": {DEEP}', "is not JSON: it is nested too deep"),
    ],
)
def test_a_model_of_no_heads_or_of_a_million_layers_is_refused(tmp_path: Path, field: str, message: str) -> None:
    (tmp_path / "config.json").write_text(f'{{"vocab_size": 300, {field}}}')
    with pytest.raises(NotTrainedError, match=message):
        read_language_model(tmp_path)
