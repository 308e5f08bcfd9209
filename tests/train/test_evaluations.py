"""What a run does at its evaluations beside taking values: the best checkpoint, an early end, samples."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from shardwise.launch import inject
from shardwise.spec.errors import ConfigError
from shardwise.train import evaluation, loop
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from tests.train.test_spec import Line, train_on
from tests.train.towers import spec as towers
from tests.train.train_here import metrics, sets, summary, train_here, train_well

DATA = [(torch.full((3,), i / 32), torch.tensor(i / 16)) for i in range(32)]
#: Of the evaluations before the first step and after every second one. NaN is never the best.
VALUES = [math.nan, 0.2, 0.5, 0.3, 0.5, 0.4, 0.6]


def quality(_output: Any, batch: Any) -> sw.Mean:
    """Given for each evaluation, whatever the model does: two microbatches of each rank ask."""
    return sw.Mean(torch.tensor(VALUES[next(calls) // 2] * len(batch[0])), len(batch[0]))


calls = itertools.count()
spec = sw.TrainSpec(model=Line, data=DATA, eval_data=DATA[:16], metrics={"quality": quality})
CONFIG = """
train: {steps: 99, micro_batch_size: 4, eval_every: 2, eval_batches: 2, patience: 3}
checkpoint: {best: eval_quality, best_is: most}
log: {tensorboard: false}
"""


def test_the_best_evaluation_s_step_is_kept_and_a_run_that_gets_no_better_ends(tmp_path: Path) -> None:
    ((code, text),) = train_on(2, tmp_path, (f"{__file__}:spec", "--run-dir", "run"), config=CONFIG)
    assert code == 0, text
    held = summary(tmp_path / "run")
    assert (held["best"], held["best_step"], held["steps"]) == (0.5, 4, 10)
    assert held["reason"] == "no better eval_quality in 3 evaluations: the best is 0.5000, of step 4"
    assert f"finished 10 steps: {held['reason']}\n" in text
    assert text.count("the best eval_quality so far, kept in run/best") == 2  # of steps 2 and 4
    assert (tmp_path / "run/best/LATEST").read_text() == "checkpoints/step-00000004\n"
    assert (tmp_path / "run/LATEST").read_text() == "checkpoints/step-00000010\n"
    assert [line["eval_quality"] for line in metrics(tmp_path / "run") if "eval_quality" in line] == pytest.approx(
        VALUES[1:6]
    )


FALLING = """
model: {preset: gpt-nano, vocab_size: 256}
data: {source: stdlib, max_bytes: 100000, seq_len: 16}
train: {steps: 8, micro_batch_size: 2, eval_every: 2, eval_batches: 1, sample_prompts: [def], sample_tokens: 2}
optimizer: {lr: 3e-3}
checkpoint: {every: 3, best: eval_loss}
"""


def test_a_run_that_goes_on_from_before_its_best_evaluations_makes_them_again(tmp_path: Path) -> None:
    again = ("--run-dir", "run", "--resume", "step-00000003")
    _, resumed = train_well(tmp_path, 2, ("--run-dir", "run"), again, config=FALLING)
    best = tmp_path / "run/best"
    kept = sorted(path.name for path in (best / "checkpoints").glob("step-*"))
    assert kept == ["step-00000006", "step-00000008"]
    for step in (6, 8):
        assert f"best/checkpoints/step-{step:08d} is set aside as superseded-step-{step:08d}-*" in resumed
        assert f"step {step}  the best eval_loss so far, kept in run/best" in resumed
    samples = [json.loads(line)["step"] for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert samples == [0, 2, 4, 6, 8]
    other = sets("checkpoint.best=eval_loss", "checkpoint.best_is=most", "train.patience=9")
    train_well(tmp_path, 2, (*again, *other), config=FALLING)
    assert summary(tmp_path / "run")["best_step"] == 4  # the largest of the falling losses after step 3


def asked_to_stop_in_step_4() -> None:
    inject._FAULTS = inject.parse("step_begin@step=4:term")


def test_a_stop_right_after_the_best_evaluation_keeps_its_step(tmp_path: Path) -> None:
    ((code, text),) = train_here(tmp_path, 1, ("--run-dir", "run"), config=FALLING, before=asked_to_stop_in_step_4)
    assert code == 75, text
    assert "step 4  the best eval_loss so far, kept in run/best" in text
    assert (tmp_path / "run/best/LATEST").read_text() == "checkpoints/step-00000004\n"


def test_prompts_are_continued_at_each_evaluation_as_the_checkpoint_continues_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "model: {preset: gpt-nano, vocab_size: 256}\ndata: {source: stdlib, max_bytes: 100000, seq_len: 16}\n"
    config += "train: {steps: 4, micro_batch_size: 2, eval_every: 2, eval_batches: 1, sample_tokens: 6}\n"
    prompts = sets("train.sample_prompts=[def , import os]")
    train_well(tmp_path, 2, ("--run-dir", "run", *prompts), config=config)
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (s, p) for s in (0, 2, 4) for p in ("def", "import os")
    ]
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "run", "--prompt", "import os", "--max-new-tokens", "6", "--nproc", "1", "--json"]) == 0
    assert json.dumps(lines[-1]["text"]) in capsys.readouterr().out
    train_well(tmp_path, 2, ("--run-dir", "without"), config=config)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "without")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"checkpoint": {"best": "eval_f1"}},
            "checkpoint.best: an evaluation gives eval_loss, eval_accuracy; name",
        ),
        ({"train": {"sample_prompts": ["a"]}}, "train.sample_prompts: texts are continued by language models on text"),
        ({"train": {"eval_every": None, "patience": 2}}, "train.patience: nothing is evaluated"),
    ],
)
def test_what_evaluations_do_not_give_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(read_config(None, base=given), 1, spec=towers)
    assert words in str(caught.value)


@pytest.mark.parametrize("divided", [{"cp": 2}, {"tp": 2, "sequence_parallel": True}])
def test_prompts_are_refused_before_a_start_where_sw_generate_refuses_the_plan(divided: dict[str, Any]) -> None:
    given = {"train": {"sample_prompts": ["a"]}, "parallel": divided}
    with pytest.raises(ConfigError, match="without cp and sequence_parallel"):
        resolve(read_config(None, base=given), 2)


def asked_to_stop_in_the_first_evaluation() -> None:
    evaluation.MICROBATCHES_AT_ONCE = 1
    look = loop.Loop.must_stop

    def asked(trainer: loop.Loop) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return look(trainer)

    loop.Loop.must_stop = asked  # type: ignore[method-assign]


def test_a_request_during_an_evaluation_leaves_it_and_saves_the_step(tmp_path: Path) -> None:
    ((code, text),) = train_here(tmp_path, 1, ("--run-dir", "run"), before=asked_to_stop_in_the_first_evaluation)
    assert code == 75, text
    assert "step 0  the evaluation was left: a stop was requested" in text
    assert "stop requested, saved step 1, continue with --resume" in text
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1]
