"""The snippets of docs/integrations.md, on two ranks."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

from shardwise.testing import run_on_ranks

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


def run(path: str) -> None:
    os.chdir(Path(path).parent)  # Lightning writes its logs there
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("text", re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
def test_every_snippet_of_the_page_runs_on_two_ranks(text: str, tmp_path: Path) -> None:
    (name,) = re.findall(r"shardwise\.integrations\.(\w+)", text)
    here = text.replace('accelerator="gpu", devices=8', 'accelerator="cpu", devices=2')
    here = here.replace("lightning.Trainer(", "lightning.Trainer(max_epochs=1, ")
    here = here.replace("num_workers=8, use_gpu=True", "num_workers=2").replace('"steps": 100', '"steps": 2')
    here = here.replace("/shared/runs", str(tmp_path))
    before, after = (BEFORE_RAY, AFTER_RAY) if name == "ray" else (BEFORE, "")
    given = {"folder": str(tmp_path), "name": name, "path": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    (tmp_path / "snippet.py").write_text(before.format(**given) + here + after.format(**given))
    run_on_ranks(run, 1 if name == "ray" else 2, str(tmp_path / "snippet.py"), timeout_s=250)
