"""What README.md and docs/start.md show is run: a newcomer copies it."""

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
from tests.museum import catalogue as museum
from tests.reliability.board import IDS
from tests.spmd import families, test_faults
from tests.streams import plans, planted
from tests.testing import test_locate

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "start.md").read_text()
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SHORT = "first --set train.steps=2"


def blocks(language: str, page: str = START) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def fewer(program: str) -> str:
    """A program of the pages with an eighth of its samples."""
    assert "torch.randn(256, 16, 64)" in program
    return program.replace("torch.randn(256, 16, 64)", "torch.randn(32, 16, 64)")


def snippets() -> list[tuple[str, str]]:
    """Python blocks of the pages under docs/, with the name of the page."""
    return [
        (page.name, text)
        for page in sorted((ROOT / "docs").glob("*.md"))
        if page.name not in {"integrations.md", "start.md"}  # tests/integrations has the packages; below
        for text in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        if not text.startswith("# pictures.py")  # tests/integrations/test_vision.py
    ]


def on_cpus(program: str) -> str:
    """A program for GPUs, for CPUs; one that trains says where."""
    place = 'torch.device("cuda", int(os.environ["LOCAL_RANK"]))'
    assert ("torch.cuda.set_device" in program) == (place in program)
    return program.replace(place, 'torch.device("cpu")').replace("torch.cuda.set_device(device)", "")


