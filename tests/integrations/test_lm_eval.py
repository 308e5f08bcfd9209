"""``ShardwiseLM`` on one process and two ranks beside lm-eval's own model of transformers, on tasks of our own."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from shardwise.spec.errors import ConfigError
from shardwise.testing import run_on_ranks
from tests.common.tokenizers import save_model, save_tokenizer
from tests.serve.test_serve_command import served
from tests.train.train_here import train_well

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

VOCAB, POSITIONS = 300, 48
WORDS = ["number", "hundred", "naïve lines", "return", "tabs and", "more"]
#: fp32 sums in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

CHOICES = """
task: own_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: {shots}
fewshot_split: test
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """
task: own_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
ANSWERS = """
task: own_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n", "e "], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def write_tasks(folder: Path) -> list[str]:
    """Tasks of each kind, over rows of different lengths; contexts of some are longer than the model's positions."""
    rows = [
        {
            "question": " ".join(WORDS[: 1 + at % 5]) * (1 + at % 4) + ":" * (at % 2),
            "choices": [f" {word}{' and' * (at % 3)}" for word in WORDS[:3]],
            "answer": at % 3,
            "text": f"def number_{at}(x):\n    return x + {at}\n\nOne hundred and {at} lines" * (1 + at % 3),
        }
        for at in range(12)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"choices": CHOICES, "texts": TEXTS, "answers": ANSWERS}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text.format(file=data, shots=1 if name == "choices" else 0))
    return ["own_choices", "own_texts", "own_answers"]


