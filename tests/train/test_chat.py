"""Conversations: which of their tokens are learned, and how examples share a row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.errors import ConfigError
from shardwise.train.config.resolve import RunConfig, data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.examples import Examples
from shardwise.train.data.packing import pack
from shardwise.train.data.records import Example
from shardwise.train.data.samples import Part
from shardwise.train.data.token_files import DataError
from shardwise.train.data.tokenizer import FolderTokenizer
from tests.common.tokenizers import MARKED, TEMPLATE, save_model, save_tokenizer

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")
pa = pytest.importorskip("pyarrow")
TemplateProcessing = pytest.importorskip("tokenizers.processors").TemplateProcessing

TURNS = [
    {"role": "user", "content": "def number_1?"},
    {"role": "assistant", "content": "return 1"},
    {"role": "user", "content": "and more"},
    {"role": "assistant", "content": "naïve lines"},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    return save_model(save_tokenizer(path, template=TEMPLATE), vocab_size=300, seq_len=256)


def save_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def resolved(source: Path, folder: Path, *settings: str) -> RunConfig:
    base = {
        "model": {"hf": str(folder)},
        "data": {"source": str(source), "seq_len": 200, "held_out": 0.34},
        "train": {"micro_batch_size": 1, "eval_every": None},
    }
    return resolve(read_config(None, settings, base=base), 1)


def learned(run: RunConfig, folder: Path) -> list[str]:
    """The text of each stretch of learned tokens of the first training sample."""
    rows, tokenizer = data_of(run).train.rows([0]), FolderTokenizer(folder).hf_tokenizer
    where = rows.targets[0] != -100
    edges = np.flatnonzero(np.diff(where.astype(int), prepend=0, append=0)).tolist()
    return [tokenizer.decode(rows.targets[0][first:last]) for first, last in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("assistant", ["return 1<end>\n", "naïve lines<end>\n"]),
        ("last", ["naïve lines<end>\n"]),
        ("all", [f"|user|>{TURNS[0]['content']}"]),
    ],
)
@pytest.mark.parametrize("form", ["messages", "conversations", "marked", "parquet", "saved"])
def test_what_the_assistant_says_is_learned(
    folder: Path, tmp_path: Path, setting: str, expected: list[str], form: str
) -> None:
    import datasets

    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    rows = [{"conversations": shared} if form == "conversations" else {"messages": TURNS}] * 3
    source = save_rows(tmp_path / "chat.jsonl", rows)
    settings = [f"data.learns={setting}"]
    if form == "marked":
        (tmp_path / "marked.jinja").write_text(MARKED)
        settings.append(f"data.chat_template={tmp_path / 'marked.jinja'}")
    elif form == "parquet":
        source = tmp_path / "chat.parquet"
        datasets.Dataset.from_list(rows).to_parquet(source)
    elif form == "saved":
        source = tmp_path / "saved"
        datasets.DatasetDict(train=datasets.Dataset.from_list(rows)).save_to_disk(source)
    found = learned(resolved(source, folder, *settings), folder)
    if setting == "all":
        assert len(found) == 2  # two examples in the row
        assert found[0].startswith(expected[0])
    else:
        assert found == expected * 2


@pytest.mark.parametrize("is_chat", [False, True])
def test_of_prompts_the_answers_are_learned_with_the_token_that_ends_them(
    folder: Path, tmp_path: Path, is_chat: bool
) -> None:
    row = {"prompt": TURNS[:3], "completion": TURNS[3:]} if is_chat else {"prompt": "def", "completion": " number_7"}
    source = save_rows(tmp_path / "pairs.jsonl", [row] * 3)
    assert learned(resolved(source, folder), folder) == (["naïve lines<end>\n"] if is_chat else [" number_7<end>"]) * 2


def test_messages_in_prompt_and_completion_have_one_begin_of_text_token(folder: Path, tmp_path: Path) -> None:
    """The template writes it; a tokenizer as Llama's adds another one to texts."""
    tokens = save_tokenizer(tmp_path / "tokens", template="{{ bos_token }}" + TEMPLATE, bos_token="<begin>")
    tokenizer = FolderTokenizer(tokens).hf_tokenizer
    begin = tokenizer.bos_token_id
    marks = [("<begin>", begin)]
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=marks)
    tokenizer.save_pretrained(tokens)
    rows = [{"prompt": TURNS[:3], "completion": TURNS[3:]}, {"prompt": "def", "completion": " number_7"}]
    source = save_rows(tmp_path / "pairs.jsonl", rows * 3)
    run = resolved(source, folder, f"data.tokenizer={tokens}", "data.packing=false")
    (chat, text), found = data_of(run).train.rows([0, 1]).inputs, tokenizer.apply_chat_template(TURNS)["input_ids"]
    assert chat[: len(found)].tolist() == found
    assert found.count(begin) == 1
    assert text[:2].tolist() == [begin, *tokenizer("def", add_special_tokens=False)["input_ids"][:1]]


