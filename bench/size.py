"""How large the source is: lines by package, the largest classes and functions, import cycles (``make size``).

A report that enforces nothing. The numbers under "aim" are bounds to stay below.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
SHOWN = 8
AIMS = {"all of src": "66,000 in 340", "tests": "52,000", "engine": "2,350 in 7"}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(text: str, tree: ast.Module) -> list[int]:
    """One file, its lines, and of those code, docstrings and comments. Code with a comment behind it is code."""
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings, comments, code = set[int](), set[int](), set[int]()
    for node in documented:
        if ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            place = comments if token.type == tokenize.COMMENT else code
            place.update(range(token.start[0], token.end[0] + 1))
    return [1, text.count("\n"), len(code - docstrings), len(docstrings), len(comments - code)]


def definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef]]:
    """Classes and functions with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield f"{prefix}.{node.name}", node
            yield from definitions(node, f"{prefix}.{node.name}")


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that a class annotates, and those that its methods assign on ``self``."""
    found = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    stored = [n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return found | {part.attr for part in stored if isinstance(part.value, ast.Name) and part.value.id == "self"}


def cycles() -> list[str]:
    """Import cycles inside the package; imports under ``TYPE_CHECKING`` count."""
    graph = grimp.build_graph("shardwise", exclude_type_checking_imports=False, cache_dir=None)
    imports = {name: sorted(graph.find_modules_directly_imported_by(name)) for name in sorted(graph.modules)}
    found = []
    while True:
        try:
            tuple(TopologicalSorter(imports).static_order())
        except CycleError as error:
            cycle = error.args[1]  # each module is imported by the next one
            found.append(" -> ".join(name.removeprefix("shardwise.") for name in reversed(cycle)))
            imports[cycle[1]].remove(cycle[0])
        else:
            return found


def table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    shown = Table(title=title, title_justify="left")
    for place, name in enumerate(header):
        shown.add_column(name, justify="right" if place else "left")
    for row in rows:
        shown.add_row(*row)
    return shown


def main() -> None:
    sizes: dict[str, list[int]] = {}
    classes: list[tuple[int, int, str]] = []
    functions: list[tuple[int, str]] = []
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi"), *(ROOT / "tests").rglob("*.py")]):
        text = path.read_text()
        tree, names = ast.parse(text), ["tests"]
        if path.is_relative_to(PACKAGE):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            names = [".".join(parts[:-1]) or "(root)", "all of src"]
            for name, node in definitions(tree, ".".join(parts)):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if isinstance(node, ast.ClassDef):
                    classes.append((lines, len(attributes(node)), name))
                else:
                    functions.append((lines, name))
        for name in names:
            sizes[name] = [a + b for a, b in zip(sizes.get(name, [0] * 5), count(text, tree), strict=True)]
    ordered = sorted(sizes.items(), key=lambda item: (item[0] in {"all of src", "tests"}, item[0]))
    rows = [(name, *(f"{number:,}" for number in numbers), AIMS.get(name, "")) for name, numbers in ordered]
    console = Console(width=120, highlight=False)
    header = ("package", "files", "lines", "code", "docstrings", "comments", "aim")
    console.print(table("Lines by package", header, rows))
    for title, place in (("Longest classes", 0), ("Classes by attributes (aim: at most 20)", 1)):
        found = sorted(classes, key=lambda item: -item[place])[:SHOWN]
        rows = [(name, str(lines), str(number)) for lines, number, name in found]
        console.print(table(title, ("class", "lines", "attributes"), rows))
    rows = [(name, str(lines)) for lines, name in sorted(functions, reverse=True)[:SHOWN]]
    console.print(table("Longest functions", ("function", "lines"), rows))
    found = cycles()
    console.print(f"Import cycles (aim: none): {len(found)}", *found, sep="\n  ")


if __name__ == "__main__":
    main()