def evaluate(lm: Any, folder: Path, names: list[str]) -> Any:
    """What lm-eval finds: metrics by task, and each sample's answers."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=0)
    if found is None:  # on all but the first rank
        return None
    numbers = {
        f"{task} {name}": value
        for task, metrics in found["results"].items()
        for name, value in metrics.items()
        if isinstance(value, float)
    }
    return numbers, {task: [sample["filtered_resps"] for sample in found["samples"][task]] for task in names}


def same(found: Any, expected: Any, at_least: int = 5) -> None:
    numbers, samples = found
    assert len(numbers) >= at_least
    torch.testing.assert_close(numbers, expected[0], **TOLERANCE)
    torch.testing.assert_close(as_numbers(samples["own_choices"]), as_numbers(expected[1]["own_choices"]), **TOLERANCE)
    assert samples.get("own_answers") == expected[1].get("own_answers")


def as_numbers(answers: Any) -> list[float]:
    """Log-probabilities, and whether they are greedy."""
    return [float(number == "True") if number in {"True", "False"} else float(number) for each in answers
            for pair in each for number in pair]  # fmt: skip


def build(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("lm_eval")
    save_tokenizer(save_model(tmp_path / "model", vocab_size=VOCAB, seq_len=POSITIONS))
    model = build(tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # far from uniform: the context matters
    model.save_pretrained(tmp_path / "model")
    return tmp_path


def theirs(folder: Path, max_length: int | None = None) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.pad_token = tokenizer.eos_token
    return HFLM(
        pretrained=build(folder / "model"), tokenizer=tokenizer, batch_size=1, device="cpu", max_length=max_length
    )


def ours(folder: Path, model: Any, **options: Any) -> Any:
    from transformers import AutoTokenizer

    from shardwise.integrations.lm_eval import ShardwiseLM

    return ShardwiseLM(model, AutoTokenizer.from_pretrained(folder / "model"), **options)


PLANS = {
    "zero3": sw.ParallelPlan(strategy="zero3"),
    "tp2": sw.ParallelPlan(tp=2),
    "pp2": sw.ParallelPlan(pp=2),
}


def on_rank(folder: Path, names: list[str]) -> Any:
    return {
        name: evaluate(ours(folder, sw.parallelize(build(folder / "model"), plan)), folder, names)
        for name, plan in PLANS.items()
    }


def test_numbers_are_those_of_lm_eval_s_own_model(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = write_tasks(folder)
    expected = evaluate(theirs(folder), folder, names)
    with caplog.at_level(logging.WARNING):
        same(evaluate(ours(folder, build(folder / "model"), batch_tokens=200), folder, names), expected)
    assert "contexts are longer than the model's 48 positions" in caplog.text
    first, second = run_on_ranks(on_rank, 2, folder, names, timeout_s=200)
    assert set(second.values()) == {None}
    for found in first.values():
        same(found, expected)


def test_what_the_model_cannot_do_is_refused_with_what_to_change(folder: Path) -> None:
    lm = ours(folder, build(folder / "model"))
    with pytest.raises(ConfigError, match=r"max_gen_toks=48 tokens, and there are 48 positions.\n  Set .* to 47"):
        lm._options({"max_gen_toks": 48, "until": []})
    assert lm._options({"max_gen_toks": 47, "until": []})["max_new_tokens"] == 47
    with pytest.raises(ConfigError, match="a task generates with num_beams"):
        lm._options({"max_gen_toks": 4, "until": [], "num_beams": 4})
    lm.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="neither BOS nor EOS"):
        _ = type(lm)(lm.model, lm.tokenizer).prefix_token_id
    assert type(lm)(lm.model, lm.tokenizer, prefix_token_id=7).prefix_token_id == 7


def say(folder: str, calls: list[list[str]]) -> list[tuple[int, str]]:
    """On a rank: exit codes and output of ``shardwise eval``."""
    os.chdir(folder)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    printed = []
    for arguments in calls:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            code = main(["eval", *arguments])
        printed.append((code, text.getvalue()))
    return printed


def test_the_verb_prints_these_numbers_of_a_folder_and_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = write_tasks(folder)
    numbers, _ = evaluate(theirs(folder), folder, names)
    train_well(folder, 1, ["--run-dir=run", "--set=train.eval_every=null", "--set=model.seq_len=48"])
    files = [f"--tasks={folder / name}.yaml" for name in ("choices", "texts", "answers")]
    model, run = str(folder / "model"), str(folder / "run")
    calls = [[model, *files, "--json"], [run, *files[:2], "--limit=3"]]
    alone = run_on_ranks(say, 1, str(folder), calls, timeout_s=200)[0]
    first, second = run_on_ranks(say, 2, str(folder), [[*calls[0], "--set=parallel.tp=2"], calls[1]], timeout_s=200)
    assert [code for code, _ in alone + first + second] == [0] * 6, alone
    assert [text for _, text in second] == ["", ""]
    for text in (alone[0][1], first[0][1]):
        found = json.loads(text)
        for key, expected in numbers.items():
            task, name = key.split(" ", 1)
            assert found[task][name] == pytest.approx(expected, rel=1e-4), key
    assert alone[1][1] == first[1][1]
    cells = [[cell.strip() for cell in line.split("|")] for line in alone[1][1].splitlines()]
    assert [row[1] for row in cells if len(row) > 5 and row[1][:3] == "own"] == ["own_choices", "own_texts"]
    metrics = {"acc", "acc_norm", "word_perplexity", "bits_per_byte"}
    assert metrics <= {row[5] for row in cells if len(row) > 5}
    (folder / "empty.yaml").write_text("dataset_path: json\n")
    for arguments, message in [
        ([model, "--tasks=nothing.yaml"], "there is no such file"),
        ([model, f"--tasks={folder / 'empty.yaml'}"], "the file has no line `task: NAME`"),
        ([model, files[0], "--chat"], "has no chat template"),
        ([model, files[0], "--average"], "holds no averaged weights"),
        ([model, files[0], "--set=optimizer.lr=1"], "Set fields of parallel only"),
    ]:
        assert main(["eval", *arguments]) == 78, arguments
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("plan", [[], ["--set=parallel.tp=2"], ["--set=parallel.pp=2"]], ids=["one", "tp2", "pp2"])
def test_lm_eval_s_own_client_gets_these_numbers_from_a_server(folder: Path, plan: list[str]) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    *scored, answers = write_tasks(folder)
    # Of the positions the client leaves one for a new token, and another to each context that it scores.
    expected = evaluate(theirs(folder, POSITIONS - 2), folder, scored)
    expected_answers = evaluate(theirs(folder, POSITIONS - 1), folder, [answers])
    (folder / "model").rename(folder / "tiny")
    with served(folder / "tiny", *plan) as (_, address):
        client = LocalCompletionsAPI(
            base_url=f"{address}/completions",
            tokenizer_backend="huggingface",
            tokenizer=str(folder / "tiny"),
            model="tiny",
            max_length=POSITIONS,
            batch_size=4,
        )
        same(evaluate(client, folder, scored), expected, at_least=4)
        assert evaluate(client, folder, [answers]) == expected_answers