def test_texts_of_a_data_set_are_a_stream_of_documents(folder: Path, tmp_path: Path) -> None:
    texts = ["def number_1", "One hundred", "naïve lines"] * 30
    source = save_rows(tmp_path / "texts.jsonl", [{"id": 1, "text": text} for text in texts])
    run = resolved(source, folder, "data.seq_len=16", "data.separate_documents=true")
    assert run.source.kind == "tokens"
    rows = data_of(run).train.rows([0, 1])
    tokenizer = FolderTokenizer(folder)
    assert tokenizer.hf_tokenizer.decode(rows.inputs.ravel()).startswith("def number_1<end>One hundred<end>na")
    for inputs, positions in zip(rows.inputs, rows.positions, strict=True):
        begins = np.flatnonzero(inputs[:-1] == tokenizer.ends[0]) + 1
        assert np.flatnonzero(positions == 0).tolist() == [0, *begins]
        assert set(np.diff(positions)[np.setdiff1d(np.arange(15), begins - 1)]) == {1}
    assert resolved(source, folder, "data.seq_len=16").end_token is None


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"question": "a"}], (), "has the columns question, none of which is messages"),
        ([{"text": "a"}], ("data.column=test",), "has the columns text. Did you mean 'text'?"),
        ([{"messages": TURNS}], ("data.tokenizer=bytes",), "holds conversations, which bytes have no form for"),
        ([{"prompt": "a" * 99, "completion": "b"}] * 4, ("data.seq_len=8",), "no token would be learned; 1 is needed"),
        ([{"text": "a"}], ("data.max_bytes=5",), "holds rows of a data set"),
    ],
)
def test_data_sets_that_cannot_be_used_are_refused(
    folder: Path, tmp_path: Path, rows: list[dict[str, Any]], settings: tuple[str, ...], message: str
) -> None:
    source = save_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises((ConfigError, DataError)) as caught:
        resolved(source, folder, *settings)
    assert message in str(caught.value)


