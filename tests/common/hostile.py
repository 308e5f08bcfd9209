"""A folder from a stranger: modules in it that must not be imported from there."""

from __future__ import annotations

from pathlib import Path

#: Modules that the command, a rank, the process that writes checkpoints, or one that reads data imports.
NAMES = ("typer", "torch", "numpy", "json", "safetensors", "yaml", "transformers", "datasets")


def put_modules(folder: Path) -> Path:
    """Write the modules. Each leaves the file that is returned when it is run, and then fails."""
    ran = folder / "ran"
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"import pathlib, sys\nwith pathlib.Path({str(ran)!r}).open('a') as file:\n"
            "    file.write(f'{__name__} in {sys.argv}\\n')\nraise ImportError(f'the current folder: {__name__}')\n"
        )
    return ran
