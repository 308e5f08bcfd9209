"""The snippets of docs/integrations.md, on two ranks."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

from shardwise.testing import run_on_ranks
from tests.common.tokenizers import save_model, save_tokenizer
from tests.integrations.test_lm_eval import write_tasks
from tests.launch.test_join import free_port

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "integrations.md"
#: What a reader of the page has already.
BEFORE = """
import lightning, torch, transformers
from torch.utils.data import DataLoader
from trl import SFTTrainer
import shardwise as sw
from tests.integrations import test_lightning, test_transformers_trainer as theirs

model, data, module = theirs.build(), theirs.Texts(64, 1), test_lightning.build()
args = transformers.TrainingArguments(**theirs.settings({folder!r}, 2))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
loader = DataLoader(data, 4) if {name!r} == "accelerate" else test_lightning.loader(2, 8)
"""


#: Ray's workers are processes of its own, and so the snippet is run once.
BEFORE_RAY = """
import ray, torch
import shardwise as sw
from tests.integrations.test_transformers_trainer import Texts, build as build_model

def batch_of(step):
    return torch.utils.data.default_collate([Texts(64, 1)[step]])

ray.init(num_cpus=4, include_dashboard=False, runtime_env={{"env_vars": {{"PYTHONPATH": {path!r}}}}})
"""
AFTER_RAY = """
assert result.metrics["loss"] > 0
with result.checkpoint.as_directory() as folder:
    assert folder.startswith({folder!r})
"""
BEFORE_LM_EVAL = """
from pathlib import Path
import shardwise as sw
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer
from tests.integrations import test_lm_eval as own

folder = Path({folder!r})
model, tokenizer = own.build(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
manager = TaskManager(include_path={folder!r}, include_defaults=False)
"""
AFTER_LM_EVAL = """
assert (results is None) == (torch.distributed.get_rank() > 0)
assert results is None or 0 <= results["results"]["own_choices"]["acc,none"] <= 1
"""
BEFORE_DPO = """
import trl
from tests.integrations import test_trl_preference as own

model, reference, pairs, tokenizer = own.build(), own.build(), own.rows("dpo"), own.tokenizer()
args = trl.DPOConfig(**own.settings({folder!r}, 2) | {{"max_steps": 1, "bf16": False}})
"""
BEFORE_VLLM = """
import torch
import shardwise as sw
from tests.integrations.test_vllm import Group as connect, Server

model = sw.parallelize(sw.models.gpt("gpt-tiny", num_layers=1, hidden=16, num_heads=2, vocab_size=31), "zero3")
server = Server({port}) if torch.distributed.get_rank() == 0 else None
train_one_step = torch.nn.Module.train
"""
AFTER_VLLM = """
assert server is None or (server.version, server.calls.count("/resume")) == ("1", 2)
"""
AROUND = {"ray": (BEFORE_RAY, AFTER_RAY), "lm_eval": (BEFORE_LM_EVAL, AFTER_LM_EVAL), "dpo": (BEFORE_DPO, "")}
AROUND |= {"vllm": (BEFORE_VLLM, AFTER_VLLM)}


def run(path: str) -> None:
    os.chdir(Path(path).parent)  # Lightning writes its logs there
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("text", re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
def test_every_snippet_of_the_page_runs_on_two_ranks(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = re.findall(r"shardwise\.integrations\.(?:contrib\.)?(\w+)", text) if "DPO" not in text else ["dpo"]
    here = text.replace('accelerator="gpu", devices=8', 'accelerator="cpu", devices=2')
    here = here.replace("lightning.Trainer(", "lightning.Trainer(max_epochs=1, ")
    here = here.replace("num_workers=8, use_gpu=True", "num_workers=2").replace('"steps": 100', '"steps": 2')
    here = here.replace("/shared/runs", str(tmp_path))
    here = here.replace('tasks=["hellaswag"]', 'tasks=["own_choices"], task_manager=manager, bootstrap_iters=0')
    before, after = AROUND.get(name, (BEFORE, ""))
    if name == "lm_eval":
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        save_tokenizer(save_model(tmp_path / "model", vocab_size=300))
        write_tasks(tmp_path)
    port = free_port()
    here = here.replace("http://rollouts:8000", f"http://127.0.0.1:{port}")
    here = here.replace('"trainer", port=29600', f'"127.0.0.1", port={free_port()}')
    given = {
        "folder": str(tmp_path),
        "name": name,
        "port": port,
        "path": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }
    (tmp_path / "snippet.py").write_text(before.format(**given) + here + after.format(**given))
    run_on_ranks(run, 1 if name == "ray" else 2, str(tmp_path / "snippet.py"), timeout_s=250)
