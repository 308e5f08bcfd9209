"""Which files a step enters: those that docs/architecture.md tells a reader of, fourteen at most."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
SOURCE = Path(sw.__file__).parent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


def enter_files() -> set[str]:
    """The files of the package that forward and backward of the third step enter."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(32, 4))
    model = sw.parallelize(plain, sw.ParallelPlan(strategy="zero3", merge_units=False))
    optimizer = torch.optim.AdamW(model.parameters())
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    for _ in range(3):
        entered.clear()
        optimizer.zero_grad()
        sys.setprofile(note)
        model(torch.randn(8, 32)).sum().backward()
        sys.setprofile(None)
        optimizer.step()
    inside = (Path(name) for name in entered)
    return {path.relative_to(SOURCE).as_posix() for path in inside if path.is_relative_to(SOURCE)}


def test_a_steady_step_enters_the_fourteen_files_that_the_page_of_the_architecture_tells() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("<!-- files of a step -->")[1].split("<!-- end of the files -->")[0]
    listed = set(re.findall(r"^\| `([a-z_/.]+)`", table, re.MULTILINE))
    assert len(listed) <= 14
    assert run_on_ranks(enter_files, 2) == [listed, listed]
