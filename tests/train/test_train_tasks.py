"""Masked, sequence-to-sequence and classification models in `shardwise train`: the same numbers on any ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.cli import main
from shardwise.spec.errors import ConfigError
from shardwise.train.config.resolve import data_of, resolve
from shardwise.train.config.sections import read_config
from shardwise.train.data.pairs import missing_end
from shardwise.train.data.token_files import DataError
from shardwise.train.parity import compare_with_one_process
from tests.common.tokenizers import TEXT, save_tokenizer
from tests.train.chats import cache_here
from tests.train.train_here import sets, train_here

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")
pytestmark = pytest.mark.preload("transformers", "datasets")

CONFIG = """
model: {hf: model}
data: {source: DATA, seq_len: 16, held_out: 0.3}
train: {steps: 8, micro_batch_size: 2, global_batch_size: 8, eval_every: 8, eval_batches: 1}
checkpoint: {every: 4}
optimizer: {lr: 3e-3}
schedule: {name: constant}
"""
SHAPES: dict[str, dict[str, Any]] = {
    "masked": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "classes": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    "answers": {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
}


def save(folder: Path, task: str) -> str:
    """A model and its data; returns the data's name."""
    import transformers as hf

    torch.manual_seed(0)
    save_tokenizer(folder / "model", mask_token="<mask>", pad_token="<pad>")
    shape, quiet = SHAPES[task], {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if task == "masked":
        model = hf.BertForMaskedLM(hf.BertConfig(vocab_size=300, max_position_embeddings=64, **shape, **quiet))
        (folder / "text.txt").write_text(TEXT)
    elif task == "classes":
        config = hf.BertConfig(vocab_size=300, max_position_embeddings=64, **shape, **quiet, num_labels=3)
        config.label2id = {"low": 0, "mid": 1, "high": 2}
        model = hf.BertForSequenceClassification(config)
        rows = [{"text": f"number_{i} {'and ' * (i % 3)}", "label": ("low", 1, "high")[i % 3]} for i in range(60)]
        for row in rows:
            row["label"] = config.label2id.get(row["label"], row["label"])
    else:
        model = hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=300, decoder_start_token_id=1, **shape))
        rows = [{"prompt": f"say number_{i}", "completion": "One hundred " * (i % 2) + f"and {i}"} for i in range(60)]
    model.save_pretrained(folder / "model")
    if task == "masked":
        return "text.txt"
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "rows.jsonl"


