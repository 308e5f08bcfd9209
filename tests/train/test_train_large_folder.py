"""A Llama folder of 428 million parameters, with a tokenizer of its own, under zero3 on four processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("tokenizers", reason="the hf extra is not installed")

WORLD = 4
VOCAB = 8192
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 32, "num_attention_heads": 16}
CONFIG = """
model: {hf: llama}
data: {source: stdlib, max_bytes: 200000, seq_len: 32}
train: {steps: 2, micro_batch_size: 1, eval_every: null}
parallel: {strategy: zero3}
checkpoint: {final: false}
log: {tensorboard: false}
"""
#: Of training with AdamW in fp32: the parameter, its gradient and two moments.
STATE_BYTES = 4 * 4


def make_folder(folder: Path) -> int:
    """Random weights, and a tokenizer trained on the standard library's text; returns the number of parameters."""
    import tokenizers
    import transformers as hf

    text = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    model = tokenizers.ByteLevelBPETokenizer()
    model.train([str(path) for path in text], vocab_size=VOCAB, special_tokens=["<s>", "</s>"], show_progress=False)
    hf.PreTrainedTokenizerFast(tokenizer_object=model._tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=16, vocab_size=VOCAB, max_position_embeddings=2048)
    llama = hf.LlamaForCausalLM(config)
    llama.save_pretrained(folder, max_shard_size="500MB")
    return sum(parameter.numel() for parameter in llama.parameters())


class Resident:
    """Follows the most memory that was resident in each worker of a launcher."""

    def __init__(self, launcher: int) -> None:
        self.peaks: dict[int, int] = {}
        self._launcher = launcher
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ends.wait(0.2):
            for entry in Path("/proc").iterdir():
                if entry.name.isdecimal():
                    self._see(entry)

    def _see(self, entry: Path) -> None:
        try:
            environ = (entry / "environ").read_bytes()
            lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines() if ":" in line)
        except OSError:
            return  # it has ended
        if f"SHARDWISE_LARGE_FOLDER={self._launcher}".encode() in environ and b"LOCAL_RANK=" in environ:
            self.peaks[int(entry.name)] = 1024 * int(lines.get("VmHWM", "0 kB").split()[0])

    def stop(self) -> list[int]:
        self._ends.set()
        self._thread.join()
        return sorted(self.peaks.values())[-WORLD:]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_rank_stays_below_a_third_of_the_states(tmp_path: Path) -> None:
    numel = make_folder(tmp_path / "llama")
    assert numel >= 300_000_000
    (tmp_path / "run.yaml").write_text(CONFIG)
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SHARDWISE_LARGE_FOLDER": str(os.getpid())}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise", "train", "run.yaml", "--nproc", str(WORLD), "--run-dir", "run"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    resident = Resident(os.getpid())
    out, _ = process.communicate()
    resident_bytes = resident.stop()
    assert process.returncode == 0, out
    assert "loads" not in out  # nothing was read whole
    tokens = re.search(r"data stdlib: ([\d,]+) tokens", out)
    assert tokens is not None
    assert int(tokens[1].replace(",", "")) < 100_000  # of 200,000 bytes: the folder's own tokenizer
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    states = STATE_BYTES * numel
    print(
        f"{numel:,} parameters, states {states:,} bytes; peak of tensors {summary['peak_memory_bytes']:,}"
        f" (predicted {summary['predicted_peak_memory_bytes']:,}), resident {resident_bytes};"
        f" losses {summary['first_loss']} {summary['final_loss']}; {time.monotonic() - started:.0f} s\n{out}"
    )
    assert summary["peak_memory_bytes"] < states / 3
    assert summary["predicted_peak_memory_bytes"] is not None
    assert len(resident_bytes) == WORLD
