"""The examples run as files, under torchrun or on ranks that exist already, and do what they say."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.testing import run_on_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


def run(name: str, *arguments: str, cwd: Path, strictly: bool = False) -> str:
    """What it prints under torchrun; ``strictly``: a warning is an error and the error output stays empty."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | ({"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"} if strictly else {})
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments], capture_output=True, text=True, cwd=cwd, timeout=250, check=False,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not strictly or not done.stderr
    return done.stdout


def run_file(name: str, arguments: tuple[str, ...]) -> str:
    sys.argv = [name, *arguments]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return text.getvalue()


def run_alone(name: str) -> str:
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[variable]
    return run_file(name, ())


def run_here(name: str, *arguments: str, ranks: int = 2) -> str:
    """As :func:`run`, in processes that have imported torch already; what rank 0 printed."""
    return run_on_ranks(run_file, ranks, name, arguments, timeout_s=200)[0]


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss +([0-9.]+)", text)]


def test_ten_lines_under_torchrun_and_alone(tmp_path):
    assert (EXAMPLES / "ten_lines.py").read_text().count("\n    ") <= 12
    together = losses(run("ten_lines.py", cwd=tmp_path, strictly=True))
    assert len(together) == 4
    assert together[-1] < together[0] / 2
    (alone,) = run_on_ranks(run_alone, 1, "ten_lines.py", process_group=False)
    assert losses(alone)[-1] < losses(alone)[0]


def test_t5_is_loaded_from_a_folder_and_learns_the_pairs(tmp_path):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(3)
    shape = {"d_model": 48, "d_ff": 96, "d_kv": 12, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    T5ForConditionalGeneration(T5Config(vocab_size=258, decoder_start_token_id=0, **shape)).save_pretrained(tmp_path)
    text = run_here("finetune_t5.py", "--model", str(tmp_path))
    found = losses(text)
    assert len(found) == 6
    assert found[-1] < found[0] / 3
    assert "before: say 40 ->" in text
    assert "after: say 40 -> four" in text


def test_memory_of_the_cnn_falls_in_the_classic_order():
    text = run_here("mnist_cnn.py", ranks=4)
    ddp, one_unit, auto_wrap = (float(found) for found in re.findall(r"peak +([0-9.]+) MB", text))
    assert ddp > 1.1 * one_unit > 1.1 * 1.1 * auto_wrap
    assert "DDP > FSDP in one unit > FSDP with auto-wrap: True" in text
    assert len(set(losses(text))) == 1  # all three compute the same


def test_a_table_whose_rows_are_spread_trains_as_under_ddp_and_sends_and_holds_little():
    text = run_here("embedding.py")
    assert "losses equal to the last bit: True" in text
    (sent, held), (sent_alone, held_alone) = re.findall(
        r"sent in a step +([0-9.]+) kB +parameters held +([0-9.]+)", text
    )
    assert 20 * float(sent) < float(sent_alone)
    assert float(held) < 0.51 * float(held_alone)
    first, last = (float(found) for found in re.findall(r"loss ([0-9.]+) -> ([0-9.]+)", text)[0])
    assert last < 0.6 * first


@pytest.mark.long
def test_fsdp2_and_shardwise_side_by_side(tmp_path):
    assert "equal to 1e-5: True" in run("from_fsdp2.py", cwd=tmp_path)


@pytest.mark.long
def test_fsdp1_and_shardwise_side_by_side(tmp_path):
    assert "equal to 1e-5: True" in run("from_fsdp1.py", cwd=tmp_path)


@pytest.mark.long
def test_deepspeed_and_shardwise_side_by_side(tmp_path):
    pytest.importorskip("deepspeed", reason="needs the peers extra")
    assert "equal to 1e-5: True" in run("from_deepspeed.py", cwd=tmp_path)


@pytest.mark.long
def test_gpt2_learns_in_bf16_and_is_saved(tmp_path):
    text = run("finetune_gpt2.py", "--checkpoint", str(tmp_path / "saved"), cwd=tmp_path)
    assert losses(text)[-1] < losses(text)[0] - 1.5
    verified = [sys.executable, "-m", "shardwise", "checkpoint", "verify", str(tmp_path / "saved")]
    assert subprocess.run(verified, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.long
def test_vit_learns_to_see_the_corner(tmp_path):
    before, after = re.findall(r"accuracy on new pictures ([0-9.]+)", run("finetune_vit.py", cwd=tmp_path))
    assert float(after) > max(0.5, float(before))  # one of four by chance


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--lora",), ("--strategy", "ddp")])
def test_a_chat_model_answers_what_it_was_fine_tuned_to(tmp_path, options):
    command = [sys.executable, str(EXAMPLES / "finetune_chat.py"), *options]
    text = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=True).stdout
    before, after = re.findall(r"(?:before|after): (.*)", text)
    assert "It is eight." in after
    assert "It is" not in before