@pytest.mark.parametrize("task", ["masked", "classes", "answers"])
def test_tasks_train_alike_on_any_ranks(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG.replace("DATA", save(tmp_path, task))
    one = train_here(tmp_path, 1, ("--run-dir", "one"), config=config, before=cache_here)
    two = train_here(tmp_path, 2, ("--run-dir", "two", *sets("train.steps=4")), ("--run-dir", "two", "--resume"),
                     config=config, before=cache_here)  # fmt: skip
    assert [code for code, _ in one + two] == [0, 0, 0], one + two
    plain, spread = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert [row["loss"] for row in spread] == pytest.approx([row["loss"] for row in plain], rel=5e-5)
    assert spread[-1]["eval_loss"] == pytest.approx(plain[-1]["eval_loss"], rel=5e-5)
    assert min(row["loss"] for row in plain) < plain[0]["loss"]
    monkeypatch.chdir(tmp_path)
    assert main(["export", "two", "exported"]) == 0
    kind = {"masked": "MaskedLM", "classes": "SequenceClassification", "answers": "Seq2SeqLM"}[task]
    assert f"load it with transformers.AutoModelFor{kind}.from_pretrained('exported')" in capsys.readouterr().out
    assert main(["generate", "two", "--prompt=a"]) == 78
    assert "Export the run, and use the folder with transformers" in capsys.readouterr().err
    import transformers as hf

    assert getattr(hf, f"AutoModelFor{kind}").from_pretrained("exported")


@pytest.mark.parametrize("task", ["classes", "answers"])
def test_each_task_runs_dry_and_is_compared_with_one_process(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("DATA", save(tmp_path, task)))
    assert main(["dry-run", "run.yaml", "--world-size", "2"]) == 0, capsys.readouterr().err
    resolved = resolve(read_config("run.yaml"), 1)
    cpu = torch.device("cpu")
    found = compare_with_one_process(resolved, data_of(resolved), cpu, strategies=["zero3"], num_steps=1)
    assert found.rows[0].is_bitwise


def test_the_samples_of_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = {}
    for task in SHAPES:
        folder = tmp_path / task
        folder.mkdir()
        monkeypatch.chdir(folder)
        (folder / "run.yaml").write_text(CONFIG.replace("DATA", save(folder, task)))
        found[task] = data_of(resolve(read_config("run.yaml"), 1)).train
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "masked" / "model")
    rows = found["masked"].rows(range(20))
    learned = rows.targets != -100
    assert (learned.sum(1) == 2).all()  # 15% of 16
    assert found["masked"].num_targets(range(20)) == 40
    assert 20 < (rows.inputs[learned] == tokenizer.mask_token_id).sum() <= 40
    assert np.array_equal(rows.inputs, found["masked"].rows(range(20)).inputs)

    rows = found["answers"].rows([3])
    assert tokenizer.decode(rows.inputs[0][rows.mask[0] == 1]) == "say number_3"
    assert tokenizer.decode(rows.targets[0][rows.targets[0] != -100]) == "One hundred and 3<end>"
    assert (rows.inputs[0][rows.mask[0] == 0] == tokenizer.pad_token_id).all()

    assert found["classes"].rows([0, 1, 2, 3]).targets.tolist() == [0, 1, 2, 0]
    assert found["classes"].num_targets([0, 1, 2, 3]) == 4
    assert str(found["classes"]) == "42 samples of rows"
    short = data_of(resolve(read_config("run.yaml", ["data.seq_len=7"]), 1)).train  # of the answers
    assert str(short) == "42 samples of rows; 37 have an input or a target of more than 7 tokens, which is cut"


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("masked", ("data.tokenizer=bytes",), "no token that stands for a hidden one"),
        ("masked", ("lora.rank=4",), "adapters alone do not learn masked"),
        ("answers", ("parallel.pp=2",), "it divides causal language models"),
        ("answers", ("data.column=text",), "has the columns prompt, completion: no text"),
        ("classes", ("data.source=random",), "takes rows of a data set"),
        ("classes", ("data.source=wrong.jsonl",), "wrong.jsonl:2 has label 3, expected a class's number from 0 to 2"),
        ("answers", ("data.source=wrong.jsonl",), "wrong.jsonl:2 has an empty completion"),
    ],
)
def test_what_a_task_cannot_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, settings: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.replace("DATA", save(tmp_path, task)))
    rows = [{"text": "a", "label": 2, "prompt": "a", "completion": "b"}, {"text": "a", "label": 3, "prompt": "a"}]
    Path("wrong.jsonl").write_text("".join(json.dumps({"completion": ""} | row) + "\n" for row in rows))
    with pytest.raises((ConfigError, DataError)) as caught:
        resolve(read_config("run.yaml", settings), 2)
    assert message in str(caught.value)


def test_answers_of_a_mixture_keep_their_masks_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = save(tmp_path, "answers")
    (tmp_path / "more.jsonl").write_text("".join((tmp_path / name).read_text().splitlines(keepends=True)[20:]))
    mix = f"mix: [{{source: {name}}}, {{source: more.jsonl, weight: 3}}]"
    (tmp_path / "run.yaml").write_text(CONFIG.replace("source: DATA", mix))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    both = data_of(resolve(read_config("run.yaml"), 1)).train
    apart = [data_of(resolve(read_config("run.yaml", ["data.mix=null", f"data.source={each}"]), 1)).train
             for each in (name, "more.jsonl")]  # fmt: skip
    first = apart[0].num_samples
    rows, parts = both.rows([5, first + 3]), [apart[0].rows([5]), apart[1].rows([3])]
    for key in ("inputs", "targets", "mask"):
        assert (getattr(rows, key) == np.concatenate([getattr(part, key) for part in parts])).all()
    assert both.num_targets([5, first + 3]) == apart[0].num_targets([5]) + apart[1].num_targets([3])


def test_answers_end_once_and_a_cache_of_answers_without_ends_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(CONFIG.replace("DATA", save(tmp_path, "answers")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    end = tokenizer.eos_token_id
    assert missing_end(tokenizer) == end

    def targets() -> Any:
        return data_of(resolve(read_config("run.yaml"), 1)).train.rows([3]).targets

    with monkeypatch.context() as before:
        for module in ("config.data", "data.pairs"):
            before.setattr(f"shardwise.train.{module}.missing_end", lambda _tokenizer: None)
        assert not (targets() == end).any()
    assert (targets() == end).sum() == 1
    ending = TemplateProcessing(single=f"$A {tokenizer.eos_token}", special_tokens=[(tokenizer.eos_token, end)])
    tokenizer.backend_tokenizer.post_processor = ending
    assert missing_end(tokenizer) is None
