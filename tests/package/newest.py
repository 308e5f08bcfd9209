"""The wheel with its extras and the newest version of everything but torch, which constraints.txt pins.

``make test-newest`` runs this; it needs the network, takes some minutes and leaves its environment in build/newest.
"""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.package.test_wheel import ROOT, installed, run

EXTRAS = "hf,lora,serve,eval,s3,tensorboard,torchao,wandb,mlflow,trackio"
DIST, ENVIRONMENT = ROOT / "build" / "newest" / "dist", ROOT / "build" / "newest" / "environment"
LLAMA = """
import json, sys, transformers
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)
transformers.LlamaForCausalLM(config).save_pretrained("llama")
"""
FINE_TUNE = """
name: tuned
model: {hf: llama}
data: {source: random, seq_len: 32}
train: {steps: 2, micro_batch_size: 2, eval_every: 2}
schedule: {warmup_steps: 1}
log: {tensorboard: true}
"""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def environment() -> Path:
    """A fresh environment with the wheel and its extras."""
    run("rm", "-rf", ENVIRONMENT.parent, cwd=ROOT)
    run(sys.executable, "-m", "hatchling", "build", "-d", DIST, cwd=ROOT)
    pinned = re.findall(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (DIST / "constraints.txt").write_text("\n".join(pinned) + "\n")
    (wheel,) = DIST.glob("*.whl")
    run(sys.executable, "-m", "venv", ENVIRONMENT, cwd=DIST)
    install = (ENVIRONMENT / "bin" / "python", "-m", "pip", "install", "-q", "--upgrade")
    run(*install, "-c", DIST / "constraints.txt", f"{wheel}[{EXTRAS}]", cwd=DIST)
    print(run(ENVIRONMENT / "bin" / "python", "-m", "pip", "list", cwd=DIST))
    return ENVIRONMENT


def test_the_source_archive_makes_the_same_wheel(environment: Path, tmp_path: Path) -> None:
    assert environment.is_dir()
    (archive,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    words = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path, archive)
    run(sys.executable, *words, cwd=tmp_path)
    (made,) = tmp_path.glob("*.whl")
    names = [sorted(zipfile.ZipFile(path).namelist()) for path in (made, wheel)]
    assert names[0] == names[1]


def test_the_wheel_plans_trains_and_reports(environment: Path) -> None:
    installed(environment, next(DIST.glob("*.whl")))


def test_a_model_of_transformers_is_trained_tuned_reported_and_exported(environment: Path, tmp_path: Path) -> None:
    bin_ = environment / "bin"
    run(bin_ / "python", "-c", LLAMA, cwd=tmp_path)
    (tmp_path / "run.yaml").write_text(FINE_TUNE)
    assert "finished 2 steps" in run(bin_ / "shardwise", "train", "run.yaml", "--nproc", "2", cwd=tmp_path)
    settings = ("name=adapted", "lora.rank=4", "optimizer.name=adamw8bit")
    lora = [word for setting in settings for word in ("--set", setting)]
    assert "finished 2 steps" in run(bin_ / "shardwise", "train", "run.yaml", "--nproc", "2", *lora, cwd=tmp_path)
    run(bin_ / "shardwise", "report", "runs/tuned", "--compare", "runs/adapted", cwd=tmp_path)
    assert (tmp_path / "runs" / "tuned" / "compare.html").is_file()
    run(bin_ / "shardwise", "export", "runs/tuned", "exported", cwd=tmp_path)
    load = "import transformers; print(transformers.AutoModelForCausalLM.from_pretrained('exported').num_parameters())"
    assert int(run(bin_ / "python", "-c", load, cwd=tmp_path).split()[-1]) > 0


@pytest.mark.parametrize(
    "module", ["s3fs", "lm_eval", "starlette", "uvicorn", "wandb", "mlflow", "trackio", "datasets"]
)
def test_what_an_extra_brings_can_be_imported_beside_ours(environment: Path, tmp_path: Path, module: str) -> None:
    run(environment / "bin" / "python", "-c", f"import {module}, shardwise, shardwise.integrations", cwd=tmp_path)
