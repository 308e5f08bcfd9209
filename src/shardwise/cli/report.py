"""``report``: one page of HTML for a run, or for several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.output import check_writable, show, write


def report(
    run_dir: Annotated[Path, typer.Argument(help="A run's folder.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN_DIR]...", help="After --compare: further runs.")
    ] = None,
    compare: Annotated[
        list[Path] | None, typer.Option(help="A run to show beside the first; repeatable, or name several.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file; by default report.html in the run's folder, compare.html for several."),
    ] = None,
) -> None:
    """Write one page of HTML that shows a run, or with --compare several runs side by side.

    The file needs no network. `train` writes this page when its run ends. The verb writes it for a run that was killed
    or is still running.

    Examples:

      shardwise report runs/demo

      shardwise report runs/demo --compare runs/demo-2 --compare runs/demo-3 --out compared.html
    """
    from shardwise.report import compare_page, read_run, run_page
    from shardwise.spec.errors import ConfigError
    from shardwise.spec.run_files import REPORT
    from shardwise.spec.text import printable, size

    if more and not compare:
        raise ConfigError(f"{printable(more[0])}: a second run, but no --compare.\n  Write --compare before it.")
    directories = [run_dir, *(compare or []), *(more or [])]
    runs = [read_run(directory) for directory in directories]
    path = out if out is not None else run_dir / ("compare.html" if len(runs) > 1 else REPORT)
    check_writable(path)
    page = run_page(runs[0]) if len(runs) == 1 else compare_page(runs)
    write(path, page)
    show(f"{path}: {size(len(page.encode()))}")
