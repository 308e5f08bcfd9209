"""`shardwise train` on ranks that exist already, as under torchrun: nothing is started, so a run takes a second."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from shardwise.cli import main
from shardwise.launch.file import replace
from shardwise.testing import run_on_ranks

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, dropout: 0.1}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 20, micro_batch_size: 2, global_batch_size: 8, eval_every: 10, eval_batches: 2}
optimizer: {lr: 1e-3}
checkpoint: {every: 5, keep: 10}
"""
TIMES = {"tokens_per_s", "step_time_s", "data_time_s", "optimizer_time_s", "exposed_time_s"}


def sets(*settings: str) -> tuple[str, ...]:
    """Arguments that set fields of the configuration: each is ``section.field=value``."""
    return tuple(word for setting in settings for word in ("--set", setting))


def train_here(
    folder: Path, world: int, *runs: Sequence[str], config: str = CONFIG, before: Callable[[], Any] | None = None
) -> list[tuple[int, str]]:
    """Train in ``folder`` with each of some lists of arguments, one after the other on the same ranks.

    Args:
        folder: Where ``run.yaml`` is written.
        world: Ranks.
        *runs: Arguments of `train` after the configuration file.
        config: The file.
        before: Called on every rank first, a function of a module; what it returns is kept until the end.

    Returns:
        Of every run the exit code, the same on all ranks, and what rank 0 printed.
    """
    (folder / "run.yaml").write_text(config)
    ranks = run_on_ranks(_train, world, str(folder), runs, before, timeout_s=200)
    for codes in zip(*([code for code, _ in rank] for rank in ranks), strict=True):
        assert len(set(codes)) == 1, codes
    return ranks[0]


def train_well(folder: Path, world: int, *runs: Sequence[str], config: str = CONFIG) -> list[str]:
    """As :func:`train_here`, where every run has to finish; returns what was printed."""
    results = train_here(folder, world, *runs, config=config)
    for code, text in results:
        assert code == 0, text
    return [text for _, text in results]


def _train(folder: str, runs: Sequence[Sequence[str]], before: Callable[[], Any] | None) -> list[tuple[int, str]]:
    from shardwise.train.predicted import memory

    os.chdir(folder)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    kept = before() if before is not None else None
    results = []
    with mock.patch.object(memory, "_run_dry", functools.partial(_dry_once, memory._run_dry)):
        for arguments in runs:
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                code = main(["train", "run.yaml", "--set", "log.tensorboard=false", *arguments])
            results.append((code, text.getvalue()))
    del kept
    return results


def _dry_once(run_dry: Callable[..., dict[str, int]], resolved: Any, control: Any, device: Any) -> dict[str, int]:
    """The dry run that predicts the memory of a run, made once in a session for each model, plan and batch.

    It takes as long as all steps of such a run. What it depends on is in the name of the file: all of the configuration
    but what is known to change nothing. Models in folders are left alone: a test may write another one there.
    """
    config, folder = resolved.config, os.environ.get("SHARDWISE_TEST_DRY_RUNS")
    if folder is None or config.model.hf is not None or config.lora.adapter is not None:
        return run_dry(resolved, control, device)
    rest = config.model_dump(exclude={"name": True, "schedule": True, "checkpoint": True, "log": True, "data": True,
        "optimizer": {"lr"}, "train": {"steps", "seed", "eval_every", "eval_batches"}})  # fmt: skip
    of_data = resolved.vocab_size, resolved.seq_len, resolved.end_token, resolved.raised_from, resolved.task
    key = repr(
        (
            rest,
            config.optimizer.in_backward,
            resolved.plan,
            resolved.mesh,
            resolved.batch,
            resolved.model,
            of_data,
            control.size,
            control.rank,
        )
    )
    file = Path(folder) / hashlib.sha256(f"{key} {device}".encode()).hexdigest()
    if not file.exists():
        replace(file, json.dumps(run_dry(resolved, control, device)).encode())
    return json.loads(file.read_text())


def metrics(run: Path) -> list[dict[str, Any]]:
    """Records without times."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run)]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())
