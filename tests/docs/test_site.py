"""The site's contents: that it builds is proven by ``make docs``, where a warning is an error."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.app import VERBS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def contents(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The pages that the bar at the left names."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    lists = runpy.run_path(str(DOCS / "conf.py"))["contents"].values()
    return [re.findall(r"<(.*)>", page)[0] for pages in lists for page in pages]


def test_the_contents_name_every_page_once(contents: list[str]) -> None:
    written = [page for page in contents if page.startswith("docs/") and "/reference/" not in page]
    assert sorted(written) == sorted(f"docs/{path.stem}" for path in DOCS.glob("*.md"))


def test_the_reference_describes_every_public_name_and_every_verb(tmp_path: Path) -> None:
    made = runpy.run_path(str(DOCS / "reference.py"))
    made["write_pages"](tmp_path)
    described = re.findall(r"auto(?:class|function|exception):: (\w+)", (tmp_path / "api.md").read_text())
    assert set(sw.__all__) - {"__version__", "models"} <= set(described)
    command = (tmp_path / "command.md").read_text()
    assert "## train\n" in command
    assert "## checkpoint verify\n" in command
    assert "| `micro_batch_size` |" in (tmp_path / "configuration.md").read_text()


def test_the_first_page_names_every_verb_and_each_has_a_help_text_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = (DOCS / "start.md").read_text().split("| verb | does |")[1].split("\n\n")[0]
    verbs = re.findall(r"`([a-z][a-z -]+)`", table)
    assert {verb.split()[0] for verb in verbs} == VERBS.keys()
    for verb in verbs:
        assert main([*verb.split(), "--help"]) == 0, verb
        assert "xample" in capsys.readouterr().out, verb
