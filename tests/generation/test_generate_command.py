"""`shardwise generate` on a run, a checkpoint and a Hugging Face folder: one process and two say the same."""

from __future__ import annotations

import contextlib
import io
import json
import os

import pytest

from shardwise.cli import main
from shardwise.testing import run_on_ranks
from shardwise.train.data.tokenizer import FolderTokenizer
from tests.common.tokenizers import save_model, save_tokenizer
from tests.train.train_here import train_well

pytestmark = pytest.mark.preload("transformers.models.llama.modeling_llama")

PROMPTS = ["--prompt=def main(", "--prompt=im", "--tokens=12, 7 9"]
DRAWN = ["--temperature=0.9", "--top-k=50", "--top-p=0.97", "--seed=3"]


def say(folder, calls):
    """On a rank: what the verb prints, by call."""
    os.chdir(folder)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    printed = []
    for arguments in calls:
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            code = main(["generate", *arguments])
        printed.append((code, text.getvalue()))
    return printed


def test_one_process_and_two_say_the_same_of_a_run_its_checkpoint_and_a_hugging_face_folder(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    usual = ["--set=optimizer.lr=1e-2", "--set=train.eval_every=null"]
    with_average = ["--run-dir=run", "--set=train.ema_decay=0.98", *usual]
    train_well(tmp_path, 2, with_average, ["--run-dir=plain", "--set=train.steps=5", *usual])

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.5, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    run, count = "run", "--max-new-tokens=6"
    calls = [
        [run, *PROMPTS, count],
        [run, *PROMPTS, count, *DRAWN, "--json"],
        [f"{run}/checkpoints/step-00000005", *PROMPTS, count, *DRAWN, "--json"],
        [run, PROMPTS[0], count, "--stream"],
        [run, *PROMPTS, count, *DRAWN, "--json", "--average"],
        ["llama", "--tokens=5 6", "--tokens=33", count, "--json"],
    ]
    alone = run_on_ranks(say, 1, str(tmp_path), calls, timeout_s=120)[0]
    assert [code for code, _ in alone] == [0] * len(calls), alone
    divided = [[*call, f"--set=parallel.{axis}=2"] for axis in ("tp", "pp") for call in calls]
    ranks = run_on_ranks(say, 2, str(tmp_path), calls + divided, timeout_s=120)
    assert ranks[0] == alone * 3
    assert all(text == "" for _, text in ranks[1])  # the first rank speaks
    greedy, drawn, earlier, streamed, averaged, llama = (text for _, text in alone)
    assert greedy.startswith("def main(")
    assert len({drawn, earlier, averaged}) == 3
    assert streamed.rstrip("\n") == greedy.split("\nim", 1)[0]
    rows = [json.loads(line) for line in drawn.splitlines()]
    assert [row["prompt"] for row in rows] == [list(b"def main("), list(b"im"), [12, 7, 9]]
    assert all(len(row["tokens"]) == 6 for row in rows)
    assert [row["text"] is None for row in rows] == [False, False, True]
    assert [len(json.loads(line)["tokens"]) for line in llama.splitlines()] == [6, 6]

    for arguments, code, message in [
        ([str(tmp_path), PROMPTS[0]], 65, "not a run, checkpoint or Hugging Face folder: it holds no checkpoints"),
        ([str(tmp_path / "nothing"), PROMPTS[0]], 65, "there is no such folder"),
        ([str(tmp_path / run)], 78, "there is no prompt"),
        ([str(tmp_path / run), "--prompt=" + "x" * 999, "--nproc=2"], 78, "prompt 0 has 999 tokens, and there are"),
        ([str(tmp_path / run), "--tokens=1 256"], 78, "token 1 is 256, the model knows 0 to 255"),
        ([str(tmp_path / run), "--tokens=a"], 78, "expected numbers"),
        ([str(tmp_path / run), "--prompt=a\udcff"], 78, "--prompt is not UTF-8"),  # a byte that the shell passes on
        ([str(tmp_path / run), *PROMPTS, "--stream"], 78, "several prompts"),
        ([str(tmp_path / run), PROMPTS[0], "--top-k=3"], 78, "no meaning at temperature=0"),
        ([str(tmp_path / run), PROMPTS[0], "--set=optimizer.lr=1"], 78, "Set fields of parallel only"),
        ([str(tmp_path / run), PROMPTS[0], "--set=parallel.tp=2", "--nproc=3"], 78, "3"),
        ([str(tmp_path / "llama"), "--tokens=5", "--average"], 78, "a Hugging Face folder holds no averaged weights"),
        ([str(tmp_path / "plain"), PROMPTS[0], "--average"], 78, "checkpoint step-00000005 holds no averaged weights"),
        ([str(tmp_path / "llama"), PROMPTS[0]], 78, "has no tokenizer that can be loaded"),
    ]:
        assert main(["generate", *arguments]) == code, arguments
        assert message in capsys.readouterr().err


def test_ids_alone_end_at_the_folder_s_own_end_token(tmp_path, capsys):
    folder = save_model(tmp_path / "llama", vocab_size=300)
    call = ["generate", str(folder), "--tokens=5 6", "--max-new-tokens=6", "--json"]
    assert main(call) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    end = next(token for token in tokens[1:] if token != tokens[0])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 12345]}))
    assert main(call) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens[: tokens.index(end) + 1]


def test_a_stream_ends_with_the_bytes_of_an_incomplete_character(tmp_path, capsys, monkeypatch):
    """They were held back if the text ended at an end token."""
    folder = save_tokenizer(save_model(tmp_path / "llama", vocab_size=300))
    first = FolderTokenizer(folder).encode("\u00ef")[0]  # the first byte of two, or a token for both
    tokens = [[first], [0]]
    monkeypatch.setattr("shardwise.train.load.TrainedModel.generate", lambda *_args, **_more: iter(tokens))
    texts = []
    for form in ([], ["--stream"]):
        assert main(["generate", str(folder), "--prompt=a", "--max-new-tokens=9", *form]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == ["a\ufffd\n"] * 2
