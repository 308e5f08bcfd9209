"""The snippets of docs/integrations.md, on two ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from shardwise.testing import run_on_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
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


def run(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("text", re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
def test_every_snippet_of_the_page_runs_on_two_ranks(text: str, tmp_path: Path) -> None:
    (name,) = re.findall(r"shardwise\.integrations\.(\w+)", text)
    here = text.replace('accelerator="gpu", devices=8', 'accelerator="cpu", devices=2, max_epochs=1')
    (tmp_path / "snippet.py").write_text(BEFORE.format(folder=str(tmp_path), name=name) + here)
    run_on_ranks(run, 2, str(tmp_path / "snippet.py"), timeout_s=120)
