"""What the README shows is run: a newcomer copies it."""

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from shardwise.cli import main
from shardwise.testing import run_on_ranks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SHORT = "first --set train.steps=2"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def fewer(program: str) -> str:
    """A program of the README with an eighth of its samples."""
    assert "torch.randn(256, 16, 64)" in program
    return program.replace("torch.randn(256, 16, 64)", "torch.randn(32, 16, 64)")


def snippets() -> list[tuple[str, str]]:
    """Python blocks of the pages under docs/, with the name of the page."""
    return [
        (page.name, text)
        for page in sorted((ROOT / "docs").glob("*.md"))
        if page.name != "integrations.md"  # tests/integrations has the packages for it
        for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]


def run_file(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def run_strictly(path: str, port: int) -> str:
    """Run a file on a rank, as alone where ``port`` is 0 and else as under torchrun: what it prints.

    A warning is an error, and nothing may be written to the error output.
    """
    if not port:
        for name in RANK_VARIABLES:
            del os.environ[name]
    else:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(Path(path).parent)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("error")
        run_file(path)
    assert not err.getvalue()
    return out.getvalue()


def run_alone(path: Path) -> str:
    (text,) = run_on_ranks(run_strictly, 1, str(path), 0, process_group=False)
    return text


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.mark.parametrize("text", blocks("python"))
def test_every_python_block_runs_as_it_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(fewer(text))
    assert "in 7 units on 1 ranks" in run_alone(tmp_path / "train.py")


@pytest.mark.slow
@pytest.mark.parametrize(("page", "text"), snippets(), ids=lambda value: value if value.endswith(".md") else "")
def test_every_snippet_of_the_pages_runs_on_two_ranks(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text(text)
    run_on_ranks(run_file, 2, str(tmp_path / "snippet.py"))


def launch(commands: list[str], folder: str) -> list[str]:
    """On a rank: what torchrun and its workers print, command by command. A warning in a worker is an error."""
    for name in RANK_VARIABLES:
        del os.environ[name]
    os.environ |= {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    texts = []
    for command in commands:
        path = Path(f"out-{os.getpid()}-{len(texts)}")
        kept = os.dup(1)
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
            try:
                torchrun.main(command.split())
            finally:
                os.dup2(kept, 1)
        texts.append(path.read_text())
        path.unlink()
    return texts


@pytest.mark.slow
def test_two_machines_meet_as_the_page_says_and_rank_0_alone_prints_and_saves(tmp_path: Path) -> None:
    """Both machines are here, with one process each."""
    commands = re.findall(r"^\$ torchrun (--nnodes 2 .*?(?:train.py|--run-dir \S+))$", README, re.DOTALL | re.MULTILINE)
    for old, new in (("\\\n", " "), ("--nproc-per-node 8", "--nproc-per-node 1"), ("/shared/runs/first", SHORT)):
        commands = [command.replace(old, new) for command in commands]
    commands = [command.replace("HOST:29500", f"localhost:{free_port()}") for command in commands]
    (tmp_path / "train.py").write_text(fewer(blocks("python")[0]))
    (tmp_path / "run.yaml").write_text(blocks("yaml")[0])
    printed = run_on_ranks(launch, 2, commands, str(tmp_path), process_group=False, timeout_s=120)
    loop, command = zip(*printed, strict=True)
    (text,) = (text for text in loop if text)
    assert text.count("in 7 units on 2 ranks (this is rank 0)") == 1
    assert len(re.findall(r"^epoch \d: loss", text, re.MULTILINE)) == 2
    assert sorted(text.count("finished 2 steps") for text in command) == [0, 1]
    assert (tmp_path / "first" / "checkpoints" / "step-00000002").is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "model.pt", "run.yaml", "train.py"]


def test_times_of_generation_are_those_of_the_file_that_is_linked() -> None:
    page = (ROOT / "docs" / "inference.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith(("| one process ", "| tp=2", "| pp=2", "| ddp |"))]
    measured = (ROOT / "docs" / re.findall(r"\]\(([^)]+-generation\.md)\)", page)[0]).read_text().splitlines()
    assert len(shown) == 4
    assert set(shown) <= set(measured)


def test_every_page_is_linked() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", README))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix == ".md"} <= linked


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_configuration_is_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["validate", str(tmp_path / "run.yaml")]) == 0


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)`", README)) | set(re.findall(r"\$ make ([a-z-]+)", README)) <= targets


def test_every_verb_that_is_named_has_a_help_text_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    table = README.split("| verb | does |")[1].split("\n\n")[0]
    verbs = re.findall(r"`([a-z][a-z -]+)`", table)
    assert len(verbs) >= 9
    for verb in verbs:
        assert main([*verb.split(), "--help"]) == 0, verb
        assert "xample" in capsys.readouterr().out, verb


def test_every_file_that_is_linked_exists() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_source_file_that_is_named_exists() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", page.read_text()):
            assert any((ROOT / folder / name).exists() for folder in ("src/shardwise", "src", "")), (
                f"{page.name}: {name}"
            )


def test_pictures_are_as_their_script_draws_them(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "pictures.py"), str(tmp_path)], check=False)
    assert done.returncode == 0
    for path in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert path.read_text() == (tmp_path / path.name).read_text(), f"run: python docs/pictures.py ({path.name})"


def test_measured_ratios_are_those_of_the_file_that_is_linked() -> None:
    rows = re.findall(r"^\| ([^|]+) / ([^|]+) \| ([\w-]+) \| ([^|]+) \| \[[^]]+\]\(([^)]+)\)", README, re.MULTILINE)
    assert len(rows) >= 10
    for ours, other, case, ratio, file in rows:
        lines = (ROOT / file).read_text().splitlines()
        assert any(f"{ours} / {other} | {case} |" in line and f"| {ratio}" in line for line in lines), (
            ours,
            other,
            ratio,
        )


def loops() -> tuple[str, str]:
    """The program of the README's diff, before and after, for a CPU."""
    lines = fewer(blocks("diff")[0]).replace('torch.device("cuda")', 'torch.device("cpu")').splitlines(keepends=True)
    lines = [line for line in lines if "set_device" not in line]
    before, after = ("".join(line[1:] or "\n" for line in lines if line[:1] != sign) for sign in "+-")
    return before, after


def test_the_diff_of_the_first_screen_is_six_lines_long() -> None:
    assert len(re.findall(r"^\+", blocks("diff")[0], re.MULTILINE)) == 6


@pytest.mark.slow
def test_the_diff_of_the_first_screen_runs_before_and_after(tmp_path: Path) -> None:
    before, after = loops()
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(after)
    run_alone(tmp_path / "before.py")
    run_on_ranks(run_strictly, 2, str(tmp_path / "after.py"), free_port(), process_group=False)
