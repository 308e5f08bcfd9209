"""A Hugging Face folder is trained on the tokens of its own tokenizer, and the run continues text with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.train.checkpoints.checkpoints import saved_config
from shardwise.train.data.tokenizer import FolderTokenizer
from tests.common.tokenizers import TEXT, save_model, save_tokenizer
from tests.train.chats import cache_here
from tests.train.train_here import losses, sets, train_here

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama")

CONFIG = """
model: {hf: llama}
data: {source: text.txt, seq_len: 16, held_out: 0.1}
train: {steps: 12, micro_batch_size: 2, gradient_accumulation_steps: 1, eval_every: null}
optimizer: {lr: 1e-2}
"""


def test_a_folder_is_trained_and_continues_text_with_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(save_tokenizer(tmp_path / "llama"), vocab_size=300)
    (tmp_path / "text.txt").write_text(TEXT)
    run, again = ("--run-dir", "run"), ("--run-dir", "run", "--resume", *sets("train.steps=14"))
    results = train_here(tmp_path, 2, run, again, config=CONFIG, before=cache_here)
    assert [code for code, _ in results] == [0, 0], results
    tokens = len(FolderTokenizer(tmp_path / "llama").encode(TEXT)) + 1
    assert f"data text.txt: {tokens:,} tokens; samples" in results[0][1]
    assert len(list((tmp_path / "cache" / "shardwise" / "data").rglob("*.arrow"))) == 1
    assert losses(tmp_path / "run")[-1] < 0.9 * losses(tmp_path / "run")[0]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-00000014")
    assert saved_config(checkpoint)["data"]["tokenizer"] == "llama"

    monkeypatch.chdir(tmp_path)
    assert main(["generate", "run", "--prompt=def number_3", "--max-new-tokens=8"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("def number_3")
    assert len(said) > len("def number_3") + 8  # tokens of several letters