def test_rows_that_cannot_be_used_are_named_by_number(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_rows(tmp_path / "rows.jsonl", [{"messages": TURNS}, {"messages": [{"content": "x"}]}])
    with pytest.raises(DataError, match=r"rows.jsonl:2 cannot be used: expected that every message has a role"):
        resolved(source, folder)
    for answer in ({"role": "assistant", "content": None}, {"from": "gpt", "value": None}, {"from": [], "value": "x"}):
        source = save_rows(tmp_path / "null.jsonl", [{"messages": TURNS}, {"messages": [TURNS[0], answer]}])
        with pytest.raises(DataError, match=r"null.jsonl:2 cannot be used: expected that every message has a role"):
            resolved(source, folder)
    (tmp_path / "rows.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with monkeypatch.context() as patched:
        patched.setattr("fsspec.utils.infer_compression", lambda _name: None)  # without zstandard
        with pytest.raises(DataError, match=r"rows.jsonl.zst is compressed by zstd[\s\S]*pip install zstandard"):
            resolved(tmp_path / "rows.jsonl.zst", folder)
    (tmp_path / "broken.jsonl").write_text('{"messages": [\n')
    with pytest.raises(DataError, match=r"broken.jsonl:1 cannot be read: it is not JSON"):
        resolved(tmp_path / "broken.jsonl", folder)
    plain = save_model(save_tokenizer(tmp_path / "plain"), vocab_size=300, seq_len=256)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        resolved(save_rows(tmp_path / "rows.jsonl", [{"messages": TURNS}] * 3), plain)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_advice(folder: Path, tmp_path: Path) -> None:
    template = "{{ messages | length }}" + TEMPLATE
    (tmp_path / "counts.jinja").write_text(template)
    source = save_rows(tmp_path / "chat.jsonl", [{"messages": TURNS}] * 3)
    with pytest.raises(ConfigError, match=r"otherwise when more follows(?s:.)*data.learns=last"):
        resolved(source, folder, f"data.chat_template={tmp_path / 'counts.jinja'}")


#: As Qwen3's: the last answer has thoughts, earlier ones have none.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content.split('</think>')[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_earlier_answers_are_learned_as_a_template_writes_them_without_thoughts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thinks.jinja").write_text(THINKS)
    thought = [*TURNS[:1], {"role": "assistant", "content": "<think>one</think>\n\nreturn 1"}, *TURNS[2:]]
    for turns in (TURNS, thought):
        source = save_rows(tmp_path / "chat.jsonl", [{"messages": turns}] * 3)
        run = resolved(source, folder, f"data.chat_template={tmp_path / 'thinks.jinja'}", "data.seq_len=250")
        assert learned(run, folder)[:2] == ["return 1<end>\n", "<think>\n\n</think>\n\nnaïve lines<end>\n"]


LENGTHS = st.lists(st.integers(2, 30), min_size=1, max_size=60)


@given(lengths=LENGTHS, seq_len=st.integers(8, 24), packs=st.booleans())
def test_every_example_is_in_one_row_once_with_its_targets(lengths: list[int], seq_len: int, packs: bool) -> None:
    examples = [Example(list(range(100 * n, 100 * n + k)), [(k // 2, k)]) for n, k in enumerate(lengths)]
    columns = pa.array([each.ids for each in examples]), pa.array([[*each.spans[0]] for each in examples])
    half = len(lengths) // 2  # columns of files come in parts
    rows = pack(Examples(*(pa.chunked_array([each[:half], each[half:]]) for each in columns)), seq_len, packs=packs)
    held = rows.rows(range(rows.num_samples))
    expected = {}
    for example, length in zip(examples, lengths, strict=True):
        cut, first = example.ids[:seq_len], max(length // 2, 1)
        if len(cut) > first:
            expected[cut[0]] = cut[first:]
    assert sorted(held.targets[held.targets != -100].tolist()) == sorted(itertools.chain(*expected.values()))
    assert rows.num_targets(range(rows.num_samples)) == sum(map(len, expected.values()))
    where = held.targets != -100
    assert np.array_equal(held.targets[where] - 1, held.inputs[where])  # each target follows its input
    if packs:
        begins = held.inputs[(held.positions == 0) & (held.inputs % 100 == 0) & (held.inputs + held.positions > 0)]
        assert set(begins.tolist()) >= set(expected) - {0}
        assert rows.num_samples <= 11 / 9 * sum(min(k, seq_len) for k in lengths) / seq_len * 2 + 4


def test_the_end_of_a_document_begins_positions_anew() -> None:
    part = Part([np.array([5, 6, 9, 5, 9, 9, 6, 6, 9, 5])], 0, 10, 4, None, 9)
    rows = part.rows([0, 1])
    assert rows.inputs.tolist() == [[5, 6, 9, 5], [9, 9, 6, 6]]
    assert rows.positions is not None
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 0, 0, 1]]
