"""Names on the Hugging Face hub: a snapshot of this machine's cache, laid out as huggingface_hub lays it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from shardwise.cli.plan import find_subject
from shardwise.spec.errors import ConfigError
from shardwise.spec.hf_cache import how_to_fetch, hub_name, local_folder
from shardwise.spec.shape.names import KNOWN, plain_name
from shardwise.train.config.sections import read_config

NAME, COMMIT = "some-org/Small-Llama", "5e1f" * 10


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model that has been fetched: links to files that are kept by their hash."""
    root = tmp_path / "hub" / "models--some-org--Small-Llama"
    folder = root / "snapshots" / COMMIT
    for made in (root / "refs", root / "blobs", folder):
        made.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    (root / "blobs" / "abc").write_text(json.dumps({**KNOWN["llama-3-8b"], "num_hidden_layers": 2}))
    (folder / "config.json").symlink_to("../../blobs/abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_a_name_on_the_hub_is_its_cached_snapshot_unless_a_folder_of_that_name_is_there(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert local_folder(NAME) == snapshot
    assert hub_name(snapshot) == NAME
    assert hub_name(tmp_path) is None
    assert local_folder("some-org/Other") == Path("some-org/Other")
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert local_folder(NAME) == Path(NAME)


def test_a_configuration_notes_the_folder_and_plan_reads_it(snapshot: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"hf": NAME}, "data": {"tokenizer": "bytes"}}))
    config = read_config(file, []).config
    assert config.model.hf == str(snapshot)
    assert config.data.tokenizer == "bytes"
    subject = find_subject(NAME)
    assert subject.shape.name == "Small-Llama"
    assert subject.model == {"hf": str(snapshot)}


def test_what_has_not_been_fetched_is_said_with_the_command_that_does() -> None:
    with pytest.raises(ConfigError, match="hf download some-org/Unheard-Of") as caught:
        find_subject("some-org/Unheard-Of")
    assert "its name on the Hugging Face hub" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("google-t5/t5-base", "t5-base"),
    ],
)
def test_names_on_the_hub_are_well_known_models(name: str, known: str) -> None:
    assert plain_name(name) == known
    assert find_subject(name).config == KNOWN[known]


def test_a_run_s_folder_that_is_missing_is_not_to_be_downloaded() -> None:
    assert how_to_fetch("runs/demo") == "nothing is downloaded"
    assert how_to_fetch(NAME) == f"`hf download {NAME}` fetches it"
