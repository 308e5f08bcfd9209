"""Sizes of the presets against the closed form and against published counts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.spec.errors import ConfigError
from shardwise.spec.shape.gpt import PRESETS, GPTConfig, gpt_config


@pytest.mark.parametrize("name", PRESETS)
def test_count_of_a_preset_is_the_published_closed_form(name):
    c = PRESETS[name]
    L, h, V, s = c.num_layers, c.hidden, c.vocab_size, c.seq_len
    assert c.num_parameters == L * (12 * h * h + 13 * h) + (V + s) * h + 2 * h


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_gpt2_sizes_have_exactly_the_released_counts(name, count):
    assert PRESETS[name].num_parameters == count


@pytest.mark.parametrize(("name", "billions"), [("gpt-175b", 175), ("gpt-1t", 1008)])
def test_large_presets_have_the_published_billions(name, billions):
    assert round(PRESETS[name].num_parameters / 1e9) == billions


def test_demo_is_small_and_deep_enough():
    c = PRESETS["gpt-demo"]
    assert 1e6 < c.num_parameters < 2e6
    assert c.num_layers >= 5
    assert (c.vocab_size, c.seq_len) == (256, 128)


def test_default_feed_forward_follows_an_overridden_hidden():
    assert gpt_config("gpt-tiny", hidden=96).ffn_hidden == 384
    assert gpt_config("gpt-tiny", ffn=100).ffn_hidden == 100


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        GPTConfig(num_layers=0, hidden=-4, num_heads=2.5, vocab_size=True, seq_len=8, tied=1, dropout=1.0)
    assert str(caught.value) == (
        "the model's configuration has 6 problems:\n"
        "  - num_layers=0 is not a whole number of at least 1\n"
        "  - hidden=-4 is not a whole number of at least 1\n"
        "  - num_heads=2.5 is not a whole number of at least 1\n"
        "  - vocab_size=True is not a whole number of at least 1\n"
        "  - tied=1 is not true or false\n"
        "  - dropout=1.0 is not a number from 0 up to, not including, 1\n"
        "  Correct these fields of the model."
    )


def test_heads_must_divide_hidden_and_experts_must_be_enough():
    with pytest.raises(ConfigError, match=r"num_heads=3 does not divide hidden=64\n.*experts_per_token=4 is more"):
        gpt_config("gpt-tiny", num_heads=3, num_experts=2, experts_per_token=4)


def test_experts_per_token_without_experts_is_refused():
    with pytest.raises(ConfigError, match="experts_per_token=3 means nothing without num_experts"):
        gpt_config("gpt-tiny", experts_per_token=3)


def test_unknown_preset_and_field_suggest_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown model preset 'gpt-tinny'.\n  Did you mean 'gpt-tiny'\?"):
        gpt_config("gpt-tinny")
    with pytest.raises(ConfigError, match=r"1 unknown field:\n  - 'hiden'\n  Did you mean 'hidden'\?"):
        gpt_config("gpt-tiny", hiden=3)


def test_models_can_be_imported_and_counted_without_torch():
    code = "import sys, shardwise.models as m; m.PRESETS['gpt-1t'].num_parameters; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
