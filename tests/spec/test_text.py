import pytest

from shardwise.spec.errors import ConfigError, PlacementError
from shardwise.spec.placement import canonical_name
from shardwise.spec.shape.gpt import gpt_config
from shardwise.spec.text import aligned, did_you_mean, similar


def test_a_hint_names_the_most_similar_word_or_is_empty():
    assert did_you_mean("hiden", ["heads", "hidden"]) == " Did you mean 'hidden'?"
    assert not did_you_mean("xyz", ["heads", "hidden"])
    assert not did_you_mean("", ["heads", "hidden"])
    for word, meant in {
        "AdamW": "adamw",
        "Qwen3": "qwen3-8b",
        "h100": "H100-80GB",
        "r": "rank",
        "ADAM": "adam",
    }.items():
        known = ["adam", "adamw8bit", "adamw", "qwen2.5-7b", "qwen3-235b", "qwen3-8b", "A100-40GB", "H100-80GB", "rank"]
        assert did_you_mean(word, known) == f" Did you mean {meant!r}?"
    assert similar("step-00000021", ["other", "step-00000020", "step-00000011"]) == ["step-00000020", "step-00000011"]


def test_a_message_without_a_hint_keeps_its_indentation():
    with pytest.raises(PlacementError, match=r"unknown strategy 'qqq'\.\n  Known: ddp"):
        canonical_name("qqq")
    with pytest.raises(ConfigError, match=r"unknown model preset 'qqq'\.\n  Use one of: "):
        gpt_config("qqq")


def test_a_table_has_names_on_the_left_and_numbers_on_the_right():
    assert aligned([("a", "number"), ("longer", "1"), ("b", "")]) == ["a       number", "longer       1", "b"]
