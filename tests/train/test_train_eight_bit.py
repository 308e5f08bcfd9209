"""`shardwise train` with `optimizer.name: adamw8bit`, torchao's AdamW with states in 8 bit."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from shardwise.cost.workload import OPTIMIZERS
from shardwise.spec.errors import ConfigError
from shardwise.spec.memory.eight_bit import eight_bit_bytes
from shardwise.train.config.resolve import resolve
from shardwise.train.config.sections import read_config
from tests.common.blockwise import TORCHAO, torchao_adamw
from tests.train.train_here import losses, sets, train_here

CONFIG = """
model: {preset: gpt-nano, vocab_size: 256, dropout: 0.0}
data: {source: stdlib, max_bytes: 100000}
train: {steps: 6, micro_batch_size: 4, gradient_accumulation_steps: 1, eval_every: null}
optimizer: {name: adamw8bit, lr: 2e-3}
checkpoint: {every: 3}
"""

BLOCKS = "parallel.granularity=[block, 4096]"  # what train takes by itself for adamw8bit

needs_torchao = pytest.mark.skipif(
    not TORCHAO.exists(), reason=f"torchao is not in {TORCHAO}; `make venv` puts it there"
)


def with_torchao() -> None:
    sys.path.append(str(TORCHAO))
    torch.compiler.set_stance("force_eager")


@needs_torchao
def test_a_run_goes_on_under_another_strategy_with_less_than_half_of_the_state(tmp_path: Path) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    (code, text), (plain_code, plain_text) = train_here(
        tmp_path, 2, ("--run-dir", "first"), ("--run-dir", "plain", *sets("optimizer.name=adamw", BLOCKS)),
        config=CONFIG, before=with_torchao,
    )  # fmt: skip
    assert code == 0, text
    assert plain_code == 0, plain_text
    whole = losses(first)
    assert whole[:1] == losses(tmp_path / "plain")[:1]
    assert whole == pytest.approx(losses(tmp_path / "plain"), abs=0.05)
    shutil.copytree(first, other)
    ((code, text),) = train_here(
        tmp_path, 2, ("--run-dir", "other", "--resume", "step-00000003", *sets("parallel.strategy=ddp")),
        config=CONFIG, before=with_torchao,
    )  # fmt: skip
    assert code == 0, text
    assert "resumed at step 3" in text
    assert losses(other) == whole
    predicted = json.loads((other / "plan.json").read_text())["predicted_bytes_per_rank"]["optimizer"]
    assert json.loads((other / "memory.json").read_text())["held_bytes"]["optimizer"] == predicted
    adamw = json.loads((tmp_path / "plain" / "plan.json").read_text())["predicted_bytes_per_rank"]["optimizer"]
    assert predicted < 0.5 * 2 * adamw  # a quarter but for small parameters; AdamW's here is divided by two


@needs_torchao
def test_bytes_of_its_state_are_those_of_torchao() -> None:
    for numel in (256 * 20, 4096, 4100, 100):
        parameter = torch.nn.Parameter(torch.zeros(numel))
        parameter.grad = torch.ones(numel)
        optimizer = torchao_adamw([parameter])
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        held = 0
        for value in optimizer.state[parameter].values():
            parts = value.__tensor_flatten__()[0] if type(value) is not torch.Tensor else []
            held += sum(getattr(value, part).nbytes for part in parts) or value.nbytes
        assert held == eight_bit_bytes("weight", numel, 4), numel
    assert OPTIMIZERS["adamw8bit"] == pytest.approx(eight_bit_bytes("weight", 2**24, 4) / 2**26, rel=1e-3)


def refusal(folder: Path, *settings: str) -> str:
    (folder / "run.yaml").write_text(CONFIG)
    raw = read_config(folder / "run.yaml", list(settings))
    with pytest.raises(ConfigError) as caught:
        resolve(raw, 2, checks_data=False)
    return str(caught.value)


def test_what_it_needs_is_said_before_a_process_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    text = refusal(tmp_path, "parallel.granularity=row", "optimizer.flat=true")
    assert "adamw8bit is torchao's, which is not installed; pip install 'shardwise[torchao]'" in text
    assert "a scale for each 256 elements, which have to be on one rank; set parallel.granularity=[block, 4096]" in text
    assert "optimizer.flat: adamw8bit chooses by each parameter's size how its state is kept" in text