def run_file(path: str) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.chdir(Path(path).parent)
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
    """On the CPU in place of GPUs."""
    (tmp_path / "snippet.py").write_text(on_cpus(text))
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
    commands = re.findall(r"^\$ torchrun (--nnodes 2 .*?(?:train.py|--run-dir \S+))$", START, re.DOTALL | re.MULTILINE)
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
    page = (ROOT / "docs" / "evaluate-and-serve.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith(("| one process ", "| tp=2", "| pp=2", "| ddp |"))]
    measured = (ROOT / "docs" / re.findall(r"\]\(([^)]+-generation\.md)\)", page)[0]).read_text().splitlines()
    assert len(shown) == 4
    assert set(shown) <= set(measured)


def test_the_numbers_of_planted_faults_are_those_of_the_tests() -> None:
    kinds = [bug.found in {*planted.KINDS, "wait"} for bug in planted.BUGS.values()]
    num_found, num_equivalent = sum(kinds), len(kinds) - sum(kinds)
    num_locate = len(test_locate.FAULTS) + 1  # OTHER_GROUP
    own = sum(bug.framework.startswith("shardwise") for bug in museum.BUGS.values())
    expected = [
        f"| {num_locate} faults that users make",
        f" {len(plans.CASES)} plans, {len(plans.WIDE)} products of degrees",
        f" {len(kinds)} planted bugs check the detector. It finds {num_found}; the other {num_equivalent} change",
        f"All {len(families.SUPPORT)} [families]",
        f"All of {len(test_faults.FAULTS) + len(test_faults.BACKWARDS)} planted faults",
        f"| {len(museum.BUGS)} bugs are planted into the engine one at a time, {len(museum.BUGS) - own} reported of",
        f"| {len(IDS)} faults are injected",
    ]
    page = (ROOT / "docs" / "testing.md").read_text()
    assert [text for text in expected if text not in page] == []


def test_every_page_is_linked() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", README))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").iterdir() if path.suffix == ".md"} <= linked


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_configuration_is_valid(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main(["validate", str(tmp_path / "run.yaml")]) == 0


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert (
        set(re.findall(r"make ([a-z-]+)`", README + START)) | set(re.findall(r"\$ make ([a-z-]+)", README + START))
        <= targets
    )


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


#: Names of the README's table in the files of measurements.
MEASURED_AS = {"DeepSpeed ZeRO-3": "DeepSpeed 3", "DeepSpeed ZeRO-2": "DeepSpeed 2"}


def test_measured_ratios_are_those_of_the_files_that_are_linked() -> None:
    head, rule, *rows = re.findall(r"^\|.*\|$", README.partition("## Beside")[2].partition("\n## ")[0], re.MULTILINE)
    quiet, busy, gpu = (
        (ROOT / file).read_text().splitlines() for file in re.findall(r"\]\((bench/results/20[^)]+)\)", README)[:3]
    )
    told = "takes 0.98 of FSDP2's time and 0.92 of that of DDP under autocast for GPT-2-medium (0.97 and 0.93 for 1.3B"
    assert told in " ".join(README.split())
    for name, number in (("torch FSDP2 | 271", "0.98"), ("torch DDP, autocast | 289", "0.92")):
        assert any(line.startswith(f"| {name}") and f"| {number} (" in line for line in gpu)
    for name, number in (("torch FSDP2 | 352", "0.97"), ("torch DDP, autocast | 368", "0.93")):
        assert any(line.startswith(f"| {name}") and f"| {number} |" in line for line in gpu)
    columns = [cell.strip(" `").replace(", `", " ") for cell in head.strip("|").split("|")][2:]
    assert columns == ["step wide", "step compute", "step host", "memory wide"]
    found = 0
    for row in rows:
        ours, other, *ratios = (cell.strip(" `") for cell in row.strip("|").split("|"))
        for column, ratio in zip(columns, ratios, strict=True):
            if ratio:
                what, case = column.replace("memory", "resident above start").rsplit(" ", 1)
                name = f"| {what}, {ours} / {MEASURED_AS.get(other, other)} | {case}"  # wide-zero, wide-zero1 too
                number = f"| {ratio.removesuffix(' (*)')}"
                lines = busy if ratio.endswith("(*)") else quiet
                assert any(line.startswith(name) and number in line for line in lines), (name, number)
                found += 1
    assert found >= 10
    assert rule


def test_screens_of_the_plan_are_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """README.md shows a part of it, docs/planning.md all."""
    screens = {}
    for page in ("README.md", "docs/planning.md"):
        text = (ROOT / page).read_text().partition("<!-- screen: llama-3-8b -->")[2]
        screens[page] = blocks("console", text)[0].splitlines()
    command = screens["README.md"].pop(0)
    assert screens["docs/planning.md"].pop(0) == command
    assert main(command.removeprefix("$ shardwise ").split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert screens["docs/planning.md"] == printed
    rest = iter(printed)
    assert all(line in rest for line in screens["README.md"] if line != "...")  # these lines, in this order
    command, *shown = blocks("console", (ROOT / "docs/planning.md").read_text().partition("<!-- measured -->")[2])[
        0
    ].splitlines()
    assert main(command.removeprefix("$ shardwise ").split()) == 0
    rest = iter(capsys.readouterr().out.splitlines())
    assert all(line in rest for line in shown if line != "...")


def loops() -> tuple[str, str]:
    """The program of the README's diff, before and after, for a CPU."""
    lines = (
        fewer(blocks("diff", README)[0])
        .replace('torch.device("cuda")', 'torch.device("cpu")')
        .splitlines(keepends=True)
    )
    lines = [line for line in lines if "set_device" not in line]
    before, after = ("".join(line[1:] or "\n" for line in lines if line[:1] != sign) for sign in "+-")
    return before, after


def test_the_diff_of_the_first_screen_is_six_lines_long() -> None:
    assert len(re.findall(r"^\+", blocks("diff", README)[0], re.MULTILINE)) == 6


@pytest.mark.slow
def test_the_diff_of_the_first_screen_runs_before_and_after(tmp_path: Path) -> None:
    before, after = loops()
    (tmp_path / "before.py").write_text(before)
    (tmp_path / "after.py").write_text(after)
    run_alone(tmp_path / "before.py")
    run_on_ranks(run_strictly, 2, str(tmp_path / "after.py"), free_port(), process_group=False)
