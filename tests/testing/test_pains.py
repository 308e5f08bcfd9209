"""The index of known pains (``tests/PAINS.md``) is true: its tests exist, and each issue is named by one of them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def rows() -> list[tuple[str, list[str], list[str]]]:
    """Of each row the pain, its issues and its tests."""
    lines = [line for line in (TESTS / "PAINS.md").read_text().splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [(pain, issues.split(", "), re.findall(r"`([^`]+)`", tests)) for pain, issues, tests in cells]


@functools.cache
def said_by(test: str) -> str:
    """Name and docstring of a test. That of its file says nothing about one test."""
    path, name = test.split("::")
    tree = ast.parse((TESTS / path).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found, f"{test} is not there"
    return f"{name} {ast.get_docstring(found[0]) or ''}"


@pytest.mark.parametrize(("pain", "issues", "tests"), rows(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_issue_is_named_by_a_test_that_is_there(pain, issues, tests):
    assert tests, pain
    said = " ".join(said_by(test) for test in tests)
    for issue in issues:
        number = issue.rpartition("#")[2]
        assert re.search(rf"(?<!\d){number}(?!\d)", said), f"no test of this row names {issue}"


def test_every_issue_is_there_once():
    issues = [issue for _, found, _ in rows() for issue in found]
    assert len(issues) == len(set(issues)) == 41
    assert all(re.fullmatch(r"[\w-]+#\d+", issue) for issue in issues)
