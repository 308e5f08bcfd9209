"""The site's contents: that it builds is proven by ``make docs``, where a warning is an error."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import typer

import shardwise as sw
from shardwise.cli import main
from shardwise.cli.app import VERBS, build, fill_in_resume

DOCS = Path(__file__).parents[2] / "docs"


def pages() -> list[Path]:
    """The first page and those under docs/."""
    return [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


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
    assert {name for page in pages() for name in re.findall(r"\bsw\.(\w+)", page.read_text())} <= {*sw.__all__, "NAME"}
    command = (tmp_path / "command.md").read_text()
    assert "## train\n" in command
    assert "## checkpoint verify\n" in command
    configuration = (tmp_path / "configuration.md").read_text()
    assert "| `micro_batch_size` |" in configuration
    assert "One of `stop`, `skip`." in configuration
    assert "|  |\n" not in configuration  # each key is described


def test_a_page_names_every_verb_and_each_has_a_help_text_with_an_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = (DOCS / "launching.md").read_text().split("| verb | does |")[1].split("\n\n")[0]
    verbs = re.findall(r"`([a-z][a-z -]+)`", table)
    assert {verb.split()[0] for verb in verbs} == VERBS.keys()
    for verb in verbs:
        assert main([*verb.split(), "--help"]) == 0, verb
        assert "xample" in capsys.readouterr().out, verb
    for group in {verb.split()[0] for verb in verbs if " " in verb}:
        main([group, "--help"])
        assert "...\n" not in capsys.readouterr().out.partition("Commands:")[2]  # no summary of a verb is cut off


def test_the_first_page_is_short() -> None:
    """Explanations, lists and limits have pages under docs/."""
    assert len((DOCS.parent / "README.md").read_text().splitlines()) < 120
    assert len((DOCS / "start.md").read_text().splitlines()) <= 120


def commands() -> list[tuple[str, list[str]]]:
    """Commands of ours that pages show, with the page."""
    found = []
    for page in pages():
        for line in re.findall(r"^\$ shardwise (.*(?:\\\n.*)*)$", page.read_text(), re.MULTILINE):
            words = shlex.split(line.replace("\\\n", " "), comments=True)
            ends = [place for place, word in enumerate(words) if word in {"|", ">", "&&"}]
            found.append((page.name, words[: ends[0] if ends else None]))
    return found


def test_the_options_of_every_command_that_a_page_shows_exist() -> None:
    shown = commands()
    assert len(shown) > 10
    for page, words in shown:
        command, rest = typer.main.get_command(build()), words
        while hasattr(command, "commands"):
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            command.make_context(words[0], fill_in_resume(rest))
        except Exception as error:  # whatever parsing raises
            raise AssertionError(f"{page}: {' '.join(words)}") from error


@pytest.mark.slow
def test_commands_of_pages_for_newcomers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that start no process."""
    monkeypatch.chdir(tmp_path)
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "start.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "run.yaml").write_text(yaml)
    pages = {"README.md", "start.md", "which-plan.md", "how-it-works.md", "support.md"}
    shown = [words for page, words in commands() if page in pages and words[0] in {"plan", "dry-run", "env"}]
    assert {words[0] for words in shown} == {"plan", "dry-run", "env"}
    for words in shown:
        assert main(words) == 0, words
