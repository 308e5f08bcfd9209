"""What is uploaded: the wheel alone, outside of the checkout, does what the first page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import shardwise

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path) -> str:
    """What a program prints, without this checkout on any path."""
    kept = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "RANK", "WORLD_SIZE"}}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT)
    run(sys.executable, *words, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def installed(environment: Path, wheel: Path) -> None:
    """The wheel's own files do what the first page says."""
    bin_, folder = environment / "bin", environment / "elsewhere"
    folder.mkdir()
    place = run(bin_ / "python", "-c", "import shardwise; print(shardwise.__file__)", cwd=folder).strip()
    assert Path(place).is_relative_to(environment), f"{wheel.name} is not what is imported"
    assert f"shardwise     {shardwise.__version__}" in run(bin_ / "shardwise", "env", cwd=folder)
    plan = ("plan", "gpt2-xl", "--gpus", "8", "--gpu", "A100-40GB-SXM", "--report", "plan.html")
    assert "1  " in run(bin_ / "shardwise", *plan, cwd=folder)  # tables of hardware, styles of pages
    settings = ("train.steps=2", "schedule.warmup_steps=1", "train.eval_every=2")
    train = ("train", "--nproc", "2", *(word for setting in settings for word in ("--set", setting)))
    assert "finished 2 steps" in run(bin_ / "shardwise", *train, cwd=folder)
    assert (folder / "runs" / "demo" / "report.html").is_file()


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/shardwise").rglob("*.*")}
    assert {name for name in files if not name.endswith(".pyc")} <= held
    assert "shardwise/launch/jobs/slurm.sh.jinja" in held


@pytest.mark.slow
def test_the_wheel_trains_where_the_checkout_is_not(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment; nothing is downloaded."""
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        environment,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    (found,) = environment.glob("lib/python*/site-packages")
    (found / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installed(environment, wheel)


@pytest.mark.long
def test_the_wheel_trains_with_what_pip_brings(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    run(
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "-c",
        ROOT / "constraints.txt",
        wheel,
        cwd=tmp_path,
    )
    installed(environment, wheel)


def test_the_version_is_one() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [shardwise.__version__]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == shardwise.__version__


def test_issue_forms_ask_for_what_is_needed() -> None:
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert [form.name for form in forms] == ["bug.yml", "config.yml", "feature.yml"]
    for form in forms:
        found = yaml.safe_load(form.read_text())
        if form.name != "config.yml":
            fields = found["body"]
            assert {"name", "description", "body"} <= found.keys()
            assert len({field["id"] for field in fields}) == len(fields)
            assert all(field["attributes"]["label"] for field in fields)


def test_extras_allow_the_versions_of_transformers_that_make_test_integrations_runs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {line for lines in extras.values() for line in lines if line.startswith("transformers")}
    oldest, newest = re.search(r"^TRANSFORMERS := (\S+) (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE).groups()
    major, minor, _ = map(int, newest.split("."))
    pinned = re.search(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert asked == {f"transformers>={least},<{major}.{minor + 1}" for least in (oldest, pinned)}
