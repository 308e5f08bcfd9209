"""The floors hold, and what is for planning loads no torch."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Floors that must not load torch.
TORCH_FREE = ["spec", "cost", "sim", "planner", "report"]


def _modules():
    names = ["shardwise"]
    for floor in TORCH_FREE:
        path = str(ROOT / "src" / "shardwise" / floor)
        names.append(f"shardwise.{floor}")
        names += [info.name for info in pkgutil.walk_packages([path], f"shardwise.{floor}.")]
    return names


def test_the_package_and_its_planning_floors_import_no_torch():
    # One process for all of them, root first: as soon as one module loads torch it is named.
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *_modules()], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_planning_floor_is_in_the_contract_that_forbids_torch():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (sources,) = [
        contract["source_modules"] for contract in contracts if contract.get("forbidden_modules") == ["torch"]
    ]
    assert sorted(sources) == sorted(f"shardwise.{floor}" for floor in TORCH_FREE)


def test_floors():
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.exists():
        pytest.fail(f"{lint} is missing: pip install -c constraints.txt -e '.[dev]'")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_lies_on_one_floor_and_a_package_above_floors_imports_nothing():
    root = ROOT / "src" / "shardwise"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    floors = [name.strip() for layer in layers for name in layer.replace(":", "|").split("|")]
    off = []
    for path in root.rglob("*.py"):
        *packages, module = path.relative_to(root).with_suffix("").parts
        name = ".".join([*packages, module] if module != "__init__" else packages)
        on = [floor for floor in floors if f"{name}.".startswith(f"{floor}.")]
        if module == "__init__" and any(floor.startswith(f"{name}.") for floor in floors):
            imports = [
                node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
            ]
            on += [] if imports else ["above floors"]
        off += [] if len(on) == 1 or name in {"", "__main__"} else [f"{name}: {on}"]
    assert not off


#: Modules besides ``torch_private`` with lines that are marked as reading a private name. It only gets shorter.
READ_PRIVATE_NAMES = {
    "api/dry_run.py",
    "api/export_form.py",
    "parallel/context/apply.py",
    "parallel/context/kernel.py",
    "engine/hooks.py",
    "engine/extensions/activation_offload.py",
    "weights/init/deferred.py",
    "integrations/contrib/verl.py",
    "measure/calibrate.py",
    "measure/meta.py",
    "measure/storage.py",
    "measure/trace.py",
    "parallel/pipeline/stage.py",
    "parallel/pipeline/stage_module.py",
    "parallel/pipeline/trace.py",
    "parallel/tensor/agreement.py",
    "parallel/tensor/layer.py",
    "testing/settings.py",
    "train/model/pretrained.py",
}


def test_no_further_module_reads_private_names():
    """Ruff refuses what is not marked; ``comm`` is exempt there, because its transports call each other."""
    root = ROOT / "src" / "shardwise"
    marked = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if "SLF001" in path.read_text()}
    assert marked - {"torch_private.py"} == READ_PRIVATE_NAMES


#: Words that make the first words of a docstring no noun and no verb: a free relative, or an order without its subject.
FOREIGN = {"What", "How", "Where", "Which", "Who", "Whose", "Of", "Have", "Let", "Be"}


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = []
    for path in (ROOT / "src" / "shardwise").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node)
                if text and text.split()[0].rstrip(",.:") in FOREIGN:
                    found.append(f"{path.name}: {text.splitlines()[0]}")
    assert found == []
