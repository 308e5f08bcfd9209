"""Files to trees: numbers, text by declared type, positions, and everything that is refused before it is built."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from shardwise.spec.errors import ConfigError
from shardwise.train.config.document import Problem, parse_yaml, plain_scalar, read_document


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("3E4", 3e4),
        (".5", 0.5),
        ("-2.", -2.0),
        ("12", 12),
        ("1_000", 1000),
        ("-0", 0),
        ("true", True),
        ("False", False),
        ("~", None),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1e", "1e"),
        ("2026-01-01", "2026-01-01"),
        ("9" * 100, "9" * 100),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: object) -> None:
    result = plain_scalar(text)
    assert result == value
    assert type(result) is type(value)


def test_every_value_knows_its_line() -> None:
    where = parse_yaml("a:\n  b: 1\n  c: [1,\n    2]\n", "run.yaml").where
    assert where["a", "c", "1"] == "run.yaml:4"
    assert (where["a", "b"], where["a", "c"]) == ("run.yaml:2", "run.yaml:3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "f:4: duplicate key 'c', first given at f:3"),
        ("a: !!python/object/apply:os.system [echo]", "f:1: tags such as"),
        ("a: !include x", "f:1: tags such as"),
        ("a: 1\n---\nb: 2", "f:2: .*expected a single document"),
        ("[" * 5000, "nested more than 24 levels"),
        ("a: &x [*x]", "nested more than 24 levels"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "merge keys"),
        ("{[1]: 2}", "a key must be plain text"),
        ("a: b: c", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: *x", "f:1: .*undefined alias"),
    ],
)
def test_what_is_refused_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(Problem, match=message.replace("(", "\\(").replace("<", "<")):
        parse_yaml(text, "f")


def test_an_alias_bomb_is_refused_at_once() -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for left, right in zip("abcdefg", "bcdefgh", strict=True):
        bomb += f"{right}: &{right} [{', '.join([f'*{left}'] * 10)}]\n"
    started = time.process_time()  # of this process: a busy machine is no failure
    with pytest.raises(Problem, match=r"more than 20,000 values"):
        parse_yaml(bomb, "f")
    assert time.process_time() - started < 1.0


def test_merging_goes_key_by_key_and_the_later_place_wins() -> None:
    document = parse_yaml("a: {b: 1, c: 2}", "base")
    document.merge(parse_yaml("a: {c: 3}", "over"))
    assert document.values == {"a": {"b": 1, "c": 3}}
    assert (document.where["a", "b"], document.where["a", "c"]) == ("base:1", "over:1")


def test_an_anchor_stands_for_its_value_wherever_it_is_named() -> None:
    document = parse_yaml("a: &x {b: [1]}\nc: *x\n", "run.yaml")
    document.merge(parse_yaml("a: {b: 2}", "over"))
    assert document.values == {"a": {"b": 2}, "c": {"b": [1]}}


def test_files_that_cannot_be_a_configuration_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist"):
        read_document(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder"):
        read_document(tmp_path)
    (tmp_path / "big.yaml").write_text("a: " + "x" * (1 << 20))
    with pytest.raises(ConfigError, match=r"at most 1,048,576"):
        read_document(tmp_path / "big.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: not UTF-8"):
        read_document(tmp_path / "latin.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"expected sections"):
        read_document(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_document(tmp_path / "empty.yaml").values == {}
