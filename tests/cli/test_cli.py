"""The command line: fast, strict, one block per error, codes of the table, examples in every help."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise
from shardwise.cli import main
from shardwise.cli.app import VERBS, fill_in_resume

GOOD = "train: {steps: 10, micro_batch_size: 2, global_batch_size: 8}\ndata: {source: random}\n"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "PET_NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


@pytest.mark.parametrize(
    "verb",
    [*VERBS, "data tokenize", *(f"checkpoint {verb}" for verb in ("inspect", "verify", "import", "export"))],
)
def test_help_of_every_verb_shows_an_example(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    code, out, _ = run(capsys, *verb.split(), "--help")
    assert code == 0
    assert "Example" in out
    examples = re.split("Arguments:|Options:", out.split("Example", 1)[1])[0]
    assert "shardwise" in examples
    assert not re.search(r"\S {2,}\S", examples)  # as they are typed


def test_the_version_is_printed_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--version")
    assert (code, out, err) == (0, f"shardwise {shardwise.__version__}\n", "")


def test_every_verb_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert all(f"  {verb} " in out for verb in VERBS)
    assert "..." not in out.partition("Commands:")[2]


def test_help_is_as_wide_as_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = run(capsys, "serve", "--help")
    assert 100 < max(map(len, out.splitlines())) <= 120
    assert "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d" in out


@pytest.mark.parametrize(
    "arguments",
    ["['--help']", "['train', '--help']", "['train', 'c.yaml', '--set', 'optimizer.lr=abc']", "['config-schema']",
     "['validate', 'c.yaml']", "['schedule', '--pp', '2']", "['train', '--nproc', '0']"],
)  # fmt: skip
def test_help_and_mistakes_load_no_torch(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    code = f"import sys; from shardwise.cli import main; main({arguments}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "--resume"], ["train", "--resume=latest"]),
        (["train", "--resume", "latest-good"], ["train", "--resume", "latest-good"]),
        (["train", "--resume", "runs/x/checkpoints/step-00000010", "c.yaml"], None),
        (["train", "--resume", "c.yaml"], ["train", "--resume=latest", "c.yaml"]),
        (["train", "--resume", "C.YML"], ["train", "--resume=latest", "C.YML"]),
        (["train", "--resume", "c.json"], ["train", "--resume=latest", "c.json"]),
        (["train", "--resume", "--nproc", "2"], ["train", "--resume=latest", "--nproc", "2"]),
        (["train", "--resume=step-1", "c.yaml"], None),
        (["train", "--", "--resume"], None),
        ([], None),
    ],
)
def test_a_bare_resume_means_latest(arguments: list[str], expected: list[str] | None) -> None:
    assert fill_in_resume(arguments) == (arguments if expected is None else expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "optimizer.lr=abc"], "--set optimizer.lr: expected a valid number, got 'abc'"),
        (["--set", "optimizer.lrr=1"], "--set optimizer.lrr: unknown key. Did you mean 'lr'?"),
        (["--nproc", "0"], "--nproc 0: cannot start 0 processes, at least 1 is needed"),
        (["--nproc", "-3"], "--nproc -3: cannot start -3 processes"),
        (["--nproc", "100000"], "--nproc 100000: "),
        (["--nproc", "2", "--set", "parallel.dp_shard=3"], "axis dp_shard=3 makes 3 ranks, but the world has 2"),
        (["--nproc", "3"], "8 samples are not a multiple of micro_batch_size=2 * 3 ranks = 6; use 6 or 12"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--set", "log.wandb=true"], "log.wandb=true, but wandb is not installed"),
    ],
)
def test_mistakes_end_with_78_in_one_block_and_start_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    code, out, err = run(capsys, "train", "c.yaml", *arguments)
    assert (code, out) == (78, "")
    assert err.startswith("ConfigError: ")
    assert message in err
    assert not (tmp_path / "runs").exists()


def test_parity_finds_a_mesh_that_is_none_before_it_starts_a_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.launch.elastic.launch", lambda *_, **__: pytest.fail("workers were started"))
    assert main(["parity", "--nproc", "2", "--strategies", "zero3,data_parallel"]) == 78
    assert "runs replicas in one process, but the world has 2" in capsys.readouterr().err


def test_a_missing_configuration_is_78_and_missing_data_is_65(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, "train", "none.yaml")[0] == 78
    (tmp_path / "c.yaml").write_text(GOOD.replace("random", "none.txt"))
    code, _, err = run(capsys, "train", "c.yaml")
    assert code == 65
    assert "none.txt: no such file or folder" in err


@pytest.mark.parametrize("arguments", [["fly"], ["train", "--nproc", "two"], ["train", "--unknown"]])
def test_wrong_usage_is_2(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(capsys, *arguments)[0] == 2


def test_an_interrupt_while_the_command_is_built_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.cli.app.build", interrupt)
    assert main(["env"]) == 130


def test_resuming_what_is_not_there_is_65(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    code, _, err = run(capsys, "train", "c.yaml", "--resume")
    assert code == 65
    assert "no run 'c' to resume" in err


def test_control_characters_of_others_are_escaped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    _, _, err = run(capsys, "train", "c.yaml", "--set", "name=\x1b]0;owned\x07", "--set", "\u202emodel.x=1")
    assert "\x1b" not in err
    assert "\u202e" not in err


def test_validate_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    code, out, _ = run(capsys, "validate", "c.yaml", "--nproc", "2")
    assert code == 0
    assert "gradient_accumulation_steps: 2" in out
    assert "# global batch 8 = micro batch 2 x accumulation 2 x 2 ranks" in out
    (tmp_path / "again.yaml").write_text(out)
    assert run(capsys, "validate", "again.yaml", "--nproc", "2")[1].splitlines()[1:] == out.splitlines()[1:]


def test_validate_reads_the_spec_that_train_would(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(GOOD)
    (tmp_path / "mine.py").write_text("import shardwise as sw\nspec = sw.TrainSpec(loss=lambda output, batch: 0)\n")
    code, out, _ = run(capsys, "validate", "c.yaml", "--spec", "mine.py", "--nproc", "2")
    assert (code, "spec: mine.py" in out) == (0, True)


def test_the_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "config-schema")
    assert code == 0
    assert "optimizer" in json.loads(out)["properties"]


def test_env_names_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert {"shardwise", "python", "torch", "devices", "cores", "memory", "backends", "bf16"} <= set(facts)
    assert run(capsys, "env")[0] == 0


def test_text_is_tokenized_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    code, out, _ = run(capsys, "data", "tokenize", "a.txt", "a.tokens")
    assert code == 0
    assert "9 tokens from 1 files" in out
    assert run(capsys, "data", "tokenize", "a.txt", "a.tokens")[0] == 78
    assert run(capsys, "data", "tokenize", "a.txt", "a.tokens", "--force")[0] == 0
    assert run(capsys, "data", "tokenize", "none", "b.tokens")[0] == 65
    assert run(capsys, "data", "tokenize", "a.txt", "no/such/folder/b.tokens")[0] == 74


def test_checkpoints_that_are_not_there_are_65(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for verb in ("inspect", "verify"):
        assert run(capsys, "checkpoint", verb, "none")[0] == 65
        assert run(capsys, "checkpoint", verb, "run")[0] == 65


def test_eval_without_lm_eval_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "lm_eval" else find(name))
    code, out, err = run(capsys, "eval", "runs/demo", "--tasks", "hellaswag")
    assert (code, out) == (78, "")
    assert err == "ConfigError: eval needs lm_eval.\n  Install shardwise[eval].\n"
