"""The tables of keys in docs/migrating.md (``python -m bench.migrating_tables``), made from what ``convert`` reads."""

from __future__ import annotations

from pathlib import Path

from shardwise.cli.convert import Row, tables

PAGE = Path(__file__).parents[1] / "docs" / "migrating.md"
START, END = "<!-- keys of {}: made by python -m bench.migrating_tables -->", "<!-- end of keys of {} -->"
_GROUPS = {"automatic": "nothing to set: ", "none": "no counterpart: "}


def table(kind: str) -> str:
    """The keys of a project's configuration, and what each becomes."""
    return "\n".join([f"| {kind} | here |", "|---|---|", *(_line(row) for row in tables()[kind][1])])


def _line(row: Row) -> str:
    keys = ", ".join(f"`{key}`" for key in row.keys.split())
    if not row.sets:
        return f"| {keys} | {_GROUPS[row.to]}{row.text} |"
    sources: dict[str, list[str]] = {}
    for there, to in row.values.items():
        sources.setdefault("null" if to is None else str(to).lower(), []).append(there)
    values = [f"{', '.join(f'`{each}`' for each in there)}: `{to}`" for to, there in sources.items() if there != [to]]
    return f"| {keys} | {'; '.join(filter(None, [f'`{row.to}`', row.text, *_without_default(values)]))} |"


def _without_default(values: list[str]) -> list[str]:
    return [value for value in values if not value.endswith(": `default`")]


def main() -> None:
    text = PAGE.read_text("utf-8")
    for kind in tables():
        before, _, rest = text.partition(START.format(kind))
        _, _, after = rest.partition(END.format(kind))
        text = f"{before}{START.format(kind)}\n\n{table(kind)}\n\n{END.format(kind)}{after}"
    PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
